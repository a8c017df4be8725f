"""Speed of a device at training a block, and names that peers on one device share."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from swarm_ft.protocol.spec.flops import block_flops

WIDTH, HEADS = 768, 12
"""Sizes of the timed block: those of GPT-2."""
BATCH, TOKENS = 2, 128
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Random id of Linux's start, equal in all its containers and network namespaces."""
DIGEST_CHARS, KEY_CHARS = 12, 32
LEAST_S = 0.3
MOST_PASSES = 200


def training_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the measured floating-point operations a second for training a block of GPT-2.

    Args:
        device: Device of the computation.
        dtype: Dtype of the computation.
    """
    block = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, device=device
    )
    hidden = torch.zeros(BATCH, TOKENS, WIDTH, device=device, requires_grad=True)
    _pass(block, hidden, dtype)  # warm-up
    began_s, used_s, passes = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began_s < LEAST_S and passes < MOST_PASSES:
        _pass(block, hidden, dtype)
        passes += 1
    seconds = time.perf_counter() - began_s
    if device.type == "cpu":  # the load of other programs is measured separately
        had_s = (time.process_time() - used_s) / torch.get_num_threads()
        seconds = min(seconds, had_s) or seconds
    weights = sum(parameter.numel() for parameter in block.parameters())
    return passes * block_flops(weights, WIDTH, BATCH * TOKENS, TOKENS) / seconds


def peers_at_once(device: torch.device) -> float:
    """Return the number of peers like this one for which the device computes at full speed.

    Args:
        device: Device of the computation; peers take turns on a GPU.
    """
    if device.type != "cpu":
        return 1.0
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return cores / torch.get_num_threads()


def host_digest(device: torch.device) -> str:
    """Return a public name that only peers on the same device of one machine share."""
    return hashlib.sha256(_identity(device)).hexdigest()[:DIGEST_CHARS]


def machine_key(device: torch.device) -> str:
    """Return a secret that only peers on the same device of one machine share.

    It does not follow from `host_digest`, which all members of a swarm may read.
    """
    return hashlib.sha256(b"machine key " + _identity(device)).hexdigest()[:KEY_CHARS]


def _identity(device: torch.device) -> bytes:
    """Return Linux's boot id, or else the network card's address, with the device.

    A GPU has its UUID, where torch knows it: its number depends on the GPUs that a process may see.
    """
    try:
        name = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        name = f"{uuid.getnode():x}"
    place = str(device)
    if device.type == "cpu":
        place = "cpu"
    elif device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        place = f"cuda {getattr(properties, 'uuid', device)}"
    return f"{name} {place}".encode()


def _pass(block: nn.Module, hidden: torch.Tensor, dtype: torch.dtype) -> None:
    lower = dtype is not torch.float32
    with torch.autocast(hidden.device.type, dtype) if lower else nullcontext():
        loss = block(hidden).float().sum()
    loss.backward()
    block.zero_grad()
    loss.item()  # waits for the device
