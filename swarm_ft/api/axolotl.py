"""Axolotl's keys: which have a field here, which change nothing here, and which a swarm refuses.

Source: axolotl's `src/axolotl/utils/schemas` and `core/builders`, at 067b021 (July 2026).
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from swarm_ft.protocol.spec.options import nearest

RENAMED = {
    "base_model": "model",
    "sequence_len": "seq_length",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "lr_scheduler": "lr_schedule",
    "max_grad_norm": "clip_grad_norm",
    "optimizer": "optim",
    "lora_target_modules": "target_modules",
    "sample_packing": "packing",
    "val_set_size": "eval_size",
    "output_dir": "out",
    "hub_model_id": "push_to_hub",
}
"""Keys that have the same meaning here under another name, with the field's name."""
WORDS = {
    "lr_schedule": {"constant_with_warmup": "constant"},
    "truncation": {"truncate": "cut"},
    "optim": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "paged_adamw_8bit"), "adamw-8bit"),
        "paged_adamw_32bit": "adamw",
    },
}
"""By field, axolotl's words for values that have another word here."""

VOLUNTEERS = "each volunteer decides that for its machine (serve-stage --dtype, --device)"
SHARES_OUT = "the swarm shares a model out itself"
TEMPLATE = (
    "the model's own chat template is used (tokenizer_default); put another one beside the model, "
    "as chat_template.jinja"
)
TOKENIZER = "the model's own tokenizer is used as it is"
NOT_TRAINED = "preferences and rewards are not trained on"
LR = "a run has one learning rate and lr_scheduler: constant, constant_with_warmup, linear, cosine"
BLOCKS = "train_layers: START-STOP chooses the blocks that train"

REFUSED = {
    **dict.fromkeys(("bf16", "fp16", "bfloat16", "float16"), VOLUNTEERS),
    **dict.fromkeys(
        (
            "deepspeed",
            "fsdp",
            "fsdp_config",
            "fsdp_version",
            "dp_shard_size",
            "tensor_parallel_size",
            "context_parallel_size",
            "sequence_parallel_degree",
        ),
        SHARES_OUT,
    ),
    **dict.fromkeys(("chat_template_jinja", "chat_template_kwargs"), TEMPLATE),
    **dict.fromkeys(("tokens", "added_tokens_overrides", "tokenizer_config"), TOKENIZER),
    **dict.fromkeys(("tokenizer_legacy", "tokenizer_use_mistral_common"), TOKENIZER),
    **dict.fromkeys(("rl", "reward_model", "process_reward_model"), NOT_TRAINED),
    **dict.fromkeys(("cosine_min_lr_ratio", "cosine_constant_lr_ratio", "lr_groups"), LR),
    **dict.fromkeys(("lr_scheduler_kwargs", "embedding_lr", "loraplus_lr_ratio"), LR),
    **dict.fromkeys(("unfrozen_parameters", "peft_layers_to_transform"), BLOCKS),
    **dict.fromkeys(
        ("wandb_project", "wandb_entity", "wandb_name", "wandb_run_id", "use_wandb"),
        "report_to: wandb sends losses there; the variable WANDB_PROJECT names the project",
    ),
    **dict.fromkeys(
        ("wandb_watch", "wandb_log_model"),
        "report_to: wandb sends losses there, and nothing of the model",
    ),
    **dict.fromkeys(
        ("trackio_project_name", "trackio_run_name", "trackio_space_id"),
        "report_to: trackio sends losses there; the variable TRACKIO_PROJECT names the project",
    ),
    **dict.fromkeys(
        ("loss_watchdog_threshold", "loss_watchdog_patience"),
        "a run is not ended by its training loss; early_stopping_patience ends one by evaluations",
    ),
    "num_labels": "task: classification trains classes",
    "pretraining_dataset": "name it under datasets, with type: completion",
    "streaming": "a file is read row by row, and a dataset of the hub as it is needed",
    "lora_model_dir": "training does not go on from an adapter",
    "lora_modules_to_save": "adapters alone are trained; --train-layers trains blocks whole",
    "peft_use_rslora": "adapters are scaled by lora_alpha over lora_r",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "group_by_length": "samples are not sorted by length",
    "dataset_exact_deduplication": "rows that are equal all count",
    "eval_sequence_len": "samples that are evaluated are cut as those that train",
    "trust_remote_code": "code that comes with a model or a dataset is never run",
    "resume_from_checkpoint": "a run goes on by itself; resume: true finds it again",
    "auto_resume_from_checkpoints": "a run goes on by itself; resume: true finds it again",
    "torch_compile": VOLUNTEERS,
    "revision": "a model and a dataset are read at their newest revision",
}
"""Keys that a job may have only as off, auto or empty, with the reason."""

