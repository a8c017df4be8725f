"""Replay of a recording: the state of the swarm at every moment, decided again. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType

from swarm_ft.coordinator.decide.machine import decide
from swarm_ft.coordinator.facts.events import Effect, EmitEvent, PeerLost
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.member_names import NO_NAMES, MemberNames
from swarm_ft.coordinator.recording.entries import (
    Base,
    Batch,
    Decided,
    Entry,
    MachineTold,
    Numbered,
    Passed,
    RelaysSeen,
    after_passed,
)
from swarm_ft.coordinator.watching import overview, with_names
from swarm_ft.errors import BadOption, JournalError
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import RelayStatus, StatusRequest, SwarmStatus

ENDS_BEFORE_S = 60.0
"""Most seconds between the end of a recording and a time that it is asked about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The state of the swarm after one entry of a recording.

    Attributes:
        version: Version of the swarm-ft that decided.
        unix_s: Seconds of the wall clock.
        machines: Measurements that members sent of their machines.
        next_event: Number of the next event for people.
        entry: Entry that led to this state.
        effects: Effects of that entry.
        names: Names of members for people; a recording has none.
    """

    version: str
    unix_s: float
    state: SwarmState
    machines: Mapping[PeerId, Machine]
    relays: tuple[RelayStatus, ...]
    next_event: int
    entry: Entry
    effects: tuple[Effect, ...] = ()
    names: MemberNames = NO_NAMES

    def status(self, page: StatusRequest) -> SwarmStatus:
        """Return a page of the status, as the coordinator would have sent its operator."""
        found = overview(self.state, page, None, self.machines)
        return replace(
            with_names(replace(found, relays=self.relays), self.names),
            version=self.version,
            unix_s=self.unix_s,
            next_event=self.next_event,
        )

    def run(self, run_id: RunId | None) -> Run | None:
        """Return this run, if it is known."""
        return self.state.runs.get(run_id) if run_id is not None else None


def moments(batches: Iterable[Batch]) -> Iterator[Moment]:
    """Yield all moments of a recording, in order.

    Args:
        batches: Batches, the first of which begins with a `Base`.

    Raises:
        JournalError: The batches do not follow from each other.
    """
    moment: Moment | None = None
    for batch in batches:
        for entry in batch.entries:
            moment = _after(moment, entry, batch)
            yield moment


def _after(moment: Moment | None, entry: Entry, batch: Batch) -> Moment:
    if isinstance(entry, Base):
        return _beginning(entry, batch)
    if moment is None:
        raise JournalError("recording: expected a state as its first entry; it is damaged")
    after = replace(moment, entry=entry, effects=())
    match entry:
        case Decided():
            return _decided(after, entry, batch.unix_at(entry.now_s))
        case Passed():
            state = after_passed(moment.state, entry)
            return replace(after, state=state, unix_s=batch.unix_at(entry.now_s))
        case MachineTold(peer_id, machine):
            return _with_machines(after, {**moment.machines, peer_id: machine})
        case RelaysSeen(relays):
            return replace(after, relays=relays)
        case Numbered(next_event):
            return replace(after, next_event=next_event)


def _beginning(base: Base, batch: Batch) -> Moment:
    return Moment(
        version=base.version,
        unix_s=batch.unix_at(base.now_s),
        state=base.state,
        machines=base.machines,
        relays=base.relays,
        next_event=base.next_event,
        entry=base,
    )


def _decided(moment: Moment, entry: Decided, unix_s: float) -> Moment:
    state, effects = decide(moment.state, entry.event, entry.now_s)
    num_events = sum(isinstance(effect, EmitEvent) for effect in effects)
    after = replace(
        moment,
        state=state,
        unix_s=unix_s,
        next_event=moment.next_event + num_events,
        effects=tuple(effects),
    )
    if isinstance(entry.event, PeerLost):
        others = {p: m for p, m in moment.machines.items() if p != entry.event.peer_id}
        return _with_machines(after, others)
    return after


def _with_machines(moment: Moment, machines: Mapping[PeerId, Machine]) -> Moment:
    return replace(moment, machines=MappingProxyType(dict(machines)))


# ---- choice of a moment


@dataclass(slots=True)
class _Seen:
    """Least, most and present steps of one run, and the last moment at which it reached a step."""

    steps: int
    least: int
    most: int
    reached: Moment | None = None


def at_step(all_moments: Iterable[Moment], step: int, run_id: RunId | None = None) -> Moment:
    """Return the last moment at which a run reached this number of steps.

    Args:
        all_moments: Moments of a recording.
        step: Number of committed steps.
        run_id: Run; None: the only one.

    Raises:
        BadOption: The recording has no such run, or no such step of it; or several runs.
    """
    found: dict[RunId, _Seen] = {}
    for moment in all_moments:
        for run in moment.state.runs.values():
            _see(found, run.run_id, run.past.all_steps, step, moment)
    known = ", ".join(found) or "none"
    if run_id is None and len(found) != 1:
        raise BadOption(f"--run: expected one run in the recording, or its name; known: {known}")
    name = run_id or next(iter(found))
    if name not in found:
        raise BadOption(f"--run: expected a run of the recording, got {name}; known: {known}")
    seen = found[name]
    if seen.reached is None:
        raise BadOption(
            f"--at {step}: the recording has steps {seen.least} to {seen.most} of {name}"
        )
    return seen.reached


def _see(found: dict[RunId, _Seen], name: RunId, steps: int, step: int, moment: Moment) -> None:
    seen = found.setdefault(name, _Seen(-1, steps, steps))
    if steps > seen.steps and steps == step:  # a rollback to this step does not count
        seen.reached = moment
    seen.steps, seen.least, seen.most = steps, min(seen.least, steps), max(seen.most, steps)


def at_time(all_moments: Iterable[Moment], unix_s: float) -> Moment:
    """Return the last moment that was not later.

    Raises:
        BadOption: The recording begins later, or ends more than a minute before.
    """
    first = last = chosen = None
    for moment in all_moments:
        first, last = first or moment, moment
        if moment.unix_s > unix_s:
            break
        chosen = moment
    if first is None or last is None:
        raise BadOption("the recording is empty")
    if chosen is None or last.unix_s < unix_s - ENDS_BEFORE_S:
        span = f"{_when(first.unix_s)} to {_when(last.unix_s)}"
        raise BadOption(f"--at-time {_when(unix_s)}: the recording is from {span}")
    return chosen


def at_end(all_moments: Iterable[Moment]) -> Moment:
    """Return the last moment.

    Raises:
        BadOption: The recording is empty.
    """
    last = None
    for last in all_moments:  # noqa: B007 - only the last one counts
        pass
    if last is None:
        raise BadOption("the recording is empty")
    return last


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
