"""What a stage keeps of a text that is continued: transformers' own cache of keys and values.

Blocks find their layer of a cache by the number that they have in the whole model, their base asks
layer 0 for the length of the text, or the first layer of a kind for its mask. So a stage's cache has
a layer for every block of the model: those of other stages are one of its own of the same kind, or,
where there is none, count tokens and keep nothing of them.

Whether a family's blocks keep what they need there is not written down anywhere: it is tried, on a
few tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from swarm_ft.errors import BadModel
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.stage.skeleton import ModelConfig

TRIED = (3, 1, 2)
"""Tokens that are read one part after the other: of a prompt, a token, more of a text."""


class StageCache(DynamicCache):  # type: ignore[misc] # transformers has no types
    """A cache for some blocks of a model, of which nothing is read.

    Args:
        config: the whole model's.
        layers: the stage's blocks.
    """

    def __init__(self, config: ModelConfig, layers: LayerRange) -> None:
        super().__init__(config=config)
        self._counting: list[Any] = []
        own = self.layers[layers.start : layers.stop]
        for index, layer in enumerate(self.layers):
            if layers.start <= index < layers.stop:
                continue
            same = next((one for one in own if type(one) is type(layer)), None)
            if same is not None:
                self.layers[index] = same
            elif isinstance(layer, CacheLayerMixin):
                self._counting.append(layer)

    def passed(self, num_tokens: int) -> None:
        """The stage's blocks have read so many tokens more."""
        nothing = torch.empty(1, 1, num_tokens, 0)
        for layer in self._counting:
            layer.update(nothing, nothing)


def bytes_in(cache: StageCache) -> int:
    """What the cache's tensors take."""
    tensors = [t for layer in cache.layers for t in _tensors_in(vars(layer))]
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def _tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [t for one in values for t in _tensors_in(one)] if _holds(value) else []


def _holds(value: object) -> bool:
    return isinstance(value, dict | list | tuple)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What a text takes at a stage.

    Attributes:
        fixed: bytes, however long it is.
        per_token: bytes of each token.
    """

    fixed: int
    per_token: int

    def of(self, num_tokens: int) -> int:
        """Bytes of a text of so many tokens; no fewer than it takes."""
        return self.fixed + self.per_token * num_tokens


def try_out(
    config: ModelConfig,
    layers: LayerRange,
    x: Tensor,
    run: Callable[[Tensor, StageCache | None], Tensor],
    rtol: float,
) -> CacheSize:
    """Whether a stage gives for a text in parts what it gives for all of it at once.

    Args:
        config: the whole model's.
        layers: the stage's blocks.
        x: its input for `sum(TRIED)` tokens, [1, T] or [1, T, C].
        run: the stage, with a cache or without one.
        rtol: how far a token's output [C] may be off, relative to its norm.

    Returns:
        What a text takes, as these few tokens tell.

    Raises:
        BadModel: it does not; says why.
    """
    try:
        cache = StageCache(config, layers)
        parts, sizes = [], []
        for part in x.split(TRIED, dim=1):
            parts.append(run(part, cache))
            sizes.append(bytes_in(cache))
    except Exception as exc:  # noqa: BLE001 - of some family's own code, for any reason
        why = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        raise _refused(config, f"they do not run with it ({why})") from exc
    if not sizes[-1]:
        raise _refused(config, "they left nothing in it")
    whole, inparts = run(x, None), torch.cat(parts, dim=1)
    off = float(((whole - inparts).norm(dim=-1) / whole.norm(dim=-1).clamp_min(1e-30)).max())
    if not off <= rtol:  # so is NaN
        raise _refused(
            config,
            f"layers {layers} give for a text in parts something else than for the whole "
            f"(off by {off:.2g} of it, expected {rtol:g} at most)",
        )
    per_token = -(-(sizes[2] - sizes[1]) // TRIED[2])
    return CacheSize(max(0, sizes[2] - per_token * sum(TRIED)), per_token)


def _refused(config: ModelConfig, why: str) -> BadModel:
    return BadModel(
        f"architecture '{config.model_type}' cannot generate by stages: expected its blocks to keep "
        f"what they need of a text in transformers' own cache; {why}"
    )
