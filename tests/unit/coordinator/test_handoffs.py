"""What the coordinator makes of what it knows of buffers, from commits to hand-offs."""

from dataclasses import replace

import pytest

from swarm_ft.coordinator.effects import LedgerRecord, Note, Write
from swarm_ft.coordinator.events import RunCancelled
from swarm_ft.coordinator.journal import Journal
from swarm_ft.coordinator.overview import overview
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.buffer_reports import BufferCounts, HeldBuffers
from swarm_ft.protocol.coordinator_messages import FollowBuffers
from swarm_ft.protocol.peer_messages import BuffersFollowed, StageReady
from swarm_ft.protocol.sample_set import SampleSet
from swarm_ft.protocol.status import RunPhase

RUN = RunId("run-1")
EPOCH_STEPS = 16


@pytest.fixture
def spec(make_spec):
    """Sixteen steps an epoch, so that a few are looked at ahead; buffers are cheap to hand on."""
    return make_spec(
        seq_length=64,
        num_samples=64,
        batch_size=4,
        micro_batch_size=1,
        num_steps=40,
        shuffle=True,
        buffer_bits=4,
    )


@pytest.fixture
def replicas(make_peer):
    return [make_peer(name, "0-2" if name[0] == "a" else "2-4") for name in ("a", "a2", "b", "b2")]


def pair(swarm, sample):
    """Who holds a sample's buffer."""
    ledger = swarm.run().ledger
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


def notes(swarm):
    return [effect.text for effect in swarm.effects if isinstance(effect, Note)]


def follows(swarm):
    return swarm.said(FollowBuffers)


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
    assert (swarm.run().ledger is not None) is is_there


def test_a_run_of_one_stage_has_no_ledger(swarm, spec, make_peer):
    begun(swarm, spec, (make_peer("all", "0-4"),))
    assert swarm.run().ledger is None
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
    assert swarm.run().ledger == before.ledger
    assert swarm.run().traffic == before.traffic
    assert before.traffic[0].key_frames > 0
    swarm.join(*replicas)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_with_a_run_its_ledger_goes(tmp_path, make_swarm, spec, replicas):
    swarm = make_swarm(Journal(str(tmp_path / "journal.db")))
    begun(swarm, spec, replicas)
    train_until(swarm, 4)
    swarm.handle(RunCancelled(RUN))
    swarm.restart()
    assert swarm.run().ledger is None


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
    assert swarm.run().traffic[0].key_frames == swarm.run().snapshot.traffic[0].key_frames > 0
    assert {pair[0] for pair in pairs(swarm)} == {"a", None}


# ---- hand-offs


def test_buffers_follow_before_their_samples_do(swarm, spec, replicas):
    """Whoever was told in time has what its microbatches need when they come."""
    begun(swarm, spec, replicas)
    train_until(swarm, EPOCH_STEPS)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    for peer, follow in follows(swarm):
        others = {"a", "a2", "b", "b2"} - {peer}
        assert 1 <= len(follow.sources) <= 2
        assert set(follow.sources) <= others
    (note,) = {text.split(": ")[1].split(",")[-1] for text in notes(swarm)}
    assert note == " so their buffers follow"


def test_what_followed_is_found_by_the_next_plan(swarm, spec, replicas):
    begun(swarm, spec, replicas)
    swarm.settle_until(lambda: bool(follows(swarm)))
    peer, follow = follows(swarm)[0]
    sample, index = follow.samples[0], "a2b2".index(peer[0]) // 2
    assert pair(swarm, sample)[index] != peer
    swarm.settle_until(lambda: pair(swarm, sample)[index] == peer)
    assert swarm.run().hand_offs.asked[sample] >= {(2, peer)}
    records = [e.record for e in swarm.effects if isinstance(e, Write)]
    assert any(
        isinstance(r, LedgerRecord) and len(r.change.chunks) == 1 and not r.change.is_new
        for r in records
    )


def test_what_comes_after_the_sample_went_on_is_void(swarm, spec, replicas):
    for peer in replicas:
        peer.is_slow_to_follow = True
    begun(swarm, spec, replicas)
    swarm.settle_until(lambda: bool(follows(swarm)))
    name, follow = follows(swarm)[0]
    peer = next(peer for peer in replicas if peer.peer_id == name)
    swarm.settle_until(lambda: not set(follow.samples) & swarm.run().hand_offs.asked.keys())
    before = swarm.run().ledger
    swarm.say(peer, peer.followed(follow))
    assert swarm.run().ledger == before


