"""Events of a swarm as frozen values: numbered, with a time, and a text for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.spec.bounds import Length, Range, Text
from swarm_ft.protocol.spec.member_name import ShownName
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField

MAX_SERIAL = (1 << 63) - 1
Serial = Annotated[int, Range(0, MAX_SERIAL)]


class EventKind(IntEnum):
    """Kind of an event; the numbers are those of the wire."""

    COORDINATOR_STARTED = 1
    PEER_JOINED = 2
    PEER_LEFT = 3
    """A peer left on purpose."""
    PEER_GONE = 4
    """A peer's stream broke, or it was silent for too long."""
    PEER_SILENT = 5
    """A peer is silent, or others wait for it; it may yet be given up."""
    PEER_REFUSED = 6
    """A peer's report cannot be true."""
    PEER_SET_ASIDE = 7
    PEER_RELIEVED = 8
    """A peer became slow, and others take most of its share."""
    PEER_LEAVING = 9
    """A peer requested to leave, and hands over first."""
    PEER_PAUSED = 10
    PEER_RESUMED = 11
    DISK_LOW = 18
    """The coordinator's disk is nearly full."""
    DISK_FREE = 19
    """The coordinator's disk has room again."""
    RUN_SUBMITTED = 20
    RUN_QUEUED = 21
    RUN_WAITING = 22
    RUN_LOADING = 23
    RUN_TRAINING = 24
    RUN_WENT_BACK = 25
    RUN_EVALUATED = 26
    SNAPSHOT_WHOLE = 27
    SNAPSHOT_LOST = 28
    RUN_EXPORTING = 29
    RUN_FINISHED = 30
    RUN_COLLECTED = 31
    RUN_CANCELLED = 32
    RUN_FAILED = 33
    RUN_PAUSED = 34
    RUN_RESUMED = 35
    RUN_STEERED = 36
    """A person changed an option of the run."""
    RUN_MOVED = 37
    """Layers moved between the run's stages, so that steps take less time."""

    @property
    def label(self) -> str:
        """Name of the kind for people and `--json`: `went-back`, `peer-joined`."""
        return self.name.lower().removeprefix("run_").replace("_", "-")


class Actor(IntEnum):
    """The person who requested a change of a run; the numbers are those of the wire."""

    CLIENT = 1
    """An unknown client, in a swarm without keys."""
    OWNER = 2
    """The client that submitted the run."""
    OPERATOR = 3
    """The coordinator's operator, on its page."""

    @property
    def label(self) -> str:
        """Name of the actor for `--json`: `operator`."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmEvent:
    """An event of a swarm.

    Attributes:
        serial: Number that rises by one with each event; those of other clients' runs count too.
        unix_s: Time of the coordinator's decision, by its wall clock.
        kind: Kind of the event.
        run_id: Run of the event, if any.
        peer_id: Peer of the event, if any.
        from_step: Committed steps before it.
        to_step: Committed steps after it; of an evaluation or a snapshot, steps in the weights.
        words: Text for people; empty for another client's run.
        actor: Person who requested it; None if nobody did.
        peer_name: The peer's name for people. Empty: it follows from the peer's id.
    """

    serial: Serial
    unix_s: Annotated[float, Range(0.0)]
    kind: EventKind
    run_id: RunId | None = None
    peer_id: PeerId | None = None
    from_step: StepNumber | None = None
    to_step: StepNumber | None = None
    words: Text = ""
    actor: Actor | None = None
    peer_name: Annotated[str, ShownName(is_optional=True)] = ""


MAX_PAGE_EVENTS = 256
"""Events in one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmEvents:
    """Coordinator to caller: consecutive events, oldest first."""

    events: Annotated[tuple[SwarmEvent, ...], Length(MAX_PAGE_EVENTS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventsRequest:
    """Member to coordinator: a request for events, and perhaps for later ones.

    Attributes:
        since: First serial number to send; the journal may have dropped older ones.
        run_id: Run of the events; None: all events.
        follows: Whether later events follow until the caller ends the call.
    """

    since: Serial = 0
    run_id: RunId | None = None
    follows: bool = False
    protocol_version: Annotated[int, VersionField("client", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Steered:
    """A request to pause, to resume or to change a run, which the coordinator granted.

    Attributes:
        number: Place among all requests for this run, from 1.
        kind: `RUN_PAUSED`, `RUN_RESUMED` or `RUN_STEERED`.
        actor: Person who requested it.
        step: Committed steps at that time.
        words: Text of the request.
    """

    number: Annotated[int, Range(1, (1 << 32) - 1)]
    kind: EventKind
    actor: Actor
    step: StepNumber
    words: Text


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """A rollback of a run: steps from `to_step` on are void, and are repeated.

    Attributes:
        from_step: Committed steps before it.
        to_step: Committed steps from now on.
        why: Reason: the lost weights.
        remedy: Measure that would have saved these steps.
    """

    from_step: StepNumber
    to_step: StepNumber
    why: Text
    remedy: Text

    @property
    def words(self) -> str:
        """Text of the rollback for people."""
        lost = self.from_step - self.to_step
        steps = "1 step is" if lost == 1 else f"{lost} steps are"
        return (
            f"went back from step {self.from_step} to step {self.to_step} because {self.why}; "
            f"{steps} made again. What would have kept them: {self.remedy}"
        )
