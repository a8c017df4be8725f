"""RunSpec: all facts that the peers of a run must agree on, and their digest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Any, Self, TypeVar

from swarm_ft.codec.sizes import MAX_CHANNELS, MAX_TOKENS
from swarm_ft.codec.spec import (
    MAX_SPEC_CHARS,
    MIN_QUALITY_STEP,
    CodecName,
    CodecSpec,
    Direction,
    Feedback,
    parse_codec_spec,
    parse_dp_spec,
    parse_key_spec,
    parse_replacement,
)
from swarm_ft.digest import DIGEST_BYTES, digest_of
from swarm_ft.errors import BadCodec, BadLayers, BadModel, BadOption
from swarm_ft.ids import PeerId, SampleId
from swarm_ft.protocol.spec.bounds import (
    MAX_FACTOR,
    MAX_ID_BYTES,
    MAX_SCALAR,
    Digest,
    Length,
    NameList,
    OneOf,
    Range,
)
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange, parse_trained
from swarm_ft.protocol.spec.options import Option, check
from swarm_ft.protocol.spec.quality import Prices, QualityControl

T = TypeVar("T")

VERSION = 10
"""Version of the fields below.

Add fields only with another version, and teach `protocol.wire.earlier` the meaning of specs of this
one.
"""
NO_NONCE = bytes(DIGEST_BYTES)
"""Nonce of a model whose digests stay in one process."""
BUFFER_BITS = (16, 8, 4)
"""Bits of a buffer's value that users may choose."""
MAX_SAMPLES = 1 << 24
MAX_SEQ_LENGTH = MAX_TOKENS
MIN_LENGTH = 1
"""Tokens of a sample at least."""
MAX_HIDDEN_SIZE = MAX_CHANNELS
MAX_VOCAB_SIZE = 1 << 20
MAX_END_TOKENS = 8
MAX_STEPS = 1 << 31
MAX_BATCH_SIZE = 1 << 16
MAX_EVAL_SAMPLES = 1 << 14
MAX_EVAL_BYTES = 32 << 20
"""Bytes of the held-out samples' rows, which travel with a plan in one message."""
MAX_MICROBATCHES = MAX_BATCH_SIZE + 2 * MAX_EVAL_SAMPLES
"""Microbatches of a step: those that train, and one of each held-out sample and pass.

Shadows of training samples may replace some of the latter.
"""
MAX_REFERENCE_BYTES = 1000
BYTES_PER_FLOAT = 4
BYTES_PER_TOKEN = 4
"""Bytes of a token in storage and on the wire, as little-endian uint32."""
MAX_PRIVATE_ENDS = 64
MAX_READERS = 16
MAX_LORA_R = 1 << 12
MAX_LORA_ALPHA = 1 << 16
MAX_TARGETS = 64
MAX_LORA_DROPOUT = 0.95
MAX_TRAIN_LAYERS_CHARS = 16
MAX_LABELS = (1 << 10) - 1
"""Largest number of classes that fits into the bits of a word, see `sample_rows`."""
MAX_COUNTS = 3 * MAX_LABELS
"""Largest number of counts, see `tasks.Task.num_counts`."""
MAX_LABELS_CHARS = 1 << 14
MIN_LABELS = 2
COPIES_PER_WEIGHT = 4
"""Copies in a peer's memory of a weight that AdamW trains.

They are the weight, its gradient and two moments, all equally large. A frozen weight has one copy.
"""
COPY_IN_8_BITS = (1 + 4 / 256) / 4
"""Size of an 8-bit moment with a scale for each 256, in float32 values."""
PACKED_VALUES = 64
"""Values of a packed weight in 8 or 4 bits that share one float32 scale."""
MAX_METRIC_CHARS = 64
METRIC_PREFIX = "eval_"
CLASS_METRICS = ("accuracy", "matthews_correlation", "f1")
"""Metrics of tasks with classes, beside the loss."""
FINER_FIRST = 0.7
"""Step of first activations as a share of that of changes: adapters are most sensitive to these."""
ALL_LINEAR = "all-linear"
"""Value of `--target-modules` for adapters at every linear layer of the blocks."""
CodecText = Annotated[str, Length(MAX_SPEC_CHARS)]
"""A codec as users write it, such as `aq3+z`."""


@dataclass(frozen=True, slots=True)
class Codecs:
    """Codecs of activations and their gradients at boundaries, as `--fw` and `--bw` take them."""

    forward: str
    backward: str

    def __str__(self) -> str:
        return f"{self.forward}/{self.backward}"


class TaskKind(IntEnum):
    """Kind of the task, see `tasks`; the numbers are those of the wire."""

    CAUSAL_LM = 1
    CLASSIFICATION = 2
    TOKEN_CLASSIFICATION = 3


class LrSchedule(IntEnum):
    """Schedule of the learning rate; the numbers are those of the wire."""

    CONSTANT = 1
    LINEAR = 2
    COSINE = 3


class EvalStrategy(IntEnum):
    """Schedule of evaluations; the numbers are those of the wire."""

    NO = 1
    STEPS = 2
    EPOCH = 3


class SaveStrategy(IntEnum):
    """Schedule of snapshots; the numbers are those of the wire."""

    NO = 1
    STEPS = 2
    EPOCH = 3


class EvalCompression(IntEnum):
    """Compression of held-out samples' activations; the numbers are those of the wire."""

    OFF = 1
    ON = 2
    BOTH = 3


class Adapter(IntEnum):
    """Kind of the adapter that trains instead of the model's weights; numbers of the wire."""

    NONE = 1
    LORA = 2
    DORA = 3


class BaseDtype(IntEnum):
    """Dtype of frozen weights in memory; the numbers are those of the wire."""

    FLOAT32 = 1
    BFLOAT16 = 2


class Dtype(IntEnum):
    """Dtype of stored weights; the numbers are those of the wire."""

    AUTO = 1
    FLOAT32 = 2
    BFLOAT16 = 3
    FLOAT16 = 4


