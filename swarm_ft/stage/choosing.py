"""Which token follows: of a text's last logits, as `generate` of transformers chooses it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm_ft.protocol.spec.digest import seed_of
from swarm_ft.protocol.spec.sampling import Sampling


def choose(logits_v: Tensor, sampling: Sampling | None, place: int) -> int:
    """The token that is to stand at a place of a text.

    Args:
        logits_v: float32 [V], on any device.
        sampling: how it is drawn; None chooses the likeliest.
        place: of the token, counted from 0. With the seed it says what is drawn.
    """
    if sampling is None:
        return int(logits_v.argmax())
    scores = _warpers(sampling)(torch.empty(1, 0), logits_v.float().cpu()[None])
    generator = torch.Generator().manual_seed(seed_of(f"{sampling.seed}/{place}"))
    return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=generator))


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """In the order in which transformers has them."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
