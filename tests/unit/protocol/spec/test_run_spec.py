"""RunSpec: one digest for equal specs, another for any other, and clear refusals."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from swarm_ft.codec.spec import Axis, CodecName, CodecSpec, Direction, Feedback
from swarm_ft.errors import BadCodec, BadModel, BadOption
from swarm_ft.ids import SampleId
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.quality import QualityControl
from swarm_ft.protocol.spec.run_spec import (
    COPIES_PER_WEIGHT,
    MAX_EVAL_SAMPLES,
    Adapter,
    BaseDtype,
    Codecs,
    Dtype,
    EvalCompression,
    EvalStrategy,
    LrSchedule,
    ModelSpec,
    Optim,
    RunSpec,
    SaveStrategy,
    TaskKind,
    TrainSpec,
)
from tests.specs import model_spec as model_spec_of
from tests.specs import train_spec as train_spec_of

PINNED_DIGEST = "a02886dd96aa56d5b392e7c6d177068a"

OTHER_MODEL: dict[str, Any] = {
    "reference": "other",
    "architecture": "llama",
    "num_blocks": 4,
    "hidden_size": 65,
    "vocab_size": 1001,
    "block_bytes": 1,
    "embed_digest": b"x" * 16,
    "block_digests": (b"1" * 16, b"0" * 16, b"2" * 16),
    "head_digest": b"x" * 16,
    "tied_embeddings": False,
    "linear_bytes": 1,
    "adapter_bytes": 1,
    "shared_bytes": 4,
    "dtype": Dtype.BFLOAT16,
    "nonce": b"n" * 16,
    "owner": "somebody",
}
OTHER_TRAIN: dict[str, Any] = {
    "num_samples": 11,
    "seq_length": 129,
    "batch_size": 6,
    "micro_batch_size": 4,
    "num_steps": 10,
    "learning_rate": 1.0000000000000002e-3,
    "lr_schedule": LrSchedule.COSINE,
    "warmup_steps": 3,
    "weight_decay": 0.0,
    "clip_grad_norm": 0.5,
    "router_aux_loss_coef": 0.01,
    "seed": 1,
    "shuffle": False,
    "dropout": True,
    "sync_tied_embeddings": True,
    "quality": 0.01,
    "forward_codec": "aq3",
    "backward_codec": "none",
    "num_eval_samples": 3,
    "eval_strategy": EvalStrategy.EPOCH,
    "eval_steps": 5,
    "eval_compression": EvalCompression.BOTH,
    "key_codec": "q8",
    "frozen_codec": "fp16",
    "dp_codec": "q4",
    "save_steps": 100,
    "save_strategy": SaveStrategy.EPOCH,
    "save_total_limit": 5,
    "early_stopping_patience": 3,
    "early_stopping_threshold": 0.01,
    "metric_for_best_model": "f1",
    "load_best_model_at_end": True,
    "buffer_bits": 8,
    "fill_codec": "aq2",
    "fill_microbatches": 3,
    "drain_codec": "q1.5+z",
    "drain_microbatches": 2,
    "private_ends": "one",
    "share_with": "other",
    "adapter": Adapter.DORA,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "target_modules": "q_proj,v_proj",
    "merge": True,
    "train_layers": "1-",
    "task_kind": TaskKind.CLASSIFICATION,
    "label_names": "a,b",
    "end_token_ids": (3, 7),
    "dtype": Dtype.FLOAT16,
    "base_dtype": BaseDtype.BFLOAT16,
    "load_in_8bit": True,
    "load_in_4bit": True,
    "optim": Optim.SGD,
    "gradient_checkpointing": True,
}


CLASSES: dict[str, Any] = {"task_kind": TaskKind.TOKEN_CLASSIFICATION, "label_names": "b,c,d"}
OF_ADAPTERS = {"merge", "base_dtype", "load_in_8bit", "load_in_4bit"}


def test_other_values_are_given_for_every_field() -> None:
    assert set(OTHER_MODEL) == {field.name for field in fields(ModelSpec)}
    assert set(OTHER_TRAIN) == {field.name for field in fields(TrainSpec)}


@pytest.mark.parametrize("name", OTHER_MODEL)
def test_another_model_has_another_digest(run_spec: RunSpec, name: str) -> None:
    changes = {name: OTHER_MODEL[name]}
    if name == "num_blocks":  # which has to be that of the digests
        changes["block_digests"] = (*run_spec.model.block_digests, b"3" * 16)
    other = replace(run_spec.model, **changes)
    assert replace(run_spec, model=other).digest() != run_spec.digest()


@pytest.mark.parametrize("name", OTHER_TRAIN)
def test_another_training_has_another_digest(run_spec: RunSpec, name: str) -> None:
    if name == "label_names":  # of classes
        run_spec = replace(run_spec, train=replace(run_spec.train, **CLASSES))
    if name in OF_ADAPTERS:
        run_spec = replace(run_spec, train=replace(run_spec.train, adapter=Adapter.LORA))
    if name in ("early_stopping_patience", "load_best_model_at_end"):
        run_spec = replace(run_spec, train=replace(run_spec.train, eval_steps=2, save_steps=4))
    if name == "early_stopping_threshold":
        patient = replace(run_spec.train, eval_steps=2, early_stopping_patience=1)
        run_spec = replace(run_spec, train=patient)
    if name == "metric_for_best_model":  # of classes
        run_spec = replace(run_spec, train=replace(run_spec.train, **CLASSES))
    if name == "quality":  # from which codecs follow
        usual = replace(
            run_spec.train, forward_codec="aq3+z", backward_codec="q3+z", key_codec="q4+z"
        )
        run_spec = replace(run_spec, train=usual)
    more = CLASSES if name == "task_kind" else {}
    other = replace(run_spec.train, **{**more, name: OTHER_TRAIN[name]})
    assert replace(run_spec, train=other).digest() != run_spec.digest()


def test_a_head_of_classes_trains_whatever_else_does(run_spec: RunSpec) -> None:
    train = replace(run_spec.train, **CLASSES, train_layers="0-1")
    with pytest.raises(BadOption, match="a head of classes trains with the last block"):
        replace(run_spec, train=train)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"label_names": "a,b"}, "--labels: expected --task classification"),
        ({**CLASSES, "label_names": ""}, "--labels: expected 2 classes or more, got none"),
        ({**CLASSES, "label_names": "a"}, "--labels: expected 2 classes or more, got a"),
        ({**CLASSES, "label_names": "a,b,a"}, "--labels: expected 1023 different names"),
        ({**CLASSES, "label_names": "a,, b"}, "--labels: expected printable names"),
        ({**CLASSES, "label_names": ",".join(map(str, range(1025)))}, "1023 different names"),
    ],
)
def test_classes_have_names_and_whole_models(
    run_spec: RunSpec, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadOption, match=why):
        replace(run_spec.train, **changes)


PATIENT: dict[str, Any] = {"early_stopping_patience": 2}
LOADS_BEST: dict[str, Any] = {"load_best_model_at_end": True}
EVERY_EPOCH: dict[str, Any] = {"eval_strategy": EvalStrategy.EPOCH}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (PATIENT, "--early-stopping-patience: expected evaluations on the way; add --eval-steps"),
        ({**PATIENT, "eval_strategy": EvalStrategy.NO, "eval_steps": 2}, "expected evaluations on"),
        ({"early_stopping_patience": -1}, "--early-stopping-patience: expected 0 to"),
        ({"early_stopping_threshold": 0.1}, "expected --early-stopping-patience beside it"),
        ({**PATIENT, "eval_steps": 2, "early_stopping_threshold": -1.0}, "threshold: expected"),
        (LOADS_BEST, "--load-best-model-at-end: expected evaluations on the way"),
        ({**LOADS_BEST, "eval_steps": 2}, "expected --save-steps 2 or a multiple.*got none"),
        ({**LOADS_BEST, "eval_steps": 2, "save_steps": 3}, "--save-steps 2 or a multiple.*got 3"),
        ({**LOADS_BEST, **EVERY_EPOCH, "save_steps": 3}, "--save-strategy epoch.*got steps"),
        (
            {**LOADS_BEST, "eval_steps": 2, "save_strategy": SaveStrategy.EPOCH},
            "--save-strategy steps, as --eval-strategy, got epoch",
        ),
        ({"metric_for_best_model": "accuracy"}, "expected loss with this --task, got 'accuracy'"),
        ({**CLASSES, "metric_for_best_model": "auc"}, "expected loss or accuracy or matthews"),
        ({"save_total_limit": 0}, "--save-total-limit: expected 1 to"),
    ],
)
def test_what_evaluations_decide_needs_evaluations_and_snapshots(
    run_spec: RunSpec, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadOption, match=why):
        replace(run_spec.train, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {**PATIENT, **EVERY_EPOCH, "early_stopping_threshold": 1},
        {**LOADS_BEST, "eval_steps": 2, "save_steps": 6},
        {**LOADS_BEST, **EVERY_EPOCH, "save_strategy": SaveStrategy.EPOCH},
        {**CLASSES, "metric_for_best_model": "eval_matthews_correlation"},
        {"metric_for_best_model": "eval_loss"},
    ],
)
def test_what_agrees_is_taken(run_spec: RunSpec, changes: dict[str, Any]) -> None:
    assert replace(run_spec.train, **changes).num_steps == run_spec.train.num_steps


def test_the_digest_is_stable(run_spec: RunSpec) -> None:
    """A changed digest locks old peers out of new runs: raise `VERSION` with it."""
    assert run_spec.digest().hex() == PINNED_DIGEST


def test_a_run_keeps_the_digest_that_it_inherited_unless_its_codecs_are_others(
    run_spec: RunSpec,
) -> None:
    inherited = replace(run_spec, inherited_digest=b"i" * 16)
    assert inherited.digest() == b"i" * 16
    changed = inherited.with_codecs(Codecs("aq2", "q4"))
    assert changed.digest() == run_spec.with_codecs(Codecs("aq2", "q4")).digest()


def test_the_key_of_digests_is_of_one_nonce_and_one_owner(run_spec: RunSpec) -> None:
    models = [
        replace(run_spec.model, nonce=nonce, owner=owner)
        for nonce in (b"n" * 16, b"m" * 16)
        for owner in ("", "ada", "bob")
    ]
    assert len({model.digest_key for model in models}) == len(models)


def test_what_is_below_all_that_trains_is_constant_if_samples_come_again(run_spec: RunSpec) -> None:
    def of(**changes: Any) -> RunSpec:
        train = replace(run_spec.train, num_samples=8, batch_size=4, micro_batch_size=2)
        wanted: dict[str, Any] = {"train_layers": "2-", "num_steps": 3, "dropout": False}
        wanted |= changes
        return replace(run_spec, train=replace(train, **wanted))

    twice = of()
    assert [twice.is_cacheable(boundary) for boundary in (1, 2, 3)] == [True, True, False]
    keeps = {layers: of().caches_input(LayerRange(*layers)) for layers in ((0, 2), (0, 3), (1, 2))}
    assert keeps == {(0, 2): False, (0, 3): False, (1, 2): False}
    assert twice.caches_input(LayerRange(1, 3))
    assert twice.caches_input(LayerRange(2, 3))
    for never in (of(num_steps=2), of(dropout=True), of(train_layers="0-2")):
        assert not never.is_cacheable(1)
        assert not never.caches_input(LayerRange(2, 3))
    assert of(train_layers="0-2").work(LayerRange(0, 3)) == 3
    assert twice.work(LayerRange(0, 3)) == pytest.approx(1 + 2 / 3)
    assert of(adapter=Adapter.LORA).work(LayerRange(1, 2)) == 1 / 2


def test_equal_specs_share_a_digest(run_spec: RunSpec) -> None:
    train = replace(run_spec.train, weight_decay=0.0, clip_grad_norm=1.0, learning_rate=1.0)
    same = replace(run_spec.train, weight_decay=-0.0, clip_grad_norm=1, learning_rate=1)
    assert train == same
    digests = {RunSpec(model=run_spec.model, train=spec).digest() for spec in (train, same)}
    assert len(digests) == 1


def test_a_buffer_begins_with_the_key_codec_or_with_the_gradients_own(
    train_spec: TrainSpec,
) -> None:
    assert train_spec.key_frame_codec(Direction.FORWARD) == CodecSpec(CodecName.FP16, 1600)
    other = replace(train_spec, key_codec="qc0.25", backward_codec="top10+ef21+z")
    forward, backward = (other.key_frame_codec(way) for way in Direction)
    assert forward == CodecSpec(CodecName.QC, 25, Axis.CHANNEL, entropy=True)
    assert other.codec(Direction.BACKWARD).feedback is Feedback.EF21
    assert backward == CodecSpec(CodecName.TOP, 1000, entropy=True)
    assert not backward.is_delta


@pytest.mark.parametrize(
    ("codec", "first"),
    [
        ("q1.5+z+last", "q1.5t+d+book+z"),
        ("q0.7+z+last", "q1t+d+book+z"),
        ("q2t+last", "q2t+book"),
        ("qc0.5+z+last", "qc0.5t+d+book"),
        ("top0.5+last", "top0.5+book"),
    ],
)
def test_first_gradients_go_beside_a_codebook_in_a_bit_at_least(
    train_spec: TrainSpec, codec: str, first: str
) -> None:
    spec = replace(train_spec, backward_codec=codec)
    assert str(spec.key_frame_codec(Direction.BACKWARD)) == first


def test_properties(run_spec: RunSpec) -> None:
    assert run_spec.model.layers == LayerRange(0, 3)
    assert run_spec.train.steps_per_epoch == 3
    assert run_spec.train.codec(Direction.FORWARD) == CodecSpec(CodecName.AQ, 400, Axis.BOTH)
    assert run_spec.train.codec(Direction.BACKWARD) == CodecSpec(CodecName.Q, 800, Axis.TOKEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 0}, "number of samples: expected 1 to 16777216, got 0"),
        ({"seq_length": 1}, "--seq-length: expected 2 to 131072, got 1"),
        ({"batch_size": 0}, "--batch-size: expected 1 to 65536, got 0"),
        ({"micro_batch_size": 0}, "--micro-batch-size: expected 1 to 65536, got 0"),
        ({"num_steps": 0}, "number of steps: expected 1 to 2147483648, got 0"),
        ({"warmup_steps": -1}, "--warmup-steps: expected 0 to 2147483648, got -1"),
        ({"seed": -1}, "--seed: expected 0 to 9223372036854775807, got -1"),
        ({"seed": 1 << 63}, "--seed: expected 0 to"),
        ({"learning_rate": -1.0}, "--lr: expected a finite number, 0 to 1e+30, got -1.0"),
        ({"learning_rate": 1e38}, "--lr: expected a finite number, 0 to 1e+30, got 1e+38"),
        ({"learning_rate": float("nan")}, "--lr: expected a finite number, 0 to 1e+30, got nan"),
        ({"weight_decay": 1e7}, "--weight-decay: expected a finite number, 0 to 1e+06, got 1"),
        ({"weight_decay": float("inf")}, "--weight-decay: expected a finite number"),
        ({"clip_grad_norm": -0.1}, "--clip-grad-norm: expected a finite number"),
        ({"micro_batch_size": 3}, "--batch-size 4 is not divisible by --micro-batch-size 3"),
        ({"micro_batch_size": 8}, "--batch-size 4 is not divisible by --micro-batch-size 8"),
    ],
)
def test_a_bad_option_is_named_with_what_was_expected(
    train_spec: TrainSpec, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadOption) as raised:
        replace(train_spec, **changes)
    assert raised.value.message.startswith(message)


def test_codecs_are_checked_for_their_direction(train_spec: TrainSpec) -> None:
    with pytest.raises(BadCodec, match="zip"):
        replace(train_spec, forward_codec="zip")
    with pytest.raises(BadCodec, match="forward only"):
        replace(train_spec, backward_codec="aq4")
    with pytest.raises(BadCodec, match="error feedback is for gradients"):
        replace(train_spec, forward_codec="q4+ef")
    with pytest.raises(BadCodec, match="key frame builds on nothing"):
        replace(train_spec, key_codec="aq4")
    with pytest.raises(BadCodec, match="zip"):
        replace(train_spec, key_codec="zip")
    with pytest.raises(BadCodec, match="expected none, fp16, bf16"):
        replace(train_spec, dp_codec="top10")


def test_what_fills_the_pipeline_has_a_codec_of_its_own(train_spec: TrainSpec) -> None:
    assert train_spec.fill_frame_codec == train_spec.codec(Direction.FORWARD)
    other = replace(train_spec, fill_codec="aq2")
    assert other.fill_frame_codec == CodecSpec(CodecName.AQ, 200, Axis.BOTH)
    with pytest.raises(BadOption, match="--fill-microbatches: expected 1 to"):
        replace(train_spec, fill_microbatches=0)


@pytest.mark.parametrize(
    ("forward", "fill", "error"),
    [
        ("aq4", "q2", "--fill: expected a delta codec, such as aq2, like --fw aq4, got q2"),
        ("q4", "aq2", "--fill: expected a codec without buffers, like --fw q4, got aq2"),
        ("aq4", "zip", "codec 'zip'"),
        ("q4", "q2+ef", "error feedback is for gradients"),
    ],
)
def test_it_builds_on_the_same_buffers(
    train_spec: TrainSpec, forward: str, fill: str, error: str
) -> None:
    with pytest.raises((BadOption, BadCodec), match=re.escape(error)):
        replace(train_spec, forward_codec=forward, fill_codec=fill)


def test_what_drains_the_pipeline_has_a_codec_of_its_own(train_spec: TrainSpec) -> None:
    assert train_spec.drain_frame_codec == train_spec.codec(Direction.BACKWARD)
    other = replace(train_spec, drain_codec="q0.5+z")
    assert other.drain_frame_codec.number == 0.5
    with pytest.raises(BadOption, match="--drain-microbatches: expected 1 to"):
        replace(train_spec, drain_microbatches=0)


@pytest.mark.parametrize(
    ("backward", "drain", "error"),
    [
        ("q1+z+last", "q0.6+z", "--drain: expected a codec with the state of --bw q1+z"),
        ("q4", "q2+ef", "with the same +ef, +ef21 or +last, got q2+ef"),
        ("q4", "zip", "--drain: codec 'zip'"),
        ("q4", "aq2", "forward only"),
    ],
)
def test_it_keeps_the_same_of_a_sample(
    train_spec: TrainSpec, backward: str, drain: str, error: str
) -> None:
    with pytest.raises((BadOption, BadCodec), match=re.escape(error)):
        replace(train_spec, backward_codec=backward, drain_codec=drain)


def with_codecs(spec: TrainSpec, codecs: dict[str, Any]) -> TrainSpec:
    return replace(spec, **codecs)


@pytest.mark.parametrize(
    "codecs",
    [
        {"forward_codec": "aqk0.5", "key_codec": "qk0.5"},
        {"forward_codec": "aqk0.5", "fill_codec": "aqk1"},
        {"forward_codec": "aqk0.5", "fill_codec": "aq2"},
        {"forward_codec": "aq4", "fill_codec": "aqk1"},
        {"forward_codec": "qk0.5"},
        {"forward_codec": "qk0.5", "fill_codec": "q2"},
    ],
)
def test_activations_may_be_coded_along_a_basis(
    train_spec: TrainSpec, codecs: dict[str, str]
) -> None:
    spec = with_codecs(train_spec, codecs)
    codec = spec.codec(Direction.FORWARD)
    assert spec.compressed_eval_codec == (
        spec.key_frame_codec(Direction.FORWARD) if codec.is_delta else codec
    )


@pytest.mark.parametrize(
    ("codecs", "error"),
    [
        ({"frozen_codec": "qk1"}, "--frozen: expected a codec without buffers or a basis"),
        ({"frozen_codec": "aqk1"}, "--frozen: expected a codec without buffers or a basis"),
        ({"backward_codec": "qk1"}, "--bw: codec 'qk1': qk needs a basis of activations"),
        ({"backward_codec": "aqk1"}, "--bw: codec 'aqk1': qk needs a basis of activations"),
        ({"key_codec": "aqk1"}, "--key: codec 'aqk1': a key frame builds on nothing; use qk1"),
        ({"dp_codec": "qk1"}, "--dp: codec 'qk1': expected none, fp16, bf16"),
        ({"fill_codec": "qk1"}, "--fill: expected a delta codec"),
        (
            {"forward_codec": "qk1", "fill_codec": "aqk2"},
            "--fill: expected a codec without buffers",
        ),
    ],
)
def test_nothing_else_is(train_spec: TrainSpec, codecs: dict[str, str], error: str) -> None:
    with pytest.raises((BadOption, BadCodec), match=re.escape(error)):
        with_codecs(train_spec, codecs)


@pytest.mark.parametrize("bits", [0, 2, 5, 15, 32, -4])
def test_buffers_take_16_8_or_4_bits(train_spec: TrainSpec, bits: int) -> None:
    with pytest.raises(BadOption, match=f"--buffer-bits: expected 16, 8 or 4, got {bits}"):
        replace(train_spec, buffer_bits=bits)


def test_replicas_gradients_have_a_codec_of_their_own(train_spec: TrainSpec) -> None:
    assert train_spec.reduction_codec == CodecSpec(CodecName.NONE, 3200)
    other = replace(train_spec, dp_codec="q4").reduction_codec
    assert other == CodecSpec(CodecName.Q, 400, Axis.TOKEN)


@pytest.mark.parametrize(
    ("names", "peers"), [("", set()), ("one", {"one"}), ("one,other,one", {"one", "other"})]
)
def test_the_ends_are_for_those_who_are_named(
    train_spec: TrainSpec, names: str, peers: set[str]
) -> None:
    assert replace(train_spec, private_ends=names).trusted_with_ends == peers


def test_private_ends_that_are_no_names_are_refused(train_spec: TrainSpec) -> None:
    with pytest.raises(BadOption, match="--private-ends: expected 1 to 64 bytes of printable"):
        replace(train_spec, private_ends="one,")


def test_only_tied_embeddings_can_be_kept_tied(
    model_spec: ModelSpec, train_spec: TrainSpec
) -> None:
    with pytest.raises(BadOption, match="--tied-embeddings sync: expected a model with tied"):
        RunSpec(
            model=replace(model_spec, tied_embeddings=False),
            train=replace(train_spec, sync_tied_embeddings=True),
        )


@pytest.mark.parametrize(
    ("shared", "train", "values", "sharing"),
    [
        (0, {}, 0, ""),
        (48, {}, 12, "abc"),
        (48, {"train_layers": "1-"}, 0, ""),
        (48, {"train_layers": "0-2"}, 12, "abc"),
        (48, {"adapter": Adapter.LORA}, 0, ""),
        (0, {"sync_tied_embeddings": True}, 32 * 8, "ac"),
    ],
)
def test_stages_that_train_one_weight_sum_its_gradients(
    shared: int, train: dict[str, Any], values: int, sharing: str
) -> None:
    model = model_spec_of(num_blocks=3, shared_bytes=shared, tied_embeddings=True)
    spec = RunSpec(model=model, train=train_spec_of(**train))
    assert spec.shared_values == values
    assert spec.sharing("abc") == tuple(sharing)
    assert spec.sharing("a") == ()
    # Every stage holds it, with its gradient and moments if it trains.
    plain = RunSpec(model=replace(model, shared_bytes=0), train=spec.train)
    layers = LayerRange(1, 2)
    copies = COPIES_PER_WEIGHT if shared and values else 1
    assert spec.memory_bytes(layers) == plain.memory_bytes(layers) + copies * shared
    assert spec.trained_bytes(layers) == plain.trained_bytes(layers) + (shared if values else 0)


def test_tied_embeddings_are_not_kept_tied_beside_other_shared_weights() -> None:
    model = model_spec_of(shared_bytes=48, tied_embeddings=True)
    with pytest.raises(BadOption, match="expected a model whose blocks share no weights"):
        RunSpec(model=model, train=train_spec_of(sync_tied_embeddings=True))


@pytest.mark.parametrize("reference", ["dir\nwith a line", "d" * 1001])
def test_a_reference_that_others_could_not_read_is_refused(
    model_spec: ModelSpec, reference: str
) -> None:
    with pytest.raises(BadModel, match="at most 1000 bytes of printable UTF-8"):
        replace(model_spec, reference=reference)


def test_held_out_samples_have_rows_behind_the_others_and_a_name_for_each_pass(
    train_spec: TrainSpec,
) -> None:
    train = replace(
        train_spec, num_samples=10, num_eval_samples=3, eval_compression=EvalCompression.BOTH
    )
    names = [SampleId(sample) for sample in range(16)]
    assert [train.row_of(sample) for sample in names] == [*range(13), 10, 11, 12]
    assert [train.is_held_out(sample) for sample in names] == [False] * 10 + [True] * 6
    assert [train.is_compressed(sample) for sample in names[10:]] == [False] * 3 + [True] * 3
    assert (train.num_rows, train.data_bytes) == (13, 13 * train.sample_bytes)
    one = replace(train, eval_compression=EvalCompression.ON)
    assert [one.is_compressed(sample) for sample in names[10:13]] == [True] * 3
    assert not replace(train, num_eval_samples=0).is_held_out(SampleId(10))


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"seq_length": 16}, MAX_EVAL_SAMPLES),
        ({"seq_length": 1 << 16}, 128),
        ({"seq_length": 1 << 16, "eval_compression": EvalCompression.BOTH}, 64),
        ({"seq_length": 16, "num_samples": (1 << 24) - 5}, 5),
    ],
)
def test_no_more_are_held_out_than_go_into_a_plan(
    train_spec: TrainSpec, changes: dict[str, Any], most: int
) -> None:
    evaluated = replace(train_spec, **changes, num_eval_samples=most)
    assert TrainSpec.most_eval_samples(evaluated, evaluated.num_samples) == most
    with pytest.raises(BadOption, match="expected"):
        replace(evaluated, num_eval_samples=most + 1)


@pytest.mark.parametrize(
    ("forward", "backward", "others"),
    [
        ("aq3+z", "q3+z", [("aq2", "none"), ("aqc0.5", "top10"), ("aqtop10", "fp16+z")]),
        ("q4", "q4+ef", [("none", "q2+z+ef"), ("top10", "top10+ef"), ("q4+z", "q8+ef")]),
        ("aq4", "q4+ef21", [("aq8+z", "top10+ef21")]),
    ],
)
def test_codecs_may_go_on_with_what_others_keep_of_samples(
    train_spec: TrainSpec, forward: str, backward: str, others: list[tuple[str, str]]
) -> None:
    before = replace(train_spec, forward_codec=forward, backward_codec=backward)
    for other in others:
        after = before.with_codecs(Codecs(*other))
        assert after == replace(before, forward_codec=other[0], backward_codec=other[1])
        assert after.with_codecs(before.codecs) == before


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        (("zip", "q8"), "--fw: codec 'zip': expected a codec such as"),
        (("aq9", "q8"), "--fw: codec 'aq9': 9 bits is outside 1 to 8"),
        (("q4", "q8"), "--fw: codec 'q4': expected a delta codec (aq1 to aq8,"),
        (("aq2", "aq2"), "--bw: codec 'aq2': aq builds on a sample's last activation"),
        (("aq2", "q4+ef"), "--bw: codec 'q4+ef': expected a codec without per-sample state (none,"),
        (("aq2", ""), "--bw: codec '': expected a codec such as"),
        (("a" * 999, "q8"), "--fw: codec 'aaaa"),
    ],
)
def test_codecs_that_keep_something_else_are_refused(
    train_spec: TrainSpec, codecs: tuple[str, str], message: str
) -> None:
    with pytest.raises(BadCodec) as raised:
        train_spec.with_codecs(Codecs(*codecs))
    assert raised.value.message.startswith(message)
    assert len(raised.value.message) < 300


@pytest.mark.parametrize(("codec", "kin"), [("q4+ef", "q2+ef"), ("top10+ef21", "q2+ef21")])
def test_a_codec_with_feedback_is_followed_by_one_with_the_same(
    train_spec: TrainSpec, codec: str, kin: str
) -> None:
    before = replace(train_spec, backward_codec=codec)
    with pytest.raises(BadCodec, match=re.escape(f"such as {kin}, with the per-sample state of")):
        before.with_codecs(Codecs("aq4", "q4"))
    assert before.with_codecs(Codecs("aq4", kin)).backward_codec == kin


def test_what_fills_the_pipeline_follows_unless_it_was_said(train_spec: TrainSpec) -> None:
    assert train_spec.with_codecs(Codecs("aq2", "q8")).fill_frame_codec.bits == 2
    filled = replace(train_spec, fill_codec="aq3")
    assert filled.with_codecs(Codecs("aq2", "q8")).fill_frame_codec.bits == 3


def test_what_drains_the_pipeline_follows_unless_it_was_said(train_spec: TrainSpec) -> None:
    assert train_spec.with_codecs(Codecs("aq2", "q8")).drain_frame_codec.bits == 8
    drained = replace(train_spec, drain_codec="q3")
    assert drained.with_codecs(Codecs("aq2", "q8")).drain_frame_codec.bits == 3


WITH_QUALITY = {
    "forward_codec": "aq3+z",
    "backward_codec": "q3+z",
    "key_codec": "q4+z",
    "quality": 0.01,
}


def test_codecs_follow_from_a_quality() -> None:
    train = train_spec_of(**WITH_QUALITY)
    step = QualityControl.of(0.01, adapts=False).step_size
    assert train.codecs == Codecs(f"aqk{step:g}", "q2+z")
    assert train_spec_of(**WITH_QUALITY | {"quality": 0.03}).codecs.backward == "q1.5+z"
    assert train.key_codec == f"qk{round(0.7 * step, 2):g}"
    finer = train.with_codecs(Codecs("aqk0.1", "q1.5+z"))
    assert (finer.forward_codec, finer.key_codec) == ("aqk0.1", "qk0.07")
    finest = train.with_codecs(Codecs("aqk0.02", "q1.5+z"))
    assert finest.key_codec == "qk0.02", "there is none that is finer"


def test_codecs_follow_from_a_quality_otherwise_for_adapters() -> None:
    train = train_spec_of(**WITH_QUALITY, adapter=Adapter.LORA)
    step = QualityControl.of(0.01, adapts=True).step_size
    assert train.codecs == Codecs(f"aqk{step:g}", "q3+z")
    assert replace(train, num_steps=train.num_steps + 1).codecs == train.codecs


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"forward_codec": "aq4"}, "leave out --fw aq4, or --quality"),
        ({"backward_codec": "q8"}, "leave out --bw q8, or --quality"),
        ({"key_codec": "fp16"}, "leave out --key fp16, or --quality"),
        ({"fill_codec": "aq2"}, "leave out --fill aq2, or --quality"),
        ({"drain_codec": "q1+z"}, "leave out --drain q1+z, or --quality"),
        ({"dropout": True}, "expected no --dropout beside it"),
    ],
)
def test_a_quality_leaves_no_choice_of_codecs(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BadOption, match=re.escape(why)):
        train_spec_of(**WITH_QUALITY | changes)


def test_shadows_have_names_behind_all_others_and_rows_of_the_samples() -> None:
    train = train_spec_of(**WITH_QUALITY, num_eval_samples=2, eval_compression=EvalCompression.BOTH)
    shadows = [train.shadow_of(SampleId(sample)) for sample in range(train.num_samples)]
    assert shadows == list(range(train.num_names, train.num_names + train.num_samples))
    assert [train.row_of(shadow) for shadow in shadows] == list(range(train.num_samples))
    assert all(train.is_held_out(shadow) and not train.is_compressed(shadow) for shadow in shadows)
    assert not any(train.is_shadow(SampleId(sample)) for sample in range(train.num_names))
    assert not any(map(train_spec_of(num_eval_samples=2).is_shadow, shadows))
