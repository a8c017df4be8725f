"""The choice of the next token from a text's last logits, as in `generate` of transformers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm_ft.digest import seed_of
from swarm_ft.protocol.spec.sampling import Sampling


def choose(logits_v: Tensor, sampling: Sampling | None, place: int) -> int:
    """Return the token for a position of a text.

    Args:
        logits_v: Logits, float32 [V], on any device.
        sampling: Settings of the random choice; None: the most likely token.
        place: Position of the token, from 0; with the seed it determines the draw.
    """
    if sampling is None:
        return int(logits_v.argmax())
    scores = _warpers(sampling)(torch.empty(1, 0), logits_v.float().cpu()[None])
    generator = torch.Generator().manual_seed(seed_of(f"{sampling.seed}/{place}"))
    return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=generator))


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """Return the processors in the order of transformers."""
    warpers = LogitsProcessorList()
    if sampling.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers
