"""Training settings that all systems share where the compute is real."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.slow_network.work import Work

WEIGHT_DECAY = 0.01
LEARNING_RATE = 1e-4
CLIP_GRAD_NORM = 1.0


def random_tokens(work: Work, vocab_size: int) -> Tensor:
    """Draw the int64 tokens [B, T] that every step trains on."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (work.batch_size, work.tokens), generator=generator)
