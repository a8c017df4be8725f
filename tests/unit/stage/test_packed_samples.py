"""Documents that share a sample train as each does in a sample of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.run_spec import TrainSpec
from swarm_ft.protocol.spec.sample_rows import (
    Words,
    counts_of,
    join_documents,
    pad_rows,
    samples_in,
    words_of,
)
from swarm_ft.stage import module
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.document_packing import groups_of, positions_in, scatter_outputs
from tests.families import small_config
from tests.unit.stage.conftest import (
    VOCAB_SIZE,
    MakeTrainSpec,
    Pipeline,
    lengths_of,
    save_random_model,
)
from tests.unit.stage.test_families import ALL

LENGTH = 24
# Windows are of 6 tokens, and experts take those of other documents beside their own.
MASKED = ("gpt2", "llama", "gemma3_text", "mistral", "mixtral", "gpt_neo")
"""Of these transformers keeps documents apart by its masks."""
APART = ("mamba", "bloom", "qwen3_next")
"""These have a state, or ignore positions in their masks: each document is computed alone."""
LENGTHS: Sequence[Sequence[int]] = ((9, 8, 7), (2, 11, 3, 5), (4, 2))
RTOL = 1e-6
COMPUTED_APART = {
    "afmoe",
    "bailing_hybrid",
    "bamba",
    "biogpt",
    "bloom",
    "falcon",
    "falcon_mamba",
    "gpt_oss",
    "granitemoehybrid",
    "inkling_text",
    "jamba",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "minimax",
    "mpt",
    "nemotron_h",
    "olmo_hybrid",
    "openai-gpt",
    "opt",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "trocr",
    "xglm",
    "xlstm",
}
"""Families that docs/reference/models.md lists."""
NOISE_FACTOR = 8.0
"""Gradients may differ by so many times what two batchings without packing differ by.

Packed samples take other kernels besides: attention with a mask. Up to 4.4 times was measured.
"""


def document(random: np.random.Generator, length: int) -> Words:
    """Its first third is a prompt."""
    return words_of(random.integers(1, VOCAB_SIZE, length), np.arange(length) >= length // 3)


def made(lengths: Sequence[Sequence[int]] = LENGTHS) -> tuple[list[Words], list[Words]]:
    """Samples of several documents, and a sample for each of them."""
    random = np.random.default_rng(3)
    documents = [[document(random, length) for length in of_one] for of_one in lengths]
    packed = np.concatenate([pad_rows(join_documents(of_one), LENGTH) for of_one in documents])
    alone = [pad_rows(one, LENGTH) for of_one in documents for one in of_one]
    return [packed], alone


@pytest.fixture(scope="module")
def train(make_train_spec: MakeTrainSpec) -> TrainSpec:
    return make_train_spec(seq_length=LENGTH, batch_size=3, micro_batch_size=3)


class Trained:
    """A step over some microbatches: its loss, and all gradients by name."""

    def __init__(
        self,
        source: Path,
        train: TrainSpec,
        batches: Sequence[Words],
        num_stages: int = 1,
        attention: str | None = None,
    ) -> None:
        pipeline = Pipeline(open_checkpoint(str(source)), train, num_stages, torch.float32)
        modules = [stage.weights.module for stage in pipeline.stages]
        for part in (part for one in modules for part in one.causal_model.modules()):
            if attention is not None and isinstance(part, PreTrainedModel):
                part.set_attn_implementation(attention)
        num_targets = sum(counts_of(rows).num_targets for rows in batches)
        for stage in pipeline.stages:
            stage.begin_step(StepNumber(0), num_targets)
        self.loss = sum(pipeline.ragged(i, rows) for i, rows in enumerate(batches)) / num_targets
        self.gradients = {
            name: parameter.grad
            for one in modules
            for name, parameter in one.named_parameters()
            if parameter.grad is not None
        }
        self.masks = {one._masks_documents for one in modules}  # noqa: SLF001


def assert_same(found: Trained, expected: Trained, rtol: float = RTOL) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=RTOL)
    assert distance(found, expected) <= rtol


def distance(found: Trained, expected: Trained) -> float:
    """Return how far all gradients together are apart, relative to their norm."""
    assert found.gradients.keys() == expected.gradients.keys()
    pairs = [(found.gradients[name], one) for name, one in expected.gradients.items()]
    apart = sum(float((one - other).double().square().sum()) for one, other in pairs)
    norm = sum(float(other.double().square().sum()) for _, other in pairs)
    return math.sqrt(apart / norm)


def source_of(family: str, tmp_path: Path, **changes: Any) -> Path:
    return save_random_model(small_config(family, **changes), tmp_path / "source")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MASKED)
@pytest.mark.sampled(5)
def test_masks_keep_documents_apart(
    tmp_path: Path, train: TrainSpec, family: str, attention: str
) -> None:
    source, (packed, alone) = source_of(family, tmp_path), made()
    expected = Trained(source, train, alone, attention=attention)
    for num_stages in (1, 2):
        found = Trained(source, train, packed, num_stages, attention)
        assert found.masks == {True}
        assert_same(found, expected)


@pytest.mark.parametrize("family", APART)
def test_documents_are_computed_apart_where_masks_do_not_part_them(
    tmp_path: Path, train: TrainSpec, family: str
) -> None:
    source, (packed, alone) = source_of(family, tmp_path), made()
    found = Trained(source, train, packed, num_stages=2)
    assert found.masks == {False}
    assert_same(found, Trained(source, train, alone))


@pytest.mark.slow
@pytest.mark.families
@pytest.mark.parametrize("family", ALL)
def test_every_family_trains_packed_samples(tmp_path: Path, train: TrainSpec, family: str) -> None:
    source, (packed, alone) = source_of(family, tmp_path), made()
    found, expected = Trained(source, train, packed, num_stages=2), Trained(source, train, alone)
    # Of hybrids one stage may have blocks of one kind alone.
    assert (False in found.masks) == (family in COMPUTED_APART)
    noise = distance(Trained(source, train, [np.concatenate(alone)]), expected)
    assert_same(found, expected, max(RTOL, NOISE_FACTOR * noise))


def test_families_are_named_in_the_docs() -> None:
    page = Path("docs/reference/models.md").read_text(encoding="utf-8")
    listed = page.partition("Documents apart: ")[2].partition("\n\n")[0]
    assert {name.strip("`.") for name in " ".join(listed.split()).split(", ")} == COMPUTED_APART


def test_no_token_of_a_document_reaches_another(tmp_path: Path, train: TrainSpec) -> None:
    """Other tokens in the first document change no bit of the second one's output."""
    source = source_of("llama", tmp_path)
    outputs = []
    for seed in (1, 2):
        random = np.random.default_rng(seed)
        rows = pad_rows(join_documents([document(random, 10), words_of(range(1, 13))]), LENGTH)
        pipeline = Pipeline(open_checkpoint(str(source)), train, 2, torch.float32)
        tokens = torch.from_numpy(samples_in(rows).token_ids)
        outputs.append(pipeline.stages[0].infer(tokens, lengths_of(rows)))
    assert torch.equal(outputs[0][:, 10:22], outputs[1][:, 10:22])
    assert not torch.equal(outputs[0][:, :10], outputs[1][:, :10])


