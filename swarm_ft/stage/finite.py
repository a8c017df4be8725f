"""Search for the first value of a stage that is not finite, for the run's owner.

The search runs only after a loss, an output or a gradient was found to have inf or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from swarm_ft.base.log import get_logger
from swarm_ft.errors import SwarmError
from swarm_ft.stage.architecture import Architecture

_log = get_logger(__name__)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite."""
    return bool(torch.isfinite(tensor).all())


def origin_in(module: nn.Module, architecture: Architecture, forward: Callable[[], object]) -> str:
    """Return the first tensor of a forward pass that is not finite: a weight, or a layer's output.

    Args:
        module: Module of the stage.
        architecture: Architecture of its model, which maps names to layers.
        forward: Computes the pass once more, without a graph.

    Returns:
        ", first in " with the tensor's name and its layer; empty if the second pass is finite.
    """
    weights = (name for name, one in module.named_parameters() if not is_finite(one))
    found = next(weights, "")
    if not found:
        found = _first_output(module, forward)
    return f", first in {_named(found, architecture)}" if found else ""


def origin_among(gradients: Mapping[str, Tensor | None], architecture: Architecture) -> str:
    """Return the first gradient that is not finite; a backward pass begins at the last weight."""
    last_first = reversed(list(gradients.items()))
    found = (name for name, one in last_first if one is not None and not is_finite(one))
    name = next(found, "")
    return f", first in that of {_named(name, architecture)}" if name else ""


def _named(name: str, architecture: Architecture) -> str:
    return f"{name} ({architecture.part_of(name).replace('block', 'layer')})"


def _first_output(module: nn.Module, forward: Callable[[], object]) -> str:
    found: list[str] = []
    handles = [
        one.register_forward_hook(_noting(name, found))
        for name, one in module.named_modules()
        if name and not any(True for _ in one.children())
    ]
    try:
        forward()
    except (RuntimeError, ValueError, TypeError, SwarmError):
        _log.warning("the search for the first value that is not finite failed", exc_info=True)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else ""


def _noting(name: str, found: list[str]) -> Callable[[nn.Module, object, object], None]:
    def hook(_module: nn.Module, _inputs: object, output: object) -> None:
        if not found and not all(map(is_finite, _tensors(output))):
            found.append(name)

    return hook


def _tensors(output: object) -> Iterable[Tensor]:
    parts = output if isinstance(output, tuple | list) else (output,)
    return (part for part in parts if isinstance(part, Tensor) and part.is_floating_point())
