"""Events, losses and timelines of a recording, beside the states that `replay` finds. No I/O.

`Past` answers requests of the page as a coordinator would at one moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    Effect,
    EmitEvent,
    EvaluationRecord,
    EventRecord,
    PeerSaid,
    RollbackRecord,
    SendMessage,
)
from swarm_ft.coordinator.member_names import NO_NAMES, MemberNames
from swarm_ft.coordinator.recording.entries import Decided
from swarm_ft.coordinator.replay import Moment
from swarm_ft.coordinator.watching import event_message
from swarm_ft.errors import NotFound, OutOfTurn
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import Evaluated, StatusRequest, StepCommitted, SwarmStatus
from swarm_ft.protocol.messages.control import CommitStep, PlanStep, StepReady
from swarm_ft.protocol.messages.events import EventKind, EventsRequest, SwarmEvent
from swarm_ft.protocol.messages.timeline import (
    ClockEstimate,
    PeerTimeline,
    SpanKind,
    Spans,
    StepTimeline,
)

SAME_CLOCK = ClockEstimate(offset_us=0, error_us=0)
MAX_EVENTS = 10_000
"""Newest events that are kept, as in journals."""


@dataclass(slots=True)
class _Losses:
    """Losses of one run, by step."""

    steps: dict[int, StepCommitted] = field(default_factory=dict)
    evaluations: dict[int, Evaluated] = field(default_factory=dict)

    def roll_back(self, record: RollbackRecord) -> None:
        first = record.first_void_step
        self.steps = {step: one for step, one in self.steps.items() if step < first}
        last = first + record.is_evaluated
        self.evaluations = {s: one for s, one in self.evaluations.items() if s < last}


class RecordedHistory:
    """Events and losses of a recording. Takes moments in their order.

    Args:
        names: Names of members for people.

    Attributes:
        events: Events so far.
    """

    def __init__(self, names: MemberNames = NO_NAMES) -> None:
        self._names = names
        self.events: list[SwarmEvent] = []
        self._losses: dict[RunId, _Losses] = {}

    def take(self, moment: Moment) -> None:
        """Add the next moment."""
        happened = [effect for effect in moment.effects if isinstance(effect, EmitEvent)]
        first = moment.next_event - len(happened)
        self.events += (
            event_message(moment.state, None, EventRecord(serial, moment.unix_s, one), self._names)
            for serial, one in enumerate(happened, first)
        )
        del self.events[:-MAX_EVENTS]
        for effect in moment.effects:
            self._take(effect)

    def _take(self, effect: Effect) -> None:
        match effect:
            case CommitRecord(run_id, step):
                self._losses.setdefault(run_id, _Losses()).steps[step.step] = step
            case EvaluationRecord(run_id, found):
                self._losses.setdefault(run_id, _Losses()).evaluations[found.step] = found
            case RollbackRecord(run_id):
                self._losses.setdefault(run_id, _Losses()).roll_back(effect)

    def losses(self, run_id: RunId, first: int) -> list[StepCommitted | Evaluated]:
        """Return a run's recorded steps from `first` on, and evaluations, in order."""
        known = self._losses.get(run_id, _Losses())
        steps = [one for step, one in known.steps.items() if step >= first]
        found = [one for step, one in known.evaluations.items() if step >= first]
        return sorted([*found, *steps], key=lambda one: one.step)


# ---- timelines, as far as the coordinator knew


@dataclass(slots=True)
class _AtStep:
    planned_us: int
    ready_us: int | None = None


def timelines(all_moments: Iterable[Moment], run_id: RunId) -> Iterator[PeerTimeline]:
    """Yield each peer's timeline of each step: from the plan to its report, and to the commit.

    Recordings hold nothing finer: peers send their own timelines only while a client traces the
    run.
    """
    at: dict[PeerId, _AtStep] = {}
    for moment in all_moments:
        now_us = round(1e6 * moment.unix_s)
        entry = moment.entry
        if isinstance(entry, Decided) and isinstance(entry.event, PeerSaid):
            peer, message = entry.event.peer_id, entry.event.message
            if isinstance(message, StepReady) and message.run_id == run_id and peer in at:
                at[peer].ready_us = now_us
        for effect in moment.effects:
            match effect:
                case SendMessage(peer, PlanStep() as plan) if plan.run_id == run_id:
                    at[peer] = _AtStep(now_us)
                case SendMessage(peer, CommitStep() as commit) if (
                    commit.run_id == run_id and peer in at
                ):
                    yield from _timeline(moment, peer, commit, at.pop(peer), now_us)


