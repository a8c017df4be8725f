"""A recording: its contents, its cost, and its behaviour on a failing disk."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import pytest
import xxhash

from swarm_ft.build import described_version
from swarm_ft.coordinator.decide.machine import decide
from swarm_ft.coordinator.facts.connectivity import Connectivity, NatInfo
from swarm_ft.coordinator.facts.events import (
    CodecsChanged,
    Event,
    PeerJoined,
    PeerLost,
    PeerSaid,
    RateChanged,
    ResultCollected,
    RunAborted,
    RunCancelled,
    RunPaused,
    RunResumed,
    RunSubmitted,
    SnapshotLost,
    SnapshotWritten,
    Tick,
    TokensLost,
)
from swarm_ft.coordinator.facts.messages import Progress
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.state import Snapshot, SwarmState
from swarm_ft.coordinator.recording import files
from swarm_ft.coordinator.recording.entries import Base, Batch, Decided, Entry, Passed
from swarm_ft.coordinator.recording.files import (
    NUM_FILES,
    VERSION,
    RecordingFile,
    RecordingFiles,
    batch_from,
    files_of,
    text_of,
)
from swarm_ft.coordinator.recording.recorder import PASSED_S, Recorder, Surroundings
from swarm_ft.coordinator.recording.values import RECORDED
from swarm_ft.coordinator.replay import at_end, at_time, moments
from swarm_ft.errors import BadInput, BadOption, JournalError
from swarm_ft.ids import Attempt, BlockIndex, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.capacity import Machine
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import CommitStep, PeerAlive, SavedStage
from swarm_ft.protocol.messages.events import Actor
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.protocol.messages.reports import ByteCounts, Traffic
from swarm_ft.protocol.spec.best import Best, Judged
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Codecs, RunSpec
from tests.earlier_files import ALL, CANCELLED, DONE_STEPS, SEALED, Earlier
from tests.earlier_files import RUN as EARLIER_RUN
from tests.simulation.replaying import without_keys
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.work import calls_of

NUM_FEW = 8
NUM_PEERS, NUM_STAGES, NUM_BLOCKS = 200, 8, 40
MAX_CALLS = 100
"""Function calls per peer and second."""
MAX_BYTES_PER_S = 8_000
SAVED = Snapshot(
    last_commit=CommitStep(
        run_id=RunId("r"),
        attempt=Attempt(1),
        step=StepNumber(1),
        clip_factor=1.0,
        learning_rate=0.1,
    ),
    sent=ByteCounts(),
)
EMPTY = MappingProxyType[PeerId, Machine]({})


class Kept:
    """A `Sink` that keeps all batches."""

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


class Living:
    """A coordinator whose decisions are recorded.

    Args:
        swarm: Swarm that exists already.
    """

    def __init__(self, swarm: Swarm, recorder: Recorder) -> None:
        self.state, self.now_s = swarm.state, swarm.now_s
        self._recorder = recorder
        self.calls = 0

    def handle(self, event: Event, after_s: float = 0.001) -> None:
        self.now_s += after_s
        before = self.state
        self.state, effects = decide(before, event, self.now_s)
        self.calls += calls_of(
            lambda: self._recorder.record_decision(before, event, self.state, effects)
        )

    def all_alive(self, parts_begun: int | None = None) -> None:
        """Let every member send a heartbeat within a second, with some ticks between."""
        (run,) = self.state.runs.values()
        step = StepNumber(run.committed_steps)
        alive = PeerAlive()
        if parts_begun is not None:
            alive = PeerAlive(
                run_id=run.run_id,
                attempt=run.attempt.number,
                step=step,
                parts_begun=parts_begun,
            )
        for number, peer in enumerate(list(self.state.members)):
            self.handle(PeerSaid(peer, alive), 1.0 / len(self.state.members))
            if number % 50 == 0:
                self.handle(Tick(), 0.0)


def in_a_step(swarm: Swarm, spec: RunSpec, num_peers: int, num_stages: int) -> Swarm:
    """A swarm in a step, whose peers all sent a message just now."""
    swarm.submit(spec)
    blocks = spec.model.num_blocks
    size = blocks // num_stages
    cuts = [f"{first}-{first + size}" for first in range(0, blocks, size)]
    peers = [FakePeer(f"peer-{i:029d}", cuts[i % num_stages]) for i in range(num_peers)]
    swarm.join(*peers)
    swarm.settle_until(lambda: swarm.run().committed_steps == 2)
    for peer in peers:
        swarm.now_s += 0.001
        told = PeerSaid(peer.peer_id, PeerAlive())
        swarm.state, _ = decide(swarm.state, told, swarm.now_s)
    return swarm


@pytest.fixture
def trains(swarm: Swarm, make_spec: MakeSpec) -> Swarm:
    """A few peers in a step."""
    spec = make_spec(num_blocks=4, num_steps=4, batch_size=8, num_samples=16)
    return in_a_step(swarm, spec, NUM_FEW, 2)


def test_heartbeats_that_say_nothing_are_kept_as_their_last_times(trains: Swarm) -> None:
    sink = Kept()
    recorder = recorder_of(sink)
    living = Living(trains, recorder)
    for _ in range(5):
        living.all_alive()
    recorder.close()
    base, passed = sink.entries
    assert isinstance(base, Base)
    assert isinstance(passed, Passed)
    assert len(passed.heard) == NUM_FEW
    assert without_keys(at_end(moments(sink.batches)).state) == without_keys(living.state)


def test_what_is_told_is_kept_with_whatever_passed_before(trains: Swarm) -> None:
    sink = Kept()
    recorder = recorder_of(sink)
    living = Living(trains, recorder)
    living.all_alive()
    living.all_alive(parts_begun=1)
    first = next(iter(living.state.members))
    living.handle(PeerLost(first))
    recorder.close()
    kinds = [type(entry) for entry in sink.entries]
    assert kinds[:2] == [Base, Passed]
    assert kinds.count(Decided) == NUM_FEW + 1
    assert without_keys(at_end(moments(sink.batches)).state) == without_keys(living.state)


@pytest.mark.thorough
def test_two_hundred_peers_a_second_cost_little(swarm: Swarm, make_spec: MakeSpec) -> None:
    spec = make_spec(num_blocks=NUM_BLOCKS, num_steps=4, batch_size=200, num_samples=400)
    trains = in_a_step(swarm, spec, NUM_PEERS, NUM_STAGES)
    for is_busy in (False, True):
        num_calls, num_bytes = cost_of_3_seconds(trains, is_busy=is_busy)
        assert num_calls < 3 * MAX_CALLS * NUM_PEERS
        assert num_bytes < 3 * MAX_BYTES_PER_S


def cost_of_3_seconds(trains: Swarm, *, is_busy: bool) -> tuple[int, int]:
    """Return calls of the loop and of the writing thread, and bytes, after the base."""
    sink, written = Kept(), bytearray()
    living = Living(trains, recorder_of(sink))
    living.all_alive()
    num_first, living.calls = len(sink.batches), 0
    for second in range(3):
        living.all_alive(parts_begun=second if is_busy else None)

    def write() -> None:
        for batch in sink.batches[num_first:]:
            written.extend(zlib.compress(text_of(batch).encode()))

    num_calls = living.calls + calls_of(write)
    return num_calls, len(written)


def test_time_alone_is_written_down_now_and_then(trains: Swarm) -> None:
    sink = Kept()
    recorder = recorder_of(sink)
    living = Living(trains, recorder)
    living.all_alive()
    for _ in range(round(PASSED_S) + 1):
        living.all_alive()
    assert [type(entry) for entry in sink.entries] == [Base, Passed]


# ---- on the disk


def entries_at(state: SwarmState, now_s: float) -> Iterable[Batch]:
    """Return a base, then a tick each second."""
    base = Base(version="1", now_s=now_s, state=state, machines=EMPTY, relays=(), next_event=1)
    yield Batch(1e9 + now_s, now_s, (base,))
    for second in range(1, 9):
        yield Batch(1e9 + now_s + second, now_s + second, (Decided(now_s + second, Tick()),))


def written(folder: Path, *, key: bytes | None = None, starts: int = 1) -> list[RecordingFile]:
    for start in range(starts):
        recording = RecordingFiles(folder, key)
        for batch in entries_at(SwarmState(), 100.0 * start):
            recording.put(batch)
        recording.close()
    return [RecordingFile(path, key) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_each_start_goes_on_in_a_file_of_its_own(tmp_path: Path, key: bytes | None) -> None:
    files = written(tmp_path / "recording", key=key, starts=2)
    assert [len(list(file.batches())) for file in files] == [9, 9]
    found = list(moments(batch for file in files for batch in file.batches()))
    assert at_end(found).unix_s == 1e9 + 108
    assert at_time(found, 1e9 + 5.5).state.seen_at_s == 5.0
    assert (tmp_path / "recording").stat().st_mode & 0o77 == 0
    assert all(path.stat().st_mode & 0o77 == 0 for path in (tmp_path / "recording").iterdir())
    for unix_s in (1e9 - 1, 1e9 + 300):
        with pytest.raises(BadOption, match="the recording is from"):
            at_time(found, unix_s)


@pytest.mark.parametrize("cut", [1, 5, 13, 40])
def test_what_a_kill_leaves_half_written_is_no_part_of_it(tmp_path: Path, cut: int) -> None:
    (file,) = written(tmp_path / "recording")
    path = tmp_path / "recording" / "00000001"
    path.write_bytes(path.read_bytes()[:-cut])
    assert len(list(file.batches())) in (7, 8)


def test_another_key_opens_nothing(tmp_path: Path) -> None:
    written(tmp_path / "recording", key=b"k" * 32)
    with pytest.raises(BadInput, match="were not sealed here with this key"):
        RecordingFile(tmp_path / "recording" / "00000001", b"x" * 32).begins()
    with pytest.raises(BadInput, match="it is encrypted"):
        RecordingFile(tmp_path / "recording" / "00000001").begins()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b"swarm-ft recording 0\n",
            "expected version 1 to 4, got 0, which swarm-ft of an unknown version wrote; replay it",
        ),
        (
            b"swarm-ft recording 5; written by 0.9.0+g1a2b3c4d\n",
            "expected version 1 to 4, got 5, which swarm-ft 0.9.0\\+g1a2b3c4d wrote; replay it",
        ),
        (b"something\n", "expected a coordinator's recording, got another kind of file; move it"),
        (b"", "expected a coordinator's recording, got another kind of file; move it"),
    ],
)
def test_another_version_and_another_kind_of_file_are_refused(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "00000001"
    path.write_bytes(line)
    with pytest.raises(BadInput, match=message):
        RecordingFile(path).begins()


@pytest.mark.parametrize("earlier", [*ALL, SEALED], ids=lambda one: one.name)
def test_a_recording_of_an_earlier_commit_is_replayed(tmp_path: Path, earlier: Earlier) -> None:
    earlier.unpack(tmp_path)
    (file,) = files_of(tmp_path / "files" / "journal.db", earlier.key)
    found = at_end(moments(file.batches()))
    runs = {name: (run.phase, run.committed_steps) for name, run in found.state.runs.items()}
    assert runs == {
        EARLIER_RUN: (RunPhase.WAITING, DONE_STEPS),
        CANCELLED: (RunPhase.CANCELLED, 0),
    }


@pytest.mark.parametrize(
    ("found", "value"),
    [
        ({"run_id": "r", "by": "a client"}, RunCancelled(RunId("r"))),
        ({"run_id": "r", "by": "the swarm's owner"}, RunCancelled(RunId("r"), Actor.OPERATOR)),
        ({"run_id": "r", "by_operator": False}, RunCancelled(RunId("r"))),
        ({"run_id": "r", "by_operator": True}, RunCancelled(RunId("r"), Actor.OPERATOR)),
        ({"run_id": "r", "actor": 2}, RunCancelled(RunId("r"), Actor.OWNER)),
        ({"run_id": "r", "reason": "torn"}, TokensLost(RunId("r"), "torn")),
        (
            {"run_id": "r", "snapshot": RECORDED.encode(SAVED), "reason": "full"},
            SnapshotLost(RunId("r"), SAVED, "full"),
        ),
        ({"may_go": True, "words": "", "seconds": 0.0}, Progress(may_go=True)),
        (
            {"may_go": False, "words": "b copies", "seconds": 2.0},
            Progress(
                may_go=False,
                reason=Reason(kind=ReasonKind.RECORDED_TEXT, text="b copies"),
                seconds=2.0,
            ),
        ),
    ],
)
def test_values_of_earlier_versions_have_todays_fields(found: object, value: object) -> None:
    assert RECORDED.decode(type(value), found) == value


def test_a_file_says_who_wrote_it(tmp_path: Path) -> None:
    written(tmp_path / "recording")
    path = tmp_path / "recording" / "00000001"
    assert path.read_bytes().startswith(
        f"swarm-ft recording {VERSION}; written by {described_version()}\n".encode()
    )


def test_the_oldest_go_when_there_is_no_room(tmp_path: Path) -> None:
    folder, max_bytes = tmp_path / "recording", 8_000
    files = RecordingFiles(folder, max_bytes=max_bytes)
    base, *ticks = entries_at(SwarmState(), 0.0)
    while not (folder / f"{2 * NUM_FILES:08d}").exists():
        for batch in [base] if files.wants_base else ticks:
            files.put(batch)
    files.close()
    paths = sorted(folder.iterdir())
    sizes = [path.stat().st_size for path in paths]
    assert sum(sizes) <= max_bytes + max(sizes)
    assert paths[0].name != "00000001"
    found = list(moments(batch for path in paths for batch in RecordingFile(path).batches()))
    assert isinstance(found[0].entry, Base)


def test_a_disk_that_refuses_costs_the_recording_alone(
    tmp_path: Path, trains: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "recording"
    folder.write_text("not a folder")
    files = RecordingFiles(folder)
    recorder = recorder_of(files)
    living = Living(trains, recorder)
    living.all_alive()
    while not files.wants_base:
        pass  # its thread was refused
    folder.unlink()
    living.all_alive(parts_begun=1)
    recorder.close()
    files.close()
    assert "a part of it is lost" in caplog.text
    found = at_end(moments(RecordingFile(folder / "00000001").batches()))
    assert found.state == without_keys(living.state)


def test_what_does_not_begin_with_a_base_is_refused() -> None:
    batches = [Batch(1.0, 1.0, (Decided(1.0, Tick()),))]
    with pytest.raises(JournalError, match="expected a state as its first entry"):
        at_end(moments(batches))


# ---- as text


def test_every_kind_of_event_is_read_as_it_was_written(make_spec: MakeSpec) -> None:
    peer, run_id = PeerId("peer"), RunId("run-1")
    hello = FakePeer("peer", "0-2").hello()
    commit = CommitStep(
        run_id=run_id, attempt=Attempt(2), step=StepNumber(3), clip_factor=0.1, learning_rate=1e-5
    )
    saved = SavedStage(layers=LayerRange(0, 2), digest=bytes(range(16)), total_bytes=7)
    snapshot = Snapshot(
        last_commit=commit,
        sent=ByteCounts(forward_bytes=3),
        traffic=(Traffic(boundary=BlockIndex(2), key_frames=4),),
        judged=Judged(step=StepNumber(3), num_worse=1, best=Best(StepNumber(3), 0.1)),
        stages=(saved,),
    )
    homes = {"a": NatInfo(house="1.2.3.4", is_open=True), "b": NatInfo(house="")}
    ways = Connectivity(
        homes=MappingProxyType(homes), met=MappingProxyType({("a", "b"): Way.RELAYED})
    )
    grant = Grant(replica_only=True, layers=LayerRange(0, 2))
    key = b"q" * 32
    events: tuple[Event, ...] = (
        PeerJoined(replace(hello, machine_memory_bytes=7), grant, "machine"),
        PeerSaid(peer, PeerAlive(attempt=Attempt(1), compute_s=0.1)),
        PeerLost(peer),
        RunSubmitted(run_id, make_spec(num_steps=4), "owner", key, 7),
        RunCancelled(run_id, Actor.OPERATOR),
        RunPaused(run_id, Actor.OPERATOR),
        RunResumed(run_id),
        RateChanged(run_id, 0.1),
        CodecsChanged(run_id, Codecs("aq2+z", "q2+z")),
        ResultCollected(run_id),
        SnapshotWritten(run_id, snapshot),
        SnapshotLost(run_id, snapshot, "why"),
        TokensLost(run_id, "why"),
        RunAborted(run_id, "why"),
        Tick(ways),
        Tick(),
    )
    assert {type(event) for event in events} == set(get_args(Event))
    batch = Batch(0.1, 0.2, tuple(Decided(0.1, event) for event in events))
    text = text_of(batch)
    assert key.decode() not in text
    assert b64encode(key).decode() not in text
    keyless = [
        replace(event, storage_key=b"") if isinstance(event, RunSubmitted) else event
        for event in events
    ]
    again = batch_from(text.encode())
    assert [one.event for one in again.entries if isinstance(one, Decided)] == keyless
    assert (again.unix_s, again.now_s) == (0.1, 0.2)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1,2]", '[1,2,[["Nothing",3]]]', '[1,2,[["PeerLost",1.0,{}]]]']
)
def test_what_is_no_batch_is_refused(tmp_path: Path, text: str) -> None:
    payload = zlib.compress(text.encode())
    head = struct.pack("<IQ", len(payload), xxhash.xxh3_64_intdigest(payload))
    path = tmp_path / "00000001"
    path.write_bytes(b"swarm-ft recording 2\n" + head + payload)
    with pytest.raises(JournalError, match="it cannot be read"):
        list(RecordingFile(path).batches())


# ---- a recording may come from anybody


def forged(path: Path, *texts: bytes) -> RecordingFile:
    """Write a file with these texts as its batches, in valid frames."""
    packed = zlib.compressobj()
    with path.open("wb") as file:
        file.write(b"swarm-ft recording 2\n")
        for text in texts:
            payload = packed.compress(text) + packed.flush(zlib.Z_SYNC_FLUSH)
            file.write(struct.pack("<IQ", len(payload), xxhash.xxh3_64_intdigest(payload)))
            file.write(payload)
    return RecordingFile(path)


def test_a_batch_is_unpacked_up_to_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_BATCH_BYTES", 1 << 20)
    bomb = forged(tmp_path / "00000001", bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(JournalError, match="cannot be read: a batch has more than 1048576 bytes"):
        next(bomb.batches())
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 50_000, b"[1, 2, " + b"[" * 9000])
def test_what_is_nested_too_deeply_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(JournalError, match="cannot be read"):
        next(forged(tmp_path / "00000001", text).batches())


def test_a_batch_that_nothing_would_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "MAX_BATCH_BYTES", 10)
    assert list(written(tmp_path)[0].batches()) == []
    assert "expected 10 at most; a part of it is lost" in caplog.text
