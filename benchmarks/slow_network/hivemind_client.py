"""A client of hivemind's servers: finds them in their DHT and sends microbatches through all.

For the first line of its input that is one microbatch, for every other a step. It prints the
seconds as lines of JSON.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from hivemind import DHT
from hivemind.moe import RemoteExpert, get_experts

from benchmarks.slow_network.hivemind_experts import READY_TIMEOUT_S, HivemindJob, uid_of
from benchmarks.slow_network.hivemind_node import joined_dht, say

LOOK_S = 0.5


def main() -> None:
    """Do what the argument says."""
    job = HivemindJob.from_json(sys.argv[1])
    client = _Client(job, _find_all(joined_dht(job), job.work.stages))
    for line, _ in enumerate(sys.stdin):
        say(seconds=client.seconds_of(job.work.num_microbatches if line else 1))


def _find_all(dht: DHT, count: int) -> list[RemoteExpert]:
    uids = [uid_of(rank) for rank in range(count)]
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        experts = get_experts(dht, uids)
        if all(expert is not None for expert in experts):
            return experts
        time.sleep(LOOK_S)
    raise TimeoutError(f"not all of {uids} were there in {READY_TIMEOUT_S} s")


class _Client:
    def __init__(self, job: HivemindJob, experts: list[RemoteExpert]) -> None:
        work = job.work
        self._experts = experts
        shape = (work.micro_batch_size, work.tokens, work.channels)
        self._hidden, self._gradient = torch.randn(shape), torch.randn(shape)
        self._threads = ThreadPoolExecutor(job.in_flight)

    def seconds_of(self, num_microbatches: int) -> float:
        """What these take, forward and backward through all stages."""
        began_s = time.monotonic()
        for done in [self._threads.submit(self._microbatch) for _ in range(num_microbatches)]:
            done.result()
        return time.monotonic() - began_s

    def _microbatch(self) -> None:
        hidden = self._hidden
        for expert in self._experts:
            hidden = expert(hidden)
        hidden.backward(self._gradient)


if __name__ == "__main__":
    main()