def test_what_nobody_was_told_to_fetch_moves_nothing(swarm, spec, replicas):
    begun(swarm, spec, replicas)
    train_until(swarm, 3)
    before = swarm.run().ledger
    claim = BuffersFollowed(
        run_id=RUN, attempt=swarm.run().attempt, boundary=2, samples=(0, 1, 63, 64, 2**24 - 1)
    )
    swarm.say(replicas[0], claim)
    swarm.say(replicas[0], replace(claim, boundary=3))
    assert swarm.run().ledger == before
    assert not swarm.dismissals()


def test_nobody_is_told_twice_before_a_sample_is_visited(swarm, spec, replicas):
    for peer in replicas:
        peer.is_slow_to_follow = True
    begun(swarm, spec, replicas)
    swarm.settle()
    asked = [(p, f.attempt, s) for p, f in follows(swarm) for s in f.samples]
    assert asked
    visits_after_the_first = spec.train.num_steps // EPOCH_STEPS
    assert max(asked.count(one) for one in set(asked)) <= visits_after_the_first


@pytest.mark.parametrize("leaves", [True, False])
def test_the_buffers_of_a_replica_that_is_gone_follow_from_the_other_ends(
    swarm, spec, replicas, leaves
):
    begun(swarm, spec, replicas)
    train_until(swarm, EPOCH_STEPS)
    gone = replicas[1]
    held = {sample for sample in range(64) if pair(swarm, sample)[0] == "a2"}
    assert held
    num_told = len(follows(swarm))
    if leaves:
        swarm.leave(gone)
    else:
        swarm.lose(gone)
    swarm.settle_until(lambda: len(follows(swarm)) > num_told)
    told = follows(swarm)[num_told:]
    assert all("a2" not in follow.sources for _, follow in told)
    to_a = [follow for peer, follow in told if peer == "a"]
    assert {sample for follow in to_a for sample in follow.samples} & held
    assert {source for follow in to_a for source in follow.sources} <= {"b", "b2"}


def test_a_newcomer_that_computes_is_looked_ahead_for_without_an_attempt(
    swarm, spec, make_peer, replicas
):
    begun(swarm, spec, replicas[:3])
    train_until(swarm, EPOCH_STEPS)
    late = make_peer("b2", "2-4")
    late.is_slow_to_take = True
    swarm.join(late)
    swarm.settle_until(lambda: "b2" in swarm.run().listeners)
    train_until(swarm, EPOCH_STEPS + 2)
    assert not [peer for peer, _ in follows(swarm) if peer == "b2"]
    attempt = swarm.run().attempt
    swarm.say(late, late.taken())
    swarm.settle_until(lambda: any(peer == "b2" for peer, _ in follows(swarm)))
    assert swarm.run().attempt == attempt
    late_ones = [follow for peer, follow in follows(swarm) if peer == "b2"]
    assert sum(len(follow.samples) for follow in late_ones) > 4, "of several steps"


def test_where_a_key_frame_is_cheaper_nobody_is_told_and_the_log_says_why(swarm, spec, replicas):
    begun(swarm, replace(spec, train=replace(spec.train, buffer_bits=16)), replicas)
    swarm.settle()
    assert not follows(swarm)
    kinds = notes(swarm)
    assert 1 <= len(kinds) <= 2, "once an attempt and kind of choice"
    assert "a key frame (0.8 kB more than a delta) is no dearer than a hand-off of" in kinds[0]
    assert kinds[0].endswith("so they begin anew")


def test_a_hand_off_to_one_end_may_be_worth_it_where_one_to_both_is_not(swarm, spec, replicas):
    """8 bits, or twice 8, against the 12 bits that fp16 takes more than aq4."""
    begun(swarm, replace(spec, train=replace(spec.train, buffer_bits=8)), replicas)
    train_until(swarm, EPOCH_STEPS)
    swarm.leave(replicas[1])
    swarm.settle()
    told = [text for text in notes(swarm) if "buffers follow" in text]
    anew = [text for text in notes(swarm) if "begin anew" in text]
    assert told
    assert anew
    assert all("for both ends" in text for text in anew)
    assert not any("for both ends" in text for text in told)


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
    attempt, step = swarm.run().attempt, swarm.run().committed_steps
    swarm.say(liar, replace(liar.step_ready(step), lost=(held,)))
    assert swarm.dismissals() == {"b2": "malformed-message"}
    assert swarm.run().attempt == attempt + 1
    assert why in swarm.run().detail or any(why in s.detail for s in swarm.told_of())
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_an_inventory_that_cannot_be_is_refused_too(swarm, spec, a, b):
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.forget_said("b")
    inventory = (HeldBuffers(boundary=2, samples=SampleSet.of([2**20])),)
    ready = StageReady(run_id=RUN, attempt=swarm.run().attempt, buffers=inventory)
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
    assert boundary.key_frames == swarm.run().traffic[0].key_frames > 0
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
    assert sorted(swarm.run().ledger.peers) == sorted(PeerId(p) for p in ("a", "a2", "b", "b2"))
