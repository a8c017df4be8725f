"""The study of adapters: what is counted of changes, and what of the model trains."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality import adapters
from benchmarks.quality.boundary import Changes
from benchmarks.quality.data import Batch
from benchmarks.quality.models import CutModel, Regime, fine_tunable
from tests.unit.benchmarks.tiny_regime import TINY

ROOT = Path(__file__).parents[3]


def test_changes_have_a_size_and_directions() -> None:
    base = torch.ones(10, 4)
    direction = torch.tensor([3.0, 4.0, 0.0, 0.0]) / 5
    changes = Changes()
    assert (changes.size, changes.directions) == (0.0, 0)
    changes.add(base + 0.1 * torch.linspace(-1, 1, 10)[:, None] * direction, base)
    assert changes.directions == 1
    changes = Changes()
    x = base + torch.eye(4).repeat(3, 1)[:10] * 0.5
    changes.add(x, base)
    assert changes.directions == 4
    assert changes.size == pytest.approx(((x - base).norm() / x.norm()).item())


def test_where_all_trains_a_regime_has_the_name_that_published_runs_have() -> None:
    records = ROOT / "benchmarks/reports/quality/results.jsonl"
    first = records.read_text(encoding="utf-8").partition("\n")[0]
    assert json.loads(first)["task"] == "lm"
    plain = Regime(cola_sentences=0, cola_tokens=0)
    assert plain.digest() == json.loads(first)["regime"]
    ranks = {Regime(cola_sentences=0, cola_tokens=0, lora_r=rank).digest() for rank in (0, 4, 8)}
    assert len(ranks) == 3


def test_adapters_alone_train_from_where_they_begin() -> None:
    regime = Regime(**TINY, lora_r=4, lora_from=1, lora_mlp=0)
    weights = CutModel(regime).body.state_dict()
    model = fine_tunable(regime, weights, seed=0)
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    assert {name.partition(".lora_")[0] for name in names} == {
        "body.h.1.attn.c_attn",
        "body.h.1.attn.c_proj",
    }
    ids = torch.randint(300, (2, 16))
    batch = Batch(torch.arange(2), ids, torch.full((2,), 16), torch.empty(0))
    plain = fine_tunable(regime.without_adapters(), weights, seed=0)
    assert torch.equal(model.loss(batch)[0], plain.loss(batch)[0])


def test_the_tables_compare_with_the_run_of_the_same_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(config: str, seed: int, end: float) -> dict[str, Any]:
        changes = [[0.25, 7]]
        epochs = [{"ppl": end, "changes": changes}] * 2
        known = {"config": config, "seed": seed, "rate": 0.002, "trains": "all", "diverged": ""}
        return known | {"planned_epochs": 2, "epochs": epochs, "start": {"ppl": 100.0}}

    runs = [("none", 0, 10.0), ("none", 1, 20.0), ("aq4/q8@fp16", 0, 11.0), ("q2/q2", 1, 25.0)]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(record(*run)) + "\n" for run in runs))
    monkeypatch.setattr("sys.argv", ["adapters", str(file)])
    adapters.main()
    printed = capsys.readouterr().out
    assert "| all | 0.002 | 2 | 25.0% | 25.0% | 7 | 7 |" in printed
    assert "| all | 0.002 | 2 | 100 | 15.00 ± 7.07 | +10.00 % | +25.00 % |" in printed
