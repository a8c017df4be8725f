"""A client of hivemind's servers: finds them in their DHT and sends microbatches through all.

For the first line of its input that is one microbatch, for every other a step. It prints the
seconds, and how many calls it had to repeat by then, as lines of JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import TypeVar

import torch
from hivemind import DHT
from hivemind.moe import RemoteExpert, get_experts

from benchmarks.slow_network.hivemind_experts import READY_TIMEOUT_S, HivemindJob, uid_of
from benchmarks.slow_network.hivemind_node import joined_dht, print_document

LOOK_S = 0.5
TRIES = 5
T = TypeVar("T")


def main() -> None:
    """Run the command."""
    job = HivemindJob.from_json(sys.argv[1])
    client = _Client(job, _find_all(joined_dht(job), job.work.stages))
    for line, _ in enumerate(sys.stdin):
        seconds = client.seconds_of(job.work.num_microbatches if line else 1)
        print_document(seconds=seconds, repeats=client.repeats)


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
        shape = (work.micro_batch_size, work.tokens, work.channels)
        self.repeats = 0
        self._experts = experts
        self._hidden, self._gradient = torch.randn(shape), torch.randn(shape)
        self._threads = ThreadPool(job.in_flight)

    def seconds_of(self, num_microbatches: int) -> float:
        """Measure the seconds of microbatches, forward and backward through all stages."""
        began_s = time.monotonic()
        for _ in self._threads.imap_unordered(self._microbatch, range(num_microbatches)):
            pass
        return time.monotonic() - began_s

    def _microbatch(self, _number: int) -> None:
        output, passes = self._hidden, []
        for expert in self._experts:
            hidden = output.detach().requires_grad_()
            output = self._whole(partial(expert, hidden))
            passes.append((hidden, output))
        gradient = self._gradient
        for hidden, output in reversed(passes):
            backward = partial(torch.autograd.grad, output, hidden, gradient, retain_graph=True)
            (gradient,) = self._whole(backward)

    def _whole(self, call: Callable[[], T]) -> T:
        """Return the result of a call; repeat it while its answer is cut off.

        libp2p's daemon may reset a stream before its last bytes are read; hivemind then finds no
        tensors in the answer, and fails in one of these ways.
        """
        for _ in range(TRIES):
            try:
                return call()
            except (StopIteration, RuntimeError) as exc:
                failure = exc
                self.repeats += 1
        raise OSError(f"no whole answer in {TRIES} tries") from failure


if __name__ == "__main__":
    main()
