"""Rotary embeddings whose frequencies depend on the longest sample: longrope and dynamic NTK.

transformers chooses the frequencies of a whole batch by its longest position, and those of dynamic
NTK by the longest position so far. Since a sample's result must depend on the sample alone, samples
of different kinds are computed apart, each as transformers computes it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_LONGROPE, _DYNAMIC = "longrope", "dynamic"


@dataclass(frozen=True, slots=True)
class _Rotary:
    """A set of frequencies of a rotary embedding.

    Attributes:
        module: Module of the set.
        prefix: Prefix of its buffers' names; families with several sets have one for each layer
            type.
        rope_type: Type of the embedding, one that depends on lengths.
        threshold: Length of the longest sample of the first kind.
    """

    module: Any
    prefix: str
    rope_type: str
    threshold: int

    def kind_of(self, length: int) -> int:
        """Return a value that is equal for samples with the same frequencies."""
        if self.rope_type == _LONGROPE:
            return int(length > self.threshold)
        return max(length, self.threshold)

    def forget(self) -> None:
        """Reset dynamic frequencies to those of short samples."""
        if self.rope_type == _DYNAMIC:
            original = getattr(self.module, f"{self.prefix}original_inv_freq")
            setattr(self.module, f"{self.prefix}inv_freq", original.clone())
            setattr(self.module, f"{self.prefix}max_seq_len_cached", self.threshold)


class LengthDependence:
    """The samples of a model that may be computed together, by their lengths.

    Args:
        model: Model, whole or a stage's part.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rotaries = tuple(_rotaries_in(model))

    def __bool__(self) -> bool:
        return bool(self._rotaries)

    def kind_of(self, length: int) -> tuple[int, ...]:
        """Return a value that is equal for lengths that may be together, and rises with them."""
        return tuple(rotary.kind_of(length) for rotary in self._rotaries)

    def parts(self, lengths: Iterable[int]) -> bool:
        """Whether samples of these lengths have to be computed apart."""
        return bool(self) and len({self.kind_of(length) for length in lengths}) > 1

    def forget(self) -> None:
        """Reset all state of earlier samples."""
        for rotary in self._rotaries:
            rotary.forget()


KindOf = Callable[[int], object]
"""Function like `LengthDependence.kind_of`."""


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
