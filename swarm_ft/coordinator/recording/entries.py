"""What is recorded: whatever went into decisions, and what is shown beside what they know. Values.

Of events that changed nothing but when something was heard of, members' heartbeats and ticks, only
the last times are kept, in `Passed`: with these the state is the same as after all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.events import Event, PeerSaid, Tick
from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import RelayStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """All that is known, to begin with: at each start, and where older recordings may go.

    Attributes:
        version: of the swarm-ft that decides.
        now_s: monotonic seconds.
        state: without keys.
        machines: what members measured of themselves.
        next_event: the number of the next of what is told to people.
    """

    version: str
    now_s: float
    state: SwarmState
    machines: Mapping[PeerId, Machine]
    relays: tuple[RelayStatus, ...]
    next_event: int


@dataclass(frozen=True, slots=True)
class Decided:
    """An event from which something followed, and when it was: monotonic seconds."""

    now_s: float
    event: Event


@dataclass(frozen=True, slots=True)
class Passed:
    """Events from which nothing followed.

    Attributes:
        now_s: when the last of them was.
        heard: when something was heard last of each member that said something.
    """

    now_s: float
    heard: Mapping[PeerId, float]


@dataclass(frozen=True, slots=True)
class MachineTold:
    """A member said what it measured of its machine."""

    peer_id: PeerId
    machine: Machine


@dataclass(frozen=True, slots=True)
class RelaysSeen:
    """There are other relays, or they carried more."""

    relays: tuple[RelayStatus, ...]


@dataclass(frozen=True, slots=True)
class Numbered:
    """What happens next is told to people by this number."""

    next_event: int


Entry = Base | Decided | Passed | MachineTold | RelaysSeen | Numbered


@dataclass(frozen=True, slots=True)
class Batch:
    """Some entries in a row.

    Attributes:
        unix_s: the wall clock's time at `now_s`.
        now_s: monotonic seconds.
    """

    unix_s: float
    now_s: float
    entries: tuple[Entry, ...]

    def unix_at(self, now_s: float) -> float:
        """The wall clock's time at a moment of it."""
        return self.unix_s + now_s - self.now_s


_OTHERS = tuple(
    one.name
    for one in fields(SwarmState)
    if one.compare and one.name not in ("members", "seen_at_s")
)


def only_passed(before: SwarmState, event: Event, after: SwarmState) -> bool:
    """Whether an event changed nothing but when something was heard."""
    if not isinstance(event, (PeerSaid, Tick)):
        return False
    if any(getattr(before, name) != getattr(after, name) for name in _OTHERS):
        return False
    peer_id = heard_in(before, event)
    if peer_id is None or peer_id not in after.members:
        return before.members == after.members
    one, other = before.members[peer_id], after.members[peer_id]
    is_same = one == replace(other, heard_at_s=one.heard_at_s)
    return is_same and {**after.members, peer_id: one} == before.members


def in_short(before: SwarmState, event: Event) -> Event:
    """The same event; of ways that are known already a tick says nothing."""
    return Tick() if isinstance(event, Tick) and event.ways == before.ways else event


def after_passed(state: SwarmState, passed: Passed) -> SwarmState:
    """The state after events from which nothing followed."""
    members = dict(state.members)
    for peer, heard_at_s in passed.heard.items():
        members[peer] = replace(members[peer], heard_at_s=heard_at_s)
    return replace(state, seen_at_s=passed.now_s, members=MappingProxyType(members))


def heard_in(state: SwarmState, event: Event) -> PeerId | None:
    """The member of whom something was heard."""
    if isinstance(event, PeerSaid) and event.peer_id in state.members:
        return event.peer_id
    return None
