"""Who watches which run, and what each has yet to be told. Nothing of it outlives the process.

A watcher may want to know what peers do when: as long as one does, plans ask the run's peers for
it. Their timelines pass through here, unread and unkept.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.members import Roll, contributors
from swarm_ft.coordinator.plan.steps import ends_of
from swarm_ft.errors import Busy, Unavailable
from swarm_ft.identity.roles import Caller
from swarm_ft.ids import BlockIndex, PeerId, RunId
from swarm_ft.protocol.machines.rate import Rate
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import (
    MAX_PAGE_MEMBERS,
    MAX_PAGE_RUNS,
    BoundaryStatus,
    RunEvent,
    RunSummary,
    StatusRequest,
    SwarmStatus,
)
from swarm_ft.protocol.messages.events import SwarmEvent
from swarm_ft.protocol.messages.reports import BufferCounts, Traffic
from swarm_ft.protocol.messages.timeline import PeerTimeline
from swarm_ft.protocol.spec.digest import DIGEST_BYTES
from swarm_ft.transport.rules import may_read

FIRST_PAGE = StatusRequest()
NO_MACHINES: Mapping[PeerId, Machine] = MappingProxyType({})
NO_DIGEST = bytes(DIGEST_BYTES)
"""Of what is not the caller's business."""

# ---- everything that the coordinator knows, as `swarm-ft status` shows it


def overview(
    state: SwarmState,
    page: StatusRequest = FIRST_PAGE,
    caller: Caller | None = None,
    machines: Mapping[PeerId, Machine] = NO_MACHINES,
) -> SwarmStatus:
    """A page of members and a page of runs.

    Args:
        state: all that is known.
        page: from which ones on.
        caller: who asks, and is told details of its own runs, and of those that are shared with it,
            alone; None: nobody has keys.
        machines: what members measured of themselves.
    """
    roll = Roll(state, machines, caller)
    queue = _queue(state)
    members = islice(state.members.values(), page.first_member, None)
    runs = islice(state.runs.values(), page.first_run, page.first_run + MAX_PAGE_RUNS)
    has_runs = any(_may_read(caller, run) for run in state.runs.values())
    return SwarmStatus(
        members=tuple(
            roll.status(m, m.idle if has_runs else without_words(m.idle))
            for m in islice(members, MAX_PAGE_MEMBERS)
        ),
        runs=tuple(_summary(run, queue, is_own=_may_read(caller, run)) for run in runs),
        num_members=len(state.members),
        num_runs=len(state.runs),
        contributors=contributors(state) if page == FIRST_PAGE else (),
    )


def _queue(state: SwarmState) -> list[RunId]:
    """Runs that wait for peers, behind one that has some."""
    waiting = [run.run_id for run in state.going_runs if not run.attempt.assignments]
    return [run.run_id for run in state.active_runs[-1:]] + waiting


def _summary(run: Run, queue: Sequence[RunId], *, is_own: bool) -> RunSummary:
    status, train = run.status, run.spec.train
    place = queue.index(run.run_id) if run.run_id in queue else 0
    step_s = fmean(run.measured.step_seconds or (0.0,))
    is_paused = run.steering.is_paused and not run.phase.is_over
    left = train.num_steps - run.past.all_steps
    return RunSummary(
        run_id=run.run_id,
        phase=run.phase,
        detail=status.detail if is_own else without_words(status.detail),
        committed_steps=run.past.all_steps,
        num_steps=run.spec.train.num_steps,
        spec_digest=run.spec.digest() if is_own else NO_DIGEST,
        assignments=tuple(
            stage if is_own else replace(stage, endpoint="") for stage in status.assignments
        ),
        sent=status.sent,
        joining=status.joining,
        boundaries=() if run.phase.is_over else _boundaries(run),
        is_own=is_own,
        attempt=run.attempt.number,
        model=run.spec.model.reference if is_own else "",
        last_step=run.past.last_step if is_own else None,
        last_evaluation=run.past.last_evaluation if is_own else None,
        step_s=step_s,
        samples_per_s=train.batch_size / step_s if step_s else 0.0,
        tokens_per_s=_tokens_per_s(run),
        eta_s=left * step_s if step_s and run.phase.is_working and not is_paused else None,
        place=place,
        behind=queue[place - 1] if place else None,
        is_paused=is_paused,
        learning_rate=(
            run.steering.peak_at(run.past.all_steps + 1, train.learning_rate) if is_own else 0.0
        ),
        codecs=run.spec_at(run.past.all_steps + 1).train.codecs if is_own else None,
        quality=run.quality_found if is_own else None,
        snapshots=() if run.phase.is_over else tuple(s.step for s in run.past.snapshots),
    )


