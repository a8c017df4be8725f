"""Keywords of calls with their types, written by `make reference` from the declarations.

`docs/reference/options.md` describes each. Words stand for values that have words, as "lora".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict


class JobKeywords(TypedDict, total=False):
    """Arguments of `train`; one that is left out has its default."""

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
    """Arguments of `plan`: a job without data."""

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
    """Arguments of `attach`: places of the result and of reports."""

    out: str | Path
    json_file: str | Path | None
    trace_file: str | Path | None
    report_to: str
    logging_dir: str | Path | None
    push_to_hub: str | None
    hub_private_repo: bool


class GenerateKeywords(TypedDict, total=False):
    """Arguments of `generate`, with the names of transformers."""

    max_new_tokens: int
    chat: bool
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int | None


class TrainerKeywords(TypedDict, total=False):
    """Names of `TrainingArguments` and `SFTConfig`; `api/arguments.py` decides on each."""

    output_dir: str | Path
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_train_epochs: float
    max_steps: int
    seed: int
    data_seed: object
    auto_find_batch_size: object
    train_sampling_strategy: object
    length_column_name: object
    learning_rate: float
    lr_scheduler_type: str
    lr_scheduler_kwargs: object
    warmup_steps: float
    optim: str
    optim_args: object
    optim_target_modules: object
    weight_decay: float
    adam_beta1: object
    adam_beta2: object
    adam_epsilon: object
    max_grad_norm: float
    label_smoothing_factor: object
    neftune_noise_alpha: object
    average_tokens_across_devices: object
    bf16: object
    fp16: object
    bf16_full_eval: object
    fp16_full_eval: object
    activation_checkpointing: object
    gradient_checkpointing: bool
    activation_checkpointing_kwargs: object
    gradient_checkpointing_kwargs: object
    torch_compile: object
    torch_compile_backend: object
    torch_compile_mode: object
    tf32: object
    use_liger_kernel: object
    liger_kernel_config: object
    use_cache: object
    torch_empty_cache_steps: object
    use_cpu: object
    full_determinism: object
    deepspeed: object
    fsdp: object
    parallelism_config: object
    fsdp_config: object
    accelerator_config: object
    ddp_find_unused_parameters: object
    ddp_bucket_cap_mb: object
    ddp_broadcast_buffers: object
    ddp_static_graph: object
    ddp_backend: object
    ddp_timeout: object
    local_rank: object
    dataloader_num_workers: object
    dataloader_persistent_workers: object
    dataloader_prefetch_factor: object
    dataloader_multiprocessing_context: object
    dataloader_pin_memory: object
    dataloader_in_order: object
    dataloader_drop_last: object
    remove_unused_columns: object
    label_names: object
    report_to: str | list[str] | None
    run_name: object
    project: object
    trackio_space_id: object
    trackio_bucket_id: object
    trackio_static_space_id: object
    logging_strategy: object
    logging_steps: object
    logging_first_step: object
    log_on_each_node: object
    logging_nan_inf_filter: object
    log_level: object
    log_level_replica: object
    disable_tqdm: object
    debug: object
    skip_memory_metrics: object
    include_num_input_tokens_seen: object
    eval_strategy: str
    eval_steps: int | None
    eval_delay: object
    eval_on_start: object
    per_device_eval_batch_size: object
    prediction_loss_only: object
    batch_eval_metrics: object
    include_for_metrics: object
    eval_do_concat_batches: object
    eval_use_gather_object: object
    eval_accumulation_steps: object
    load_best_model_at_end: bool
    metric_for_best_model: str | None
    greater_is_better: object
    save_strategy: str
    save_steps: int
    save_total_limit: int | None
    save_only_model: object
    save_on_each_node: object
    enable_jit_checkpoint: object
    resume_from_checkpoint: object
    ignore_data_skip: object
    restore_callback_states_from_checkpoint: object
    push_to_hub: bool
    hub_model_id: str | None
    hub_private_repo: bool | None
    hub_token: object
    hub_strategy: object
    hub_always_push: object
    hub_revision: object
    do_train: object
    do_eval: object
    do_predict: object
    model_init_kwargs: object
    trust_remote_code: object
    router_aux_loss_coef: object
    chat_template_path: object
    dataset_text_field: str | None
    dataset_kwargs: object
    dataset_num_proc: object
    eos_token: object
    pad_token: object
    max_length: int | None
    truncation_mode: object
    shuffle_dataset: object
    packing: bool
    packing_strategy: str
    padding_free: object
    eval_packing: object
    activation_offloading: object
    pad_to_multiple_of: object
    completion_only_loss: bool | None
    assistant_only_loss: bool
    loss_type: object
    evaluation_strategy: object
    warmup_ratio: float
    logging_dir: str | Path | None
    max_seq_length: object
    group_by_length: object
    save_safetensors: object
    push_to_hub_model_id: object
    push_to_hub_organization: object
    push_to_hub_token: object
    adafactor: object
    sharded_ddp: object
    fp16_opt_level: object
    fp16_backend: object
    half_precision_backend: object
    fsdp_min_num_params: object
    fsdp_transformer_layer_cls_to_wrap: object
    overwrite_output_dir: object
    no_cuda: object
    use_mps_device: object
    use_ipex: object
    jit_mode_eval: object
    torchdynamo: object
    ray_scope: object
    tpu_num_cores: object
    tpu_metrics_debug: object
    include_tokens_per_second: object
    include_inputs_for_metrics: object
    mp_parameters: object
    per_gpu_eval_batch_size: object
    past_index: object
    use_legacy_prediction_loop: object
    dataset_batch_size: object
    num_of_sequences: object
    chars_per_token: object
    use_liger: object
    per_gpu_train_batch_size: object
    split_batches: object
    dispatch_batches: object
    swarm: JobKeywords
