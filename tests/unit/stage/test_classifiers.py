"""Models that classify: stages train as transformers' whole model does, from the same new head."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DebertaConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    PretrainedConfig,
    RobertaConfig,
    get_linear_schedule_with_warmup,
)

from swarm_ft.errors import BadModel, MalformedMessage
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Optim, TaskKind
from swarm_ft.protocol.spec.sample_rows import (
    NO_LABEL,
    SECOND,
    Words,
    label_tokens,
    pad_rows,
    samples_in,
)
from swarm_ft.protocol.spec.training_plan import step_microbatches, step_samples
from swarm_ft.stage.checkpoint import check_checkpoint, open_checkpoint
from tests.families import small_config
from tests.unit.stage.conftest import (
    SEQ_LENGTH,
    VOCAB_SIZE,
    MakeTrainSpec,
    Pipeline,
    received,
    save_random_model,
)
from tests.unit.stage.test_stage_parity import relative_error

NAMES = ("bad", "fair", "good")
AUTO = {
    TaskKind.CLASSIFICATION: AutoModelForSequenceClassification,
    TaskKind.TOKEN_CLASSIFICATION: AutoModelForTokenClassification,
}
CASES = [
    ("gpt2", TaskKind.CLASSIFICATION),
    ("llama", TaskKind.CLASSIFICATION),
    ("qwen3", TaskKind.CLASSIFICATION),
    ("mistral", TaskKind.CLASSIFICATION),
    ("gpt2", TaskKind.TOKEN_CLASSIFICATION),
    ("llama", TaskKind.TOKEN_CLASSIFICATION),
    *((family, kind) for family in ("bert", "roberta", "electra", "deberta-v3") for kind in AUTO),
    ("deberta-v2", TaskKind.CLASSIFICATION),
    ("deberta", TaskKind.CLASSIFICATION),
]
PAD = 1
"""In no sample, and what encoders of the RoBERTa kind count positions from."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
}
_RELATIVE = _SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
ENCODERS: dict[str, PretrainedConfig] = {
    "bert": BertConfig(**_SIZES),
    "roberta": RobertaConfig(**_SIZES, type_vocab_size=1),
    "electra": ElectraConfig(**_SIZES, embedding_size=16),
    "deberta-v3": DebertaV2Config(
        **_RELATIVE,
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
    ),
    "deberta-v2": DebertaV2Config(**_RELATIVE, type_vocab_size=2, embedding_size=16),
    "deberta": DebertaConfig(**_RELATIVE, max_relative_positions=6),
}


def save_model(family: str, directory: Path) -> Path:
    """Pre-trained to write, as it were; without a head of classes."""
    if family in ENCODERS:
        return save_random_model(ENCODERS[family], directory, auto=AutoModelForMaskedLM)
    return save_random_model(small_config(family), directory)


def rows_for(kind: TaskKind, seed: int = 3, count: int = 11) -> Words:
    """Samples of all lengths, every other of two texts; a class at the last token, or at some."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        length = int(rng.integers(1, SEQ_LENGTH + 1))
        labels = np.full(length, NO_LABEL)
        labels[-1] = rng.integers(len(NAMES))
        if kind is TaskKind.TOKEN_CLASSIFICATION:
            labels = np.where(rng.random(length) < 0.6, rng.integers(0, 3, length), labels)
        ids = rng.integers(PAD + 1, VOCAB_SIZE, length)
        is_second = np.arange(length) * (number % 2) > length // 3
        rows.append(pad_rows(label_tokens(ids, labels, is_second), SEQ_LENGTH))
    return np.concatenate(rows)


def pipeline_of(
    directory: Path, make_train_spec: MakeTrainSpec, kind: TaskKind, num_stages: int, **more: Any
) -> Pipeline:
    train = make_train_spec(task_kind=kind, label_names=",".join(NAMES), **more)
    return Pipeline(open_checkpoint(str(directory), train), train, num_stages, torch.float32)


def whole_model(pipeline: Pipeline, kind: TaskKind) -> Any:
    """transformers' own, with the head that the run begins with."""
    model = AUTO[kind].from_pretrained(
        pipeline.checkpoint.reference,
        num_labels=len(NAMES),
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    weights = pipeline.checkpoint.load(pipeline.spec.model.layers, pipeline.spec.model)
    model.load_state_dict(weights)
    return model.eval()


def has_types(model: Any) -> bool:
    """Whether it learned to distinguish two texts."""
    return getattr(model.config, "type_vocab_size", 0) > 1


def whole_loss(model: Any, rows: Words) -> Tensor:
    """Mean over targets, of a padded batch as people give it to transformers."""
    samples = samples_in(rows)
    labels = torch.from_numpy(samples.labels)
    mask = torch.arange(labels.shape[1]) < torch.from_numpy(samples.lengths)[:, None]
    ids, types = torch.from_numpy(samples.token_ids % SECOND), samples.token_ids // SECOND
    extra = {"token_type_ids": torch.from_numpy(types)} if has_types(model) else {}
    tokens = torch.where(mask, ids, PAD)
    logits = model(input_ids=tokens, attention_mask=mask.long(), **extra).logits
    if logits.ndim == 2:
        labels = labels[labels != NO_LABEL]
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=NO_LABEL)


