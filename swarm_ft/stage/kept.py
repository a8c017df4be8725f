"""What a stage keeps of a text that is continued: transformers' own cache of keys and values.

Blocks find their layer of a cache by the number that they have in the whole model; their base asks
layer 0 how long the text is, and the first layer of a kind for its mask. So a stage's cache has a
layer for every block of the model: those of other stages are one of its own of the same kind, or,
where there is none, only count tokens.

Whether a family's blocks keep what they need there is not written down anywhere: it is tried, on a
few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from swarm_ft.errors import BadModel, SwarmError
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.stage.skeleton import ModelConfig

TRIED = (3, 1, 2)
"""Tokens that are read one part after the other: of a prompt, a token, more of a text."""
TRIED_SINGLY = (3, 1, 1, 1)
"""The same by blocks that go on from what they keep with one token at a time."""


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
        little = torch.zeros(1, 1, num_tokens, 1)  # of nothing, a layer would count no tokens
        for layer in self._counting:
            layer.update(little, little)


def bytes_in(cache: StageCache) -> int:
    """What the cache's tensors take."""
    tensors = (tensor for layer in cache.layers for tensor in _tensors_in(vars(layer)))
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


@dataclass(frozen=True, slots=True)
class Keeping:
    """How a stage keeps texts.

    Attributes:
        singly: tokens are read one at a time, but for those that a text begins with.
        fixed_bytes: of a text, however long it is.
        token_bytes: of each token.
    """

    singly: bool
    fixed_bytes: int
    token_bytes: int

    def num_bytes(self, num_tokens: int) -> int:
        """Of a text of so many tokens; no fewer than it takes."""
        return self.fixed_bytes + self.token_bytes * num_tokens


Run = Callable[[Tensor, StageCache | None], Tensor]


def try_out(config: ModelConfig, layers: LayerRange, x: Tensor, run: Run, rtol: float) -> Keeping:
    """Whether a stage gives for a text in parts what it gives for all of it at once, and how.

    Args:
        config: the whole model's.
        layers: the stage's blocks.
        x: its input for `sum(TRIED)` tokens, [1, T] or [1, T, C].
        run: the stage, with a cache or without one.
        rtol: how far a token's output [C] may be off, relative to its norm.

    Raises:
        BadModel: it does not; says why.
    """
    try:
        whole = run(x, None)
        for parts in (TRIED, TRIED_SINGLY):
            inparts, sizes = _in_parts(layers, config, x, parts, run)
            off = float(((whole - inparts).norm(dim=-1) / whole.norm(dim=-1)).max())
            if off <= rtol and sizes[-1]:
                token_bytes = -(-(sizes[-1] - sizes[0]) // sum(parts[1:]))
                fixed_bytes = max(0, sizes[-1] - token_bytes * sum(parts))
                return Keeping(parts is TRIED_SINGLY, fixed_bytes, token_bytes)
    except SwarmError:
        raise
    except Exception as exc:  # of some family's own code, for any reason
        why = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        raise _refused(config, f"they do not run with it ({why})") from exc
    if not sizes[-1]:
        raise _refused(config, "they left nothing in it")
    raise _refused(
        config,
        f"layers {layers} give for a text in parts something else than for the whole "
        f"(off by {off:.2g} of it, expected {rtol:g} at most)",
    )


def _in_parts(
    layers: LayerRange, config: ModelConfig, x: Tensor, parts: Sequence[int], run: Run
) -> tuple[Tensor, list[int]]:
    """The output of all of a text, and what it takes after each part.

    Another text is read in between: blocks that keep something elsewhere take it from that one.
    """
    cache, another = StageCache(config, layers), StageCache(config, layers)
    outputs, sizes = [], []
    for index, part in enumerate(torch.split(x, list(parts), dim=1)):
        outputs.append(run(part, cache))
        sizes.append(bytes_in(cache))
        run(x.flip(1)[:, index : index + 1], another)
    return torch.cat(outputs, dim=1), sizes


def _refused(config: ModelConfig, why: str) -> BadModel:
    return BadModel(
        f"architecture '{config.model_type}' cannot generate by stages: expected its blocks to "
        f"keep what they need of a text in transformers' own cache; {why}"
    )
