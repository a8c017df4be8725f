"""Small models of every family of decoders that transformers has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 97
NUM_BLOCKS = 4

# By any of the names that families have for a size. The window is shorter than a sample.
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), NUM_BLOCKS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "inner_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    "pad_token_id": None,
    "dropout": 0.0,
    **dict.fromkeys(("sliding_window", "window_size"), 6),
    "attention_layers": ["global", "local"] * 2,
    "attention_types": [[["global", "local"], 2]],
    "rotary_dim": 4,
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    # latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "index_topk": 4,
    # linear attention and state spaces
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_conv_kernel_dim", "mamba_d_conv"), 2),
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
_LATENT = {"num_key_value_heads": 4}
# What some families need beside.
_MORE: Mapping[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _LATENT,
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 0,
        "global_head_dim": 8,
    },
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 0,
    },
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": _LATENT,
    "mamba2": {"num_heads": 8},
    "minicpm3": _LATENT,
    "modernbert-decoder": {"pad_token_id": 0},
    "youtu": _LATENT,
    "zaya": {"num_experts_per_tok": 1},
}
# Their configs hold other modules' too, whose sizes are not small.
COMPOSED = frozenset(
    model_type
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if getattr(CONFIG_MAPPING[model_type], "sub_configs", None)
    and model_type not in ("dbrx", "mpt")
)


def small_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A config of a family whose model has some ten thousand weights.

    Raises:
        Exception: of any kind: this family wants other numbers.
    """
    family = CONFIG_MAPPING[model_type]
    known = {*inspect.signature(family.__init__).parameters}
    known |= {*getattr(family, "__dataclass_fields__", {})}
    sizes = {name: size for name, size in _SIZES.items() if name in known}
    return family(**sizes | _MORE.get(model_type, {}) | changes)
