"""Collection of the inputs of decisions, flushed every second. It does no I/O itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from swarm_ft.build import described_version
from swarm_ft.coordinator.facts.events import Effect, EmitEvent, Event
from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.coordinator.recording.entries import (
    Base,
    Batch,
    Decided,
    Entry,
    MachineTold,
    Numbered,
    Passed,
    RelaysSeen,
    changes_only_times,
    sender_of,
    without_known_ways,
)
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import RelayStatus

FLUSH_S = 1.0
"""Most seconds that a kill loses."""
PASSED_S = 30.0
"""Most seconds until the passage of time is recorded."""


class Sink(Protocol):
    """Receiver of batches."""

    @property
    def wants_base(self) -> bool:
        """Whether the next batch must begin with a `Base`."""
        ...

    def put(self, batch: Batch) -> None:
        """Store a batch after all earlier ones, without waiting."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """Functions that return values which displays show beside the state, see `Base`."""

    machines: Callable[[], Mapping[PeerId, Machine]]
    relays: Callable[[], tuple[RelayStatus, ...]]
    next_event: Callable[[], int]
    unix_s: Callable[[], float]


class Recorder:
    """Records decisions for a sink.

    Args:
        sink: Receiver of batches.
        around: Values beside the state.
    """

    def __init__(self, sink: Sink, around: Surroundings) -> None:
        self._sink = sink
        self._around = around
        self._entries: list[Entry] = []
        self._last_heard_s: dict[PeerId, float] = {}
        self._has_passed = False
        self._now_s = 0.0
        self._flushed_s = self._passed_s = 0.0
        self._relays: tuple[RelayStatus, ...] = ()
        self._next_event: int | None = None

    def record_decision(
        self,
        before: SwarmState,
        event: Event,
        after: SwarmState,
        effects: Sequence[Effect],
    ) -> None:
        """Record an event and whether it had effects, before these are numbered."""
        now_s = after.seen_at_s
        if self._next_event is None or self._sink.wants_base:
            self._begin(before, now_s)
        if self._next_event != self._around.next_event():
            self._next_event = self._around.next_event()
            self._entries.append(Numbered(self._next_event))
        if not effects and changes_only_times(before, event, after):
            self._pass(after, event)
        else:
            self._end_passed()
            self._entries.append(Decided(now_s, without_known_ways(before, event)))
        self._next_event += sum(isinstance(effect, EmitEvent) for effect in effects)
        self._now_s = now_s
        self._flush_in_time()

    def record_machine(self, peer_id: PeerId, machine: Machine) -> None:
        """Record a member's report of its machine."""
        if self._next_event is not None:
            self._entries.append(MachineTold(peer_id, machine))

    def close(self) -> None:
        """Flush all entries."""
        self._end_passed()
        self._flush()

    def _begin(self, state: SwarmState, now_s: float) -> None:
        self.close()
        self._now_s = self._passed_s = now_s
        self._next_event, self._relays = self._around.next_event(), self._around.relays()
        self._entries.append(
            Base(
                version=described_version(),
                now_s=now_s,
                state=state,
                machines=MappingProxyType(dict(self._around.machines())),
                relays=self._relays,
                next_event=self._next_event,
            )
        )
        self._flush()

    def _pass(self, after: SwarmState, event: Event) -> None:
        self._has_passed = True
        peer_id = sender_of(after, event)
        if peer_id is not None:
            self._last_heard_s[peer_id] = after.seen_at_s

    def _end_passed(self) -> None:
        if self._has_passed:
            self._entries.append(Passed(self._now_s, self._last_heard_s))
            self._last_heard_s, self._has_passed, self._passed_s = {}, False, self._now_s

    def _flush_in_time(self) -> None:
        if self._now_s - self._flushed_s < FLUSH_S:
            return
        if self._now_s - self._passed_s >= PASSED_S:
            self._end_passed()
        relays = self._around.relays()
        if relays != self._relays:
            self._relays = relays
            self._entries.append(RelaysSeen(relays))
        self._flush()

    def _flush(self) -> None:
        self._flushed_s = self._now_s
        if self._entries:
            batch = Batch(self._around.unix_s(), self._now_s, tuple(self._entries))
            self._entries = []
            self._sink.put(batch)
