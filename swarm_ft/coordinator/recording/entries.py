"""Entries of a recording: all inputs of decisions, and values that only displays show. Values.

Heartbeats of members and ticks that change nothing but times are not recorded one by one. `Passed`
holds only their last times, which lead to the same state.
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
    """A complete state: at each start, and where older recordings may be deleted.

    Attributes:
        version: Version of the swarm-ft that decides.
        now_s: Monotonic seconds.
        state: State without keys.
        machines: Measurements that members sent of their machines.
        next_event: Number of the next event for people.
    """

    version: str
    now_s: float
    state: SwarmState
    machines: Mapping[PeerId, Machine]
    relays: tuple[RelayStatus, ...]
    next_event: int


@dataclass(frozen=True, slots=True)
class Decided:
    """An event that had effects, with its monotonic seconds."""

    now_s: float
    event: Event


@dataclass(frozen=True, slots=True)
class Passed:
    """Events without effects.

    Attributes:
        now_s: Monotonic seconds of the last of them.
        heard: Monotonic seconds of the last message of each member that sent some.
    """

    now_s: float
    heard: Mapping[PeerId, float]


@dataclass(frozen=True, slots=True)
class MachineTold:
    """A member's report of its machine."""

    peer_id: PeerId
    machine: Machine


@dataclass(frozen=True, slots=True)
class RelaysSeen:
    """A change of the relays, or of their traffic."""

    relays: tuple[RelayStatus, ...]


@dataclass(frozen=True, slots=True)
class Numbered:
    """A change of the next event's number."""

    next_event: int


Entry = Base | Decided | Passed | MachineTold | RelaysSeen | Numbered


@dataclass(frozen=True, slots=True)
class Batch:
    """Some successive entries.

    Attributes:
        unix_s: Seconds of the wall clock at `now_s`.
        now_s: Monotonic seconds.
    """

    unix_s: float
    now_s: float
    entries: tuple[Entry, ...]

    def unix_at(self, now_s: float) -> float:
        """Return the wall clock's time at these monotonic seconds."""
        return self.unix_s + now_s - self.now_s


_OTHERS = tuple(
    one.name
    for one in fields(SwarmState)
    if one.compare and one.name not in ("members", "seen_at_s")
)


def changes_only_times(before: SwarmState, event: Event, after: SwarmState) -> bool:
    """Whether an event changed nothing but times of messages."""
    if not isinstance(event, (PeerSaid, Tick)):
        return False
    if any(getattr(before, name) != getattr(after, name) for name in _OTHERS):
        return False
    peer_id = sender_of(before, event)
    if peer_id is None or peer_id not in after.members:
        return before.members == after.members
    one, other = before.members[peer_id], after.members[peer_id]
    is_same = one == replace(other, heard_at_s=one.heard_at_s)
    return is_same and {**after.members, peer_id: one} == before.members


def without_known_ways(before: SwarmState, event: Event) -> Event:
    """Return the same event; a tick without news of the connectivity lacks it."""
    return Tick() if isinstance(event, Tick) and event.ways == before.ways else event


def after_passed(state: SwarmState, passed: Passed) -> SwarmState:
    """Return the state after events without effects."""
    members = dict(state.members)
    for peer, heard_at_s in passed.heard.items():
        members[peer] = replace(members[peer], heard_at_s=heard_at_s)
    return replace(state, seen_at_s=passed.now_s, members=MappingProxyType(members))


def sender_of(state: SwarmState, event: Event) -> PeerId | None:
    """Return the member that sent the message, if it is one."""
    if isinstance(event, PeerSaid) and event.peer_id in state.members:
        return event.peer_id
    return None
