"""What the coordinator makes of what it knows of buffers."""

from dataclasses import replace

import pytest

from swarm_ft.coordinator.facts.events import RunCancelled
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.watching import overview
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import StageReady
from swarm_ft.protocol.messages.reports import BufferCounts, HeldBuffers, SampleSet

RUN = RunId("run-1")
EPOCH_STEPS = 16


@pytest.fixture
def spec(make_spec):
    """Sixteen steps an epoch."""
    return make_spec(
        seq_length=64,
        num_samples=64,
        batch_size=4,
        micro_batch_size=1,
        num_steps=40,
        shuffle=True,
    )


@pytest.fixture
def replicas(make_peer):
    return [make_peer(name, "0-2" if name[0] == "a" else "2-4") for name in ("a", "a2", "b", "b2")]


def pair(swarm, sample):
    """Who holds a sample's buffer."""
    ledger = swarm.run().past.ledger
    upstream, downstream = ledger.entries([sample])[0][0].tolist()
    return ledger.holder(upstream), ledger.holder(downstream)


def pairs(swarm):
    return [pair(swarm, sample) for sample in range(swarm.run().spec.train.num_samples)]


def train_until(swarm, step):
    swarm.settle_until(lambda: swarm.run().committed_steps >= step)


def begun(swarm, spec, peers):
    swarm.submit(spec)
    swarm.join(*peers)
    return swarm


# ---- what is known


def test_a_commit_tells_who_holds_what(swarm, spec, a, b):
    begun(swarm, spec, (a, b))
    assert set(pairs(swarm)) == {(None, None)}
    train_until(swarm, 3)
    held = {sample for sample in range(64) if pair(swarm, sample) == ("a", "b")}
    assert held == a.buffers[2] == b.buffers[2]
    assert len(held) == 12


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
    swarm, make_spec, a, b, codecs, is_there
):
    begun(swarm, make_spec(**codecs), (a, b))
    assert (swarm.run().past.ledger is not None) is is_there


def test_a_run_of_one_stage_has_no_ledger(swarm, spec, make_peer):
    begun(swarm, spec, (make_peer("all", "0-4"),))
    assert swarm.run().past.ledger is None
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_an_inventory_takes_out_what_is_not_there_and_adds_nothing(swarm, spec, a, b):
    begun(swarm, spec, (a, b))
    train_until(swarm, 3)
    kept, strange = sorted(b.buffers[2])[:5], sorted(set(range(64)) - b.buffers[2])[0]
    swarm.lose(b)
    b.buffers[2] = {*kept, strange}
    before = pairs(swarm)
    assert {pair for pair in before if None not in pair} == {("a", "b")}
    swarm.join(b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    assert [sample for sample in range(64) if pair(swarm, sample) == ("a", "b")] == kept
    assert pair(swarm, strange) == (None, None)
    assert all(now[0] == then[0] for now, then in zip(pairs(swarm), before, strict=True))


def test_a_loss_takes_out_one_end(swarm, spec, a, b):
    begun(swarm, spec, (a, b))
    train_until(swarm, 3)
    (sample, other) = sorted(b.buffers[2])[:2]
    train_until(swarm, 4)
    ready = replace(
        b.step_ready(swarm.run().committed_steps),
        lost=(HeldBuffers(boundary=2, samples=SampleSet.of([sample])),),
    )
    swarm.say(b, ready)
    assert pair(swarm, sample) == ("a", None)
    assert pair(swarm, other) == ("a", "b")


def test_a_restarted_coordinator_knows_it_all_again(tmp_path, make_swarm, spec, replicas):
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


def test_with_a_run_its_ledger_goes(tmp_path, make_swarm, spec, replicas):
    swarm = make_swarm(Journal(str(tmp_path / "journal.db")))
    begun(swarm, spec, replicas)
    train_until(swarm, 4)
    swarm.handle(RunCancelled(RUN))
    swarm.restart()
    assert swarm.run().past.ledger is None


def test_who_goes_back_to_the_beginning_knows_nothing(tmp_path, make_swarm, spec, a, b, newcomer):
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


def test_who_goes_back_to_a_snapshot_keeps_what_is_known(swarm, spec, a, b, newcomer):
    begun(swarm, replace(spec, train=replace(spec.train, save_steps=3)), (a, b))
    train_until(swarm, 5)
    swarm.leave(b)
    swarm.join(newcomer)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    assert swarm.run().committed_steps == 3
    past = swarm.run().past
    assert past.traffic[0].key_frames == past.snapshot.traffic[0].key_frames > 0
    assert {pair[0] for pair in pairs(swarm)} == {"a", None}


# ---- what cannot be


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (HeldBuffers(boundary=3), "buffers of boundary 3; its stage has 2"),
        (HeldBuffers(boundary=2, samples=SampleSet.of([64])), "samples below 64"),
    ],
)
def test_who_tells_of_buffers_that_cannot_be_is_sent_away(swarm, spec, replicas, held, why):
    begun(swarm, spec, replicas)
    train_until(swarm, 2)
    liar = replicas[3]
    attempt, step = swarm.run().attempt.number, swarm.run().committed_steps
    swarm.say(liar, replace(liar.step_ready(step), lost=(held,)))
    assert swarm.dismissals() == {"b2": "malformed-message"}
    assert swarm.run().attempt.number == attempt + 1
    assert why in swarm.run().detail or any(why in s.detail for s in swarm.told_of())
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_an_inventory_that_cannot_be_is_refused_too(swarm, spec, a, b):
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.forget_said("b")
    inventory = (HeldBuffers(boundary=2, samples=SampleSet.of([2**20])),)
    ready = StageReady(run_id=RUN, attempt=swarm.run().attempt.number, buffers=inventory)
    swarm.say(b, ready)
    assert swarm.dismissals() == {"b": "malformed-message"}