WITHOUT_EFFECT = frozenset(
    {
        *("logging_steps", "include_tokens_per_second", "profiler_steps", "debug", "strict"),
        *("dataset_prepared_path", "dataset_processes", "dataset_num_proc"),
        *("dataset_keep_in_memory", "remove_unused_columns"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor"),
        *("ddp_timeout", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        *("ddp_find_unused_parameters", "device_map", "low_cpu_mem_usage", "lora_on_cpu"),
        *("gc_steps", "gc_collect_steps", "torch_empty_cache_steps"),
        *("gradient_checkpointing_kwargs", "activation_offloading"),
        *("attn_implementation", "flash_attention", "sdp_attention", "xformers_attention"),
        *("flex_attention", "eager_attention", "flash_attn_cross_entropy", "flash_attn_rms_norm"),
        *("flash_attn_fuse_mlp", "flash_attn_fuse_qkv", "use_kernels", "tf32"),
        *("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"),
        *("cut_cross_entropy", "chunked_cross_entropy", "chunked_cross_entropy_num_chunks"),
        *("tiled_mlp", "tiled_mlp_num_shards"),
        *("liger_rope", "liger_rms_norm", "liger_layer_norm", "liger_glu_activation"),
        *("liger_swiglu", "liger_cross_entropy", "liger_fused_linear_cross_entropy"),
        *("pad_to_sequence_len", "pad_to_multiple_of", "eval_sample_packing", "eval_batch_size"),
        *("sample_packing_group_size", "sample_packing_bin_size", "sample_packing_eff_est"),
        *("sample_packing_mp_start_method", "total_num_tokens", "total_supervised_tokens"),
        *("eot_tokens", "tokenizer_type", "save_only_model"),
        *("is_llama_derived_model", "is_mistral_derived_model", "is_qwen_derived_model"),
        *("hf_use_auth_token", "hub_strategy"),
    }
)
"""Keys about how a machine computes, pads, caches or logs, which never change what is learned.

`eot_tokens` is one of them, since the end of each turn that is learned is learned as well.
"""
PLUGINS_WITHOUT_EFFECT = ("LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin")
EXPECTED = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "save_safetensors": True,
    "tokenizer_use_fast": True,
    "dataloader_drop_last": False,
    "lora_fan_in_fan_out": False,
}
"""Keys that a job may have with this value alone."""
OFF: tuple[Any, ...] = (None, False, "auto", 0, 0.0, "", [], {})
"""Values that ask for nothing."""

DEFAULTS = {
    "epochs": ("num_epochs", "1"),
    "lr_schedule": ("lr_scheduler", "cosine"),
    "warmup_ratio": ("warmup_ratio", "0.03, of 100 steps at most"),
    "seq_length": ("sequence_len", "512"),
    "batch_size": ("gradient_accumulation_steps", "1, of micro_batch_size samples"),
    "truncation": ("excess_length_strategy", "drop"),
    "shuffle": ("shuffle", "true"),
}
"""By field, the key and axolotl's own default, where ours is another."""


# ---- datasets


class RowType(NamedTuple):
    """What a `type` of datasets says of their rows.

    Attributes:
        asks: the option that `train_on_inputs` sets for such rows; empty if all is learned anyway.
        roles: columns that such rows have to have; see `--column`.
        is_text: whether a row is one text.
    """

    asks: str = ""
    roles: tuple[str, ...] = ()
    is_text: bool = False


_CHAT = RowType(asks="assistant_only_loss", roles=("messages",))
_TEXT = RowType(is_text=True)
ROW_TYPES = {
    "completion": _TEXT,
    "chat_template": _CHAT,
    "alpaca": RowType(asks="completion_only_loss", roles=("instruction", "output")),
    "pretraining": _TEXT,
    "pretrain": _TEXT,
    "chat_template.default": _CHAT,
}
ROLES = {"human": "user", "gpt": "assistant"}
"""Roles that have another name in axolotl's own mapping."""
COLUMNS = {"field_messages": "messages", "field_tools": "tools", "field_system": "system"}
"""Keys of an entry that name a column, with the role that the column has."""
MESSAGE_KEYS = (("role", "content"), ("from", "value"))
"""Keys that a message's role and content can have."""


def row_problem(name: str, value: Any, known: Iterable[str]) -> str:
    """Why an entry of `datasets` cannot have a key with this value; empty if it can.

    Args:
        name: of the key.
        value: never None.
        known: other keys, of which the nearest is named.
    """
    if value in OFF and name != "roles_to_train":
        return ""
    check = _ENTRY_KEYS.get(name)
    if check is not None:
        return check(value)
    return f"there is no such key{nearest(name, [*known, *_ENTRY_KEYS])}"


def _roles_to_train(value: Any) -> str:
    names = value if isinstance(value, list) else [value]
    roles = {ROLES.get(name, name) for name in names if isinstance(name, str)}
    if roles == {"assistant"} and len(names) == 1:
        return ""
    return (
        f"expected [assistant], got {shown(value)}; what others say is learned with "
        "train_on_inputs: true alone"
    )


def _one_of(*expected: Any) -> Callable[[Any], str]:
    words = " or ".join(map(str, expected))
    return lambda value: "" if value in expected else f"expected {words}, got {shown(value)}"


def _mappings(value: Any) -> str:
    keys = (value.get("role"), value.get("content")) if isinstance(value, dict) else ()
    if keys in MESSAGE_KEYS and len(value) == len(keys):
        return ""
    return (
        "expected role: role and content: content, or role: from and content: value, "
        f"got {shown(value)}"
    )


def _template(value: Any) -> str:
    return "" if str(value).startswith("tokenizer_default") else TEMPLATE


def _refused(words: str) -> Callable[[Any], str]:
    return lambda _value: words


_ENTRY_KEYS: dict[str, Callable[[Any], str]] = {
    "roles_to_train": _roles_to_train,
    "train_on_eos": _one_of("turn"),
    "train_on_eot": _one_of("turn"),
    "message_property_mappings": _mappings,
    "message_field_role": _one_of("role", "from"),
    "message_field_content": _one_of("content", "value"),
    "message_field_training": _one_of("train", "training", "trainable", "weight"),
    "message_field_training_detail": _refused("a message is learned as a whole, or not at all"),
    "chat_template": _template,
    "chat_template_jinja": _refused(TEMPLATE),
    "field_thinking": _one_of("reasoning_content"),
    "template_thinking_key": _one_of("reasoning_content"),
    "split_thinking": _refused("messages go to the template as they are"),
    "drop_system_message": _refused("messages go to the template as they are"),
    "roles": _refused("roles go to the template by axolotl's default names"),
    "shards": _refused("max_samples: N takes the first N samples alone"),
    "shards_idx": _refused("max_samples: N takes the first N samples alone"),
    "data_files": _refused("path: names a file, or a directory of files"),
    "revision": _refused("a dataset is read at its newest revision"),
    "trust_remote_code": _refused("code that comes with a dataset is never run"),
}


def shown(value: object) -> str:
    """A value of a file for messages: short, and without what could steer a terminal."""
    return reprlib.repr(value)