def step_gradients(pipeline: Pipeline, step: int, rows: Words) -> float:
    batches = step_microbatches(pipeline.spec.train, StepNumber(step))
    own = rows[[sample for batch in batches for sample in batch.samples]]
    num_targets = int((samples_in(own).labels != NO_LABEL).sum())
    for stage in pipeline.stages:
        stage.begin_step(StepNumber(step), num_targets)
    loss = sum(pipeline.ragged(batch.index, rows[list(batch.samples)]) for batch in batches)
    return loss / num_targets


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.sampled(5)
def test_stages_train_as_the_whole_classifier(
    make_train_spec: MakeTrainSpec, tmp_path: Path, family: str, kind: TaskKind
) -> None:
    source = save_model(family, tmp_path / "model")
    pipeline, rows = pipeline_of(source, make_train_spec, kind, 3), rows_for(kind)
    train, model = pipeline.spec.train, whole_model(pipeline, kind)
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    spared = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=train.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, train.warmup_steps, train.num_steps)
    losses = []
    for step in range(train.num_steps):
        loss = whole_loss(model, rows[list(step_samples(train, StepNumber(step)))])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_grad_norm)
        losses.append(step_gradients(pipeline, step, rows))
        assert losses[-1] == pytest.approx(loss.item(), rel=1e-5)
        pipeline.commit(step)
        assert pipeline.grad_norms[-1] == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step()
        schedule.step()
    found = {name: w for stage in pipeline.stages for name, w in stage.state().items()}
    for name, weight in model.named_parameters():
        if name.endswith("key.bias"):
            continue  # softmax ignores it: its gradient is rounding, which AdamW divides by itself
        assert relative_error(name, found[name], weight.detach()) < 1e-4, name


@pytest.mark.parametrize("family", ["gpt2", "roberta", "deberta-v3"])
def test_blocks_that_are_computed_twice_change_no_bit(
    make_train_spec: MakeTrainSpec, tmp_path: Path, family: str
) -> None:
    source, kind = save_model(family, tmp_path), TaskKind.CLASSIFICATION
    rows = rows_for(kind)
    plain, again = (
        pipeline_of(
            source, make_train_spec, kind, 2, dropout=True, gradient_checkpointing=recomputes
        )
        for recomputes in (False, True)
    )
    for step in range(plain.spec.train.num_steps):
        assert step_gradients(again, step, rows) == step_gradients(plain, step, rows)
        again.commit(step)
        plain.commit(step)
    assert again.digests() == plain.digests()


