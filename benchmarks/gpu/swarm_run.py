"""A swarm of processes on one machine whose links have a rate, and what its steps took.

Peers are processes of their own (`member`), each behind a link (`paced_link`); the coordinator and
the client share this one. A run goes on while links change their rate: of the steps at a rate the
first is not counted, for it may have begun before.
"""

from __future__ import annotations

import asyncio
import queue
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from benchmarks.gpu.member import StaticDirectory
from benchmarks.gpu.processes import Processes, free_ports
from swarm_ft.base.clock import SystemClock
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.spec.layers import LayerRange, split_evenly
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport

MEMBER, LINK = "benchmarks.gpu.member", "benchmarks.gpu.paced_link"
UP_TIMEOUT_S = 180.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The measured steps at one rate.

    Attributes:
        mbps: of each direction between two neighbours; 0: not paced.
        step_s: in the median.
        steps: that count.
        forward_bytes: of all boundaries in a step.
    """

    mbps: float
    step_s: float
    steps: int
    loss: float
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True, slots=True)
class Mark:
    """The progress of a run: one phase and its seconds.

    Attributes:
        mbps: as in `Cell`.
    """

    mbps: float
    what: str
    seconds: float
    loss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Swarm:
    """One that is up."""

    processes: Processes
    client: SwarmClient
    links: Sequence[str]

    def set_mbps(self, mbps: float) -> None:
        """Set the rate of all links from now on."""
        for link in self.links:
            self.processes.send(link, {"mbps": mbps})


@asynccontextmanager
async def swarm_up(
    num_blocks: int, num_stages: int, device: str, dtype: str
) -> AsyncIterator[Swarm]:
    """Start a coordinator and peers that divide the blocks among them."""
    with tempfile.TemporaryDirectory(prefix="gpu-swarm-") as folder, Processes() as processes:
        transport = GrpcTransport(GrpcOptions())
        with closing(Journal(str(Path(folder) / "coordinator.db"))) as journal:
            service = CoordinatorService(journal, SystemClock(), moves_layers=False)
            server = await transport.serve("127.0.0.1", 0, service.handlers())
            running = asyncio.create_task(service.run())
            try:
                layers = split_evenly(LayerRange(0, num_blocks), num_stages)
                links = await asyncio.to_thread(
                    _start_peers, processes, layers, server.endpoint, device, dtype
                )
                client = SwarmClient(StaticDirectory(server.endpoint), transport)
                yield Swarm(processes=processes, client=client, links=links)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                await server.stop()


def _start_peers(
    processes: Processes, layers: Sequence[LayerRange], coordinator: str, device: str, dtype: str
) -> list[str]:
    links = []
    for stage, (part, port) in enumerate(zip(layers, free_ports(len(layers)), strict=True)):
        link, name = f"link-{stage}", f"peer-{stage}"
        links.append(link)
        processes.start(link, LINK, [f"127.0.0.1:{port}"])
        announced = processes.receive(link, UP_TIMEOUT_S)["port"]
        job = {
            "--coordinator": coordinator,
            "--port": str(port),
            "--announce": f"127.0.0.1:{announced}",
            "--layers": str(part),
            "--peers": str(len(layers)),
            "--peer-id": name,
            "--device": device,
            "--dtype": dtype,
        }
        processes.start(name, MEMBER, [word for pair in job.items() for word in pair])
    for stage in range(len(layers)):
        processes.receive(f"peer-{stage}", UP_TIMEOUT_S)
    return links


async def cells(
    swarm: Swarm,
    spec: RunSpec,
    rates_mbps: Sequence[float],
    steps: int,
    *,
    end_s: float,
    last_s: float,
) -> AsyncIterator[Cell | Mark]:
    """Train a job and change the links meanwhile.

    Args:
        spec: each of its steps visits all samples.
        rates_mbps: one after the other.
        steps: that count at each rate.
        end_s: monotonic seconds; a rate that would not be done by then is not begun.
        last_s: so too; whatever there is ends then. The first rate may take so long.

    Raises:
        RuntimeError: the run, or a process, came to an end.
    """
    tokens = random_tokens(spec)
    swarm.set_mbps(0.0)
    began_s = time.monotonic()
    run = await swarm.client.submit(spec, [row.tobytes() for row in tokens])
    rates, seen, slowest_s = list(rates_mbps), list[StepCommitted](), 0.0
    async with aclosing(swarm.client.watch(run.run_id, lambda _trouble: None)) as events:
        mbps: float | None = None
        async for event in _until(swarm.processes, events, last_s):
            yield _mark(event, mbps, len(seen), time.monotonic() - began_s)
            if not isinstance(event, StepCommitted):
                if getattr(event, "phase", None) is RunPhase.FAILED:
                    raise RuntimeError(str(getattr(event, "detail", "the run failed")))
                continue
            if mbps is None:  # every sample's first visit, and what is compiled
                mbps = _next(swarm, rates)
                continue
            seen.append(event)
            slowest_s = max(slowest_s, event.seconds)
            if len(seen) > steps:
                yield _cell(mbps, seen[1:])
                seen.clear()
                is_late = time.monotonic() + (steps + 1) * slowest_s > end_s
                if not rates or is_late:
                    break
                mbps = _next(swarm, rates)
    swarm.set_mbps(0.0)
    await swarm.client.cancel(run.run_id)


def _mark(event: RunEvent, mbps: float | None, seen: int, since_s: float) -> Mark:
    if isinstance(event, StepCommitted):
        kind = "first visits" if mbps is None else "counts" if seen else "links may have changed"
        return Mark(mbps or 0.0, f"step {event.step}: {kind}", event.seconds, event.loss)
    phase = getattr(event, "phase", None)
    what = phase.name.lower() if isinstance(phase, RunPhase) else type(event).__name__
    why = f" ({event.detail})" if isinstance(event, RunStatus) and event.detail else ""
    return Mark(0.0, f"{what}{why}, after it was submitted", since_s)


def _next(swarm: Swarm, rates: list[float]) -> float:
    mbps = rates.pop(0)
    swarm.set_mbps(mbps)
    return mbps


async def _until(
    processes: Processes, events: AsyncIterator[RunEvent], end_s: float
) -> AsyncIterator[RunEvent]:
    """Yield events until they end or `end_s` is reached; check that all processes live."""
    while (left_s := end_s - time.monotonic()) > 0:
        coming = asyncio.ensure_future(anext(events))
        while not (await asyncio.wait([coming], timeout=min(1.0, left_s)))[0]:
            processes.check_all_run()
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
                return
        try:
            yield coming.result()
        except StopAsyncIteration:
            return


def _cell(mbps: float, counted: Sequence[StepCommitted]) -> Cell:
    last = counted[-1]
    return Cell(
        mbps=mbps,
        step_s=median(step.seconds for step in counted),
        steps=len(counted),
        loss=last.loss,
        forward_bytes=last.sent.forward_bytes,
        backward_bytes=last.sent.backward_bytes,
    )


def random_tokens(spec: RunSpec) -> Any:  # noqa: ANN401 - numpy's own type is no help here
    """Little-endian uint32 [samples, tokens]."""
    shape = (spec.train.num_samples, spec.train.seq_length)
    drawn = np.random.default_rng(0).integers(0, spec.model.vocab_size, shape)
    return drawn.astype("<u4")


def streamed(work: Coroutine[Any, Any, None], found: queue.SimpleQueue[T | None]) -> Iterator[T]:
    """Yield the items that a coroutine queues while it runs in a thread of its own.

    Raises:
        Exception: what the coroutine ended with.
    """
    failures: list[Exception] = []

    def run() -> None:
        try:
            asyncio.run(work)
        except Exception as error:  # noqa: BLE001 - it is raised again where it is waited for
            failures.append(error)
        finally:
            found.put(None)

    threading.Thread(target=run, daemon=True).start()
    while (item := found.get()) is not None:
        yield item
    if failures:
        raise failures[0]
