"""What there is of a causal language model beside its weights: how it reads, and where it ends."""

from __future__ import annotations

import json
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from swarm_ft.protocol.spec.tasks import CausalLm
from swarm_ft.stage.architecture import architecture_of
from swarm_ft.stage.checkpoint import (
    CONFIG_FILE,
    GENERATION_FILE,
    Source,
    find_source,
    one_line,
    read_config,
    tokenizer_in,
)
from swarm_ft.stage.skeleton import ModelConfig, build_skeleton


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """See the module's docstring.

    Attributes:
        ends: tokens behind which a text ends, as `generate` of transformers knows them.
        positions: that a text may have; None if any number.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    positions: int | None


def open_words(reference: str) -> Words:
    """Read them; of the hub no weights are fetched.

    Args:
        reference: directory or hub id.

    Raises:
        BadModel: missing, without a tokenizer, unreadable, or of an unknown architecture.
    """
    source = find_source(reference)
    config = read_config(source, CausalLm())
    try:
        architecture = architecture_of(build_skeleton(config))
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as exc:
        raise source.refused(f"{CONFIG_FILE} describes no model ({one_line(exc)})") from exc
    return Words(
        tokenizer=tokenizer_in(source),
        ends=_ends_in(source, config),
        positions=architecture.positions,
    )


def _ends_in(source: Source, config: ModelConfig) -> frozenset[int]:
    path = source.find(GENERATION_FILE)
    try:
        fields = json.loads(path.read_text(encoding="utf-8")) if path is not None else {}
        ends = fields.get("eos_token_id", getattr(config, "eos_token_id", None))
        several = ends if isinstance(ends, list) else [ends]
        return frozenset(int(end) for end in several if end is not None)
    except (OSError, ValueError, TypeError, AttributeError) as exc:
        raise source.refused(f"{GENERATION_FILE} is unreadable ({one_line(exc)})") from exc
