from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LrSchedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LR_SCHEDULE_UNSPECIFIED: _ClassVar[LrSchedule]
    LR_SCHEDULE_CONSTANT: _ClassVar[LrSchedule]
    LR_SCHEDULE_LINEAR: _ClassVar[LrSchedule]
    LR_SCHEDULE_COSINE: _ClassVar[LrSchedule]

class Adapter(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAPTER_UNSPECIFIED: _ClassVar[Adapter]
    ADAPTER_NONE: _ClassVar[Adapter]
    ADAPTER_LORA: _ClassVar[Adapter]
    ADAPTER_DORA: _ClassVar[Adapter]

class BaseDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BASE_DTYPE_UNSPECIFIED: _ClassVar[BaseDtype]
    BASE_DTYPE_FLOAT32: _ClassVar[BaseDtype]
    BASE_DTYPE_BFLOAT16: _ClassVar[BaseDtype]

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_AUTO: _ClassVar[Dtype]
    DTYPE_FLOAT32: _ClassVar[Dtype]
    DTYPE_BFLOAT16: _ClassVar[Dtype]
    DTYPE_FLOAT16: _ClassVar[Dtype]

class Optim(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPTIM_UNSPECIFIED: _ClassVar[Optim]
    OPTIM_ADAMW: _ClassVar[Optim]
    OPTIM_ADAFACTOR: _ClassVar[Optim]
    OPTIM_SGD: _ClassVar[Optim]
    OPTIM_ADAMW_8BIT: _ClassVar[Optim]

class EvalStrategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVAL_STRATEGY_UNSPECIFIED: _ClassVar[EvalStrategy]
    EVAL_STRATEGY_NO: _ClassVar[EvalStrategy]
    EVAL_STRATEGY_STEPS: _ClassVar[EvalStrategy]
    EVAL_STRATEGY_EPOCH: _ClassVar[EvalStrategy]

class SaveStrategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAVE_STRATEGY_UNSPECIFIED: _ClassVar[SaveStrategy]
    SAVE_STRATEGY_NO: _ClassVar[SaveStrategy]
    SAVE_STRATEGY_STEPS: _ClassVar[SaveStrategy]
    SAVE_STRATEGY_EPOCH: _ClassVar[SaveStrategy]

class EvalCompression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVAL_COMPRESSION_UNSPECIFIED: _ClassVar[EvalCompression]
    EVAL_COMPRESSION_OFF: _ClassVar[EvalCompression]
    EVAL_COMPRESSION_ON: _ClassVar[EvalCompression]
    EVAL_COMPRESSION_BOTH: _ClassVar[EvalCompression]

class TaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_KIND_UNSPECIFIED: _ClassVar[TaskKind]
    TASK_KIND_CAUSAL_LM: _ClassVar[TaskKind]
    TASK_KIND_CLASSIFICATION: _ClassVar[TaskKind]
    TASK_KIND_TOKEN_CLASSIFICATION: _ClassVar[TaskKind]
LR_SCHEDULE_UNSPECIFIED: LrSchedule
LR_SCHEDULE_CONSTANT: LrSchedule
LR_SCHEDULE_LINEAR: LrSchedule
LR_SCHEDULE_COSINE: LrSchedule
ADAPTER_UNSPECIFIED: Adapter
ADAPTER_NONE: Adapter
ADAPTER_LORA: Adapter
ADAPTER_DORA: Adapter
BASE_DTYPE_UNSPECIFIED: BaseDtype
BASE_DTYPE_FLOAT32: BaseDtype
BASE_DTYPE_BFLOAT16: BaseDtype
DTYPE_UNSPECIFIED: Dtype
DTYPE_AUTO: Dtype
DTYPE_FLOAT32: Dtype
DTYPE_BFLOAT16: Dtype
DTYPE_FLOAT16: Dtype
OPTIM_UNSPECIFIED: Optim
OPTIM_ADAMW: Optim
OPTIM_ADAFACTOR: Optim
OPTIM_SGD: Optim
OPTIM_ADAMW_8BIT: Optim
EVAL_STRATEGY_UNSPECIFIED: EvalStrategy
EVAL_STRATEGY_NO: EvalStrategy
EVAL_STRATEGY_STEPS: EvalStrategy
EVAL_STRATEGY_EPOCH: EvalStrategy
SAVE_STRATEGY_UNSPECIFIED: SaveStrategy
SAVE_STRATEGY_NO: SaveStrategy
SAVE_STRATEGY_STEPS: SaveStrategy
SAVE_STRATEGY_EPOCH: SaveStrategy
EVAL_COMPRESSION_UNSPECIFIED: EvalCompression
EVAL_COMPRESSION_OFF: EvalCompression
EVAL_COMPRESSION_ON: EvalCompression
EVAL_COMPRESSION_BOTH: EvalCompression
TASK_KIND_UNSPECIFIED: TaskKind
TASK_KIND_CAUSAL_LM: TaskKind
TASK_KIND_CLASSIFICATION: TaskKind
TASK_KIND_TOKEN_CLASSIFICATION: TaskKind

class LayerRange(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("reference", "architecture", "num_blocks", "hidden_size", "vocab_size", "block_bytes", "embed_digest", "block_digests", "head_digest", "tied_embeddings", "linear_bytes", "adapter_bytes", "shared_bytes", "dtype", "nonce", "owner")
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    EMBED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIED_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    LINEAR_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    reference: str
    architecture: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    block_bytes: int
    embed_digest: bytes
    block_digests: _containers.RepeatedScalarFieldContainer[bytes]
    head_digest: bytes
    tied_embeddings: bool
    linear_bytes: int
    adapter_bytes: int
    shared_bytes: int
    dtype: Dtype
    nonce: bytes
    owner: str
    def __init__(self, reference: _Optional[str] = ..., architecture: _Optional[str] = ..., num_blocks: _Optional[int] = ..., hidden_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., embed_digest: _Optional[bytes] = ..., block_digests: _Optional[_Iterable[bytes]] = ..., head_digest: _Optional[bytes] = ..., tied_embeddings: _Optional[bool] = ..., linear_bytes: _Optional[int] = ..., adapter_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., nonce: _Optional[bytes] = ..., owner: _Optional[str] = ...) -> None: ...

class TrainSpec(_message.Message):
    __slots__ = ("num_samples", "seq_length", "batch_size", "micro_batch_size", "num_steps", "learning_rate", "lr_schedule", "warmup_steps", "weight_decay", "clip_grad_norm", "seed", "shuffle", "dropout", "sync_tied_embeddings", "forward_codec", "backward_codec", "key_codec", "dp_codec", "save_steps", "buffer_bits", "fill_codec", "fill_microbatches", "drain_codec", "drain_microbatches", "share_with", "num_eval_samples", "eval_strategy", "eval_steps", "eval_compression", "private_ends", "adapter", "lora_r", "lora_alpha", "lora_dropout", "target_modules", "merge", "train_layers", "task_kind", "label_names", "base_dtype", "load_in_8bit", "load_in_4bit", "optim", "gradient_checkpointing", "save_strategy", "save_total_limit", "early_stopping_patience", "early_stopping_threshold", "metric_for_best_model", "frozen_codec", "router_aux_loss_coef", "quality", "dtype", "load_best_model_at_end", "end_token_ids")
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SEQ_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LR_SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    CLIP_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    DROPOUT_FIELD_NUMBER: _ClassVar[int]
    SYNC_TIED_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_CODEC_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_CODEC_FIELD_NUMBER: _ClassVar[int]
    KEY_CODEC_FIELD_NUMBER: _ClassVar[int]
    DP_CODEC_FIELD_NUMBER: _ClassVar[int]
    SAVE_STEPS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BITS_FIELD_NUMBER: _ClassVar[int]
    FILL_CODEC_FIELD_NUMBER: _ClassVar[int]
    FILL_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_CODEC_FIELD_NUMBER: _ClassVar[int]
    DRAIN_MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    SHARE_WITH_FIELD_NUMBER: _ClassVar[int]
    NUM_EVAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EVAL_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    EVAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    EVAL_COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_ENDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    LORA_R_FIELD_NUMBER: _ClassVar[int]
    LORA_ALPHA_FIELD_NUMBER: _ClassVar[int]
    LORA_DROPOUT_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODULES_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TASK_KIND_FIELD_NUMBER: _ClassVar[int]
    LABEL_NAMES_FIELD_NUMBER: _ClassVar[int]
    BASE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOAD_IN_8BIT_FIELD_NUMBER: _ClassVar[int]
    LOAD_IN_4BIT_FIELD_NUMBER: _ClassVar[int]
    OPTIM_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_CHECKPOINTING_FIELD_NUMBER: _ClassVar[int]
    SAVE_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SAVE_TOTAL_LIMIT_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_PATIENCE_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    METRIC_FOR_BEST_MODEL_FIELD_NUMBER: _ClassVar[int]
    FROZEN_CODEC_FIELD_NUMBER: _ClassVar[int]
    ROUTER_AUX_LOSS_COEF_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOAD_BEST_MODEL_AT_END_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
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
    key_codec: str
    dp_codec: str
    save_steps: int
    buffer_bits: int
    fill_codec: str
    fill_microbatches: int
    drain_codec: str
    drain_microbatches: int
    share_with: str
    num_eval_samples: int
    eval_strategy: EvalStrategy
    eval_steps: int
    eval_compression: EvalCompression
    private_ends: str
    adapter: Adapter
    lora_r: int
    lora_alpha: int
    lora_dropout: float
    target_modules: str
    merge: bool
    train_layers: str
    task_kind: TaskKind
    label_names: str
    base_dtype: BaseDtype
    load_in_8bit: bool
    load_in_4bit: bool
    optim: Optim
    gradient_checkpointing: bool
    save_strategy: SaveStrategy
    save_total_limit: int
    early_stopping_patience: int
    early_stopping_threshold: float
    metric_for_best_model: str
    frozen_codec: str
    router_aux_loss_coef: float
    quality: float
    dtype: Dtype
    load_best_model_at_end: bool
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_samples: _Optional[int] = ..., seq_length: _Optional[int] = ..., batch_size: _Optional[int] = ..., micro_batch_size: _Optional[int] = ..., num_steps: _Optional[int] = ..., learning_rate: _Optional[float] = ..., lr_schedule: _Optional[_Union[LrSchedule, str]] = ..., warmup_steps: _Optional[int] = ..., weight_decay: _Optional[float] = ..., clip_grad_norm: _Optional[float] = ..., seed: _Optional[int] = ..., shuffle: _Optional[bool] = ..., dropout: _Optional[bool] = ..., sync_tied_embeddings: _Optional[bool] = ..., forward_codec: _Optional[str] = ..., backward_codec: _Optional[str] = ..., key_codec: _Optional[str] = ..., dp_codec: _Optional[str] = ..., save_steps: _Optional[int] = ..., buffer_bits: _Optional[int] = ..., fill_codec: _Optional[str] = ..., fill_microbatches: _Optional[int] = ..., drain_codec: _Optional[str] = ..., drain_microbatches: _Optional[int] = ..., share_with: _Optional[str] = ..., num_eval_samples: _Optional[int] = ..., eval_strategy: _Optional[_Union[EvalStrategy, str]] = ..., eval_steps: _Optional[int] = ..., eval_compression: _Optional[_Union[EvalCompression, str]] = ..., private_ends: _Optional[str] = ..., adapter: _Optional[_Union[Adapter, str]] = ..., lora_r: _Optional[int] = ..., lora_alpha: _Optional[int] = ..., lora_dropout: _Optional[float] = ..., target_modules: _Optional[str] = ..., merge: _Optional[bool] = ..., train_layers: _Optional[str] = ..., task_kind: _Optional[_Union[TaskKind, str]] = ..., label_names: _Optional[str] = ..., base_dtype: _Optional[_Union[BaseDtype, str]] = ..., load_in_8bit: _Optional[bool] = ..., load_in_4bit: _Optional[bool] = ..., optim: _Optional[_Union[Optim, str]] = ..., gradient_checkpointing: _Optional[bool] = ..., save_strategy: _Optional[_Union[SaveStrategy, str]] = ..., save_total_limit: _Optional[int] = ..., early_stopping_patience: _Optional[int] = ..., early_stopping_threshold: _Optional[float] = ..., metric_for_best_model: _Optional[str] = ..., frozen_codec: _Optional[str] = ..., router_aux_loss_coef: _Optional[float] = ..., quality: _Optional[float] = ..., dtype: _Optional[_Union[Dtype, str]] = ..., load_best_model_at_end: _Optional[bool] = ..., end_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RunSpec(_message.Message):
    __slots__ = ("version", "model", "train", "inherited_digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    INHERITED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    model: ModelSpec
    train: TrainSpec
    inherited_digest: bytes
    def __init__(self, version: _Optional[int] = ..., model: _Optional[_Union[ModelSpec, _Mapping]] = ..., train: _Optional[_Union[TrainSpec, _Mapping]] = ..., inherited_digest: _Optional[bytes] = ...) -> None: ...
