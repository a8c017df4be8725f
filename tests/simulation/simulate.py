"""One simulation from its beginning to its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from swarm_ft.base.log import ROOT
from tests.simulation.call import Observed
from tests.simulation.customer import Customer
from tests.simulation.injection import Injector
from tests.simulation.invariants import Invariants
from tests.simulation.links import Wires
from tests.simulation.loop import Deadlock, NumberedTask, VirtualLoop, running_process
from tests.simulation.machines import Machine, PeerRole, World, coordinate
from tests.simulation.network import Network
from tests.simulation.scenario import CLIENT, COORDINATOR, LAST_FAULT_S, Scenario
from tests.simulation.tampering import Tamperer
from tests.simulation.trace import Trace

PATIENCE_S = 300.0
"""Virtual time in which the run must finish once nothing goes wrong any more."""
MAX_EVENTS = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a simulation.

    Attributes:
        failures: invariants that did not hold; empty if all did.
        virtual_s: how long it took in its own time.
        faults: how often each kind happened, frames that were tampered with included.
        trace_digest: equal for equal histories.
        lines: the trace, if it was kept.
    """

    failures: tuple[str, ...]
    virtual_s: float
    num_events: int
    num_commits: int
    num_rollbacks: int
    faults: Counter[str]
    trace_digest: str
    lines: tuple[str, ...]


def simulate(scenario: Scenario, *, keep_trace: bool = False) -> Outcome:
    """Run a scenario until all clients have their results, an invariant breaks or patience ends."""
    folder = Path(tempfile.mkdtemp(prefix="swarm-ft-sim-", dir=_memory_disk()))
    gc.disable()  # collections would run finalizers at moments that depend on other processes' work
    try:
        with _seeded_names(scenario.seed):
            return _Simulation(scenario, folder, keep_trace=keep_trace).run()
    finally:
        with _silent_graveyard(), _loop_of_the_dead():
            gc.collect()
        gc.enable()
        shutil.rmtree(folder, ignore_errors=True)


