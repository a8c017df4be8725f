"""One cell: a run during which one process meets one fault, watched from submission to result."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from swarm_ft.client.job import Job
from swarm_ft.errors import RunFailed, SwarmError
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.spec.member_name import default_name
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.fault_matrix.cells import PHASES, Cell, Fault, Role
from tests.fault_matrix.processes import Command
from tests.fault_matrix.swarm import STAGES, TWO_OF_EACH, Swarm
from tests.fault_matrix.timeline import Timeline
from tests.fault_matrix.verdict import Observed, problems_of, relative_difference

TRIAL_TIMEOUT_S = 150.0
FROZEN_S = 20.0
ZOMBIE_AFTER_STEPS = 2
"""A frozen peer that a replica stands in for wakes up while the others train on."""
STEPS, STEPS_WITH_NEWCOMER = 12, 96
_LAYERS = {Role.FIRST: STAGES[0], Role.LAST: STAGES[2]}
_ONE_IN_THE_MIDDLE = {**TWO_OF_EACH, STAGES[1]: 1}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        detection_s: from the fault until somebody knew of it; None where nobody has to.
        recovery_s: from the fault until the next step counted.
        difference: of the losses from the quiet run's, relative, the largest.
        problem: what is not as it should be; empty if all is.
    """

    cell: Cell
    detection_s: float | None = None
    recovery_s: float | None = None
    difference: float = math.nan
    problem: str = ""


@dataclass(slots=True)
class Trial:
    """See the module's docstring.

    Attributes:
        quiet: losses of a run without faults, at least as long as this one.
    """

    swarm: Swarm
    job: Job
    cell: Cell
    quiet: Sequence[float]
    _events: Timeline[RunEvent] = field(default_factory=Timeline)
    _client: Command | None = None

    async def outcome(self) -> Outcome:
        """Do it; whatever comes of it, in TRIAL_TIMEOUT_S at most."""
        try:
            async with asyncio.timeout(TRIAL_TIMEOUT_S):
                return await self._run()
        except TimeoutError:
            last = self._events.entries[-1].item if self._events.entries else "nothing was heard"
            problem = f"not over in {TRIAL_TIMEOUT_S:.0f} s; {last}"
        except SwarmError as error:
            problem = error.message
        return Outcome(cell=self.cell, problem=problem)

    async def _run(self) -> Outcome:
        is_alone = self.cell.role in (Role.LONE, Role.NEWCOMER)
        await self.swarm.refill(_ONE_IN_THE_MIDDLE if is_alone else TWO_OF_EACH)
        await self.swarm.all_joined()
        trigger = await self._trigger()
        if self.cell.role is not Role.SOURCE:
            self._order(trigger)
        run_id = await self._submit()
        watching = asyncio.create_task(watch(self.swarm, run_id, self._events))
        try:
            if self.cell.role is Role.SOURCE:
                trigger = await _unless_over(watching, self._first_source())
            fault_s = await _unless_over(watching, self._fault(trigger))
            victim = self._victim(trigger)
            detection_s = await self._detection(victim, fault_s)
            await self._heal(victim, fault_s)
            recovered_s = await _unless_over(watching, self._recovered(fault_s))
            await self._repair(victim, fault_s, recovered_s)
            await watching
        finally:
            trigger.release()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return await self._concluded(run_id, detection_s, recovered_s - fault_s)

    # ---- who is who

    async def _trigger(self) -> Command:
        """The process that reaches the point."""
        role = self.cell.role
        if role is Role.NEWCOMER:
            return await self.swarm.add_peer(STAGES[1])
        if role is Role.COORDINATOR and self.cell.is_self_inflicted:
            return self.swarm.the_coordinator
        return self.swarm.peers[_LAYERS.get(role, STAGES[1])][0]

    def _order(self, trigger: Command) -> None:
        fault = self.cell.fault if self.cell.is_self_inflicted else "hold"
        trigger.order(fault, self.cell.phase, PHASES[self.cell.phase])

    async def _first_source(self) -> Command:
        """Return the ordered peer that first hands over to a newcomer; it stands at the fault.

        Both are held where they begin, so that neither is through before the other is known.
        """
        sources = tuple(self.swarm.peers[STAGES[1]])
        for source in sources:
            source.order("hold", self.cell.phase, 1)
        await self.swarm.add_peer(STAGES[1])
        tasks = {asyncio.create_task(source.obeyed()): source for source in sources}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        first = tasks[done.pop()]
        for source in sources:
            if source is not first:
                source.release()
        self._order(first)
        return first

    def _victim(self, trigger: Command) -> Command:
        match self.cell.role:
            case Role.COORDINATOR:
                return self.swarm.the_coordinator
            case Role.DHT:
                return self.swarm.dht["dht-0"]
            case Role.CLIENT if self._client is not None:
                return self._client
            case _:
                return trigger

    # ---- the run

    def _spec(self) -> RunSpec:
        is_joined = self.cell.role in (Role.NEWCOMER, Role.SOURCE)
        return spec_of(self.job, STEPS_WITH_NEWCOMER if is_joined else STEPS)

    async def _submit(self) -> RunId:
        if self.cell.role is not Role.CLIENT:
            return (await self.swarm.client.submit(self._spec(), self.job.samples)).run_id
        known = {run.run_id for run in (await self.swarm.client.status()).runs}
        self._client = await self.swarm.start_client(STEPS)
        while True:
            runs = (await self.swarm.client.status()).runs
            new = [run.run_id for run in runs if run.run_id not in known]
            if new:
                return new[0]
            await asyncio.sleep(0.1)

    # ---- the fault

    async def _fault(self, trigger: Command) -> float:
        """Return the moment at which the victim met the fault."""
        obeyed_s = await trigger.obeyed()
        if self.cell.is_self_inflicted:
            return obeyed_s
        victim, number = self._victim(trigger), signal.SIGKILL
        if self.cell.fault is Fault.STOP:
            number = signal.SIGSTOP
        fault_s = time.monotonic()
        victim.send(number)
        trigger.release()
        return fault_s

    async def _detection(self, victim: Command, fault_s: float) -> float | None:
        """Return the seconds until the coordinator's or a peer's log names the victim."""
        match self.cell.role:
            case Role.CLIENT | Role.DHT:
                return None
            case Role.COORDINATOR:
                log = self.swarm.peers[STAGES[0]][0].log
                words: tuple[str, ...] = ("coordinator: ",)
            case _:
                log = self.swarm.the_coordinator.log
                shown = default_name(victim.name)
                words = (f"{shown} disconnected", f"{shown} is dismissed")
        line = await log.first(lambda text: any(word in text for word in words), fault_s)
        return line.at_s - fault_s

    async def _heal(self, victim: Command, fault_s: float) -> None:
        """Bring back what the run cannot do without."""
        role, fault = self.cell.role, self.cell.fault
        if fault is Fault.KILL and role is Role.COORDINATOR:
            await victim.ended()
            await self.swarm.start_coordinator()
        elif fault is Fault.KILL and role is Role.LONE:
            await victim.ended()
            await self.swarm.refill(_ONE_IN_THE_MIDDLE)
        elif fault is Fault.STOP and role in (Role.COORDINATOR, Role.LONE):
            await asyncio.sleep(fault_s + FROZEN_S - time.monotonic())
            victim.send(signal.SIGCONT)

    async def _recovered(self, fault_s: float) -> float:
        """Return the moment at which the step that the fault delayed was committed."""
        if self.cell.role in (Role.CLIENT, Role.DHT):
            return (await self._events.first(_is_commit, fault_s)).at_s
        resumed = await self._events.first(_is_training, fault_s)
        # The watch may report older ones again.
        first_step = resumed.item.committed_steps if isinstance(resumed.item, RunStatus) else 0
        commit = await self._events.first(lambda event: _is_commit(event, first_step), resumed.at_s)
        return commit.at_s

    async def _repair(self, victim: Command, fault_s: float, recovered_s: float) -> None:
        """Make the swarm what it was, for the rest of the run and the trials to come."""
        role, fault = self.cell.role, self.cell.fault
        if fault is Fault.STOP and role.is_peer and role is not Role.LONE:
            await self._steps_after(recovered_s, ZOMBIE_AFTER_STEPS)
            victim.send(signal.SIGCONT)
        elif fault is Fault.STOP:
            await asyncio.sleep(max(0.0, fault_s + FROZEN_S - time.monotonic()))
            victim.send(signal.SIGCONT)
        elif fault is Fault.KILL and role is Role.DHT:
            await victim.ended()
            await self.swarm.start_dht("dht-0")
        elif fault is Fault.KILL and role.is_peer:
            await victim.ended()
            await self.swarm.refill(TWO_OF_EACH)

    async def _steps_after(self, moment_s: float, count: int) -> None:
        for _ in range(count):
            moment_s = (await self._events.first(_is_commit, moment_s + 1e-6)).at_s

    # ---- the end

    async def _concluded(
        self, run_id: RunId, detection_s: float | None, recovery_s: float
    ) -> Outcome:
        observed = Observed(
            cell=self.cell,
            events=tuple(entry.item for entry in self._events.entries),
            quiet=self.quiet[: self._spec().train.num_steps],
            detection_s=detection_s,
        )
        problem = problems_of(observed)
        if self.cell.role is Role.CLIENT and self._client is not None:
            problem = problem or await self._fetched_by_a_client(run_id, self._client)
        else:
            await self.swarm.client.acknowledge_result(run_id)
        return Outcome(
            cell=self.cell,
            detection_s=detection_s,
            recovery_s=recovery_s,
            difference=relative_difference(observed),
            problem=problem,
        )

    async def _fetched_by_a_client(self, run_id: RunId, client: Command) -> str:
        """Return the problem with the result that the same or another client fetches."""
        if self.cell.fault is Fault.KILL:
            client = await self.swarm.start_attached(run_id)
        code = await client.ended()
        return "" if code == 0 else f"{client.name} ended with {code}; its log tells why"


