"""Decisions on the arguments of transformers, TRL and axolotl: one for each name.

`SwarmConfig` takes the names of `TRAINER`, a job file those of `DECISIONS` (`api/translation.py`).
A test holds `TRAINER` against the fields of the installed libraries: a new one needs a decision.

Sources: transformers' `training_args.py` (5.23, and names of 4.x that scripts still have), TRL's
`sft_config.py` (1.16), axolotl's `src/axolotl/utils/schemas` and `core/builders` at 067b021 (July
2026).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OFF: tuple[Any, ...] = (None, False, "auto", 0, 0.0, "", [], {})
"""Values that request nothing."""


@dataclass(frozen=True, slots=True)
class Honoured:
    """An argument that sets an option of a job.

    Attributes:
        option: Field of the option; empty if several arguments together set options.
    """

    option: str = ""


@dataclass(frozen=True, slots=True)
class Ignored:
    """An argument that does not change the result of a run.

    Attributes:
        note: Explanation of the swarm's own behaviour; may be empty.
        default: The library's own default, which needs no note.
    """

    note: str = ""
    default: Any = None


@dataclass(frozen=True, slots=True)
class Refused:
    """An argument that requests something that a swarm does not do.

    Attributes:
        reason: Reason with the nearest option; empty if the message lists the allowed values.
        allowed: Values beside `OFF` that request the swarm's own behaviour.
    """

    reason: str = ""
    allowed: tuple[Any, ...] = ()

    def problem(self, value: object) -> str:
        """Return the reason to refuse a value; empty if the value is allowed."""
        is_off = bool(self.reason) and value in OFF
        if value is None or is_off or value in self.allowed or _number(value) in self.allowed:
            return ""
        expected = " or ".join(map(str, self.allowed))
        return self.reason or f"expected {expected}, got {shown(value)}"


def shown(value: object) -> str:
    """Shorten a value for messages, and escape control characters."""
    return reprlib.repr(value)


def _number(value: object) -> float | None:
    """Parse a text as a number: YAML reads 1e-8 as a text."""
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


Decision = Honoured | Ignored | Refused


def _all(names: Iterable[str], decision: Decision) -> dict[str, Decision]:
    return dict.fromkeys(names, decision)


# ---- reasons that several arguments share

PRECISION = (
    "weights train in float32, and each peer computes in float32 or bfloat16 (serve-stage "
    "--dtype); base_dtype: bfloat16 halves the memory of an adapter's frozen weights"
)
SHARES_OUT = "the swarm partitions the model itself"
TEMPLATE = (
    "the swarm uses the model's own chat template (tokenizer_default); put another one beside the "
    "model, as chat_template.jinja"
)
TOKENIZER = "the swarm uses the model's own tokenizer without changes"
LR = "a run has one learning rate and lr_scheduler: constant, constant_with_warmup, linear, cosine"
NO_TOKEN = "log in with 'hf auth login'; a job carries no token"
RESUMES = "a run continues by itself; resume: true returns to it"
CUSTOM_CODE = "the swarm never runs code of a model or a dataset"
BLOCKS = "train_layers: START-STOP chooses the blocks that train"
NOT_TRAINED = "the swarm does not train on preferences or rewards"
METRICS = "the swarm evaluates the loss and a task's own metrics; it has no compute_metrics"
WANDB = "report_to: wandb reports losses; the variable WANDB_PROJECT sets the project"
TRACKIO = "report_to: trackio reports losses; the variable TRACKIO_PROJECT sets the project"

PLAIN = Ignored()


# ---- transformers.TrainingArguments

_TRAINING_ARGUMENTS: Mapping[str, Decision] = {
    # Steps, batches and seeds.
    "output_dir": Honoured("out"),
    "per_device_train_batch_size": Honoured(),
    "gradient_accumulation_steps": Honoured(),
    "num_train_epochs": Honoured("epochs"),
    "max_steps": Honoured("steps"),
    "seed": Honoured("seed"),
    "data_seed": Honoured(),
    "auto_find_batch_size": Ignored("a peer takes as many microbatches as fit into its memory"),
    "train_sampling_strategy": Honoured(),
    "length_column_name": Ignored(default="length"),
    # Optimizer.
    "learning_rate": Honoured("learning_rate"),
    "lr_scheduler_type": Honoured("lr_schedule"),
    "lr_scheduler_kwargs": Refused(LR),
    "warmup_steps": Honoured(),
    "optim": Honoured("optim"),
    "optim_args": Refused("optimizers take no further arguments"),
    "optim_target_modules": Refused("the swarm has no GaLore, APOLLO or similar optimizers"),
    "weight_decay": Honoured("weight_decay"),
    "adam_beta1": Refused(allowed=(0.9,)),
    "adam_beta2": Refused(allowed=(0.999,)),
    "adam_epsilon": Refused(allowed=(1e-8,)),
    "max_grad_norm": Honoured("clip_grad_norm"),
    "label_smoothing_factor": Refused("the loss has no label smoothing"),
    "neftune_noise_alpha": Refused("the swarm adds no noise to embeddings"),
    "average_tokens_across_devices": Ignored(
        "a step's loss is the mean over all its learned tokens", default=True
    ),
    # Devices and precision.
    **_all(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"), Ignored(PRECISION)),
    "activation_checkpointing": Honoured("gradient_checkpointing"),
    "gradient_checkpointing": Honoured("gradient_checkpointing"),
    **_all(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), PLAIN),
    **_all(("torch_compile", "torch_compile_backend", "torch_compile_mode"), PLAIN),
    **_all(("tf32", "use_liger_kernel", "liger_kernel_config", "use_cache"), PLAIN),
    **_all(("torch_empty_cache_steps", "use_cpu", "full_determinism"), PLAIN),
    **_all(("deepspeed", "fsdp", "parallelism_config"), Refused(SHARES_OUT)),
    "fsdp_config": PLAIN,  # fsdp turns it on
    **_all(("accelerator_config", "ddp_find_unused_parameters", "ddp_bucket_cap_mb"), PLAIN),
    **_all(("ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"), PLAIN),
    "ddp_timeout": Ignored(default=1800),
    "local_rank": Ignored(default=-1),
    # Data.
    **_all(("dataloader_num_workers", "dataloader_persistent_workers"), PLAIN),
    **_all(("dataloader_prefetch_factor", "dataloader_multiprocessing_context"), PLAIN),
    **_all(("dataloader_pin_memory", "dataloader_in_order"), Ignored(default=True)),
    "dataloader_drop_last": Refused("an epoch's last step may be smaller; no sample is dropped"),
    "remove_unused_columns": Ignored(default=True),
    "label_names": Refused("the labels are the tokens; use task and labels for classes"),
    # Logs.
    "report_to": Honoured("report_to"),
    "run_name": Ignored("the swarm names the run"),
    "project": Ignored(TRACKIO, default="huggingface"),
    **_all(("trackio_space_id", "trackio_bucket_id"), Refused(TRACKIO)),
    "trackio_static_space_id": Refused(TRACKIO),
    "logging_strategy": Ignored(default="steps"),
    **_all(("logging_steps", "logging_first_step"), PLAIN),
    **_all(("log_on_each_node", "logging_nan_inf_filter"), Ignored(default=True)),
    "log_level": Ignored(default="passive"),
    "log_level_replica": Ignored(default="warning"),
    **_all(("disable_tqdm", "debug"), PLAIN),
    "skip_memory_metrics": Ignored(default=True),
    "include_num_input_tokens_seen": Ignored(default="no"),
    # Evaluation.
    "eval_strategy": Honoured("eval_strategy"),
    "eval_steps": Honoured("eval_steps"),
    "eval_delay": Refused("the swarm evaluates from the start; eval_steps sets the interval"),
    "eval_on_start": Ignored("the swarm evaluates before the first step"),
    "per_device_eval_batch_size": Ignored(default=8),
    **_all(("prediction_loss_only", "batch_eval_metrics"), Ignored(METRICS)),
    "include_for_metrics": Ignored(METRICS),
    "eval_do_concat_batches": Ignored(default=True),
    **_all(("eval_use_gather_object", "eval_accumulation_steps"), PLAIN),
    "load_best_model_at_end": Honoured("load_best_model_at_end"),
    "metric_for_best_model": Honoured("metric_for_best_model"),
    "greater_is_better": Honoured(),
    # Snapshots.
    "save_strategy": Honoured("save_strategy"),
    "save_steps": Honoured("save_steps"),
    "save_total_limit": Honoured("save_total_limit"),
    **_all(("save_only_model", "save_on_each_node"), PLAIN),
    "enable_jit_checkpoint": Ignored("a peer that leaves hands its state over"),
    "resume_from_checkpoint": Refused(RESUMES),
    "ignore_data_skip": Refused("a run continues at its next sample"),
    "restore_callback_states_from_checkpoint": PLAIN,
    # The hub.
    "push_to_hub": Honoured("push_to_hub"),
    "hub_model_id": Honoured(),
    "hub_private_repo": Honoured("hub_private_repo"),
    "hub_token": Refused(NO_TOKEN, allowed=("<HUB_TOKEN>",)),
    "hub_strategy": Ignored("the result is uploaded once, at the end", default="every_save"),
    "hub_always_push": Ignored("the result is uploaded once, at the end"),
    "hub_revision": Refused("the result goes to the repository's main branch"),
    # Arguments of scripts, not of a Trainer.
    **_all(("do_train", "do_eval", "do_predict"), PLAIN),
}

# ---- trl.SFTConfig

_SFT_CONFIG: Mapping[str, Decision] = {
    "model_init_kwargs": Honoured(),
    "trust_remote_code": Refused(CUSTOM_CODE),
    "router_aux_loss_coef": Honoured("router_aux_loss_coef"),
    "chat_template_path": Refused(TEMPLATE),
    "dataset_text_field": Honoured(),
    "dataset_kwargs": Refused("the client tokenizes rows itself (docs/how-to/prepare-data.md)"),
    "dataset_num_proc": PLAIN,
    "eos_token": Refused(TOKENIZER, allowed=("<EOS_TOKEN>",)),
    "pad_token": Ignored(default="<PAD_TOKEN>"),
    "max_length": Honoured("seq_length"),
    "truncation_mode": Refused("a long document loses its end", allowed=("keep_start",)),
    "shuffle_dataset": Honoured(),
    "packing": Honoured("packing"),
    "packing_strategy": Honoured(),
    **_all(("padding_free", "eval_packing", "activation_offloading"), PLAIN),
    "pad_to_multiple_of": PLAIN,
    "completion_only_loss": Honoured("completion_only_loss"),
    "assistant_only_loss": Honoured("assistant_only_loss"),
    "loss_type": Refused(
        "the loss is the negative log-likelihood (nll)", allowed=("nll", "chunked_nll")
    ),
}

FORMER: Mapping[str, Decision] = {
    "evaluation_strategy": Honoured("eval_strategy"),
    "warmup_ratio": Honoured("warmup_ratio"),
    "logging_dir": Honoured("logging_dir"),
    "max_seq_length": Honoured("seq_length"),
    "group_by_length": Refused("the swarm does not sort samples by length"),
    "save_safetensors": Refused(allowed=(True,)),
    "push_to_hub_model_id": Refused("hub_model_id sets the repository"),
    "push_to_hub_organization": Refused("hub_model_id sets the repository, as OWNER/NAME"),
    "push_to_hub_token": Refused(NO_TOKEN, allowed=("<PUSH_TO_HUB_TOKEN>",)),
    "adafactor": Refused("optim: adafactor"),
    "sharded_ddp": Refused(SHARES_OUT),
    "fp16_opt_level": Ignored(default="O1"),
    **_all(("fp16_backend", "half_precision_backend"), Ignored(default="auto")),
    **_all(("fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"), PLAIN),
    **_all(("overwrite_output_dir", "no_cuda", "use_mps_device", "use_ipex"), PLAIN),
    **_all(
        ("jit_mode_eval", "torchdynamo", "ray_scope", "tpu_num_cores", "tpu_metrics_debug"), PLAIN
    ),
    **_all(("include_tokens_per_second", "include_inputs_for_metrics", "mp_parameters"), PLAIN),
    **_all(("per_gpu_eval_batch_size", "past_index", "use_legacy_prediction_loop"), PLAIN),
    **_all(("dataset_batch_size", "num_of_sequences", "chars_per_token", "use_liger"), PLAIN),
    "per_gpu_train_batch_size": Refused("its present name is per_device_train_batch_size"),
    **_all(("split_batches", "dispatch_batches"), PLAIN),
}
"""Arguments of transformers 4 and of earlier releases of TRL that scripts still use."""

TRAINER: Mapping[str, Decision] = {**_TRAINING_ARGUMENTS, **_SFT_CONFIG, **FORMER}
"""Decisions on the arguments of `SwarmConfig`, by name."""

# ---- axolotl

_AXOLOTL: Mapping[str, Decision] = {
    **_all(("bfloat16", "float16"), Ignored(PRECISION)),
    **_all(("fsdp_config", "fsdp_version", "dp_shard_size"), Refused(SHARES_OUT)),
    **_all(("tensor_parallel_size", "context_parallel_size"), Refused(SHARES_OUT)),
    "sequence_parallel_degree": Refused(SHARES_OUT),
    **_all(("chat_template_jinja", "chat_template_kwargs"), Refused(TEMPLATE)),
    **_all(("tokens", "added_tokens_overrides", "tokenizer_config"), Refused(TOKENIZER)),
    **_all(("tokenizer_legacy", "tokenizer_use_mistral_common"), Refused(TOKENIZER)),
    **_all(("rl", "reward_model", "process_reward_model"), Refused(NOT_TRAINED)),
    **_all(("cosine_min_lr_ratio", "cosine_constant_lr_ratio", "lr_groups"), Refused(LR)),
    **_all(("embedding_lr", "loraplus_lr_ratio"), Refused(LR)),
    **_all(("unfrozen_parameters", "peft_layers_to_transform"), Refused(BLOCKS)),
    **_all(("wandb_project", "wandb_entity", "wandb_name", "wandb_run_id"), Refused(WANDB)),
    "use_wandb": Refused(WANDB),
    **_all(
        ("wandb_watch", "wandb_log_model"),
        Refused("report_to: wandb reports losses, and nothing of the model"),
    ),
    **_all(("trackio_project_name", "trackio_run_name"), Refused(TRACKIO)),
    **_all(
        ("loss_watchdog_threshold", "loss_watchdog_patience"),
        Refused(
            "the training loss cannot end a run; early_stopping_patience ends one by evaluations"
        ),
    ),
    "num_labels": Refused("task: classification trains classes"),
    "pretraining_dataset": Refused("list it under datasets, with type: completion"),
    "streaming": Refused("the client streams files and hub datasets in any case"),
    "lora_model_dir": Refused("training cannot continue from an adapter"),
    "lora_modules_to_save": Refused("only adapters train; --train-layers trains whole blocks"),
    "peft_use_rslora": Refused("lora_alpha over lora_r scales the adapters"),
    "dataset_exact_deduplication": Refused("the client does not remove equal rows"),
    "eval_sequence_len": Refused("held-out samples have the length of training samples"),
    "auto_resume_from_checkpoints": Refused(RESUMES),
    "revision": Refused("the swarm reads the newest revision of a model and a dataset"),
    "tokenizer_use_fast": Refused(allowed=(True,)),
    "lora_fan_in_fan_out": Refused(allowed=(False,)),
    **_all(("profiler_steps", "strict", "dataset_prepared_path", "dataset_processes"), PLAIN),
    **_all(("dataset_keep_in_memory", "device_map", "low_cpu_mem_usage", "lora_on_cpu"), PLAIN),
    **_all(("gc_steps", "gc_collect_steps", "attn_implementation", "flash_attention"), PLAIN),
    **_all(("sdp_attention", "xformers_attention", "flex_attention", "eager_attention"), PLAIN),
    **_all(("flash_attn_cross_entropy", "flash_attn_rms_norm", "flash_attn_fuse_mlp"), PLAIN),
    **_all(("flash_attn_fuse_qkv", "use_kernels", "lora_mlp_kernel", "lora_qkv_kernel"), PLAIN),
    **_all(("lora_o_kernel", "lora_embedding_kernel", "cut_cross_entropy"), PLAIN),
    **_all(("chunked_cross_entropy", "chunked_cross_entropy_num_chunks"), PLAIN),
    **_all(("tiled_mlp", "tiled_mlp_num_shards"), PLAIN),
    **_all(("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation"), PLAIN),
    **_all(("liger_swiglu", "liger_cross_entropy", "liger_fused_linear_cross_entropy"), PLAIN),
    **_all(("pad_to_sequence_len", "eval_sample_packing", "eval_batch_size"), PLAIN),
    **_all(("sample_packing_group_size", "sample_packing_bin_size"), PLAIN),
    **_all(("sample_packing_eff_est", "sample_packing_mp_start_method"), PLAIN),
    **_all(("total_num_tokens", "total_supervised_tokens", "tokenizer_type"), PLAIN),
    # The loss covers the end of each learned turn in any case.
    "eot_tokens": PLAIN,
    **_all(("is_llama_derived_model", "is_mistral_derived_model"), PLAIN),
    **_all(("is_qwen_derived_model", "hf_use_auth_token"), PLAIN),
}

DECISIONS: Mapping[str, Decision] = {**TRAINER, **_AXOLOTL}
"""Decisions on the keys of a job file, by name, beside the names of the options themselves."""

# ---- values

WORDS: Mapping[str, Mapping[str, str]] = {
    "lr_schedule": {"constant_with_warmup": "constant"},
    "truncation": {"truncate": "cut"},
    "optim": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
        **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused"), "adamw"),
        **dict.fromkeys(("adamw_apex_fused", "paged_adamw_32bit", "paged_adamw"), "adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit"), "adamw-8bit"),
    },
    "metric_for_best_model": {
        f"eval_{name}": name for name in ("loss", "accuracy", "f1", "matthews_correlation")
    },
}
"""The libraries' words for values that have another word here, by the option's field."""

MODEL_INIT: Mapping[str, Decision] = {
    **_all(("dtype", "torch_dtype"), Ignored(PRECISION, default="auto")),
    **_all(("attn_implementation", "use_cache", "use_kernels", "device_map"), PLAIN),
    **_all(("low_cpu_mem_usage", "use_safetensors", "cache_dir"), PLAIN),
    "token": Refused(NO_TOKEN),
    "revision": Refused("the swarm reads a model's newest revision"),
    "trust_remote_code": Refused(CUSTOM_CODE),
    "quantization_config": Refused("load_in_4bit or load_in_8bit quantizes the frozen weights"),
    "load_in_4bit": Refused("load_in_4bit is an option of the job"),
    "load_in_8bit": Refused("load_in_8bit is an option of the job"),
}
"""Decisions on the arguments of `from_pretrained` in `model_init_kwargs`."""