def _tokens_per_s(run: Run) -> float:
    """Over the last steps whose targets were counted."""
    counted = run.measured.step_targets
    seconds = sum(run.measured.step_seconds[-len(counted) :]) if counted else 0.0
    return sum(counted) / seconds if seconds else 0.0


def told_to(state: SwarmState, caller: Caller | None, event: SwarmEvent) -> SwarmEvent:
    """What happened, as a caller may know it: of others' runs without words."""
    run = state.runs.get(event.run_id) if event.run_id is not None else None
    is_hidden = caller is not None and event.run_id is not None
    if is_hidden and not (run and _may_read(caller, run)):
        return replace(event, words="")
    return event


def _may_read(caller: Caller | None, run: Run) -> bool:
    return may_read(caller, run.owner, run.spec.train.readers)


def without_words(text: str) -> str:
    """What follows a colon is a failure's message, of whoever's run that was."""
    return text.partition(":")[0]


def _boundaries(run: Run) -> tuple[BoundaryStatus, ...]:
    """What is kept at each boundary between stages, and what went over it."""
    traffic = {one.boundary: one for one in run.past.traffic}
    last, codecs = run.past.last_step, run.spec_at(run.past.all_steps).train.codecs
    newest = {one.boundary: one for one in last.traffic} if last is not None else {}
    ledger, stages = run.past.ledger, run.computing
    buffered = ledger.buffered(stages) if ledger and stages else {}
    boundaries = [BlockIndex(stage.layers.start) for stage in stages[1:]]
    return tuple(
        BoundaryStatus(
            boundary=boundary,
            buffered_samples=buffered.get(boundary, 0),
            key_frames=traffic.get(boundary, Traffic(boundary=boundary)).key_frames,
            delta_frames=traffic.get(boundary, Traffic(boundary=boundary)).delta_frames,
            kept=_kept(run, boundary),
            forward_codec=codecs.forward,
            backward_codec=codecs.backward,
            traffic=traffic.get(boundary, Traffic(boundary=boundary)),
            newest=newest.get(boundary, Traffic(boundary=boundary)),
        )
        for boundary in boundaries
    )


def _kept(run: Run, boundary: BlockIndex) -> BufferCounts:
    """What all peers told of a boundary; who is away, or hosts another stage now, keeps nothing."""
    total = BufferCounts(boundary=boundary)
    for peer, kept in run.measured.buffers.items():
        counts = kept.get(boundary)
        if counts and boundary in ends_of(run, peer):
            total += counts
        elif counts:
            total += replace(counts, samples=0, memory_bytes=0, disk_bytes=0)
    return total


FRAME_S = 0.5
"""How old an answer to `Status` may be that a caller gets again."""
FRESH_PER_S, FRESH_BURST = 2.0, 8
"""Answers that are made for one caller; what it asks beyond that gets one of these again."""
MAX_FRAMES = 16
"""Answers that are remembered; one has some megabytes at most."""


class _Frame(NamedTuple):
    """An answer to `Status`, and of what state it tells."""

    made_s: float
    state: object
    data: bytes


_NO_FRAME = _Frame(-math.inf, None, b"")


class StatusFrames:
    """Answers to `Status`. Callers get one again while nothing happened, or if they ask too often.

    Args:
        make: makes the answer for a page and a caller.
        state: the present one; another object whenever something happened.
    """

    def __init__(
        self,
        make: Callable[[StatusRequest, Caller | None], bytes],
        state: Callable[[], object],
    ) -> None:
        self._make = make
        self._state = state
        self._fresh: Rate[str] = Rate(per_s=FRESH_PER_S, burst=FRESH_BURST)
        self._frames: dict[tuple[str, StatusRequest], _Frame] = {}

    async def frame(self, page: StatusRequest, caller: Caller | None) -> bytes:
        """An answer, as the bytes of its message."""
        name, loop = caller.name if caller is not None else "", asyncio.get_running_loop()
        while True:
            now_s, known = loop.time(), self._frames.get((name, page), _NO_FRAME)
            is_young = now_s - known.made_s <= FRAME_S
            if is_young and known.state is self._state():
                return known.data
            wait_s = self._fresh.wait_s(name, now_s)
            if not wait_s:
                return self._made(name, page, caller, now_s)
            if is_young:
                return known.data
            await asyncio.sleep(wait_s)

    def _made(self, name: str, page: StatusRequest, caller: Caller | None, now_s: float) -> bytes:
        made = _Frame(now_s, self._state(), self._make(page, caller))
        self._frames.pop((name, page), None)
        self._frames[name, page] = made
        if len(self._frames) > MAX_FRAMES:
            del self._frames[next(iter(self._frames))]
        return made.data


