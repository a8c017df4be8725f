"""Watchers of runs, and the messages that each reader may receive. Nothing is stored.

A watcher may trace a run: as long as one does, plans request timelines from the run's peers. These
are forwarded here without being read or kept.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from swarm_ft.coordinator.facts.events import EventRecord, Published
from swarm_ft.coordinator.facts.messages import Idle, Message, Progress, Release
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.member_names import NO_NAMES, MemberNames
from swarm_ft.coordinator.members import Roll, contributors
from swarm_ft.coordinator.plan.learned_costs import left_s_range
from swarm_ft.coordinator.plan.steps import ends_of
from swarm_ft.coordinator.reason_texts import as_text, event_in_words, steered, went_back
from swarm_ft.digest import DIGEST_BYTES
from swarm_ft.errors import Busy, Unavailable
from swarm_ft.identity.roles import Caller
from swarm_ft.ids import BlockIndex, PeerId, RunId, StepNumber
from swarm_ft.protocol.machines.rate import Rate
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import (
    MAX_CODEC_CHANGES,
    MAX_NAMES,
    MAX_PAGE_MEMBERS,
    MAX_PAGE_RUNS,
    BoundaryStatus,
    RunEvent,
    RunStatus,
    RunSummary,
    StageResult,
    StatusRequest,
    SwarmStatus,
)
from swarm_ft.protocol.messages.control import (
    MAX_RUN_PEERS,
    LeaveProgress,
    ReleaseStage,
    StayIdle,
    ToPeer,
)
from swarm_ft.protocol.messages.events import SwarmEvent
from swarm_ft.protocol.messages.reports import BufferCounts, Traffic
from swarm_ft.protocol.messages.timeline import PeerTimeline
from swarm_ft.protocol.spec.member_name import default_name
from swarm_ft.transport.rules import may_read

FIRST_PAGE = StatusRequest()
NO_MACHINES: Mapping[PeerId, Machine] = MappingProxyType({})
NO_DIGEST = bytes(DIGEST_BYTES)
"""Digest in place of one that the caller may not know."""

# ---- reasons, redacted for each reader


def redacted(
    reason: Reason, may_read: Callable[[RunId], bool], run_id: RunId | None = None
) -> Reason:
    """Return the reason without texts and values of runs that its reader may not read.

    Args:
        reason: Reason with all fields.
        may_read: Function that decides whether the reader may read a run.
        run_id: Run that has the reason; None: no run has it.
    """
    owner = reason.run_id or run_id
    parts = tuple(redacted(part, may_read, owner) for part in reason.parts)
    if owner is not None and may_read(owner):
        return replace(reason, parts=parts)
    return replace(reason, text="", text_before="", value=None, value_before=None, parts=parts)


def words_for(
    state: SwarmState, caller: Caller | None, reason: Reason | None, run_id: RunId | None = None
) -> str:
    """Return a reason's text for a caller; None: the operator, who may know all of it."""
    if reason is None or caller is None:
        return as_text(reason)
    return as_text(redacted(reason, partial(_may_read_named, state, caller), run_id))


def message_to_peer(message: Message, names: MemberNames = NO_NAMES) -> ToPeer:
    """Return the message with its reason as text. No peer gets the texts of a run."""
    match message:
        case Release(run_id=run_id, reason=reason, is_over=is_over):
            words = _words_for_peer(reason, names)
            return ReleaseStage(run_id=run_id, reason=words, is_over=is_over)
        case Idle(reason=reason):
            return StayIdle(reason=_words_for_peer(reason, names))
        case Progress(may_go=may_go, reason=reason, seconds=seconds):
            words = _words_for_peer(reason, names)
            return LeaveProgress(may_go=may_go, words=words, seconds=seconds)
        case _:
            return message


def _words_for_peer(reason: Reason | None, names: MemberNames) -> str:
    return names.in_text(as_text(reason and redacted(reason, lambda _: False)))


def status_of(run: Run, names: MemberNames = NO_NAMES) -> RunStatus:
    """Return the run's status for its readers."""
    own = run.reason and redacted(run.reason, run.run_id.__eq__, run.run_id)
    return RunStatus(
        run_id=run.run_id,
        phase=run.phase,
        detail=names.in_text(as_text(own)),
        committed_steps=run.past.all_steps,
        attempt=run.attempt.number,
        spec=run.spec,
        assignments=run.attempt.assignments,
        sent=run.past.sent,
        joining=run.listeners,
        results=tuple(
            StageResult(peer_id=peer, file=file)
            for peer in run.peers
            if (file := run.past.exported.get(peer))
        ),
        result_step=StepNumber(run.committed_steps) if run.past.trained_steps else None,
        codecs=run.steering.codecs[-MAX_CODEC_CHANGES:],
        quality=run.quality_found,
        steered=tuple(filter(None, map(steered, run.steering.requests))),
        names=names.of((one.peer_id for one in run.attempt.assignments), MAX_RUN_PEERS),
    )


def event_of(run_id: RunId, published: Published, names: MemberNames = NO_NAMES) -> RunEvent:
    """Return the message that a run's readers receive of `Publish`."""
    match published:
        case Run():
            return status_of(published, names)
        case Reason():
            back = went_back(redacted(published, run_id.__eq__, run_id))
            why, remedy = names.in_text(back.why), names.in_text(back.remedy)
            return replace(back, why=why, remedy=remedy)
        case _:
            return published


# ---- the status of the swarm, as `swarm-ft status` shows it


def overview(
    state: SwarmState,
    page: StatusRequest = FIRST_PAGE,
    caller: Caller | None = None,
    machines: Mapping[PeerId, Machine] = NO_MACHINES,
) -> SwarmStatus:
    """Return a page of members and a page of runs.

    Args:
        state: Present state.
        page: First member and first run.
        caller: Member that requests it, and gets details only of runs that it may read; None: no
            member has keys.
        machines: Measurements that members sent of their machines.
    """
    roll = Roll(state, machines, caller)
    queue = _queue(state)
    members = islice(state.members.values(), page.first_member, None)
    runs = islice(state.runs.values(), page.first_run, page.first_run + MAX_PAGE_RUNS)
    return SwarmStatus(
        members=tuple(
            roll.status(member, words_for(state, caller, member.idle))
            for member in islice(members, MAX_PAGE_MEMBERS)
        ),
        runs=tuple(
            replace(
                _summary(run, queue, is_own=_may_read(caller, run)),
                detail=words_for(state, caller, run.reason, run.run_id),
            )
            for run in runs
        ),
        num_members=len(state.members),
        num_runs=len(state.runs),
        contributors=contributors(state) if page == FIRST_PAGE else (),
    )


def with_names(found: SwarmStatus, names: MemberNames) -> SwarmStatus:
    """Name members by their names for people, in the status and in its texts."""
    return replace(
        found,
        members=tuple(replace(one, idle=names.in_text(one.idle)) for one in found.members),
        runs=tuple(replace(one, detail=names.in_text(one.detail)) for one in found.runs),
        names=names.of(_mentioned(found), MAX_NAMES),
    )


def _mentioned(found: SwarmStatus) -> Iterator[str]:
    """Ids of all members that a status mentions, those that matter most first."""
    yield from (member.peer_id for member in found.members)
    yield from (stage.peer_id for run in found.runs for stage in run.assignments)
    yield from (relay.name for relay in found.relays)
    yield from (one.peer_id for one in found.contributors)


def _queue(state: SwarmState) -> list[RunId]:
    """Return the runs that wait for peers, after the last one that has some."""
    waiting = [run.run_id for run in state.going_runs if not run.attempt.assignments]
    return [run.run_id for run in state.active_runs[-1:]] + waiting


