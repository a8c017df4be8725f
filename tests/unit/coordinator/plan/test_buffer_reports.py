"""Effects of reported buffers on the ledger and the status."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from swarm_ft.coordinator.facts.events import RunCancelled
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.watching import overview
from swarm_ft.ids import BlockIndex, PeerId, RunId, SampleId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import StageReady
from swarm_ft.protocol.messages.reports import BufferCounts, HeldBuffers, SampleSet
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.reasons import kinds_in
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN = RunId("run-1")
EPOCH_STEPS = 16
BOUNDARY = BlockIndex(2)
Pair: TypeAlias = tuple[PeerId | None, PeerId | None]


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    """A spec with sixteen steps per epoch."""
    return make_spec(
        seq_length=64,
        num_samples=64,
        batch_size=4,
        micro_batch_size=1,
        num_steps=40,
        shuffle=True,
    )


@pytest.fixture
def replicas(make_peer: type[FakePeer]) -> list[FakePeer]:
    return [make_peer(name, "0-2" if name[0] == "a" else "2-4") for name in ("a", "a2", "b", "b2")]


def pair(swarm: Swarm, sample: int) -> Pair:
    """Return the holders of a sample's buffer."""
    ledger = swarm.run().past.ledger
    assert ledger is not None
    upstream, downstream = ledger.entries([SampleId(sample)])[0][0].tolist()
    holders = (None, *ledger.peers)
    return holders[upstream], holders[downstream]


def pairs(swarm: Swarm) -> list[Pair]:
    return [pair(swarm, sample) for sample in range(swarm.run().spec.train.num_samples)]


def train_until(swarm: Swarm, step: int) -> None:
    swarm.settle_until(lambda: swarm.run().committed_steps >= step)


def begun(swarm: Swarm, spec: RunSpec, peers: Collection[FakePeer]) -> Swarm:
    swarm.submit(spec)
    swarm.join(*peers)
    return swarm


# ---- what is known


def test_a_commit_tells_who_holds_what(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, (a, b))
    assert set(pairs(swarm)) == {(None, None)}
    train_until(swarm, 3)
    samples = {sample for sample in range(64) if pair(swarm, sample) == ("a", "b")}
    assert samples == a.buffers[BOUNDARY] == b.buffers[BOUNDARY]
    assert len(samples) == 12


@pytest.mark.parametrize(
    ("codecs", "is_there"),
    [
        ({"forward_codec": "none", "backward_codec": "q8"}, False),
        ({"forward_codec": "none", "backward_codec": "q8+ef"}, False),
        ({"forward_codec": "none", "backward_codec": "q8+ef21"}, True),
        ({"forward_codec": "aqtop10", "backward_codec": "none"}, True),
    ],
)
def test_only_runs_with_buffers_at_both_ends_have_a_ledger(
    swarm: Swarm,
    make_spec: MakeSpec,
    a: FakePeer,
    b: FakePeer,
    codecs: dict[str, str],
    is_there: bool,
) -> None:
    begun(swarm, make_spec(**codecs), (a, b))
    assert (swarm.run().past.ledger is not None) is is_there


