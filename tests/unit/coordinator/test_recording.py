"""A recording: what is kept of what happens, what it costs, and what becomes of it on a disk."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.coordinator.facts.events import PeerJoined, PeerSaid, RunSubmitted, Tick
from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.coordinator.recording.entries import Base, Batch, Decided, Entry, Passed
from swarm_ft.coordinator.recording.files import (
    NUM_FILES,
    RecordingFile,
    RecordingFiles,
    text_of,
)
from swarm_ft.coordinator.recording.recorder import PASSED_S, Recorder, Surroundings
from swarm_ft.coordinator.replay import at_end, at_time, moments
from swarm_ft.errors import BadInput, BadOption, JournalError
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import PeerAlive
from tests.simulation.replaying import without_keys
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

NUM_PEERS, NUM_STAGES, NUM_BLOCKS = 200, 8, 40
MAX_SHARE = 0.02
"""Of a core."""


class Kept:
    """A `Sink`."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.wants_base = False

    def put(self, batch: Batch) -> None:
        self.batches.append(batch)

    @property
    def entries(self) -> list[Entry]:
        return [entry for batch in self.batches for entry in batch.entries]


def recorder_of(sink: Kept | RecordingFiles) -> Recorder:
    around = Surroundings(
        machines=dict, relays=tuple, next_event=lambda: 1, unix_s=lambda: 1_700_000_000.0
    )
    return Recorder(sink, around)


def hear(swarm: Swarm, recorder: Recorder, event: PeerSaid | Tick) -> None:
    before = swarm.state
    recorder.decided(before, event, *after(swarm, event))


def after(swarm: Swarm, event: PeerSaid | Tick) -> tuple[SwarmState, Sequence[object]]:
    effects = swarm.handle(event)
    return swarm.state, effects
