"""The cache of keys and values that a stage keeps for a text, in transformers' own format.

Blocks find their layer of a cache by their number in the whole model. Their base takes the text's
length from layer 0, and its masks from the first layer of each kind. A stage's cache therefore has
a layer for every block of the model: blocks of other stages share a layer of the same kind, or, if
the stage has none, have a layer that counts tokens only.

No configuration shows whether a family's blocks keep all state in this cache, so that a stage tries
it on a few tokens.
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

TRIAL_PARTS = (3, 1, 2)
"""Tokens of the parts in the trial: a prompt, one token, more of a text."""
SINGLE_TOKEN_TRIAL_PARTS = (3, 1, 1, 1)
"""Tokens of the parts in the second trial, for blocks that continue with one token at a time."""


class StageCache(DynamicCache):  # type: ignore[misc] # transformers has no types
    """An empty cache for some blocks of a model.

    Args:
        config: Config of the whole model.
        layers: Blocks of the stage.
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

    def count_tokens(self, num_tokens: int) -> None:
        """Count tokens that the stage's blocks have read."""
        little = torch.zeros(1, 1, num_tokens, 1)  # with no channels a layer would count no tokens
        for layer in self._counting:
            layer.update(little, little)


def bytes_in(cache: StageCache) -> int:
    """Return the bytes of the cache's tensors."""
    tensors = (tensor for layer in cache.layers for tensor in _tensors_in(vars(layer)))
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Cache behaviour of a stage.

    Attributes:
        one_token_at_a_time: Whether tokens after a prompt have to be read one at a time.
        fixed_bytes: Bytes of a text, independent of its length.
        token_bytes: Bytes of each token.
    """

    one_token_at_a_time: bool
    fixed_bytes: int
    token_bytes: int

    def num_bytes(self, num_tokens: int) -> int:
        """Return an upper bound for the bytes of a text."""
        return self.fixed_bytes + self.token_bytes * num_tokens


Run = Callable[[Tensor, StageCache | None], Tensor]


def probe_cache(
    config: ModelConfig, layers: LayerRange, x: Tensor, run: Run, rtol: float
) -> CacheLayout:
    """Try whether a stage gives equal results for a text in parts and at once; return how it can.

    Args:
        config: Config of the whole model.
        layers: Blocks of the stage.
        x: Input for `sum(TRIED)` tokens, [1, T] or [1, T, C].
        run: Computes the stage, with or without a cache.
        rtol: Largest difference of a token's output [C], relative to its norm.

    Raises:
        BadModel: The results differ; the message has the reason.
    """
    try:
        whole = run(x, None)
        for parts in (TRIAL_PARTS, SINGLE_TOKEN_TRIAL_PARTS):
            inparts, sizes = _in_parts(layers, config, x, parts, run)
            off = float(((whole - inparts).norm(dim=-1) / whole.norm(dim=-1)).max())
            if off <= rtol and sizes[-1]:
                token_bytes = -(-(sizes[-1] - sizes[0]) // sum(parts[1:]))
                fixed_bytes = max(0, sizes[-1] - token_bytes * sum(parts))
                return CacheLayout(parts is SINGLE_TOKEN_TRIAL_PARTS, fixed_bytes, token_bytes)
    except SwarmError:
        raise
    except Exception as exc:  # a family's own code may raise anything
        why = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        raise _refused(config, f"they do not run with it ({why})") from exc
    if not sizes[-1]:
        raise _refused(config, "they stored nothing in it")
    raise _refused(
        config,
        f"layers {layers} compute other values for a text in parts than for the whole text "
        f"(relative difference {off:.2g}, expected {rtol:g} at most)",
    )


def _in_parts(
    layers: LayerRange, config: ModelConfig, x: Tensor, parts: Sequence[int], run: Run
) -> tuple[Tensor, list[int]]:
    """Return the output of a text in parts, and the cache's bytes after each part.

    Another text is read in between: blocks with state elsewhere would mix the two.
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
        f"architecture '{config.model_type}' cannot generate in stages: expected its blocks to "
        f"keep what they need of a text in transformers' own cache; {why}"
    )
