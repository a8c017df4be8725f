"""What happened in a swarm, and why, as frozen values: numbered, with a time, in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.spec.bounds import Length, Range, Text
from swarm_ft.protocol.spec.member_name import ShownName
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

MAX_SERIAL = (1 << 63) - 1
Serial = Annotated[int, Range(0, MAX_SERIAL)]


class EventKind(IntEnum):
    """What kind of thing happened; the numbers are those of the wire."""

    COORDINATOR_STARTED = 1
    PEER_JOINED = 2
    PEER_LEFT = 3
    """On purpose."""
    PEER_GONE = 4
    """Its stream broke, or it said nothing for too long."""
    PEER_SILENT = 5
    """Nothing is heard of it, or it is waited for; it may yet be given up."""
    PEER_REFUSED = 6
    """What it told cannot be."""
    PEER_SET_ASIDE = 7
    PEER_RELIEVED = 8
    """It got slow, and others take most of its share."""
    PEER_LEAVING = 9
    """It would leave, and hands over first."""
    PEER_PAUSED = 10
    PEER_RESUMED = 11
    DISK_LOW = 18
    """The coordinator's disk is nearly full."""
    DISK_FREE = 19
    """It has room again."""
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
    """Its owner changed something of it."""
    RUN_MOVED = 37
    """Layers moved between its stages, so that steps take less time."""

    @property
    def label(self) -> str:
        """For people and `--json`: `went-back`, `peer-joined`."""
        return self.name.lower().removeprefix("run_").replace("_", "-")


class Actor(IntEnum):
    """The person who requested a change of a run; the numbers are those of the wire."""

    CLIENT = 1
    """Some client, in a swarm without keys."""
    OWNER = 2
    """The client that submitted the run."""
    OPERATOR = 3
    """Whoever runs the coordinator, on its page."""

    @property
    def label(self) -> str:
        """The name for `--json`: `operator`."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmEvent:
    """Something that happened.

    Attributes:
        serial: rises by one with each; those of a run that is another client's are there too.
        unix_s: when the coordinator decided it, by its wall clock.
        run_id: the run that it is about, if it is about one.
        peer_id: so too of a peer.
        from_step: how many steps counted before it.
        to_step: and after it: of an evaluation or a snapshot, how many are in the weights.
        words: empty where it is about another client's run.
        actor: the person who requested it; None if nobody did.
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
    """Events in a row, oldest first."""

    events: Annotated[tuple[SwarmEvent, ...], Length(MAX_PAGE_EVENTS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventsRequest:
    """Tell what happened, and perhaps what happens.

    Attributes:
        since: the first serial number that is wanted; older ones may be forgotten.
        run_id: only what is about this run.
        follows: go on telling until the caller hangs up.
    """

    since: Serial = 0
    run_id: RunId | None = None
    follows: bool = False
    protocol_version: Annotated[int, Spoken("client", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Steered:
    """A request to pause, to resume or to change a run, which the coordinator granted.

    Attributes:
        number: place among all requests for this run, from 1.
        kind: `RUN_PAUSED`, `RUN_RESUMED` or `RUN_STEERED`.
        actor: the person who requested it.
        step: how many steps were committed.
        words: the request as a sentence.
    """

    number: Annotated[int, Range(1, (1 << 32) - 1)]
    kind: EventKind
    actor: Actor
    step: StepNumber
    words: Text


@dataclass(frozen=True, kw_only=True, slots=True)
class WentBack:
    """A run went back: steps from `to_step` on do not count any more, and are made again.

    Attributes:
        from_step: how many steps counted.
        to_step: how many count from now on.
        why: whose weights are lost.
        remedy: what would have kept these steps.
    """

    from_step: StepNumber
    to_step: StepNumber
    why: Text
    remedy: Text

    @property
    def words(self) -> str:
        """All of it, as a sentence."""
        lost = self.from_step - self.to_step
        steps = "1 step is" if lost == 1 else f"{lost} steps are"
        return (
            f"went back from step {self.from_step} to step {self.to_step} because {self.why}; "
            f"{steps} made again. What would have kept them: {self.remedy}"
        )
