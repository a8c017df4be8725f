"""Loss, gradients and counts in chunks are those of whole logits, which never exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Gemma2Config, PretrainedConfig, Qwen3Config
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.qwen3 import modeling_qwen3

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Adapter, BaseDtype, TaskKind
from swarm_ft.protocol.spec.sample_rows import NO_LABEL
from swarm_ft.stage import chunked_loss, weight_products
from swarm_ft.stage.activation_memory import LiveBytes
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.chunked_loss import Chunks
from swarm_ft.stage.engine import StageEngine
from swarm_ft.stage.module import StageModule
from swarm_ft.stage.weight_products import DeferredLinears
from tests.families import small_config
from tests.unit.stage.conftest import (
    SEQ_LENGTH,
    VOCAB_SIZE,
    MakePipeline,
    MakeTrainSpec,
    Pipeline,
    save_random_model,
)
from tests.unit.stage.test_classifiers import evaluated, pipeline_of, rows_for, save_model
from tests.unit.stage.test_classifiers import step_gradients as classifier_gradients

FEW = 5
"""Targets in a chunk."""
BATCHES, BATCH_SIZE = 2, 3
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": small_config("gpt2"),
    "llama": small_config("llama"),
    "caps": small_config("gemma2", final_logit_softcapping=2.0),
    "scales": small_config("cohere", logit_scale=0.25),
    "divides": small_config("granite", logits_scaling=3.0),
    "bias": small_config("phi"),
    "tied": small_config("llama", tie_word_embeddings=True),
    "muP": small_config("minicpm3"),
}
LORA = {"adapter": Adapter.LORA}
METHODS: list[tuple[str, int, dict[str, Any]]] = [
    *((name, 2, {}) for name in CONFIGS),
    ("tied", 1, {"sync_tied_embeddings": True}),
    ("tied", 2, {"sync_tied_embeddings": True}),
    ("caps", 2, LORA),
    ("bias", 2, LORA | {"base_dtype": BaseDtype.BFLOAT16}),
    ("llama", 2, LORA | {"load_in_4bit": True}),
    ("llama", 2, {"gradient_checkpointing": True}),
    ("gpt2", 2, {"train_layers": "0-3"}),
]


def small_chunks(monkeypatch: pytest.MonkeyPatch, num_targets: int, num_outputs: int) -> None:
    monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", num_targets * num_outputs * 4)
    monkeypatch.setattr(chunked_loss, "EVAL_CHUNK_BYTES", (num_targets + 1) * num_outputs * 4)
    monkeypatch.setattr(chunked_loss, "SLICE_BYTES", 2 * num_outputs * 4)


def labelled_tokens(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; of an odd seed some labels are only read."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB_SIZE, (BATCH_SIZE, SEQ_LENGTH), generator=generator)
    is_read = torch.rand(tokens.shape, generator=generator) < 0.4 * (seed % 2)
    return tokens, tokens.masked_fill(is_read, NO_LABEL)


def step(pipeline: Pipeline) -> list[Tensor]:
    """Losses, and the gradient of each stage, of a few microbatches; and an evaluation's loss."""
    *upstream, last = pipeline.stages
    batches = [labelled_tokens(seed) for seed in range(BATCHES)]
    num_targets = sum(int((labels[:, 1:] != NO_LABEL).sum()) for _, labels in batches)
    for stage in pipeline.stages:
        stage.begin_step(StepNumber(0), num_targets)
    losses = []
    for index, (tokens, labels) in enumerate(batches):
        x = inferred = tokens
        for stage in upstream:
            x, inferred = stage.forward(MicrobatchIndex(index), x), stage.infer(inferred)
        losses.append(last.evaluate(inferred, labels).loss_sum)
        made = last.forward_backward(MicrobatchIndex(index), x, labels)
        losses.append(made.loss_sum)
        gradient = made.input_gradient
        for stage in reversed(upstream):
            if gradient is not None:
                gradient = stage.backward(MicrobatchIndex(index), gradient)
        for stage in pipeline.stages:
            stage.weight_gradients(MicrobatchIndex(index))
    return [torch.tensor(losses), *(stage.flat_gradient() for stage in pipeline.stages)]