async def watch(swarm: Swarm, run_id: RunId, events: Timeline[RunEvent]) -> None:
    """Keep all events of a run until it is over.

    Raises:
        RunFailed: it has no result.
    """
    async with aclosing(swarm.client.watch(run_id, lambda _trouble: None)) as arriving:
        async for event in arriving:
            events.add(event)
    last = events.entries[-1].item
    if not isinstance(last, RunStatus) or last.phase not in (RunPhase.FINISHED, RunPhase.COLLECTED):
        raise RunFailed(f"run {run_id} did not finish: {last}")


def spec_of(job: Job, num_steps: int) -> RunSpec:
    """The job's run, so many steps long."""
    return replace(job.spec, train=replace(job.spec.train, num_steps=num_steps))


def _is_commit(event: RunEvent, first_step: int = 0) -> bool:
    return isinstance(event, StepCommitted) and event.step >= first_step


def _is_training(event: RunEvent) -> bool:
    return isinstance(event, RunStatus) and event.phase is RunPhase.TRAINING


async def _unless_over(run: asyncio.Task[None], waiting: Coroutine[Any, Any, T]) -> T:
    """Return the awaited result; do not wait longer than the run lasts.

    Raises:
        RunFailed: the run was over before.
    """
    task = asyncio.create_task(waiting)
    await asyncio.wait((run, task), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        run.result()
        raise RunFailed("the run was over before the fault, or before its end could be seen")
    return task.result()