class _Simulation:
    def __init__(self, scenario: Scenario, folder: Path, *, keep_trace: bool) -> None:
        seed = scenario.seed
        self._scenario = scenario
        self._folder = folder
        self._loop = VirtualLoop(Random(f"{seed}/compute"), mean_compute_s=scenario.mean_compute_s)
        self._trace = Trace(self._loop.time, folder=str(folder), keep=keep_trace)
        self._tamperer = Tamperer(Random(f"{seed}/tampering"))
        self._invariants = Invariants(scenario.specs, self._trace)
        observed = Observed(
            tamperer=self._tamperer,
            trace=self._trace,
            window_messages=scenario.window_messages,
            on_frame=self._invariants.moved,
        )
        network = Network(Wires(self._loop, Random(f"{seed}/links")), observed)
        self._world = World(
            loop=self._loop,
            network=network,
            trace=self._trace,
            invariants=self._invariants,
            rng=Random(f"{seed}/directory"),
            snapshots_url="" if scenario.peers_keep else str(folder / "snapshots"),
            handover_s=scenario.handover_s,
            max_beside=scenario.max_beside,
            codecs={
                spec.digest(): wish
                for spec, wish in zip(scenario.specs, scenario.codecs, strict=False)
            },
            computes_by_block=scenario.computes_by_block,
        )
        self._machines: dict[str, Machine] = {}
        self._roles: dict[str, PeerRole] = {}
        others = {
            f"{CLIENT}-{number}": Customer(spec, after_s)
            for number, (after_s, spec) in enumerate(scenario.others, start=1)
        }
        self._customers = {CLIENT: Customer(scenario.spec), **others}
        self._happened: Counter[str] = Counter()

    def run(self) -> Outcome:
        self._loop.set_exception_handler(self._on_loop_error)
        with _logs_to(self._trace, self._invariants):
            try:
                self._loop.run_until_complete(self._main())
            except Deadlock as error:
                self._invariants.fail(str(error))
        outcome = self._outcome()
        for machine in self._machines.values():
            machine.kill(silently=True)
        self._loop.set_exception_handler(lambda _loop, _context: None)
        self._loop.close()
        return outcome

    async def _main(self) -> None:
        self._add(COORDINATOR, coordinate)
        for index, layers in enumerate(self._scenario.layers):
            self._add_peer(f"peer-{index}", layers)
        for name, customer in self._customers.items():
            self._add(name, customer)
        injector = Injector(
            self._world,
            self._machines,
            self._roles,
            lambda layers: self._add_peer(f"peer-{len(self._roles)}", layers),
        )
        injector.expect(self._scenario.faults)
        await self._until_over(injector)

    async def _until_over(self, injector: Injector) -> None:
        quiet_since_s = 0.0
        while not self._invariants.failures and not self._have_all_results():
            if injector.num_active or self._loop.time() < LAST_FAULT_S:
                quiet_since_s = self._loop.time()
            if self._loop.time() > quiet_since_s + PATIENCE_S:
                self._invariants.fail(
                    f"the run is not finished {PATIENCE_S:g} s after the last fault"
                )
            elif self._loop.num_events > MAX_EVENTS:
                self._invariants.fail(f"the run is not finished after {MAX_EVENTS} events")
            else:
                await asyncio.sleep(0.5)
        self._happened = injector.happened

    def _have_all_results(self) -> bool:
        return all(customer.has_result for customer in self._customers.values())

    def _add(self, name: str, main: Callable[[Machine], Coroutine[Any, Any, None]]) -> None:
        machine = self._machines[name] = Machine(self._world, name, main, self._folder / name)
        machine.start()

    def _add_peer(self, name: str, layers: str) -> None:
        role = self._roles[name] = PeerRole(layers)
        self._add(name, role)

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        task = context.get("task")
        if isinstance(task, NumberedTask) and task.owner and not task.owner.alive:
            return  # killed with its process, and now collected
        self._invariants.bug(f"loop: {context['message']}", context.get("exception"))

    def _outcome(self) -> Outcome:
        return Outcome(
            failures=tuple(self._invariants.failures),
            virtual_s=self._loop.time(),
            num_events=self._loop.num_events,
            num_commits=self._invariants.num_commits,
            num_rollbacks=self._invariants.num_rollbacks,
            faults=self._happened
            + Counter({f"messages: {k}": n for k, n in self._tamperer.counts.items()}),
            trace_digest=self._trace.digest,
            lines=tuple(self._trace.lines),
        )


# ---- the interpreter around a simulation


def _memory_disk() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@contextmanager
def _seeded_names(seed: int) -> Iterator[None]:
    """Random names are drawn from the seed too."""
    rng = Random(f"{seed}/names")
    with mock.patch("secrets.token_hex", lambda num_bytes=16: rng.randbytes(num_bytes).hex()):
        yield


@contextmanager
def _loop_of_the_dead() -> Iterator[None]:
    """Provide a loop for finalizers of dead machines; otherwise asyncio would make one."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        yield
    finally:
        asyncio.set_event_loop(None)
        loop.close()


@contextmanager
def _silent_graveyard() -> Iterator[None]:
    """Killed processes' coroutines are closed when they are collected; nobody needs a report."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _unraisable: None
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
        logging.disable(before)


class _LogHandler(logging.Handler):
    """Log lines become part of the trace; one with an exception is a bug's."""

    def __init__(self, trace: Trace, invariants: Invariants) -> None:
        super().__init__()
        self._trace = trace
        self._invariants = invariants

    def emit(self, record: logging.LogRecord) -> None:
        process = running_process()
        name = process.name if process is not None else "-"
        if record.exc_info:
            self._invariants.bug(f"{name}: {record.getMessage()}", record.exc_info[1])
        else:
            self._trace.say(f"{name}: {record.getMessage()}")


@contextmanager
def _logs_to(trace: Trace, invariants: Invariants) -> Iterator[None]:
    logger = logging.getLogger(ROOT)
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:] = [_LogHandler(trace, invariants)]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate
