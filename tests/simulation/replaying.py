"""A simulated coordinator's recording, decided again as it grows, must give the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.coordinator.recording.entries import Base, Batch
from swarm_ft.coordinator.recording.files import batch_from, text_of
from swarm_ft.coordinator.replay import Moment, moments

BATCHES_OF_A_FILE = 40


def without_keys(state: SwarmState) -> SwarmState:
    """Return the state as it is written down, without keys."""
    runs = {name: replace(run, storage_key=b"") for name, run in state.runs.items()}
    return replace(state, runs=MappingProxyType(runs))


def without_times(state: SwarmState) -> SwarmState:
    """Return the state as if the last heartbeat of all members were now."""
    members = {name: replace(one, heard_at_s=0.0) for name, one in state.members.items()}
    return replace(state, members=MappingProxyType(members), seen_at_s=0.0)


class Replaying:
    """A `Sink` that decides again what comes, by what would lie on the disk.

    Args:
        fail: called with the difference.
        state: what the coordinator knows now.
    """

    def __init__(self, fail: Callable[[str], None], state: Callable[[], SwarmState]) -> None:
        self._fail = fail
        self._state = state
        self._num_batches = 0
        self._coming: list[Batch] = []
        self._moments = moments(self._batches())
        self.moment: Moment | None = None

    @property
    def wants_base(self) -> bool:
        """See `Sink`."""
        return self._num_batches % BATCHES_OF_A_FILE == 0

    def put(self, batch: Batch) -> None:
        """See `Sink`."""
        is_before = self.wants_base  # what was left is put in front of the base, or is the base
        self._num_batches += 1
        again = batch_from(text_of(batch).encode())
        self._coming.append(again)
        for _ in again.entries:
            self.moment = next(self._moments)
        if is_before or isinstance(batch.entries[0], Base) or self.moment is None:
            return  # it is of the moment before
        living, found = without_keys(self._state()), self.moment.state
        if found.seen_at_s != living.seen_at_s:  # heartbeats wait to be written
            living, found = without_times(living), without_times(found)
        if living != found:
            self._fail(f"replayed after {batch.entries[-1]}:\n{found}\nlives:\n{living}")

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield self._coming.pop(0)