def test_counts_of_another_boundary_are_refused(swarm, spec, a, b):
    begun(swarm, spec, (a, b))
    train_until(swarm, 1)
    ready = a.step_ready(swarm.run().committed_steps)
    swarm.say(a, replace(ready, buffers=(BufferCounts(boundary=1),)))
    assert swarm.dismissals() == {"a": "malformed-message"}


# ---- what is shown


def test_the_overview_tells_of_every_boundary(swarm, spec, a, b):
    begun(swarm, spec, (a, b))
    train_until(swarm, 3)
    counts = BufferCounts(
        boundary=2, samples=9, memory_bytes=70, disk_bytes=30, memory_hits=4, evictions=1
    )
    swarm.forget_said("a")
    for _ in range(2):
        swarm.say(a, replace(a.step_ready(swarm.run().committed_steps), buffers=(counts,)))
    (run,) = overview(swarm.state).runs
    (boundary,) = run.boundaries
    assert (boundary.boundary, boundary.buffered_samples) == (2, 12)
    assert boundary.key_frames == swarm.run().past.traffic[0].key_frames > 0
    assert (boundary.delta_frames, boundary.hit_rate) == (0, 0.0)
    assert boundary.kept == replace(counts, memory_hits=8, evictions=2)


def test_who_is_away_keeps_nothing_but_what_it_did_counts(swarm, spec, replicas):
    begun(swarm, spec, replicas)
    train_until(swarm, 3)
    counts = BufferCounts(boundary=2, samples=9, memory_bytes=70, misses=4)
    swarm.forget_said("a2")
    ready = replicas[1].step_ready(swarm.run().committed_steps)
    swarm.say(replicas[1], replace(ready, buffers=(counts,)))
    swarm.leave(replicas[1])
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    (boundary,) = overview(swarm.state).runs[0].boundaries
    assert boundary.kept == BufferCounts(boundary=2, misses=4)


def test_counts_stay_in_their_fields_whatever_peers_tell(swarm, spec, a, b):
    begun(swarm, spec, (a, b))
    train_until(swarm, 1)
    swarm.forget_said("a")
    counts = BufferCounts(boundary=2, misses=2**50, disk_bytes=2**50)
    for _ in range(3):
        swarm.say(a, replace(a.step_ready(swarm.run().committed_steps), buffers=(counts,)))
    (boundary,) = overview(swarm.state).runs[0].boundaries
    assert boundary.kept.misses == boundary.kept.disk_bytes == 2**48


def test_peers_are_named_once(swarm, spec, replicas):
    begun(swarm, spec, replicas)
    swarm.settle()
    assert sorted(swarm.run().past.ledger.peers) == sorted(
        PeerId(p) for p in ("a", "a2", "b", "b2")
    )
