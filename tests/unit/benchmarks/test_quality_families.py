"""The kinds of models that the study trains, and the names that distinguish their runs."""

from typing import Any

import pytest
import torch

from benchmarks.quality.boundary import Cuts
from benchmarks.quality.configs import parse_config
from benchmarks.quality.data import Batch
from benchmarks.quality.families import FAMILIES
from benchmarks.quality.models import CutModel, Regime, fine_tunable, regime_of
from benchmarks.quality.table import Kind, print_tables, rows_of
from benchmarks.quality.train import RATES
from tests.unit.benchmarks.tiny_regime import TINY

FAMILY = pytest.mark.parametrize("family", FAMILIES)


def batch() -> Batch:
    ids = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    return Batch(torch.arange(2), ids, torch.full((2,), 16), torch.empty(0))


def test_families_of_one_width_have_as_many_weights_within_a_twentieth() -> None:
    sizes = [
        sum(each.numel() for each in CutModel(Regime(family=family)).parameters())
        for family in FAMILIES
    ]
    assert max(sizes) < 1.05 * min(sizes)


def test_a_llama_has_grouped_queries_and_a_gated_feed_forward_part() -> None:
    block = CutModel(Regime(**TINY, family="llama")).blocks[0]
    shapes = {name: list(one.shape) for name, one in block.named_parameters()}
    assert shapes["self_attn.k_proj.weight"] == [16, 32]  # one head for two of queries
    assert shapes["self_attn.q_proj.weight"] == [32, 32]
    assert shapes["mlp.gate_proj.weight"] == shapes["mlp.up_proj.weight"] == [96, 32]


@FAMILY
def test_what_goes_through_a_cut_is_what_the_next_block_computes_on(family: str) -> None:
    torch.manual_seed(0)
    model = CutModel(Regime(**TINY, family=family))
    plain = model.loss(batch())[0]
    for config, is_exact in (("none", True), ("q1t+z/none", False)):
        model.cuts = Cuts(parse_config(config), 1)
        assert torch.equal(model.loss(batch(), "train")[0], plain) == is_exact
        assert model.cuts.boundaries[0].forward.tally.values == 2 * 16 * 32


@FAMILY
def test_a_token_does_not_see_what_comes_after_it(family: str) -> None:
    torch.manual_seed(0)
    model, ids = CutModel(Regime(**TINY, family=family)).eval(), batch().tokens
    other = ids.clone()
    other[:, 8] = (other[:, 8] + 1) % 300
    before, after = (model.body(input_ids=each).last_hidden_state for each in (ids, other))
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8], after[:, 8])


@FAMILY
def test_adapters_lie_beside_all_linear_layers_and_begin_as_nothing(family: str) -> None:
    regime = Regime(**TINY, family=family, lora_r=4)
    weights = CutModel(regime).body.state_dict()
    model = fine_tunable(regime, weights, seed=0)
    kind = FAMILIES[family]
    trained = {
        name.partition(".lora_")[0] for name, one in model.named_parameters() if one.requires_grad
    }
    layers = [*kind.attention, *kind.mlp]
    assert trained == {
        f"body.{kind.blocks}.{block}.{layer}" for block in (0, 1) for layer in layers
    }
    plain = fine_tunable(regime.without_adapters(), weights, seed=0)
    assert torch.equal(model.loss(batch())[0], plain.loss(batch())[0])


def test_a_family_has_a_regime_and_a_backbone_of_its_own() -> None:
    plain, llama = Regime(), regime_of(["family=llama"])
    assert regime_of(["family=gpt2", "in_a_row=1"]).digest() == plain.digest()
    assert llama.digest() != plain.digest()
    assert llama.backbone().digest() != plain.backbone().digest()
    with pytest.raises(SystemExit, match=r"family=bert: expected one of gpt2, llama"):
        regime_of(["family=bert"])


def record(end: float, **known: Any) -> dict[str, Any]:
    run = {"task": "lm", "config": "none", "planned_epochs": 6, "seed": 0, "rate": RATES["lm"]}
    epochs = [{"ppl": end, "ppl_compressed": end}]
    found = {"diverged": "", "epochs": epochs, "start": {"ppl": 99.0}}
    return {**run, **found, "bits_fw": 32.0, "bits_bw": 32.0, **known}


def test_a_record_that_names_no_family_is_of_gpt2_and_others_have_tables_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    records = [
        record(40.0),
        record(20.0, family="llama", trains="all", in_a_row=1),
        record(44.0, config="q2/q2"),
        record(50.0, family="gpt2", trains="all", in_a_row=2),
        record(25.0, config="q2/q2", family="llama", trains="all"),
    ]
    assert [run["epochs"][0]["ppl"] for run in rows_of(records, "lm")["none", 6]] == [40.0]
    llama = rows_of(records, "lm", Kind("llama"))
    assert [run["epochs"][0]["ppl"] for run in llama["none", 6]] == [20.0]
    print_tables(records, None, None)
    printed = capsys.readouterr().out
    oldest, llama_table, lazy = printed.split("\n## lm: ")
    assert "| `q2/q2` | 6 | 1 | 44.00 | +10.00 |" in oldest
    assert llama_table.startswith("llama, all\n")
    assert "| `q2/q2` | 6 | 1 | 25.00 | +25.00 |" in llama_table
    assert lazy.startswith("gpt2, all, a batch 2 times in a row\n")