MAX_WATCHERS = 16
"""Of one run by one member; each may let `MAX_QUEUED` events pile up."""
MAX_OWN_WATCHERS = 32
"""Of all runs together by one member."""
MAX_QUEUED = 100_000
"""Of one watcher that does not read; then it is dropped, and may watch anew from the beginning."""
MAX_QUEUED_TIMELINES = 1_000
"""They are larger by far, and go first."""


class Watcher:
    """One who watches a run.

    Args:
        is_tracing: whether it wants timelines.
        member: whose call it is; empty where nobody has keys.
    """

    def __init__(self, *, is_tracing: bool, member: str = "") -> None:
        self.is_tracing = is_tracing
        self.member = member
        self._queue: asyncio.Queue[RunEvent | PeerTimeline] = asyncio.Queue(MAX_QUEUED)
        self._is_dropped = asyncio.Event()
        self._num_missed = 0

    async def next(self) -> RunEvent | PeerTimeline:
        """What it has yet to be told, in order."""
        return await self._queue.get()

    async def dropped(self) -> NoReturn:
        """Wait until the watcher has let too much pile up.

        Raises:
            Unavailable: it has.
        """
        await self._is_dropped.wait()
        raise Unavailable(f"this watcher left {MAX_QUEUED} events unread; it may watch anew")

    def tell(self, event: RunEvent) -> None:
        """Something happened in the run; the watcher gets to know it, or is dropped."""
        if self._queue.full():
            self._is_dropped.set()
        else:
            self._queue.put_nowait(event)

    def trace(self, told: PeerTimeline) -> None:
        """A peer told what it did; what a slow reader misses is counted in the next it gets."""
        timeline = told.timeline
        if self._queue.qsize() >= MAX_QUEUED_TIMELINES:
            self._num_missed += len(timeline.spans) + timeline.num_dropped
            return
        dropped = min(timeline.num_dropped + self._num_missed, (1 << 32) - 1)
        self._num_missed = 0
        self._queue.put_nowait(replace(told, timeline=replace(timeline, num_dropped=dropped)))


class Watchers:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._watchers: dict[RunId, list[Watcher]] = {}

    @contextmanager
    def watching(self, run_id: RunId, *, is_tracing: bool, member: str = "") -> Iterator[Watcher]:
        """Somebody who watches the run as long as the context lasts.

        Raises:
            Busy: this member watches the run, or all runs together, too often already.
        """
        if self._count(self._watchers.get(run_id, ()), member) >= MAX_WATCHERS:
            raise Busy(f"run {run_id} is watched {MAX_WATCHERS} times already; end one of these")
        if member and self._count(chain(*self._watchers.values()), member) >= MAX_OWN_WATCHERS:
            raise Busy(f"you watch {MAX_OWN_WATCHERS} times already; end one of these")
        watcher = Watcher(is_tracing=is_tracing, member=member)
        self._watchers.setdefault(run_id, []).append(watcher)
        try:
            yield watcher
        finally:
            self._watchers[run_id].remove(watcher)
            if not self._watchers[run_id]:
                del self._watchers[run_id]

    def _count(self, watchers: Iterable[Watcher], member: str) -> int:
        return sum(watcher.member == member for watcher in watchers)

    def is_traced(self, run_id: RunId) -> bool:
        """Whether somebody wants to know what the run's peers do when."""
        return any(watcher.is_tracing for watcher in self._watchers.get(run_id, ()))

    def tell(self, run_id: RunId, event: RunEvent) -> None:
        """Something happened in a run."""
        for watcher in self._watchers.get(run_id, ()):
            watcher.tell(event)

    def trace(self, timeline: PeerTimeline) -> None:
        """A peer of a run told what it did."""
        for watcher in self._watchers.get(timeline.timeline.run_id, ()):
            if watcher.is_tracing:
                watcher.trace(timeline)