def test_packed_samples_are_evaluated_as_documents_alone(tmp_path: Path, train: TrainSpec) -> None:
    source, (packed, alone) = source_of("gpt2", tmp_path), made()
    (stage,) = Pipeline(open_checkpoint(str(source)), train, 1, torch.float32).stages

    def loss_of(batches: Sequence[Words]) -> float:
        total = 0.0
        for rows in batches:
            samples = samples_in(rows)
            tokens, labels = torch.from_numpy(samples.token_ids), torch.from_numpy(samples.labels)
            total += stage.evaluate(tokens, labels, lengths_of(rows)).loss_sum
        return total

    assert loss_of(packed) == pytest.approx(loss_of(alone), rel=RTOL)


def test_blocks_are_computed_again_in_the_same_way(tmp_path: Path, train: TrainSpec) -> None:
    """Gradient checkpointing and dropout are on, in both ways."""
    packed, _ = made()
    for family, name in (("gpt2", "attn_pdrop"), ("bloom", "attention_dropout")):
        source = source_of(family, tmp_path / family, **{name: 0.1})
        dropping = replace(train, dropout=True)
        again = replace(dropping, gradient_checkpointing=True)
        expected = Trained(source, dropping, packed)
        assert_same(Trained(source, again, packed), expected)
        assert Trained(source, train, packed).loss != pytest.approx(expected.loss, rel=RTOL)


def test_positions_begin_anew_and_padding_is_a_document() -> None:
    positions = positions_in([(3, 2), 4, (2, 2, 2)], 6)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1], [0, 1] * 3]


def test_groups_hold_all_documents_with_little_padding() -> None:
    lengths: list[int | tuple[int, ...]] = [(40, 3, 2), (2,) * 20, 45, (30, 9, 5)]
    groups = groups_of(lengths, 50)
    x = torch.randn(4, 50, 3)
    taken = [group.gather(x) for group in groups]
    tokens = sum(sum(one) if isinstance(one, tuple) else one for one in lengths)
    assert tokens <= sum(one.shape[:2].numel() for one in taken) <= 2 * tokens
    again = scatter_outputs(groups, taken, torch.Size((4, 50)))
    for row, length in enumerate((45, 40, 45, 44)):
        assert torch.equal(again[row, :length], x[row, :length])
        assert not again[row, length:].any()


def test_long_samples_need_no_mask(
    tmp_path: Path, train: TrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask grows with the square of a sample's length, its documents do not."""
    source, (packed, alone) = source_of("llama", tmp_path), made()
    monkeypatch.setattr(module, "MASKED_TOKENS", LENGTH - 1)
    monkeypatch.setattr(module, "compute_packed", None)
    assert_same(Trained(source, train, packed), Trained(source, train, alone))


def test_routers_count_each_token_once(
    tmp_path: Path, make_train_spec: MakeTrainSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The balance loss is a mean over the tokens of a microbatch, in whatever documents."""
    train = make_train_spec(
        seq_length=LENGTH, batch_size=3, micro_batch_size=3, router_aux_loss_coef=0.1
    )
    source, (packed, _) = source_of("mixtral", tmp_path), made()
    ways = []
    for masks in (True, False):
        pipeline = Pipeline(open_checkpoint(str(source)), train, 1, torch.float32)
        (stage,) = pipeline.stages
        monkeypatch.setattr(module, "masks_documents", lambda *_, of_way=masks: of_way)
        stage.begin_step(StepNumber(0), 10)
        pipeline.ragged(0, packed[0])
        ways.append(stage.flat_gradient())
    assert float((ways[0] - ways[1]).norm() / ways[0].norm()) <= RTOL