@pytest.mark.parametrize("optim", [Optim.ADAFACTOR, Optim.SGD])
def test_other_optimizers_train_a_new_head(
    make_train_spec: MakeTrainSpec, tmp_path: Path, optim: Optim
) -> None:
    source, kind = save_model("gpt2", tmp_path), TaskKind.CLASSIFICATION
    pipeline = pipeline_of(source, make_train_spec, kind, 2, optim=optim, learning_rate=0.05)
    rows, losses = rows_for(kind), []
    for step in range(pipeline.spec.train.num_steps):
        losses.append(evaluated(pipeline, rows)[0])
        step_gradients(pipeline, step, rows)
        pipeline.commit(step)
    assert evaluated(pipeline, rows)[0] < losses[0]


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta", "electra", "deberta-v3"])
@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.sampled(4)
def test_the_result_is_a_classifier_that_transformers_loads(
    make_train_spec: MakeTrainSpec, tmp_path: Path, num_stages: int, family: str
) -> None:
    kind = TaskKind.CLASSIFICATION
    config = ENCODERS.get(family) or small_config(family)
    config.pad_token_id = PAD
    auto = AutoModelForMaskedLM if family in ENCODERS else AutoModelForCausalLM
    source = save_random_model(config, tmp_path / "model", auto=auto)
    pipeline = pipeline_of(source, make_train_spec, kind, num_stages)
    step_gradients(pipeline, 0, rows_for(kind))
    pipeline.commit(0)
    out = tmp_path / "out"
    out.mkdir()
    pipeline.checkpoint.save_config(out, tie_word_embeddings=pipeline.spec.keeps_tied)
    weights: dict[str, Tensor] = {}
    for stage in pipeline.stages:
        weights |= load(b"".join(stage.export()))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        out, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.id2label == dict(enumerate(NAMES))
    assert loaded.config.label2id == {name: number for number, name in enumerate(NAMES)}
    rows = rows_for(kind, seed=8)
    again = pipeline_of(out, make_train_spec, kind, 2, seed=77)
    loss = whole_loss(loaded.eval(), rows).item()
    assert evaluated(again, rows)[0] == pytest.approx(loss, rel=1e-5)


def evaluated(pipeline: Pipeline, rows: Words) -> tuple[float, tuple[int, ...]]:
    samples = samples_in(rows)
    x, labels = torch.from_numpy(samples.token_ids), torch.from_numpy(samples.labels)
    *upstream, last = pipeline.stages
    lengths = samples.lengths.tolist()
    for stage in upstream:
        x = received(stage.infer(x, lengths), samples)
    judged = last.evaluate(x, labels, lengths)
    return judged.loss_sum / len(rows), judged.counts


