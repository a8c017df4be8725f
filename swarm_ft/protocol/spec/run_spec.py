"""RunSpec: everything that all peers of a run must agree on, and its digest."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Annotated, NoReturn

from swarm_ft.errors import BadModel, BadOption
from swarm_ft.protocol.spec.bounds import Length, OneOf, Range
from swarm_ft.protocol.spec.checks import Digest
from swarm_ft.protocol.spec.codec_spec import (
    CodecSpec,
    Direction,
    Feedback,
    parse_codec_spec,
    parse_dp_spec,
    parse_key_spec,
)
from swarm_ft.protocol.spec.digest import digest_of
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange

VERSION = 8
BUFFER_BITS = (16, 8, 4)
"""What a value of a buffer may take."""
MAX_SAMPLES = 1 << 24
MAX_SEQ_LENGTH = 1 << 17
MAX_HIDDEN_SIZE = 1 << 16
MAX_VOCAB_SIZE = 1 << 24
MAX_STEPS = 1 << 31
MAX_BATCH_SIZE = 1 << 16
MAX_REFERENCE_CHARS = 1000


class LrSchedule(IntEnum):
    """How the learning rate moves; the numbers are those of the wire."""

    CONSTANT = 1
    LINEAR = 2
    COSINE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The model as every peer must find it.

    Attributes:
        reference: directory or hub id, as the client named it.
        architecture: `config.model_type`, for example `gpt2`.
        block_bytes: float32 weights of one block, for placement.
        embed_digest: of the embeddings' tensors, see `stage.checkpoint`.
        block_digests: one for each block.
        head_digest: of the final norm and the head.
        tied_embeddings: the checkpoint ties its head to its token embeddings.
    """

    reference: str
    architecture: str
    num_blocks: Annotated[int, Range(1, MAX_BLOCKS)]
    hidden_size: Annotated[int, Range(1, MAX_HIDDEN_SIZE)]
    vocab_size: Annotated[int, Range(1, MAX_VOCAB_SIZE)]
    block_bytes: int
    embed_digest: Digest
    block_digests: Annotated[tuple[Digest, ...], Length(MAX_BLOCKS, 1)]
    head_digest: Digest
    tied_embeddings: bool

    def __post_init__(self) -> None:
        for name in (self.reference, self.architecture):
            if len(name) > MAX_REFERENCE_CHARS or not name.isprintable():
                raise BadModel(
                    f"model {name[:80]!a}: expected a path or hub id of at most "
                    f"{MAX_REFERENCE_CHARS} printable characters; rename its directory"
                )
        if len(self.block_digests) != self.num_blocks:
            raise BadModel(
                f"model: expected digests of {self.num_blocks} blocks, "
                f"got {len(self.block_digests)}"
            )

    @property
    def layers(self) -> LayerRange:
        """All blocks of the model."""
        return LayerRange(0, self.num_blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec:
    """How to train.

    Attributes:
        seq_length: tokens a sample; it has seq_length - 1 targets, its own next tokens.
        batch_size: samples a step; an epoch's last step may have fewer.
        num_steps: optimizer steps in all.
        clip_grad_norm: bound of the global gradient norm, over all stages; 0 is off.
        dropout: train with the model's own dropout rates; off by default, since dropout
            noise is a floor under every delta.
        key_codec: of frames that begin a buffer.
        dp_codec: of the gradients that replicas of a stage sum.
        save_steps: steps from one snapshot to the next; 0 makes none.
        buffer_bits: of a value in both ends' buffers, one of BUFFER_BITS.
        fill_codec: of what fills the pipeline, that is of the activations of a step's first
            microbatches, for which all later stages idle; as forward_codec if empty.
        fill_microbatches: how many those are.
        sync_tied_embeddings: keep tied embeddings tied across first and last stage.
    """

    num_samples: int
    seq_length: int
    batch_size: int
    micro_batch_size: int
    num_steps: int
    learning_rate: float
    lr_schedule: LrSchedule
    warmup_steps: int
    weight_decay: float
    clip_grad_norm: float
    seed: int
    shuffle: bool
    dropout: bool
    sync_tied_embeddings: bool
    forward_codec: str
    backward_codec: str
    key_codec: str = "fp16"
    dp_codec: str = "none"
    save_steps: int = 0
    buffer_bits: int = 16
    fill_codec: str = ""
    fill_microbatches: int = 1

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_numbers(self)
        for name in ("learning_rate", "weight_decay", "clip_grad_norm"):
            # 1 equals 1.0, and 0.0 equals -0.0: equal specs must have one digest.
            object.__setattr__(self, name, float(getattr(self, name)) + 0.0)
        parse_codec_spec(self.forward_codec, Direction.FORWARD)
        parse_codec_spec(self.backward_codec, Direction.BACKWARD)
        _check_fill(self)
        parse_key_spec(self.key_codec)
        parse_dp_spec(self.dp_codec)

    def codec(self, direction: Direction) -> CodecSpec:
        """The codec of one direction."""
        text = self.forward_codec if direction is Direction.FORWARD else self.backward_codec
        return parse_codec_spec(text, direction)

    @property
    def fill_frame_codec(self) -> CodecSpec:
        """The codec of the activations that fill the pipeline."""
        return parse_codec_spec(self.fill_codec or self.forward_codec, Direction.FORWARD)

    def key_frame_codec(self, direction: Direction) -> CodecSpec:
        """The codec of the frames that begin a buffer.

        The buffer of gradients begins with a gradient by their own codec (EF21, arXiv 2106.05203).
        """
        if direction is Direction.FORWARD:
            return parse_key_spec(self.key_codec)
        return replace(self.codec(direction), feedback=Feedback.NONE)

    @property
    def reduction_codec(self) -> CodecSpec:
        """The codec of the gradients that replicas of a stage sum."""
        return parse_dp_spec(self.dp_codec)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every sample once."""
        return math.ceil(self.num_samples / self.batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """One fine-tuning job. Its digest opens every session, so no peer can disagree silently.

    Attributes:
        version: of the spec's own fields, which journals and snapshots keep too.
    """

    model: ModelSpec
    train: TrainSpec
    version: Annotated[int, OneOf((VERSION,))] = VERSION

    def __post_init__(self) -> None:
        if self.train.sync_tied_embeddings and not self.model.tied_embeddings:
            _refuse("--tied-embeddings sync", "a model with tied embeddings", "an untied one")

    def digest(self) -> bytes:
        """16 bytes that two equal specs share and two different ones do not."""
        text = json.dumps(asdict(self), sort_keys=True, default=lambda value: value.hex())
        return digest_of(text.encode())


def _refuse(option: str, expected: str, got: object) -> NoReturn:
    raise BadOption(f"{option}: expected {expected}, got {got}")


def _check_counts(spec: TrainSpec) -> None:
    bounds = (
        ("number of samples", spec.num_samples, 1, MAX_SAMPLES),
        ("--seq-length", spec.seq_length, 2, MAX_SEQ_LENGTH),
        ("--batch-size", spec.batch_size, 1, MAX_BATCH_SIZE),
        ("--micro-batch-size", spec.micro_batch_size, 1, MAX_BATCH_SIZE),
        ("--steps", spec.num_steps, 1, MAX_STEPS),
        ("--warmup-steps", spec.warmup_steps, 0, MAX_STEPS),
        ("--save-steps", spec.save_steps, 0, MAX_STEPS),
        ("--fill-microbatches", spec.fill_microbatches, 1, MAX_BATCH_SIZE),
        ("--seed", spec.seed, 0, (1 << 63) - 1),
    )
    for option, value, low, high in bounds:
        if not low <= value <= high:
            _refuse(option, f"{low} to {high}", value)
    if spec.buffer_bits not in BUFFER_BITS:
        _refuse("--buffer-bits", "16, 8 or 4", spec.buffer_bits)
    if spec.batch_size % spec.micro_batch_size:
        raise BadOption(
            f"--batch-size {spec.batch_size} is not divisible by "
            f"--micro-batch-size {spec.micro_batch_size}"
        )


def _check_fill(spec: TrainSpec) -> None:
    is_delta = spec.codec(Direction.FORWARD).is_delta
    if spec.fill_frame_codec.is_delta != is_delta:
        expected = "a codec of changes, such as aq2," if is_delta else "one without buffers"
        _refuse("--fill", f"{expected} as --fw {spec.forward_codec} is", spec.fill_codec)


def _check_numbers(spec: TrainSpec) -> None:
    for option, value, low in (
        ("--lr", spec.learning_rate, 0.0),
        ("--weight-decay", spec.weight_decay, 0.0),
        ("--clip-grad-norm", spec.clip_grad_norm, 0.0),
    ):
        if not (math.isfinite(value) and value >= low):
            _refuse(option, "a finite number, 0 or more", value)