def _timeline(
    moment: Moment, peer: PeerId, commit: CommitStep, step: _AtStep, now_us: int
) -> Iterator[PeerTimeline]:
    assignments = moment.state.runs[commit.run_id].attempt.assignments
    layers = next((one.layers for one in assignments if one.peer_id == peer), None)
    if layers is None:
        return
    origin_us, ready_us = step.planned_us, step.ready_us or now_us
    until_ready_us, took_us = ready_us - origin_us, now_us - origin_us
    spans = (
        (SpanKind.STEP, 0, took_us),
        (SpanKind.PLAN, 0, 0),
        (SpanKind.READY, until_ready_us, 0),
        (SpanKind.WAIT_COMMIT, until_ready_us, took_us - until_ready_us),
        (SpanKind.COMMIT, took_us, 0),
    )
    timeline = StepTimeline(
        run_id=commit.run_id,
        attempt=commit.attempt,
        step=commit.step,
        origin_us=origin_us,
        clock=SAME_CLOCK,
        spans=_spans(spans, commit.step),
    )
    yield PeerTimeline(peer_id=peer, layers=layers, timeline=timeline)


def _spans(spans: Sequence[tuple[SpanKind, int, int]], step: StepNumber) -> Spans:
    kinds, begins_us, durations_us = zip(*spans, strict=True)
    none = (0,) * len(spans)
    return Spans(
        kinds=tuple(map(int, kinds)),
        begin_us=begins_us,
        duration_us=durations_us,
        steps=(step,) * len(spans),
        microbatches=none,
        samples=none,
        boundaries=none,
        directions=none,
        num_bytes=none,
    )


# ---- a page of the past


class ReplayView:
    """A coordinator at one moment, for its page; see `page.status_cache.Source`.

    Args:
        moment: Moment that is shown.
        retold: Events and losses until then.
    """

    def __init__(self, moment: Moment, retold: RecordedHistory) -> None:
        self._moment = moment
        self._retold = retold

    @property
    def is_ready(self) -> bool:
        """Always False: a recording neither plans nor commits."""
        return False

    def status(self, page: StatusRequest = StatusRequest()) -> SwarmStatus:  # noqa: B008
        """Return a page of the swarm's status."""
        return self._moment.status(page)

    async def events(self, request: EventsRequest) -> AsyncGenerator[SwarmEvent, None]:
        """Yield the events until this moment."""
        for event in self._retold.events:
            if event.serial >= request.since and request.run_id in (None, event.run_id):
                yield event

    @property
    def event_counts(self) -> Mapping[EventKind, int]:
        """Number of recorded events of each kind."""
        return Counter(event.kind for event in self._retold.events)

    def losses(self, run_id: RunId, first: int, max_points: int) -> list[StepCommitted | Evaluated]:
        """Return a run's recorded steps and evaluations, at most about `max_points`.

        Raises:
            NotFound: There is no such run at this moment.
        """
        if run_id not in self._moment.state.runs:
            raise NotFound(f"{run_id} was not known at this moment")
        found = self._retold.losses(run_id, first)
        return found[:: max(1, -(-len(found) // max_points))]

    def cancel(self, run_id: RunId) -> None:
        """Raise OutOfTurn."""
        raise OutOfTurn(f"{run_id}: a recording cannot be changed")

    def pause(self, run_id: RunId) -> None:
        """Raise OutOfTurn."""
        self.cancel(run_id)

    def resume(self, run_id: RunId) -> None:
        """Raise OutOfTurn."""
        self.cancel(run_id)

    def change_rate(self, run_id: RunId, learning_rate: float) -> None:
        """Raise OutOfTurn."""
        self.cancel(run_id)

    def change_codecs(self, run_id: RunId, forward: str = "", backward: str = "") -> None:
        """Raise OutOfTurn."""
        self.cancel(run_id)
