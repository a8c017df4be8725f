"""Rotary embeddings whose frequencies depend on the longest sample beside: longrope, dynamic NTK.

transformers takes the frequencies of a whole batch from its longest position, and those of dynamic
NTK from the longest that it saw before. A sample's result is to depend on the sample alone, so
samples of different kinds are computed apart, each as transformers computes it singly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_LONGROPE, _DYNAMIC = "longrope", "dynamic"


@dataclass(frozen=True, slots=True)
class _Rotary:
    """One set of frequencies of a rotary embedding.

    Attributes:
        module: whose set it is.
        prefix: of its buffers' names; families with several sets have one for each type of layer.
        rope_type: that depends on lengths.
        threshold: the longest sample of the first kind.
    """

    module: Any
    prefix: str
    rope_type: str
    threshold: int

    def kind_of(self, length: int) -> int:
        """Equal for samples that have the same frequencies."""
        if self.rope_type == _LONGROPE:
            return int(length > self.threshold)
        return max(length, self.threshold)

    def forget(self) -> None:
        """Put dynamic frequencies back to those of short samples."""
        if self.rope_type == _DYNAMIC:
            original = getattr(self.module, f"{self.prefix}original_inv_freq")
            setattr(self.module, f"{self.prefix}inv_freq", original.clone())
            setattr(self.module, f"{self.prefix}max_seq_len_cached", self.threshold)


class LengthDependence:
    """What samples of a model may be computed together, by their lengths.

    Args:
        model: whole, or a stage's part.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rotaries = tuple(_rotaries_in(model))

    def __bool__(self) -> bool:
        return bool(self._rotaries)

    def kind_of(self, length: int) -> tuple[int, ...]:
        """Equal for lengths of which the model computes samples alike; rising with the length."""
        return tuple(rotary.kind_of(length) for rotary in self._rotaries)

    def parts(self, lengths: Iterable[int]) -> bool:
        """Whether samples of these lengths may not all be computed together."""
        return bool(self) and len({self.kind_of(length) for length in lengths}) > 1

    def forget(self) -> None:
        """Forget the samples that were computed before."""
        for rotary in self._rotaries:
            rotary.forget()


KindOf = Callable[[int], object]
"""See `LengthDependence.kind_of`."""


def _rotaries_in(model: nn.Module) -> Iterator[_Rotary]:
    for module in model.modules():
        found: Any = getattr(module, "rope_type", None)
        of_layers = found if isinstance(found, dict) else {"": found}
        for layer_type, rope_type in of_layers.items():
            if rope_type in (_LONGROPE, _DYNAMIC):
                prefix = f"{layer_type}_" if layer_type else ""
                yield _Rotary(module, prefix, rope_type, _threshold(module, layer_type, rope_type))


def _threshold(module: Any, layer_type: str, rope_type: str) -> int:  # noqa: ANN401
    if rope_type == _DYNAMIC:
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    own = parameters[layer_type] if layer_type else parameters
    return int(own["original_max_position_embeddings"])