def test_a_run_of_one_stage_has_no_ledger(
    swarm: Swarm, spec: RunSpec, make_peer: type[FakePeer]
) -> None:
    begun(swarm, spec, (make_peer("all", "0-4"),))
    assert swarm.run().past.ledger is None
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_an_inventory_takes_out_what_is_not_there_and_adds_nothing(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, (a, b))
    train_until(swarm, 3)
    samples = sorted(b.buffers[BOUNDARY])[:5]
    strange = min(set(map(SampleId, range(64))) - b.buffers[BOUNDARY])
    swarm.lose(b)
    b.buffers[BOUNDARY] = {*samples, strange}
    before = pairs(swarm)
    assert {pair for pair in before if None not in pair} == {("a", "b")}
    swarm.join(b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    assert [sample for sample in range(64) if pair(swarm, sample) == ("a", "b")] == samples
    assert pair(swarm, strange) == (None, None)
    assert all(now[0] == then[0] for now, then in zip(pairs(swarm), before, strict=True))


def test_a_loss_takes_out_one_end(swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer) -> None:
    begun(swarm, spec, (a, b))
    train_until(swarm, 3)
    (sample, other) = sorted(b.buffers[BOUNDARY])[:2]
    train_until(swarm, 4)
    ready = replace(
        b.step_ready(swarm.run().committed_steps),
        lost=(HeldBuffers(boundary=BOUNDARY, samples=SampleSet.of([sample])),),
    )
    swarm.say(b, ready)
    assert pair(swarm, sample) == ("a", None)
    assert pair(swarm, other) == ("a", "b")


def test_a_restarted_coordinator_knows_it_all_again(
    tmp_path: Path, make_swarm: type[Swarm], spec: RunSpec, replicas: list[FakePeer]
) -> None:
    swarm = make_swarm(Journal(str(tmp_path / "journal.db")))
    begun(swarm, spec, replicas)
    train_until(swarm, EPOCH_STEPS + 4)
    before = swarm.run()
    assert len({pair for pair in pairs(swarm) if None not in pair}) > 1
    swarm.restart()
    assert swarm.run().past.ledger == before.past.ledger
    assert swarm.run().past.traffic == before.past.traffic
    assert before.past.traffic[0].key_frames > 0
    swarm.join(*replicas)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_with_a_run_its_ledger_goes(
    tmp_path: Path, make_swarm: type[Swarm], spec: RunSpec, replicas: list[FakePeer]
) -> None:
    swarm = make_swarm(Journal(str(tmp_path / "journal.db")))
    begun(swarm, spec, replicas)
    train_until(swarm, 4)
    swarm.handle(RunCancelled(RUN))
    swarm.restart()
    assert swarm.run().past.ledger is None


def test_who_goes_back_to_the_beginning_knows_nothing(
    tmp_path: Path,
    make_swarm: type[Swarm],
    spec: RunSpec,
    a: FakePeer,
    b: FakePeer,
    newcomer: FakePeer,
) -> None:
    swarm = make_swarm(Journal(str(tmp_path / "journal.db")))
    begun(swarm, spec, (a, b))
    train_until(swarm, 4)
    swarm.leave(b)
    swarm.join(newcomer)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    assert swarm.num_rollbacks == 1
    assert set(pairs(swarm)) == {(None, None)}
    swarm.restart()
    assert set(pairs(swarm)) == {(None, None)}


def test_who_goes_back_to_a_snapshot_keeps_what_is_known(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    begun(swarm, replace(spec, train=replace(spec.train, save_steps=3)), (a, b))
    train_until(swarm, 5)
    swarm.leave(b)
    swarm.join(newcomer)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    assert swarm.run().committed_steps == 3
    past = swarm.run().past
    assert past.snapshot is not None
    assert past.traffic[0].key_frames == past.snapshot.traffic[0].key_frames > 0
    assert {pair[0] for pair in pairs(swarm)} == {"a", None}


# ---- what cannot be


@pytest.mark.parametrize(
    ("buffers", "kind"),
    [
        (HeldBuffers(boundary=BlockIndex(3)), Kind.INVALID_BOUNDARY),
        (
            HeldBuffers(boundary=BOUNDARY, samples=SampleSet.of([SampleId(64)])),
            Kind.INVALID_SAMPLES,
        ),
    ],
)
def test_who_tells_of_buffers_that_cannot_be_is_sent_away(
    swarm: Swarm, spec: RunSpec, replicas: list[FakePeer], buffers: HeldBuffers, kind: Kind
) -> None:
    begun(swarm, spec, replicas)
    train_until(swarm, 2)
    liar = replicas[3]
    attempt, step = swarm.run().attempt.number, swarm.run().committed_steps
    swarm.say(liar, replace(liar.step_ready(step), lost=(buffers,)))
    assert swarm.dismissals() == {"b2": "malformed-message"}
    assert swarm.run().attempt.number == attempt + 1
    assert any(kind in kinds_in(reason) for reason in swarm.reasons())
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_an_inventory_that_cannot_be_is_refused_too(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.forget_said(b.peer_id)
    inventory = (HeldBuffers(boundary=BOUNDARY, samples=SampleSet.of([SampleId(2**20)])),)
    ready = StageReady(run_id=RUN, attempt=swarm.run().attempt.number, buffers=inventory)
    swarm.say(b, ready)
    assert swarm.dismissals() == {"b": "malformed-message"}


def test_counts_of_another_boundary_are_refused(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, (a, b))
    train_until(swarm, 1)
    ready = a.step_ready(swarm.run().committed_steps)
    swarm.say(a, replace(ready, buffers=(BufferCounts(boundary=BlockIndex(1)),)))
    assert swarm.dismissals() == {"a": "malformed-message"}


# ---- what is shown


def test_the_overview_tells_of_every_boundary(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, (a, b))
    train_until(swarm, 3)
    counts = BufferCounts(
        boundary=BOUNDARY, samples=9, memory_bytes=70, disk_bytes=30, memory_hits=4, evictions=1
    )
    swarm.forget_said(a.peer_id)
    for _ in range(2):
        swarm.say(a, replace(a.step_ready(swarm.run().committed_steps), buffers=(counts,)))
    (run,) = overview(swarm.state).runs
    (boundary,) = run.boundaries
    assert (boundary.boundary, boundary.buffered_samples) == (2, 12)
    assert boundary.key_frames == swarm.run().past.traffic[0].key_frames > 0
    assert (boundary.delta_frames, boundary.hit_rate) == (0, 0.0)
    assert boundary.kept == replace(counts, memory_hits=8, evictions=2)


def test_who_is_away_keeps_nothing_but_what_it_did_counts(
    swarm: Swarm, spec: RunSpec, replicas: list[FakePeer]
) -> None:
    begun(swarm, spec, replicas)
    train_until(swarm, 3)
    counts = BufferCounts(boundary=BOUNDARY, samples=9, memory_bytes=70, misses=4)
    swarm.forget_said(PeerId("a2"))
    ready = replicas[1].step_ready(swarm.run().committed_steps)
    swarm.say(replicas[1], replace(ready, buffers=(counts,)))
    swarm.leave(replicas[1])
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    (boundary,) = overview(swarm.state).runs[0].boundaries
    assert boundary.kept == BufferCounts(boundary=BOUNDARY, misses=4)


def test_counts_stay_in_their_fields_whatever_peers_tell(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, (a, b))
    train_until(swarm, 1)
    swarm.forget_said(a.peer_id)
    counts = BufferCounts(boundary=BOUNDARY, misses=2**50, disk_bytes=2**50)
    for _ in range(3):
        swarm.say(a, replace(a.step_ready(swarm.run().committed_steps), buffers=(counts,)))
    (boundary,) = overview(swarm.state).runs[0].boundaries
    assert boundary.kept.misses == boundary.kept.disk_bytes == 2**48


def test_peers_are_named_once(swarm: Swarm, spec: RunSpec, replicas: list[FakePeer]) -> None:
    begun(swarm, spec, replicas)
    swarm.settle()
    ledger = swarm.run().past.ledger
    assert ledger is not None
    assert sorted(ledger.peers) == sorted(peer.peer_id for peer in replicas)