def _summary(run: Run, queue: Sequence[RunId], *, is_own: bool) -> RunSummary:
    train = run.spec.train
    place = queue.index(run.run_id) if run.run_id in queue else 0
    step_s = fmean(run.measured.step_seconds or (0.0,))
    is_paused = run.steering.is_paused and not run.phase.is_over
    left = train.num_steps - run.past.all_steps
    is_known = step_s and run.phase.is_working and not is_paused
    etas = tuple(left_s_range(run.measured.step_seconds, left)) if is_known else ()
    return RunSummary(
        run_id=run.run_id,
        phase=run.phase,
        detail="",  # `overview` adds it
        committed_steps=run.past.all_steps,
        num_steps=run.spec.train.num_steps,
        spec_digest=run.spec.digest() if is_own else NO_DIGEST,
        assignments=tuple(
            stage if is_own else replace(stage, endpoint="") for stage in run.attempt.assignments
        ),
        sent=run.past.sent,
        joining=run.listeners,
        boundaries=() if run.phase.is_over else _boundaries(run),
        is_own=is_own,
        attempt=run.attempt.number,
        model=run.spec.model.reference if is_own else "",
        last_step=run.past.last_step if is_own else None,
        last_evaluation=run.past.last_evaluation if is_own else None,
        step_s=step_s,
        samples_per_s=train.batch_size / step_s if step_s else 0.0,
        tokens_per_s=_tokens_per_s(run),
        eta_s=left * step_s if is_known else None,
        eta_low_s=etas[0] if etas else None,
        eta_high_s=etas[1] if etas else None,
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
    """Return the mean over the last steps whose targets were counted."""
    counted = run.measured.step_targets
    seconds = sum(run.measured.step_seconds[-len(counted) :]) if counted else 0.0
    return sum(counted) / seconds if seconds else 0.0


def event_message(
    state: SwarmState,
    caller: Caller | None,
    event: EventRecord,
    names: MemberNames = NO_NAMES,
) -> SwarmEvent:
    """Return an event's message for a caller; events of others' runs have no text."""
    happened = event.event
    run_id = happened.run_id
    run = state.runs.get(run_id) if run_id is not None else None
    is_shown = caller is None or run_id is None or (run is not None and _may_read(caller, run))
    reason = happened.reason
    if reason is not None and caller is not None:  # all readers of the run get the same
        reason = redacted(reason, lambda name: name == run_id, run_id)
    peer = happened.peer_id
    peer_name = names.shown(peer) if peer is not None else ""
    return SwarmEvent(
        serial=event.serial,
        unix_s=event.unix_s,
        kind=happened.kind,
        run_id=run_id,
        peer_id=happened.peer_id,
        from_step=_step(happened.from_step),
        to_step=_step(happened.to_step),
        words=names.in_text(event_in_words(happened.kind, reason)) if is_shown else "",
        actor=reason.actor if reason is not None and is_shown else None,
        peer_name="" if peer is None or peer_name == default_name(peer) else peer_name,
    )


def _step(number: int | None) -> StepNumber | None:
    return None if number is None else StepNumber(number)


def _may_read_named(state: SwarmState, caller: Caller | None, run_id: RunId) -> bool:
    run = state.runs.get(run_id)
    return run is not None and _may_read(caller, run)


def _may_read(caller: Caller | None, run: Run) -> bool:
    return may_read(caller, run.owner, run.spec.train.readers)


def _boundaries(run: Run) -> tuple[BoundaryStatus, ...]:
    """Return the buffers and the traffic of each boundary between stages."""
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
            kept=_buffer_counts(run, boundary),
            forward_codec=codecs.forward,
            backward_codec=codecs.backward,
            traffic=traffic.get(boundary, Traffic(boundary=boundary)),
            newest=newest.get(boundary, Traffic(boundary=boundary)),
        )
        for boundary in boundaries
    )


def _buffer_counts(run: Run, boundary: BlockIndex) -> BufferCounts:
    """Return the sum of all peers' reports of a boundary; former hosts count without buffers."""
    total = BufferCounts(boundary=boundary)
    for peer, reported in run.measured.buffers.items():
        counts = reported.get(boundary)
        if counts and boundary in ends_of(run, peer):
            total += counts
        elif counts:
            total += replace(counts, samples=0, memory_bytes=0, disk_bytes=0)
    return total


