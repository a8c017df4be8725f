"""The parts of a causal language model beside its weights: tokenizer, end tokens, positions."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from swarm_ft.protocol.spec.tasks import CausalLm
from swarm_ft.stage.checkpoint import anatomy_in, find_source, read_config
from swarm_ft.stage.generation import end_tokens_in, generation_settings
from swarm_ft.stage.tokenizer import tokenizer_in


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationInfo:
    """Tokenizer and generation settings of a model.

    Attributes:
        tokenizer: Tokenizer of the checkpoint.
        ends: Tokens that end a text, as in `generate` of transformers.
        positions: Largest number of positions of a text; None: no limit.
        unsupported_settings: Settings of its `generation_config.json` that stages do not support.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    positions: int | None
    unsupported_settings: tuple[str, ...] = ()


_UNHEEDED = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("sequence_bias", "exponential_decay_length_penalty", "forced_eos_token_id")),
    **dict.fromkeys(("forced_bos_token_id", "min_length", "min_new_tokens", "watermarking_config")),
    "num_beams": 1,
}
"""Settings that change even the most likely token, with the value that has no effect.

Nor has None.
"""


def open_generation_info(reference: str) -> GenerationInfo:
    """Read the parts of a model; from the hub no weights are fetched.

    Args:
        reference: Directory or hub id.

    Raises:
        BadModel: The model is missing or unreadable, has no tokenizer, or an unknown architecture.
    """
    source = find_source(reference)
    config = read_config(source, CausalLm())
    architecture = anatomy_in(source, config, CausalLm()).architecture
    settings = generation_settings(source)
    return GenerationInfo(
        tokenizer=tokenizer_in(source),
        ends=frozenset(end_tokens_in(source, config)),
        positions=architecture.positions,
        unsupported_settings=tuple(
            f"{name} {settings[name]}"
            for name, neutral in _UNHEEDED.items()
            if settings.get(name) not in (None, 0, neutral)
        ),
    )