def whole_logits(
    chunks: Chunks, judge: Any, num_targets: int, after_each: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Compute `loss_and_gradient` by torch's own loss and one backward pass."""
    rows = chunks.rows.detach().requires_grad_(chunks.rows.requires_grad)
    loss = torch.nn.functional.cross_entropy(judge(rows), chunks.targets_n, reduction="sum")
    torch.autograd.backward(loss / num_targets)
    return loss.detach(), rows.grad


@pytest.mark.parametrize(("name", "num_stages", "changes"), METHODS)
@pytest.mark.sampled(4)
def test_chunks_train_as_whole_logits_do(
    tmp_path: Path,
    make_train_spec: MakeTrainSpec,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    num_stages: int,
    changes: dict[str, Any],
) -> None:
    source = save_random_model(CONFIGS[name], tmp_path)
    train = make_train_spec(batch_size=6, micro_batch_size=BATCH_SIZE, **changes)

    def seen() -> list[Tensor]:
        return step(Pipeline(open_checkpoint(str(source), train), train, num_stages, torch.float32))

    with monkeypatch.context() as patch:
        patch.setattr(Chunks, "loss_and_gradient", whole_logits)
        whole = seen()
    small_chunks(monkeypatch, FEW, VOCAB_SIZE)
    monkeypatch.setattr(weight_products, "LARGE_BYTES", 1000)
    monkeypatch.setattr(weight_products, "BLOCK_BYTES", 500)
    for one, other in zip(seen(), whole, strict=True):
        assert float((one - other).norm()) <= 1e-6 * float(other.norm())


def test_one_chunk_has_the_bits_of_whole_logits_in_its_loss(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = step(make_pipeline("gpt2-tied", 2))
    monkeypatch.setattr(Chunks, "loss_and_gradient", whole_logits)
    assert torch.equal(own[0], step(make_pipeline("gpt2-tied", 2))[0])


def test_replicas_end_with_the_same_bits(
    make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_chunks(monkeypatch, FEW, VOCAB_SIZE)
    one, other = (step(make_pipeline("llama", 2)) for _ in range(2))
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("family", ["gpt2", "bert", "deberta-v3"])
@pytest.mark.parametrize("kind", [TaskKind.CLASSIFICATION, TaskKind.TOKEN_CLASSIFICATION])
@pytest.mark.sampled(4)
def test_classes_and_their_counts_are_the_same(
    tmp_path: Path,
    make_train_spec: MakeTrainSpec,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    kind: TaskKind,
) -> None:
    source, rows = save_model(family, tmp_path / "model"), rows_for(kind)

    def seen() -> tuple[list[Tensor], tuple[int, ...]]:
        pipeline = pipeline_of(source, make_train_spec, kind, 2)
        loss = classifier_gradients(pipeline, 0, rows)
        gradients = [stage.flat_gradient() for stage in pipeline.stages]
        eval_loss, counts = evaluated(pipeline, rows)
        return [torch.tensor([loss, eval_loss]), *gradients], counts

    whole, counts = seen()
    small_chunks(monkeypatch, 1, 3)
    chunked, chunked_counts = seen()
    assert chunked_counts == counts
    for one, other in zip(chunked, whole, strict=True):
        assert float((one - other).norm()) <= 1e-6 * float(other.norm())


# ---- memory


@pytest.mark.parametrize("changes", [{}, LORA, {"gradient_checkpointing": True}], ids=str)
def test_a_step_holds_two_chunks_and_no_logits(
    tmp_path: Path,
    make_train_spec: MakeTrainSpec,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    words, chunk_bytes = 4000, 160_000
    source = save_random_model(small_config("llama", vocab_size=words), tmp_path)
    train = make_train_spec(seq_length=64, micro_batch_size=4, **changes)
    spec = Pipeline(open_checkpoint(str(source), train), train, 2, torch.float32).spec
    logits_bytes = train.micro_batch_size * (train.seq_length - 1) * words * 4
    small_chunks(monkeypatch, chunk_bytes // words // 4, words)
    live = LiveBytes()
    with live:
        checkpoint = open_checkpoint(str(source), train)
        engine = StageEngine(
            checkpoint, spec, LayerRange(3, 4), device=torch.device("cpu"), dtype=torch.float32
        )
        engine.load()
        tokens = torch.randint(words, (4, 64))
        hidden = torch.randn(4, 64, spec.model.hidden_size)
        engine.begin_step(StepNumber(0), 500)
        most = []
        for index in map(MicrobatchIndex, range(2)):
            live.begin()
            before = live.now
            engine.forward_backward(index, hidden, tokens)
            engine.weight_gradients(index)
            most.append(live.most - before)
        live.begin()
        before = live.now
        engine.evaluate(hidden, tokens)
        most.append(live.most - before)
    # The second microbatch: gradients are there. Beside chunks, what the block saves, and a
    # product as large as the head's weight.
    expected = engine.microbatch_bytes + words * spec.model.hidden_size * 4
    assert most[1] < 2 * chunk_bytes + expected + 300_000 < logits_bytes / 2
    assert most[2] < 2 * chunk_bytes + 600_000 < logits_bytes / 2


SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
}
MIB = 1 << 20


QWEN3 = Qwen3Config(**SIZES, vocab_size=151_936, tie_word_embeddings=False)
GEMMA2 = Gemma2Config(**SIZES, vocab_size=256_000, tie_word_embeddings=False)
"""It caps its logits."""


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (QWEN3, "trained"),
        (QWEN3, "frozen"),
        (QWEN3, "frozen in bfloat16"),
        (GEMMA2, "trained"),
    ],
    ids=["Qwen3", "Qwen3, frozen", "Qwen3, in bfloat16", "Gemma 2"],
)
@pytest.mark.thorough
def test_4096_tokens_of_a_large_vocabulary_take_less_than_256_mib(
    config: PretrainedConfig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors have no memory: their sizes and lives are counted."""
    # Of tensors without values transformers makes masks, slowly, that no block here takes.
    for modeling in (modeling_qwen3, modeling_gemma2):
        monkeypatch.setattr(modeling, "create_causal_mask", lambda **_: None)
    monkeypatch.setattr(modeling_gemma2, "create_sliding_window_causal_mask", lambda **_: None)
    live = LiveBytes()
    stage = StageModule(config, LayerRange(1, 2))
    shapes = {name: one.shape for name, one in stage.named_parameters()}
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
        if how == "frozen in bfloat16":
            weights["lm_head.weight"] = weights["lm_head.weight"].bfloat16()
        stage.materialise(weights, torch.device("cpu"))
        trains = how == "trained"
        stage.requires_grad_(trains)
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter) if trains else None
        linears = DeferredLinears(stage)
        # Operations without values are slow, and the peak is that of any chunk: one case has all.
        num_rows = 4095 if how == "frozen" else 600
        rows = torch.zeros(num_rows, 1, config.hidden_size, requires_grad=True)
        targets_n = torch.zeros(num_rows, dtype=torch.int64)
        live.begin()
        before = live.now

        def complete() -> None:
            for product in linears.take():
                product.accumulate()

        chunks = Chunks(rows, targets_n, stage.num_outputs)
        chunks.loss_and_gradient(stage.judge, 4095, complete)
        with torch.no_grad():
            chunks.evaluate(stage.judge, is_counted=False)
    saved = (4095 - num_rows) * 2 * rows[0].nbytes
    assert live.most - before + saved < 256 * MIB