def test_counts_are_those_of_the_whole_models_answers(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    kind = TaskKind.CLASSIFICATION
    source = save_random_model(small_config("gpt2"), tmp_path)
    pipeline, rows = pipeline_of(source, make_train_spec, kind, 2), rows_for(kind, count=40)
    model, samples = whole_model(pipeline, kind), samples_in(rows)
    predictions, expected_classes = [], []
    for ids, labels, length in zip(*samples, strict=True):
        logits = model(input_ids=torch.from_numpy(ids[None, :length] % SECOND)).logits
        predictions.append(int(logits.argmax()))
        expected_classes.append(int(labels[length - 1]))
    loss, counts = evaluated(pipeline, rows)
    assert math.isfinite(loss)
    right = [
        sum(a == b == k for a, b in zip(predictions, expected_classes, strict=True))
        for k in range(3)
    ]
    assert counts == (
        *right,
        *map(predictions.count, range(3)),
        *map(expected_classes.count, range(3)),
    )


def test_a_new_head_follows_from_the_seed_and_is_in_the_digest(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    source = save_random_model(small_config("llama"), tmp_path)
    one, same, other = (
        pipeline_of(source, make_train_spec, TaskKind.CLASSIFICATION, 1, seed=seed).spec.model
        for seed in (5, 5, 6)
    )
    assert one == same
    assert one.head_digest != other.head_digest
    assert (one.embed_digest, one.block_digests) == (other.embed_digest, other.block_digests)
    assert not one.tied_embeddings


def test_a_new_head_is_the_same_bits_everywhere(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    source = save_random_model(small_config("gpt2"), tmp_path)
    pipeline = pipeline_of(source, make_train_spec, TaskKind.CLASSIFICATION, 1)
    weight = pipeline.checkpoint.load(LayerRange(3, 4), pipeline.spec.model)["score.weight"]
    assert weight.shape == (3, 32)
    assert float(weight.abs().max()) < 0.02 * 3**0.5
    assert float(weight.std()) == pytest.approx(0.02, rel=0.2)
    assert weight[0, :2].tolist() == FIRST_OF_A_HEAD


FIRST_OF_A_HEAD = [0.02382758818566799, -0.008817849680781364]


def test_a_causal_model_does_not_begin_without_its_head(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    config = small_config("llama")
    config.num_labels = 3
    config.tie_word_embeddings = False
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(BadModel, match=r"needs a tensor lm_head\.weight"):
        open_checkpoint(str(tmp_path))
    # but it goes on as what it is
    pipeline = pipeline_of(tmp_path, make_train_spec, TaskKind.CLASSIFICATION, 1)
    weights = pipeline.checkpoint.load(pipeline.spec.model.layers, pipeline.spec.model)
    assert torch.equal(weights["score.weight"], model.score.weight)


@pytest.mark.parametrize("family", ["bert", "deberta-v3", "deberta"])
def test_what_pads_a_sample_changes_nothing_of_it(
    make_train_spec: MakeTrainSpec, tmp_path: Path, family: str
) -> None:
    source = save_model(family, tmp_path)
    pipeline = pipeline_of(source, make_train_spec, TaskKind.CLASSIFICATION, 2)
    rows = rows_for(TaskKind.CLASSIFICATION, count=6)
    together, _ = evaluated(pipeline, rows)
    alone = sum(evaluated(pipeline, rows[place : place + 1])[0] for place in range(6)) / 6
    assert together == pytest.approx(alone, rel=1e-6)


def test_two_texts_are_not_one(make_train_spec: MakeTrainSpec, tmp_path: Path) -> None:
    labels = [NO_LABEL] * 5 + [1]
    one, two = (
        pad_rows(label_tokens(range(2, 8), labels, np.arange(6) >= cut), SEQ_LENGTH)
        for cut in (9, 3)
    )
    has_types_by_family = {
        "bert": True,
        "deberta-v2": True,
        "deberta-v3": False,
        "roberta": False,
        "gpt2": False,
    }
    for family, expected in has_types_by_family.items():
        source = save_model(family, tmp_path / family)
        pipeline = pipeline_of(source, make_train_spec, TaskKind.CLASSIFICATION, 2)
        assert (evaluated(pipeline, one) != evaluated(pipeline, two)) == expected


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, SECOND + VOCAB_SIZE, 2 * SECOND])
def test_tokens_that_are_none_are_refused(
    make_train_spec: MakeTrainSpec, tmp_path: Path, token: int
) -> None:
    pipeline = pipeline_of(
        save_model("bert", tmp_path), make_train_spec, TaskKind.CLASSIFICATION, 2
    )
    with pytest.raises(MalformedMessage, match="tokens: expected 0 to 96"):
        pipeline.stages[0].infer(torch.tensor([[2, token]]))


def test_positions_that_are_for_what_pads_are_not_counted(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    train = make_train_spec(task_kind=TaskKind.CLASSIFICATION, label_names="a,b")
    positions = {
        family: open_checkpoint(str(save_model(family, tmp_path / family)), train)
        for family in ("bert", "roberta")
    }
    assert positions["bert"].architecture.positions == 64
    assert positions["roberta"].architecture.positions == 62


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_peer_takes_a_model_that_can_be_trained_for_something(
    tmp_path: Path, family: str
) -> None:
    check_checkpoint(str(save_model(family, tmp_path)))
    if family == "bert":
        with pytest.raises(BadModel, match="expected a decoder"):
            open_checkpoint(str(tmp_path))


def test_encoders_whose_heads_nobody_knows_are_refused(
    make_train_spec: MakeTrainSpec, tmp_path: Path
) -> None:
    config = DistilBertConfig(vocab_size=VOCAB_SIZE, dim=32, n_layers=2, n_heads=4, hidden_dim=48)
    source = save_random_model(config, tmp_path, auto=AutoModelForMaskedLM)
    train = make_train_spec(task_kind=TaskKind.CLASSIFICATION, label_names="a,b")
    with pytest.raises(BadModel, match="'distilbert': expected a model that AutoModelForSequence"):
        open_checkpoint(str(source), train)
    with pytest.raises(BadModel, match="'distilbert': expected a decoder"):
        check_checkpoint(str(source))


def test_classes_that_are_none_are_refused(make_train_spec: MakeTrainSpec, tmp_path: Path) -> None:
    source = save_random_model(small_config("gpt2"), tmp_path)
    pipeline = pipeline_of(source, make_train_spec, TaskKind.CLASSIFICATION, 1)
    pipeline.stages[0].begin_step(StepNumber(0), 1)
    labels = torch.tensor([[NO_LABEL, len(NAMES)]])
    with pytest.raises(MalformedMessage, match="expected -100 or 0 to 2, got 3"):
        pipeline.stages[0].forward_backward(MicrobatchIndex(0), torch.tensor([[1, 2]]), labels)