FRAME_S = 0.5
"""Most seconds for which a caller gets the same reply to `Status` again."""
FRESH_PER_S, FRESH_BURST = 2.0, 8
"""New replies for one caller, per second and at once; further requests get an earlier one."""
MAX_FRAMES = 16
"""Replies that are cached; one has some megabytes at most."""


class _Frame(NamedTuple):
    """A reply to `Status`, and the state that it describes."""

    made_s: float
    state: object
    data: bytes


_NO_FRAME = _Frame(-math.inf, None, b"")


class StatusFrames:
    """Replies to `Status`, cached while nothing happens, and for callers with too many requests.

    Args:
        make: Function that encodes the reply for a page and a caller.
        state: Function that returns the present state; another object whenever something happened.
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
        """Return a reply, as the bytes of its message."""
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
"""Watchers of one run by one member, each with `MAX_QUEUED` updates at most."""
MAX_OWN_WATCHERS = 32
"""Watchers of all runs together by one member."""
MAX_QUEUED = 100_000
"""Updates that may pile up before a watcher is dropped; it may watch again from the beginning."""
MAX_QUEUED_TIMELINES = 1_000
"""The same limit for timelines, which are much larger and are dropped first."""


class Watcher:
    """A client's stream that watches a run.

    Args:
        is_tracing: Whether it receives timelines.
        member: Member of the call; empty without keys.
    """

    def __init__(self, *, is_tracing: bool, member: str = "") -> None:
        self.is_tracing = is_tracing
        self.member = member
        self._queue: asyncio.Queue[RunEvent | PeerTimeline] = asyncio.Queue(MAX_QUEUED)
        self._is_dropped = asyncio.Event()
        self._num_missed = 0

    async def next(self) -> RunEvent | PeerTimeline:
        """Return the next update, in order."""
        return await self._queue.get()

    async def dropped(self) -> NoReturn:
        """Wait until too many updates have piled up.

        Raises:
            Unavailable: They have.
        """
        await self._is_dropped.wait()
        raise Unavailable(f"this watcher left {MAX_QUEUED} events unread; watch the run again")

    def send(self, event: RunEvent) -> None:
        """Queue an update, or drop the watcher."""
        if self._queue.full():
            self._is_dropped.set()
        else:
            self._queue.put_nowait(event)

    def trace(self, traced: PeerTimeline) -> None:
        """Queue a timeline; the next one counts those that a slow reader missed."""
        timeline = traced.timeline
        if self._queue.qsize() >= MAX_QUEUED_TIMELINES:
            self._num_missed += len(timeline.spans) + timeline.num_dropped
            return
        dropped = min(timeline.num_dropped + self._num_missed, (1 << 32) - 1)
        self._num_missed = 0
        self._queue.put_nowait(replace(traced, timeline=replace(timeline, num_dropped=dropped)))


class Watchers:
    """The watchers of all runs."""

    def __init__(self) -> None:
        self._watchers: dict[RunId, list[Watcher]] = {}

    @contextmanager
    def watching(self, run_id: RunId, *, is_tracing: bool, member: str = "") -> Iterator[Watcher]:
        """Register a watcher of the run for the duration of the context.

        Raises:
            Busy: This member watches the run, or all runs together, too often already.
        """
        if self._count(self._watchers.get(run_id, ()), member) >= MAX_WATCHERS:
            raise Busy(f"{run_id} has {MAX_WATCHERS} watchers already; end one of these")
        if member and self._count(chain(*self._watchers.values()), member) >= MAX_OWN_WATCHERS:
            raise Busy(f"you have {MAX_OWN_WATCHERS} watchers already; end one of these")
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
        """Whether a watcher traces the run."""
        return any(watcher.is_tracing for watcher in self._watchers.get(run_id, ()))

    def publish(self, run_id: RunId, event: RunEvent) -> None:
        """Queue an update for all watchers of a run."""
        for watcher in self._watchers.get(run_id, ()):
            watcher.send(event)

    def trace(self, timeline: PeerTimeline) -> None:
        """Queue a timeline for all watchers that trace its run."""
        for watcher in self._watchers.get(timeline.timeline.run_id, ()):
            if watcher.is_tracing:
                watcher.trace(timeline)
