"""How fast a device trains a block, for forecasts alone."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import nn

from swarm_ft.protocol.spec.flops import block_flops

WIDTH, HEADS = 768, 12
"""Of the block that is timed: GPT-2's."""
BATCH, TOKENS = 2, 128
LEAST_S = 0.3
MOST_PASSES = 200


def training_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second, of forward and backward passes of a block of GPT-2.

    Args:
        device: that computes.
        dtype: in which.
    """
    block = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, device=device
    )
    hidden = torch.zeros(BATCH, TOKENS, WIDTH, device=device, requires_grad=True)
    _pass(block, hidden, dtype)  # what is done once
    began_s, passes = time.perf_counter(), 0
    while time.perf_counter() - began_s < LEAST_S and passes < MOST_PASSES:
        _pass(block, hidden, dtype)
        passes += 1
    seconds = time.perf_counter() - began_s
    weights = sum(parameter.numel() for parameter in block.parameters())
    return passes * block_flops(weights, WIDTH, BATCH * TOKENS, TOKENS) / seconds


def _pass(block: nn.Module, hidden: torch.Tensor, dtype: torch.dtype) -> None:
    lower = dtype is not torch.float32
    with torch.autocast(hidden.device.type, dtype) if lower else nullcontext():
        loss = block(hidden).float().sum()
    loss.backward()
    block.zero_grad()
    loss.item()  # waits for the device
