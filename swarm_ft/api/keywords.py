"""Options of calls as keywords with types; made of their declarations, by `make docs`.

`docs/options.md` says what each is for. Words stand for values that have words, as "lora".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict


class JobKeywords(TypedDict, total=False):
    """What `train` takes; whatever is left out is as by default."""

    model: str | None
    dataset: Sequence[str] | None
    split: str | None
    probabilities: str | None
    stopping_strategy: Literal["first-exhausted", "all-exhausted"]
    max_samples: int | None
    data_format: Literal["text", "lines", "jsonl", "json", "csv", "tsv", "parquet", "arrow"] | None
    subset: str | None
    text_column: str | None
    column: Sequence[str]
    template: str | None
    remove_columns: str | None
    label_column: str | None
    column_names: str | None
    delimiter: str | None
    field: str | None
    quotes: bool
    separator: str | None
    packing: bool
    packing_strategy: Literal["bfd", "wrapped"]
    truncation: Literal["cut", "drop", "split"] | None
    completion_only_loss: bool
    assistant_only_loss: bool
    eval_dataset: str | None
    eval_split: str | None
    eval_size: float
    max_eval_samples: int | None
    epochs: int
    steps: int | None
    warmup_ratio: float
    evals_per_epoch: int
    saves_per_epoch: int
    task_kind: Literal["causal-lm", "classification", "token-classification"]
    label_names: str
    batch_size: int
    micro_batch_size: int
    seq_length: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    weight_decay: float
    optim: Literal["adamw", "adafactor", "sgd", "adamw-8bit"]
    gradient_checkpointing: bool
    router_aux_loss_coef: float
    clip_grad_norm: float
    seed: int
    shuffle: bool
    dropout: bool
    sync_tied_embeddings: bool
    quality: float
    forward_codec: str
    backward_codec: str
    key_codec: str
    fill_codec: str
    fill_microbatches: int
    drain_codec: str
    drain_microbatches: int
    frozen_codec: str
    dp_codec: str
    buffer_bits: int
    adapter: Literal["none", "lora", "dora"]
    lora_r: int
    lora_alpha: int
    lora_dropout: float
    target_modules: str
    merge: bool
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    base_dtype: Literal["float32", "bfloat16"]
    load_in_8bit: bool
    load_in_4bit: bool
    train_layers: str
    save_steps: int
    save_strategy: Literal["no", "steps", "epoch"]
    save_total_limit: int
    eval_strategy: Literal["no", "steps", "epoch"]
    eval_steps: int
    eval_compression: Literal["off", "on", "both"]
    early_stopping_patience: int
    early_stopping_threshold: float
    metric_for_best_model: str
    load_best_model_at_end: bool
    private_ends: str
    share_with: str
    resume: bool
    priority: int
    out: str | Path
    json_file: str | Path | None
    trace_file: str | Path | None
    report_to: str
    logging_dir: str | Path | None
    push_to_hub: str | None
    hub_private_repo: bool


class PlanKeywords(TypedDict, total=False):
    """What `plan` takes: a job without data."""

    model: str | None
    num_samples: int
    num_eval_samples: int | None
    epochs: int
    steps: int | None
    task_kind: Literal["causal-lm", "classification", "token-classification"]
    label_names: str
    batch_size: int
    micro_batch_size: int
    seq_length: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    weight_decay: float
    optim: Literal["adamw", "adafactor", "sgd", "adamw-8bit"]
    gradient_checkpointing: bool
    router_aux_loss_coef: float
    clip_grad_norm: float
    seed: int
    shuffle: bool
    dropout: bool
    sync_tied_embeddings: bool
    quality: float
    forward_codec: str
    backward_codec: str
    key_codec: str
    fill_codec: str
    fill_microbatches: int
    drain_codec: str
    drain_microbatches: int
    frozen_codec: str
    dp_codec: str
    buffer_bits: int
    adapter: Literal["none", "lora", "dora"]
    lora_r: int
    lora_alpha: int
    lora_dropout: float
    target_modules: str
    merge: bool
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    base_dtype: Literal["float32", "bfloat16"]
    load_in_8bit: bool
    load_in_4bit: bool
    train_layers: str
    save_steps: int
    save_strategy: Literal["no", "steps", "epoch"]
    save_total_limit: int
    eval_strategy: Literal["no", "steps", "epoch"]
    eval_steps: int
    eval_compression: Literal["off", "on", "both"]
    early_stopping_patience: int
    early_stopping_threshold: float
    metric_for_best_model: str
    load_best_model_at_end: bool
    private_ends: str
    share_with: str


class OutputKeywords(TypedDict, total=False):
    """What `attach` takes: where the result and reports go."""

    out: str | Path
    json_file: str | Path | None
    trace_file: str | Path | None
    report_to: str
    logging_dir: str | Path | None
    push_to_hub: str | None
    hub_private_repo: bool


class GenerateKeywords(TypedDict, total=False):
    """What `generate` takes, by transformers' names."""

    max_new_tokens: int
    chat: bool
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
