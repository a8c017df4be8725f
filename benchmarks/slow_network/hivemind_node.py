"""The parts that hivemind's client and server share: the DHT, and lines of JSON."""

from __future__ import annotations

import builtins
import json
import sys
from typing import Any

import numpy as np
import torch
from hivemind import DHT
from hivemind.compression import quantization

from benchmarks.slow_network.hivemind_experts import HivemindJob


def joined_dht(job: HivemindJob) -> DHT:
    """Start a node on the job's host; it is the first one if the job names no others."""
    torch.set_num_threads(1)
    _let_int_take_arrays()
    listen = (f"/ip4/{job.address}/tcp/0",)
    return DHT(initial_peers=job.initial_peers, host_maddrs=listen, nat_port_map=False, start=True)


def print_document(**words: object) -> None:
    """Print a line."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def _let_int_take_arrays() -> None:
    # The 8-bit codecs of hivemind 1.1.12 read a count by `int` of an array of one number, which
    # numpy refuses since 2.4.
    quantization.int = _int


def _int(value: Any) -> int:  # noqa: ANN401
    return builtins.int(value.item() if isinstance(value, np.ndarray) else value)