class Optim(IntEnum):
    """Optimizer of the weights; the numbers are those of the wire."""

    ADAMW = 1
    ADAFACTOR = 2
    SGD = 3
    ADAMW_8BIT = 4


_FLOATS = (
    "learning_rate",
    "weight_decay",
    "clip_grad_norm",
    "router_aux_loss_coef",
    "lora_dropout",
    "early_stopping_threshold",
    "quality",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The model, as every peer must find it.

    Attributes:
        reference: Directory or hub id that the client named.
        architecture: `config.model_type`, for example `gpt2`.
        num_blocks: Number of its blocks.
        hidden_size: Width of its activations.
        vocab_size: Tokens of its vocabulary.
        block_bytes: Bytes of one block's weights in float32, for placement.
        embed_digest: Digest of the embeddings' tensors, see `stage.checkpoint`.
        block_digests: Digest of each block's tensors.
        head_digest: Digest of the tensors of the final norm and the head.
        tied_embeddings: Whether the checkpoint ties its head to its token embeddings.
        linear_bytes: Bytes of `block_bytes` in weights that can be held in fewer bits.
        adapter_bytes: Bytes of the adapters of one block in float32; 0 without adapters.
        shared_bytes: Bytes in float32 of weights that all blocks read, and every stage holds.
        dtype: Dtype of its stored weights, never AUTO.
        nonce: Random bytes of the client for this run, see `digest_key`; None in a run of
            version 8.
        owner: Name of the client of the run; empty in a swarm without keys.
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
    linear_bytes: int = 0
    adapter_bytes: int = 0
    shared_bytes: int = 0
    dtype: Dtype = Dtype.FLOAT32
    nonce: Digest | None = None
    owner: Annotated[str, Length(MAX_ID_BYTES)] = ""

    def __post_init__(self) -> None:
        for name in (self.reference, self.architecture):
            if not name.isprintable() or len(name.encode()) > MAX_REFERENCE_BYTES:
                raise BadModel(
                    f"model {name[:80]!a}: expected a path or hub id of at most "
                    f"{MAX_REFERENCE_BYTES} bytes of printable UTF-8; rename its directory"
                )
        if len(self.block_digests) != self.num_blocks:
            raise BadModel(
                f"model: expected digests of {self.num_blocks} blocks, "
                f"got {len(self.block_digests)}"
            )
        if self.dtype is Dtype.AUTO:
            raise BadModel("model: expected the dtype of its stored weights, got AUTO")

    @property
    def layers(self) -> LayerRange:
        """Range of all blocks of the model."""
        return LayerRange(0, self.num_blocks)

    @property
    def digest_key(self) -> bytes:
        """Key of the parts' digests; empty for runs that began with version 8.

        Peers and readers of a run learn its digests. In a run of their own, which has another
        owner, these digests match nothing, whatever nonce they put beside them.
        """
        return b"" if self.nonce is None else digest_of(self.nonce, self.owner.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Options of training that a user chooses, for a text of any length.

    A sample has seq_length - 1 targets, its own next tokens. An epoch's last step may have fewer
    samples than batch_size.

    Raises:
        BadOption: A value is out of its bounds, or contradicts another.
        BadCodec: A text is no codec, or the codec makes no sense for its option.
    """

    task_kind: Annotated[
        TaskKind,
        Option(
            "Training task: language modeling, sequence classification or token classification.",
            name="task",
        ),
    ] = TaskKind.CAUSAL_LM
    label_names: Annotated[
        str,
        Length(MAX_LABELS_CHARS),
        Option(
            "Class names for --task classification and token-classification. Integers in the data "
            "count these names from 0.",
            name="labels",
            metavar="NAME,NAME,...",
            default="all classes of the data, sorted",
        ),
    ] = ""
    batch_size: Annotated[int, Range(1, MAX_BATCH_SIZE), Option("Samples per optimizer step.")] = 8
    micro_batch_size: Annotated[
        int,
        Range(1, MAX_BATCH_SIZE),
        Option("Samples per microbatch; does not change the result."),
    ] = 2
    seq_length: Annotated[int, Range(2, MAX_SEQ_LENGTH), Option("Tokens per sample.")] = 128
    learning_rate: Annotated[
        float,
        Range(0.0, MAX_SCALAR),
        Option("Peak learning rate.", name="lr", default="5e-5; 2e-3 for the demo's own model"),
    ] = 5e-5
    lr_schedule: Annotated[LrSchedule, Option("Learning rate schedule after the warmup.")] = (
        LrSchedule.LINEAR
    )
    warmup_steps: Annotated[
        int,
        Range(0, MAX_STEPS),
        Option("Warmup steps, in which the learning rate rises from 0 to --lr."),
    ] = 0
    weight_decay: Annotated[
        float, Range(0.0, MAX_FACTOR), Option("Weight decay; biases and norms have none.")
    ] = 0.0
    optim: Annotated[
        Optim,
        Option(
            "Optimizer. State per weight: adamw stores two values, adamw-8bit two in 8 bits, sgd "
            "none; adafactor stores one per row and column, and its --lr is relative to the "
            "weights."
        ),
    ] = Optim.ADAMW
    gradient_checkpointing: Annotated[
        bool,
        Option(
            "Store only each block's input for the backward pass and recompute the rest: less "
            "memory, more time."
        ),
    ] = False
    router_aux_loss_coef: Annotated[
        float,
        Range(0.0, MAX_FACTOR),
        Option(
            "Weight of the load-balancing loss of mixture-of-experts models, which each block "
            "computes by itself; 0.001 to 0.02 are usual."
        ),
    ] = 0.0
    clip_grad_norm: Annotated[
        float,
        Range(0.0, MAX_SCALAR),
        Option("Maximum gradient norm over all stages; 0 disables clipping."),
    ] = 1.0
    seed: Annotated[int, Range(0, (1 << 63) - 1), Option("Seed of all random numbers.")] = 42
    shuffle: Annotated[bool, Option("Shuffle the samples every epoch.")] = False
    dropout: Annotated[
        bool,
        Option(
            "Apply the model's own dropout. Its noise limits how far delta codecs can compress."
        ),
    ] = False
    sync_tied_embeddings: Annotated[
        bool,
        Option(
            "Models with tied embeddings: untie trains head and embeddings apart, sync keeps them "
            "equal.",
            name="tied-embeddings",
            words=("untie", "sync"),
        ),
    ] = False
    quality: Annotated[
        float,
        Range(0.0, 1.0),
        Option(
            "Share of the perplexity that compression may cost, such as 0.01. It sets --fw, --bw "
            "and --key, and adjusts --fw to measurements during the run; 0 disables it.",
            metavar="SHARE",
        ),
    ] = 0.0
    forward_codec: Annotated[
        CodecText,
        Option(
            "Codec for activations: none, fp16, aq4 (changes in 4 bits), aq2+z (2 bits per value, "
            "entropy-coded), q4, aqc0.5, top10 ...",
            name="fw",
            long_name="forward-codec",
            metavar="SPEC",
        ),
    ] = "aq3+z"
    backward_codec: Annotated[
        CodecText,
        Option(
            "Codec for gradients: none, fp16, q4, q2+z, top10+ef ...",
            name="bw",
            long_name="backward-codec",
            metavar="SPEC",
        ),
    ] = "q3+z"
    key_codec: Annotated[
        CodecText,
        Option(
            "Codec for a sample's first activations, where --fw sends changes: fp16, q8, q4+z ...",
            name="key",
            long_name="key-codec",
            metavar="SPEC",
        ),
    ] = "q4+z"
    fill_codec: Annotated[
        CodecText,
        Option(
            "Codec for a step's first microbatches, while later stages wait for them; for example "
            "aq2 with --fw aq4.",
            name="fill",
            long_name="first-codec",
            metavar="SPEC",
            default="as --fw",
        ),
    ] = ""
    fill_microbatches: Annotated[
        int,
        Range(1, MAX_BATCH_SIZE),
        Option("Number of first microbatches per step that use --fill."),
    ] = 1
    drain_codec: Annotated[
        CodecText,
        Option(
            "Codec for the gradients of a step's last microbatches, while earlier stages wait for "
            "them; for example q0.6+z with --bw q1+z.",
            name="drain",
            long_name="last-codec",
            metavar="SPEC",
            default="as --bw",
        ),
    ] = ""
    drain_microbatches: Annotated[
        int,
        Range(1, MAX_BATCH_SIZE),
        Option("Number of last microbatches per step that use --drain."),
    ] = 1
    frozen_codec: Annotated[
        CodecText,
        Option(
            "Codec for activations below the lowest trained block, which never change and are sent "
            "once: q8, fp16, none ...",
            name="frozen",
            long_name="frozen-codec",
            metavar="SPEC",
        ),
    ] = "q8"
    dp_codec: Annotated[
        CodecText,
        Option(
            "Codec for the gradients that replicas of a stage sum: none, fp16, bf16, q4, q2+z ...",
            name="dp",
            long_name="replica-codec",
            metavar="SPEC",
        ),
    ] = "none"
    buffer_bits: Annotated[
        int,
        OneOf(BUFFER_BITS),
        Option(
            "Bits per value of the buffers in which --fw aq... remembers each sample at both ends. "
            "Fewer bits need less memory and disk."
        ),
    ] = 16
    adapter: Annotated[
        Adapter,
        Option(
            "Train an adapter and freeze the model's own weights. The result is an adapter for "
            "peft."
        ),
    ] = Adapter.NONE
    lora_r: Annotated[int, Range(1, MAX_LORA_R), Option("LoRA rank of --adapter.")] = 16
    lora_alpha: Annotated[
        int,
        Range(1, MAX_LORA_ALPHA),
        Option("LoRA scaling of --adapter: its output is multiplied by --lora-alpha / --lora-r."),
    ] = 32
    lora_dropout: Annotated[
        float,
        Range(0.0, MAX_LORA_DROPOUT),
        Option("LoRA dropout of --adapter; takes effect together with --dropout only."),
    ] = 0.05
    target_modules: Annotated[
        str,
        NameList(MAX_TARGETS),
        Option(
            "Linear layers of the blocks that get an adapter, by the ends of their names.",
            long_name="lora-target-modules",
            metavar="all-linear|NAME,NAME,...",
        ),
    ] = ALL_LINEAR
    merge: Annotated[
        bool,
        Option("Merge the adapter into the model; the result is the whole model."),
    ] = False
    dtype: Annotated[
        Dtype,
        Option(
            "Data type of the result's weights; auto keeps the model's. Weights train in float32, "
            "and adapters stay float32."
        ),
    ] = Dtype.AUTO
    base_dtype: Annotated[
        BaseDtype,
        Option(
            "Data type in which peers store the frozen linear layers, embeddings and head under "
            "--adapter. They compute in float32 or in their own --dtype."
        ),
    ] = BaseDtype.FLOAT32
    load_in_8bit: Annotated[
        bool,
        Option("Store the blocks' frozen linear layers in 8 bits per value (--adapter lora)."),
    ] = False
    load_in_4bit: Annotated[
        bool,
        Option("Store the blocks' frozen linear layers in 4 bits per value, nf4 (--adapter lora)."),
    ] = False
    train_layers: Annotated[
        str,
        Length(MAX_TRAIN_LAYERS_CHARS),
        Option(
            "Blocks that train or get adapters; the others are frozen. Embeddings train with block "
            "0, norm and head with the last block. Outputs of frozen blocks below are computed and "
            "sent once per sample.",
            metavar="START-|START-STOP",
            default="all",
        ),
    ] = ""
    save_steps: Annotated[
        int,
        Range(0, MAX_STEPS),
        Option(
            "Steps between two snapshots of the run.",
            default="never with --snapshots; else every minute, or less often for large states",
        ),
    ] = 0
    save_strategy: Annotated[
        SaveStrategy,
        Option("Schedule of snapshots: never (no), every --save-steps, or every epoch."),
    ] = SaveStrategy.STEPS
    save_total_limit: Annotated[
        int,
        Range(1, MAX_STEPS),
        Option(
            "Number of newest snapshots to keep. With --load-best-model-at-end the best one counts "
            "among them, and two are kept at least."
        ),
    ] = 2
    eval_strategy: Annotated[
        EvalStrategy,
        Option(
            "Schedule of evaluations on held-out samples: never (no), or before and after training "
            "and every --eval-steps or epoch in between."
        ),
    ] = EvalStrategy.STEPS
    eval_steps: Annotated[
        int,
        Range(0, MAX_STEPS),
        Option("Steps between two evaluations.", default="before and after training only"),
    ] = 0
    eval_compression: Annotated[
        EvalCompression,
        Option(
            "Compression of held-out samples' activations, with the codec of a sample's first "
            "activations; both evaluates with and without it."
        ),
    ] = EvalCompression.OFF
    early_stopping_patience: Annotated[
        int,
        Range(0, MAX_STEPS),
        Option(
            "Number of evaluations in a row without improvement after which the run ends.",
            default="never",
        ),
    ] = 0
    early_stopping_threshold: Annotated[
        float,
        Range(0.0),
        Option("Smallest improvement of the metric that counts."),
    ] = 0.0
    metric_for_best_model: Annotated[
        str,
        Length(MAX_METRIC_CHARS),
        Option(
            "Metric that ranks evaluations: loss (lower is better); with classes also accuracy, "
            "matthews_correlation or f1 (higher is better).",
            metavar="NAME",
        ),
    ] = "loss"
    load_best_model_at_end: Annotated[
        bool,
        Option(
            "Return the best evaluated weights instead of the last ones. Needs snapshots of them "
            "(--save-steps, --save-strategy)."
        ),
    ] = False
    private_ends: Annotated[
        str,
        NameList(MAX_PRIVATE_ENDS),
        Option(
            "Only these peers may host the first and the last stage, which see text and labels. "
            "Ids are those of `swarm-ft status --verbose`.",
            metavar="ID,ID,...",
            default="any",
        ),
    ] = ""
    share_with: Annotated[
        str,
        NameList(MAX_READERS),
        Option(
            "Clients that may also watch the run and fetch its result. Ids are those of "
            "`swarm-ft keys list`.",
            metavar="ID,ID,...",
            default="nobody",
        ),
    ] = ""

    def __post_init__(self) -> None:
        check(self)
        for name in _FLOATS:
            # 1 equals 1.0, and 0.0 equals -0.0: equal specs must have one digest.
            object.__setattr__(self, name, float(getattr(self, name)) + 0.0)
        if self.batch_size % self.micro_batch_size:
            raise BadOption(
                f"--batch-size {self.batch_size} is not divisible by "
                f"--micro-batch-size {self.micro_batch_size}"
            )
        if self.router_aux_loss_coef and self.gradient_checkpointing:
            raise BadOption(
                "--router-aux-loss-coef: expected no --gradient-checkpointing beside it, which "
                "discards the routers' outputs"
            )
        if self.quality:
            _check_quality(self)
            for name, text in _codecs_for(self).items():
                object.__setattr__(self, name, text)
        _check_codecs(self)
        _check_trained(self)
        _check_labels(self)
        _check_best(self)

    def codec(self, direction: Direction) -> CodecSpec:
        """Return the codec of one direction."""
        text = self.forward_codec if direction is Direction.FORWARD else self.backward_codec
        return parse_codec_spec(text, direction)

    @property
    def codecs(self) -> Codecs:
        """Codecs of both directions, as the user wrote them."""
        return Codecs(self.forward_codec, self.backward_codec)

    def with_codecs(self, codecs: Codecs) -> Self:
        """Return the options with other codecs, which need the same per-sample state.

        In a run with a configured quality, key frames become as fine as the others, and the quality
        is void.

        Raises:
            BadCodec: A text is no codec, or the codec needs another kind of per-sample state.
        """
        for way, option, text in (
            (Direction.FORWARD, "--fw", codecs.forward),
            (Direction.BACKWARD, "--bw", codecs.backward),
        ):
            try:
                parse_replacement(self.codec(way), text, way)
            except BadCodec as error:
                raise BadCodec(f"{option}: {error.message}") from error
        key = self.key_codec
        if self.quality:
            key = key_codec_of(parse_codec_spec(codecs.forward, Direction.FORWARD).number)
        return replace(
            self,
            quality=0.0,
            forward_codec=codecs.forward,
            backward_codec=codecs.backward,
            key_codec=key,
        )

    @property
    def fill_frame_codec(self) -> CodecSpec:
        """Codec of the activations that fill the pipeline."""
        return parse_codec_spec(self.fill_codec or self.forward_codec, Direction.FORWARD)

    @property
    def drain_frame_codec(self) -> CodecSpec:
        """Codec of the gradients that drain it."""
        return parse_codec_spec(self.drain_codec or self.backward_codec, Direction.BACKWARD)

    @property
    def constant_codec(self) -> CodecSpec:
        """Codec of activations that are the same at every visit."""
        return parse_codec_spec(self.frozen_codec, Direction.FORWARD)

    def key_frame_codec(self, direction: Direction) -> CodecSpec:
        """Return the codec of the frames that begin a buffer.

        The buffer of gradients begins with a gradient by their own codec (EF21, arXiv 2106.05203).
        That of `+last` begins beside a codebook, with at least a bit a value.
        """
        if direction is Direction.FORWARD:
            return parse_key_spec(self.key_codec)
        codec = self.codec(direction)
        if codec.feedback is not Feedback.LAST:
            return replace(codec, feedback=Feedback.NONE)
        is_rate = codec.name is CodecName.Q and codec.entropy
        hundredths = max(codec.hundredths, 100) if is_rate else codec.hundredths
        return replace(codec, hundredths=hundredths, feedback=Feedback.BOOK)

    @property
    def eval_passes(self) -> tuple[bool, ...]:
        """Passes over the held-out samples, each with whether it is compressed."""
        passes = {EvalCompression.OFF: (False,), EvalCompression.ON: (True,)}
        return passes.get(self.eval_compression, (False, True))

    @property
    def compressed_eval_codec(self) -> CodecSpec:
        """Codec of held-out samples' activations in a compressed pass."""
        codec = self.codec(Direction.FORWARD)
        return self.key_frame_codec(Direction.FORWARD) if codec.is_delta else codec

    @property
    def evaluates_on_the_way(self) -> bool:
        """Whether held-out samples are evaluated between the first step and the last."""
        has_steps = self.eval_strategy is EvalStrategy.STEPS and self.eval_steps > 0
        return has_steps or self.eval_strategy is EvalStrategy.EPOCH

    @property
    def takes_snapshots(self) -> bool:
        """Whether the run takes snapshots."""
        has_steps = self.save_strategy is SaveStrategy.STEPS and self.save_steps > 0
        return has_steps or self.save_strategy is SaveStrategy.EPOCH

    @property
    def best_metric(self) -> str:
        """Metric that compares evaluations: the loss, or one of the task's metrics."""
        return self.metric_for_best_model.removeprefix(METRIC_PREFIX)

    @property
    def lower_is_better(self) -> bool:
        """Whether a lower value of that metric is better."""
        return self.best_metric.endswith("loss")

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of classes, by their numbers."""
        return tuple(filter(None, self.label_names.split(",")))

    @property
    def has_classes(self) -> bool:
        """Whether targets are classes, and not tokens."""
        return self.task_kind is not TaskKind.CAUSAL_LM

    @property
    def adapts(self) -> bool:
        """Whether adapters train, and the model's own weights do not."""
        return self.adapter is not Adapter.NONE

    @property
    def copies_per_weight(self) -> float:
        """Copies in memory of a trained weight: itself, its gradient, and optimizer state."""
        if self.optim is Optim.ADAMW:
            return COPIES_PER_WEIGHT
        if self.optim is Optim.ADAMW_8BIT:
            return 2 + 2 * COPY_IN_8_BITS
        # Adafactor's columns count for a matrix with few rows, such as an adapter's.
        return 2 + (1 / self.lora_r if self.adapts and self.optim is Optim.ADAFACTOR else 0)

    @property
    def gives_adapter(self) -> bool:
        """Whether the result is an adapter alone, and no model."""
        return self.adapts and not self.merge

    @property
    def packed_bits(self) -> int:
        """Bits of a value of the blocks' packed linear layers; 0 if they are not packed."""
        return 8 * self.load_in_8bit or 4 * self.load_in_4bit

    @property
    def frozen_value_bytes(self) -> int:
        """Bytes of a value of frozen weights that are not packed."""
        return 2 if self.base_dtype is BaseDtype.BFLOAT16 else 4

    @property
    def frozen_part(self) -> float:
        """Size of a block's frozen linear layer, as a share of its size in float32."""
        if self.packed_bits:
            return (self.packed_bits / 8 + BYTES_PER_FLOAT / PACKED_VALUES) / BYTES_PER_FLOAT
        return self.frozen_value_bytes / BYTES_PER_FLOAT

    @property
    def trusted_with_ends(self) -> frozenset[PeerId]:
        """Peers that may host the first and the last stage; empty: all may."""
        return frozenset(map(PeerId, filter(None, self.private_ends.split(","))))

    @property
    def targets(self) -> tuple[str, ...]:
        """Suffixes of names of linear layers with adapters; or `ALL_LINEAR` alone."""
        return tuple(self.target_modules.split(","))

    @property
    def readers(self) -> frozenset[str]:
        """Clients that may watch the run and fetch its result, beside its owner."""
        return frozenset(filter(None, self.share_with.split(",")))

    @property
    def reduction_codec(self) -> CodecSpec:
        """Codec of the gradients that replicas of a stage sum."""
        return parse_dp_spec(self.dp_codec)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec(TrainOptions):
    """Options of training on a text of known length.

    Samples from `num_samples` on are held out: no step trains on them. With two passes, compressed
    and not, the samples of the second pass have names of their own. After these come the names of
    shadows, one for each training sample. A run with a configured quality computes shadows without
    compression.
    """

    num_samples: Annotated[int, Range(1, MAX_SAMPLES)]
    num_steps: Annotated[int, Range(1, MAX_STEPS)]
    num_eval_samples: Annotated[int, Range(0, MAX_EVAL_SAMPLES)] = 0
    end_token_ids: Annotated[
        tuple[Annotated[int, Range(0, MAX_VOCAB_SIZE - 1)], ...], Length(MAX_END_TOKENS)
    ] = ()
    """Tokens that end texts or turns of samples, beyond those of the model's own settings."""

    def __post_init__(self) -> None:
        TrainOptions.__post_init__(self)
        if self.has_classes and len(self.labels) < MIN_LABELS:
            raise BadOption(
                f"--labels: expected {MIN_LABELS} classes or more, got {self.label_names or 'none'}"
            )
        if self.quality and 2 * self.num_samples > MAX_SAMPLES:
            raise BadOption(
                f"--quality: expected at most {MAX_SAMPLES // 2} samples, got {self.num_samples}"
            )
        most = self.most_eval_samples(self, self.num_samples)
        if self.num_eval_samples > most:
            raise BadOption(
                f"--max-eval-samples: expected at most {most} samples of {self.seq_length} tokens "
                f"beside {self.num_samples} to train on, got {self.num_eval_samples}"
            )

    @staticmethod
    def most_eval_samples(options: TrainOptions, num_samples: int) -> int:
        """Return the number of samples that may be held out beside `num_samples` others."""
        num_named = num_samples * (2 if options.quality else 1)
        of_names = (MAX_SAMPLES - num_named) // len(options.eval_passes)
        sent_bytes = options.seq_length * BYTES_PER_TOKEN * len(options.eval_passes)
        # Shadows travel with a plan instead of other samples.
        in_plan = MAX_EVAL_SAMPLES - (options.micro_batch_size if options.quality else 0)
        return min(in_plan, of_names, MAX_EVAL_BYTES // sent_bytes)

    @classmethod
    def of(
        cls,
        options: TrainOptions,
        *,
        num_samples: int,
        num_steps: int,
        num_eval_samples: int = 0,
    ) -> TrainSpec:
        """Return `options` for a text.

        Args:
            options: Options that the user chose.
            num_samples: Training samples of the text.
            num_steps: Optimizer steps in all.
            num_eval_samples: Held-out samples.

        Raises:
            BadOption: One of the numbers is too large.
        """
        chosen = {field.name: getattr(options, field.name) for field in fields(TrainOptions)}
        return cls(
            **chosen,
            num_samples=num_samples,
            num_steps=num_steps,
            num_eval_samples=num_eval_samples,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        return math.ceil(self.num_samples / self.batch_size)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's tokens."""
        return self.seq_length * BYTES_PER_TOKEN

    @property
    def data_bytes(self) -> int:
        """Bytes of all samples' tokens."""
        return self.num_rows * self.sample_bytes

    @property
    def num_rows(self) -> int:
        """Samples of the run, held out or not."""
        return self.num_samples + self.num_eval_samples

    def row_of(self, sample: SampleId) -> int:
        """Return the row of a sample; second passes and shadows use rows of other names."""
        if self.is_shadow(sample):
            return sample - self.num_names
        is_second = self.num_eval_samples and sample >= self.num_rows
        return sample - self.num_eval_samples if is_second else sample

    @property
    def num_names(self) -> int:
        """Names of samples without shadows: held-out samples have one for each pass."""
        return self.num_samples + len(self.eval_passes) * self.num_eval_samples

    def is_held_out(self, sample: SampleId) -> bool:
        """Whether a sample is only evaluated under this name."""
        return self.num_samples <= sample < self.num_names or self.is_shadow(sample)

    def shadow_of(self, sample: SampleId) -> SampleId:
        """Return the name of a training sample's shadow."""
        return SampleId(self.num_names + sample)

    def is_shadow(self, sample: SampleId) -> bool:
        """Whether a name is that of a shadow."""
        return bool(self.quality) and 0 <= sample - self.num_names < self.num_samples

    def pass_of(self, held_out: SampleId) -> int:
        """Return the number of a held-out sample's pass in `eval_passes`."""
        return int(held_out >= self.num_rows)

    def is_compressed(self, held_out: SampleId) -> bool:
        """Whether a held-out sample's activations are compressed."""
        if self.is_shadow(held_out):
            return False
        return self.eval_passes[min(self.pass_of(held_out), len(self.eval_passes) - 1)]


@dataclass(frozen=True, kw_only=True)  # no slots, because of cached properties
class RunSpec:
    """A fine-tuning job; every session begins with its digest, so peers cannot differ silently.

    Attributes:
        model: The model.
        train: Options of training.
        version: Version of the spec's own fields, which journals store too.
        inherited_digest: Digest of a run that began with an earlier version, as tokens, states,
            snapshots and buffers have it. None: the digest follows from the fields.
    """

    model: ModelSpec
    train: TrainSpec
    version: Annotated[int, OneOf((VERSION,))] = VERSION
    inherited_digest: Digest | None = None

    def __post_init__(self) -> None:
        if self.train.sync_tied_embeddings and not self.model.tied_embeddings:
            raise BadOption(
                "--tied-embeddings sync: expected a model with tied embeddings, got an untied one"
            )
        if self.train.sync_tied_embeddings and self.model.shared_bytes:
            raise BadOption(
                "--tied-embeddings sync: expected a model whose blocks share no weights, as those "
                f"of {self.model.architecture} do; leave it out"
            )
        try:
            trained = self.trained_layers
        except BadLayers as error:
            raise BadOption(f"--train-layers: {error.message}") from error
        if self.train.sync_tied_embeddings and trained != self.model.layers:
            raise BadOption(
                "--tied-embeddings sync: expected embeddings and head to train, but --train-layers "
                f"{self.train.train_layers} leaves one of them out"
            )

        if self.train.has_classes and trained.stop < self.model.num_blocks:
            raise BadOption(
                f"--train-layers {self.train.train_layers}: a head of classes trains with the last "
                f"block; expected {self.model.num_blocks - 1} among them"
            )

    def with_codecs(self, codecs: Codecs) -> RunSpec:
        """See `TrainOptions.with_codecs`; the result has no inherited digest."""
        return replace(self, train=self.train.with_codecs(codecs), inherited_digest=None)

    @cached_property
    def trained_layers(self) -> LayerRange:
        """Blocks in which something trains; see `StageModule.train_only` for embeddings and head.

        Raises:
            BadLayers: The model does not have them.
        """
        return parse_trained(self.train.train_layers, self.model.num_blocks)

    @property
    def result_dtype(self) -> Dtype:
        """Dtype of the result's stored weights; adapters are float32."""
        if self.train.gives_adapter:
            return Dtype.FLOAT32
        return self.model.dtype if self.train.dtype is Dtype.AUTO else self.train.dtype

    @property
    def keeps_tied(self) -> bool:
        """Whether head and embeddings stay one tensor, in the result too."""
        trained, last = self.trained_layers, self.model.num_blocks
        are_frozen = self.train.adapts or (trained.start > 0 and trained.stop < last)
        return self.model.tied_embeddings and (self.train.sync_tied_embeddings or are_frozen)

    @property
    def shared_values(self) -> int:
        """Values of trained weights that several stages share; see `sharing`."""
        if self.train.sync_tied_embeddings:
            return self.model.vocab_size * self.model.hidden_size
        return self._shared_trained_bytes // BYTES_PER_FLOAT

    def sharing(self, stages: Sequence[T]) -> tuple[T, ...]:
        """Return the stages that add up their gradients of shared weights; at least two, or none.

        Each has a copy of the weights, applies the same sum and so keeps the same bits.

        Args:
            stages: All stages, or anything that stands for each of them, first to last.
        """
        if not self.shared_values or len(stages) == 1:
            return ()
        return tuple(stages) if self._shared_trained_bytes else (stages[0], stages[-1])

    @property
    def _shared_trained_bytes(self) -> int:
        is_frozen = self.train.adapts or self.trained_layers.start > 0
        return 0 if is_frozen else self.model.shared_bytes

    def num_frames(self, boundary: int) -> int:
        """Count a microbatch's frames over a boundary: one for each sample and direction."""
        return self.train.micro_batch_size * (1 + self.gradients_cross(boundary))

    def gradients_cross(self, boundary: int) -> bool:
        """Whether anything below the boundary in front of a block trains, and needs gradients.

        Activations at other boundaries are constants of the samples.
        """
        return boundary > self.trained_layers.start

    @property
    def caches_frozen_prefix(self) -> bool:
        """Whether outputs of the frozen prefix are cached per sample.

        They are not if a sample is visited once, or with dropout, which changes the value at every
        visit.
        """
        is_met_again = self.train.num_steps > self.train.steps_per_epoch
        return is_met_again and self.trained_layers.start > 0 and not self.train.dropout

    def is_cacheable(self, boundary: int) -> bool:
        """Whether activations cross the boundary in front of a block once per sample."""
        return self.caches_frozen_prefix and not self.gradients_cross(boundary)

    def caches_input(self, layers: LayerRange) -> bool:
        """Whether a stage caches its input: the lowest one that trains, if it is not the first."""
        has_constants = layers.start > 0 and self.is_cacheable(layers.start)
        return has_constants and self.gradients_cross(layers.stop)

    def first_uncached_stage(self, cuts: Iterable[LayerRange]) -> int:
        """Return the number of the stage that caches its input, from 0; 0 if none does."""
        return next((index for index, layers in enumerate(cuts) if self.caches_input(layers)), 0)

    @property
    def num_buffered_samples(self) -> int:
        """Number of samples that can have buffers."""
        return self.train.num_names if self.caches_frozen_prefix else self.train.num_samples

    def work(self, layers: LayerRange) -> float:
        """Return the computation of a sample's first visit, in units of a block that trains.

        Blocks below all that trains compute the forward alone: a third of a block's work, or half
        of it with adapters, which need no gradients of the block's own weights.
        """
        below = max(0, min(layers.stop, self.trained_layers.start) - layers.start)
        return len(layers) - below * (1 / 2 if self.train.adapts else 2 / 3)

    def trained_bytes(self, layers: LayerRange) -> int:
        """Return the float32 bytes of trained weights in these blocks, or shared by every stage."""
        trained = self.trained_layers
        count = max(0, min(layers.stop, trained.stop) - max(layers.start, trained.start))
        of_block = self.model.adapter_bytes if self.train.adapts else self.model.block_bytes
        return count * of_block + self._shared_trained_bytes

    def memory_bytes(self, layers: LayerRange) -> float:
        """Return the bytes of blocks in memory: weights, and gradients and optimizer if they train.

        Weights that all blocks share count at each stage.
        """
        weights: float = len(layers) * self.model.block_bytes + self.model.shared_bytes
        if self.train.adapts:
            linear = min(self.model.linear_bytes, self.model.block_bytes)
            weights -= len(layers) * linear * (1 - self.train.frozen_part)
            return weights + self.train.copies_per_weight * self.trained_bytes(layers)
        return weights + (self.train.copies_per_weight - 1) * self.trained_bytes(layers)

    def digest(self) -> bytes:
        """Return 16 bytes that are equal for equal specs, and different for different ones."""
        return self._digest if self.inherited_digest is None else self.inherited_digest

    @cached_property
    def _digest(self) -> bytes:
        fields = asdict(self)
        del fields["inherited_digest"]
        return digest_of_fields(fields)

    @cached_property
    def trusted_with_ends(self) -> frozenset[PeerId]:
        """Peers of `TrainOptions.trusted_with_ends`, cached."""
        return self.train.trusted_with_ends


def digest_of_fields(fields: Mapping[str, Any]) -> bytes:
    """Return the digest of a spec with these fields, its version among them."""
    text = json.dumps(fields, sort_keys=True, default=lambda value: value.hex())
    return digest_of(text.encode())


def _codecs_for(options: TrainOptions) -> dict[str, str]:
    """Return the codecs for a configured quality by field, before any measurement."""
    asked, adapts = options.quality, options.adapts
    step_size = QualityControl.of(asked, adapts=adapts).step_size
    return {
        "forward_codec": forward_codec_of(step_size),
        "backward_codec": Prices.of(adapts=adapts).backward_codec(asked),
        "key_codec": key_codec_of(step_size),
    }


def forward_codec_of(step_size: float) -> str:
    """Return the codec of activations with a step of `step_size` times their spread."""
    return f"aqk{step_size:g}"


def key_codec_of(step_size: float) -> str:
    """Return the codec of first activations: finer, since later changes correct little of them."""
    return f"qk{max(round(FINER_FIRST * step_size, 2), MIN_QUALITY_STEP):g}"


def _check_quality(options: TrainOptions) -> None:
    """Check that --quality alone determines the codecs, and can be measured."""
    usual = {field.name: field.default for field in fields(TrainOptions)}
    follow = {"fill_codec": "", "drain_codec": "", **_codecs_for(options)}
    for name, text in follow.items():
        got = getattr(options, name)
        if got not in (usual[name], text):
            option = {"forward": "fw", "backward": "bw"}.get(name[:-6], name[:-6])
            raise BadOption(
                f"--quality: it chooses the codecs; leave out --{option} {got}, or --quality"
            )
    if options.dropout:
        raise BadOption(
            "--quality: expected no --dropout beside it, whose noise hides the cost of compression"
        )
    if options.micro_batch_size > MAX_EVAL_SAMPLES:
        raise BadOption(
            f"--quality: expected --micro-batch-size {MAX_EVAL_SAMPLES} at most, "
            f"got {options.micro_batch_size}"
        )


def _check_trained(options: TrainOptions) -> None:
    """Check that the options choose exactly one way to train."""
    if options.merge and not options.adapts:
        raise BadOption("--merge: expected --adapter lora or dora beside it")
    _check_base(options)
    if options.adapts and options.sync_tied_embeddings:
        raise BadOption("--tied-embeddings sync: with --adapter they are frozen, and stay tied")
    if not all(options.targets):
        raise BadOption(f"--target-modules: expected {ALL_LINEAR} or NAME,NAME,..., got none")
    try:
        parse_trained(options.train_layers, MAX_BLOCKS)
    except BadLayers as error:
        raise BadOption(f"--train-layers: {error.message}") from error


def _check_base(options: TrainOptions) -> None:
    """Check that frozen weights have one dtype, which adapters support."""
    packed = f"--load-in-{options.packed_bits}bit"
    if options.load_in_8bit and options.load_in_4bit:
        raise BadOption("--load-in-4bit: expected it or --load-in-8bit, got both")
    if options.packed_bits and options.adapter is not Adapter.LORA:
        got = options.adapter.name.lower()
        raise BadOption(f"{packed}: expected --adapter lora beside it, got --adapter {got}")
    if options.base_dtype is not BaseDtype.FLOAT32 and not options.adapts:
        raise BadOption("--base-dtype: expected --adapter lora or dora beside it")


def _check_labels(options: TrainOptions) -> None:
    """Check that class names are valid and different, and that the task has classes."""
    if not options.label_names:
        return
    names = options.label_names.split(",")
    if not options.has_classes:
        raise BadOption("--labels: expected --task classification or token-classification with it")
    if len(names) > MAX_LABELS or len(set(names)) < len(names):
        raise BadOption(f"--labels: expected {MAX_LABELS} different names at most, as NAME,NAME")
    for name in names:
        if not name.isprintable() or name != name.strip() or not name:
            raise BadOption(f"--labels: expected printable names as NAME,NAME, got {name[:80]!a}")


def _check_best(options: TrainOptions) -> None:
    """Check that early stopping and the best model have evaluations, and snapshots of these."""
    patience, loads_best = options.early_stopping_patience, options.load_best_model_at_end
    known = ("loss", *(CLASS_METRICS if options.has_classes else ()))
    if options.best_metric not in known:
        raise BadOption(
            f"--metric-for-best-model: expected {' or '.join(known)} with this --task, "
            f"got {options.metric_for_best_model!a}"
        )
    if options.early_stopping_threshold and not patience:
        raise BadOption("--early-stopping-threshold: expected --early-stopping-patience beside it")
    decides = "--early-stopping-patience" if patience else "--load-best-model-at-end"
    if (patience or loads_best) and not options.evaluates_on_the_way:
        raise BadOption(
            f"{decides}: expected evaluations on the way; add --eval-steps N or "
            "--eval-strategy epoch"
        )
    if loads_best:
        _check_snapshots_of_the_best(options)


def _check_snapshots_of_the_best(options: TrainOptions) -> None:
    of_eval, of_save = options.eval_strategy.name.lower(), options.save_strategy.name.lower()
    if of_eval != of_save:
        raise BadOption(
            f"--load-best-model-at-end: expected --save-strategy {of_eval}, as --eval-strategy, "
            f"got {of_save}"
        )
    if of_eval == "steps" and (not options.save_steps or options.save_steps % options.eval_steps):
        raise BadOption(
            f"--load-best-model-at-end: expected --save-steps {options.eval_steps} or a multiple, "
            f"so that saved weights are evaluated, got {options.save_steps or 'none'}"
        )


def _check_codecs(options: TrainOptions) -> None:
    """Check that codecs parse, and that those of the same buffers all send changes or none does."""
    parsers: tuple[tuple[str, Callable[[], CodecSpec]], ...] = (
        ("--fw", lambda: options.codec(Direction.FORWARD)),
        ("--bw", lambda: options.codec(Direction.BACKWARD)),
        ("--fill", lambda: options.fill_frame_codec),
        ("--drain", lambda: options.drain_frame_codec),
        ("--key", lambda: options.key_frame_codec(Direction.FORWARD)),
        ("--frozen", lambda: options.constant_codec),
        ("--dp", lambda: options.reduction_codec),
    )
    for option, parse in parsers:
        try:
            parse()
        except BadCodec as error:
            raise BadCodec(f"{option}: {error.message}") from error
    if options.constant_codec.is_delta or options.constant_codec.has_side_info:
        raise BadOption(
            "--frozen: expected a codec without buffers or a basis, such as q8, "
            f"got {options.frozen_codec}"
        )
    if options.fill_codec:
        _check_fill(options)
    if options.drain_frame_codec.keeps != options.codec(Direction.BACKWARD).keeps:
        raise BadOption(
            f"--drain: expected a codec with the state of --bw {options.backward_codec}, "
            f"with the same +ef, +ef21 or +last, got {options.drain_codec}"
        )


def _check_fill(options: TrainOptions) -> None:
    is_delta = options.codec(Direction.FORWARD).is_delta
    if options.fill_frame_codec.is_delta != is_delta:
        expected = "a delta codec, such as aq2," if is_delta else "a codec without buffers,"
        raise BadOption(
            f"--fill: expected {expected} like --fw {options.forward_codec}, "
            f"got {options.fill_codec}"
        )
