"""Snapshots at peers: keepers, their number over time, and the restart of a lost stage."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from swarm_ft.coordinator.facts.events import EmitEvent, PeerSaid, ResultCollected, SnapshotRecord
from swarm_ft.coordinator.facts.messages import Progress
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.keepers import KEEPERS_S, MIN_EVERY_S
from swarm_ft.coordinator.plan.membership import GRACE_S
from swarm_ft.coordinator.reason_texts import as_text
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    Assign,
    GiveShard,
    KeepShard,
    SavedStage,
    SaveStage,
    ShardKept,
    ShardLost,
    ToPeer,
)
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.messages.shard import KeptShard
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.run_spec import SaveStrategy
from tests.reasons import all_parts, part_of, ranges_of, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN = RunId("run-1")
NUM_KEEPERS = 2
IDLE = "9-12"
"""Layers of no stage here: a peer that offers them can keep shards, and does nothing else."""

Keeping: TypeAlias = Callable[..., Swarm]


@pytest.fixture
def keeping(make_swarm: type[Swarm]) -> Keeping:
    """A swarm whose peers keep snapshots, with this much room each."""

    def make(*peers: FakePeer, num_keepers: int = NUM_KEEPERS, room: int = 100) -> Swarm:
        swarm = make_swarm(Journal(":memory:"))
        swarm.state = replace(swarm.state, num_keepers=num_keepers, keeps_snapshots=True)
        for peer in peers:
            peer.keep_bytes = room
        swarm.join(*peers)
        return swarm

    return make


@pytest.fixture
def c(make_peer: type[FakePeer]) -> FakePeer:
    return make_peer("c", IDLE)


@pytest.fixture
def d(make_peer: type[FakePeer]) -> FakePeer:
    return make_peer("d", IDLE)


def until_commits(swarm: Swarm, number: int) -> None:
    swarm.settle_until(lambda: len(swarm.history[RUN]) == number)


def until_kept(swarm: Swarm, step: int) -> None:
    """Train until a snapshot of so many steps is complete, and the next step is committed."""
    swarm.settle_until(lambda: step in {one.step for one in swarm.run().past.snapshots})
    swarm.settle_until(lambda: swarm.run().committed_steps > step)


def stages_of(swarm: Swarm) -> tuple[SavedStage, ...]:
    snapshot = swarm.run().past.snapshot
    return snapshot.stages if snapshot is not None else ()


def keepers_of(swarm: Swarm) -> dict[str, set[str]]:
    """Return the keepers of the newest snapshot's stages, as the coordinator knows them."""
    return {str(stage.layers): set(stage.keepers) for stage in stages_of(swarm)}


def reasons_of(swarm: Swarm, kind: EventKind) -> list[Reason | None]:
    return [e.reason for e in swarm.effects if isinstance(e, EmitEvent) and e.kind is kind]


def clear_messages(swarm: Swarm) -> None:
    swarm.effects.clear()


def test_a_stage_lies_with_who_saved_it_and_with_others_that_do_not_host_it(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer, d: FakePeer
) -> None:
    swarm = keeping(a, b, c, d)
    swarm.submit(make_spec(num_steps=5, save_steps=2))
    until_commits(swarm, 4)
    for layers, own, host in (("0-2", "a", "b"), ("2-4", "b", "a")):
        having = keepers_of(swarm)[layers]
        assert own in having
        assert len(having) == 1 + NUM_KEEPERS
        assert having <= {own, host, "c", "d"}
    keepers = [peer for peer, _ in swarm.said(KeepShard)]
    assert {"c", "d"} <= set(keepers), "room is shared out"
    for peer in (a, b, c, d):
        shards = {f"{one.layers}" for one in stages_of(swarm) if peer.peer_id in one.keepers}
        assert shards == {str(name.layers) for name in peer.kept}, "what it says it has it has"


def test_replicas_and_peers_on_probation_and_without_room_keep_nothing(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    twin, c, full = make_peer("twin", "2-4"), make_peer("c", IDLE), make_peer("full", IDLE)
    probation = make_peer("probation", IDLE, grant=Grant(replica_only=True))
    swarm = keeping(a, b, c, probation, twin)
    swarm.join(full)  # which lends nothing
    swarm.submit(make_spec(num_steps=5, save_steps=2))
    until_commits(swarm, 4)
    assert keepers_of(swarm)["2-4"] == {"b", "a", "c"}
    keepers = {peer for peer, _ in swarm.said(KeepShard)}
    assert keepers.isdisjoint({"probation", "full"})


def test_room_that_is_promised_is_not_promised_again(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer, d: FakePeer
) -> None:
    a.keep_bytes = b.keep_bytes = 0
    swarm = keeping(c, d, room=3)
    swarm.join(a, b)
    swarm.submit(make_spec(num_steps=9, save_steps=2, save_total_limit=1))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert all(len(peer.kept) <= 3 for peer in (c, d))
    assert {save.step for _, save in swarm.said(SaveStage)} >= {2, 4, 6}, "it tries again"
    assert not any(peer in "ab" for peer, _ in swarm.said(KeepShard))


def test_who_cannot_after_all_is_replaced_by_another(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer, d: FakePeer
) -> None:
    swarm = keeping(a, b, c, d)
    c.is_full = True
    swarm.submit(make_spec(num_steps=9, save_steps=2))
    until_kept(swarm, 2)
    assert keepers_of(swarm) == {"0-2": {"a", "b", "d"}, "2-4": {"a", "b", "d"}}


def test_what_nobody_else_can_keep_is_with_who_saved_it(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm = keeping(a, b, room=0)
    swarm.submit(make_spec(num_steps=9, save_steps=2))
    until_kept(swarm, 2)
    assert keepers_of(swarm) == {"0-2": {"a"}, "2-4": {"b"}}
    shards = dict(b.kept)
    swarm.lose(b)
    swarm.wait(GRACE_S)
    b.forget()
    b.kept = shards  # a process that starts again finds them on its disk
    swarm.join(b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 1


def test_the_last_peer_of_a_stage_leaves_once_another_keeps_what_it_saved(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm = keeping(a, b)
    swarm.submit(make_spec(num_steps=9, save_steps=0))
    until_commits(swarm, 3)
    swarm.would_leave(b)
    swarm.settle_until(lambda: swarm.may_go(b))
    steps = len(swarm.history[RUN])
    assert keepers_of(swarm) == {"0-2": {"a"}, "2-4": {"a", "b"}}
    swarm.leave(b)
    newcomer = make_peer("newcomer", "2-4")
    swarm.join(newcomer)
    assert swarm.run().committed_steps == steps, "none is made again"
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert steps < 9
    assert newcomer.applied == list(range(9))


def test_a_leaver_that_nobody_has_room_for_is_told_what_is_lost(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm = keeping(a, b, room=0)
    swarm.submit(make_spec(num_steps=9, save_steps=0))
    until_commits(swarm, 3)
    swarm.would_leave(b)
    swarm.settle()
    swarm.wait(5.0)
    reasons = [progress.reason for peer, progress in swarm.said(Progress) if peer == "b"]
    risks = [one for one in reasons if one and one.kind is Kind.STEPS_AT_RISK and one.amount == 4]
    no_room = reason(Kind.NO_KEEPER, layers="2-4", amount=1)
    assert any(no_room in all_parts(one) for one in risks)


def test_where_all_leave_no_disk_is_to_blame(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm = keeping(a, b, room=1 << 30)
    swarm.submit(make_spec(num_steps=9, save_steps=0))
    until_commits(swarm, 3)
    swarm.would_leave(a)
    swarm.would_leave(b)
    swarm.settle()
    swarm.wait(5.0)
    sent = [progress.reason for _, progress in swarm.said(Progress) if progress.reason]
    found = [part for one in sent for part in all_parts(one) if part.kind is Kind.NO_KEEPER]
    assert {part.amount for part in found} == {0}
    assert {as_text(part) for part in found} == {"no peer stays that could keep layers 0-2"}


def test_another_is_not_asked_for_as_long_as_one_is_on_its_way(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    swarm = keeping(a, b, c)
    swarm.deafen(c)  # it has a request, and does not answer
    swarm.submit(make_spec(num_steps=9, save_steps=1))
    until_commits(swarm, 5)
    assert {save.step for _, save in swarm.said(SaveStage)} == {1}
    swarm.lose(c)
    until_commits(swarm, 8)
    assert {save.step for _, save in swarm.said(SaveStage)} > {1}


def test_a_lost_stage_begins_from_what_is_kept_by_those_who_are_there(
    keeping: Keeping,
    make_spec: MakeSpec,
    a: FakePeer,
    b: FakePeer,
    c: FakePeer,
    make_peer: type[FakePeer],
) -> None:
    swarm = keeping(a, b, c)
    swarm.submit(make_spec(num_steps=9, save_steps=4))
    until_kept(swarm, 4)
    swarm.lose(b)
    swarm.wait(GRACE_S)
    assert swarm.run().committed_steps == 4
    clear_messages(swarm)
    newcomer = make_peer("newcomer", "2-4")
    swarm.join(newcomer)
    assigns = dict(swarm.said(Assign))
    assign: ToPeer = assigns[PeerId("newcomer")]
    assert isinstance(assign, Assign)
    assert {str(s.layers): set(s.keepers) for s in assign.saved} == {
        "0-2": {"a", "c"},
        "2-4": {"a", "c"},
    }
    may_take = {
        (peer, str(give.name.layers), taker)
        for peer, give in swarm.said(GiveShard)
        for taker in give.takers
    }
    assert {("a", "2-4", "newcomer"), ("c", "2-4", "newcomer"), ("c", "0-2", "a")} <= may_take
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert newcomer.applied == list(range(9))
    assert swarm.num_rollbacks == 1


def test_keepers_that_are_away_are_waited_for_before_a_run_goes_further_back(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    a.compute_s = b.compute_s = 40.0
    swarm = keeping(a, b)
    swarm.submit(make_spec(num_steps=9, save_steps=4))
    until_kept(swarm, 4)
    swarm.lose(a, b)
    others = [make_peer("x", "0-2"), make_peer("y", "2-4")]
    swarm.join(*others)
    swarm.wait(GRACE_S + 60.0)
    assert swarm.run().phase is RunPhase.WAITING
    waits = part_of(swarm.run().detail, Kind.AWAITS_KEEPERS)
    assert (waits.layers, waits.step) == (ranges_of("0-2, 2-4"), 4)
    shards = dict(a.kept)
    a.forget()
    a.kept = shards  # a process that starts again finds them on its disk
    swarm.join(a)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert [step.step for step in swarm.history[RUN]] == list(range(9))
    assert swarm.num_rollbacks == 1
    assert swarm.run().keeping.missing_since_s == math.inf, "a later wait begins anew"


def test_at_last_a_run_goes_on_without_keepers_that_do_not_come_back(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm = keeping(a, b)
    swarm.submit(make_spec(num_steps=9, save_steps=4))
    until_kept(swarm, 4)
    swarm.lose(a, b)
    swarm.join(make_peer("x", "0-2"), make_peer("y", "2-4"))
    swarm.wait(GRACE_S + KEEPERS_S + 10.0)
    assert swarm.run().committed_steps == 0
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_who_comes_back_without_what_it_kept_keeps_it_no_more(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    swarm = keeping(a, b, c)
    swarm.submit(make_spec(num_steps=50, save_steps=20))
    until_kept(swarm, 20)
    swarm.lose(c)
    c.kept.clear()
    swarm.join(c)
    assert all("c" not in having for having in keepers_of(swarm).values())
    records = [e for e in swarm.effects if isinstance(e, SnapshotRecord)]
    assert all("c" not in stage.keepers for stage in records[-1].snapshot.stages)
    swarm.wait(GRACE_S + 2.0)
    swarm.settle_until(lambda: all("c" in having for having in keepers_of(swarm).values()))


def test_who_is_away_for_a_moment_costs_nothing_and_who_is_for_long_is_replaced(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer, d: FakePeer
) -> None:
    swarm = keeping(a, b, c)
    swarm.submit(make_spec(num_steps=50, save_steps=20))
    until_kept(swarm, 20)
    d.keep_bytes = 100
    swarm.join(d)
    swarm.lose(c)
    swarm.wait(GRACE_S / 2)
    swarm.join(c)
    swarm.wait(GRACE_S + 2.0)
    assert not d.kept
    swarm.lose(c)
    swarm.wait(GRACE_S + 2.0)
    assert len(d.kept) == 2


def test_who_alone_keeps_a_stage_goes_once_another_does(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer, d: FakePeer
) -> None:
    swarm = keeping(a, b, c, num_keepers=1)
    a.keep_bytes = b.keep_bytes = 0
    swarm.lose(a, b)
    swarm.join(a, b)
    swarm.submit(make_spec(num_steps=500, save_steps=20))
    until_kept(swarm, 20)
    swarm.lose(b)  # so nobody but c has 2-4
    swarm.would_leave(c)
    assert swarm.may_go(c), "nobody else could keep it"
    d.keep_bytes = 100
    swarm.join(d)
    swarm.deafen(d)
    swarm.would_leave(c)
    swarm.wait(2.0)
    reasons = [progress.reason for peer, progress in swarm.said(Progress) if peer == "c"]
    assert reasons[-1] == reason(Kind.KEEPERS_COPY, layers="2-4", run_id=RUN)
    assert not swarm.may_go(c)
    swarm.lose(d)
    swarm.join(d)
    swarm.wait(2.0)
    swarm.settle_until(lambda: all("d" in having for having in keepers_of(swarm).values()))
    swarm.wait(2.0)
    assert swarm.may_go(c)


def test_after_a_restart_it_is_known_who_keeps_what(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    swarm = keeping(a, b, c)
    swarm.submit(make_spec(num_steps=9, save_steps=4))
    until_kept(swarm, 4)
    before = keepers_of(swarm)
    swarm.restart()
    assert keepers_of(swarm) == before
    swarm.join(a, b, c)
    assert keepers_of(swarm) == before


def test_what_is_of_no_use_is_let_go_of(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    swarm = keeping(a, b, c)
    swarm.submit(make_spec(num_steps=9, save_steps=2, save_total_limit=1))
    until_commits(swarm, 8)
    (step,) = [snapshot.step for snapshot in swarm.run().past.snapshots]
    assert {name.step for peer in (a, b, c) for name in peer.kept} <= {step, 8}
    old = next(iter(c.kept.values()))
    swarm.lose(c)
    swarm.settle()
    c.kept[old.name] = old
    swarm.join(c)
    steps = {snapshot.step for snapshot in swarm.run().past.snapshots}
    assert {name.step for name in c.kept} <= steps, "who was away hears it as it comes"
    swarm.handle(ResultCollected(RUN))
    assert not any(peer.kept for peer in (a, b, c))


def test_nobody_counts_as_a_keeper_that_was_not_asked_nor_ends_what_others_keep(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer, d: FakePeer
) -> None:
    swarm = keeping(a, b, c)
    swarm.join(d)  # which lends nothing
    swarm.submit(make_spec(num_steps=50, save_steps=20))
    until_kept(swarm, 20)
    before = keepers_of(swarm)
    snapshot = swarm.run().past.snapshot
    assert snapshot is not None
    for shard in [snapshot.shard(RUN, stage) for stage in snapshot.stages]:
        for claimed in (shard, KeptShard(name=shard.name, digest=b"x" * 16)):
            swarm.handle(PeerSaid(PeerId("d"), ShardKept(claimed)))
            swarm.handle(PeerSaid(PeerId("d"), ShardLost(shard=claimed, reason="mischief")))
    unknown = replace(shard, name=replace(shard.name, run_id=RunId("unknown")))
    assert swarm.handle(PeerSaid(PeerId("d"), ShardLost(shard=unknown, reason="mischief"))) == []
    assert keepers_of(swarm) == before


def test_a_snapshot_whose_stage_nobody_has_any_more_is_none(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    swarm = keeping(a, b, c)
    swarm.submit(make_spec(num_steps=50, save_steps=20))
    until_kept(swarm, 20)
    snapshot = swarm.run().past.snapshot
    assert snapshot is not None
    stage = snapshot.stages[0]
    for peer in stage.keepers:
        lost = ShardLost(shard=snapshot.shard(RUN, stage), reason="the disk is broken")
        swarm.handle(PeerSaid(peer, lost))
    assert swarm.run().past.snapshot is None
    why = reasons_of(swarm, EventKind.SNAPSHOT_LOST)[-1]
    assert reason(Kind.KEEPERS_GONE, layers="0-2") in all_parts(why)
    swarm.restart()
    assert swarm.run().past.snapshot is None


# ---- when the job has no such option


def test_a_job_that_does_not_say_is_saved_by_time(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    a.compute_s = b.compute_s = 10.0
    swarm = keeping(a, b, c)
    swarm.submit(make_spec(num_steps=30, save_steps=0))
    began_s = swarm.now_s
    swarm.settle_until(lambda: bool(swarm.said(SaveStage)))
    assert swarm.now_s - began_s >= MIN_EVERY_S
    swarm.settle_until(lambda: len(swarm.run().past.snapshots) == 2)
    first, second = (snapshot.step for snapshot in swarm.run().past.snapshots)
    assert (second - first) * 10.0 >= MIN_EVERY_S


def test_a_snapshot_that_took_long_is_not_taken_again_soon(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    a.compute_s = b.compute_s = 10.0
    swarm = keeping(a, b, c)
    swarm.submit(make_spec(num_steps=200, save_steps=0))
    until_commits(swarm, 2)
    run = swarm.run()
    slow = replace(run.keeping, took_s=100.0, began_s=swarm.now_s)
    swarm.state = swarm.state.with_run(replace(run, keeping=slow))
    began_s = swarm.now_s
    swarm.settle_until(lambda: bool(swarm.said(SaveStage)))
    assert swarm.now_s - began_s >= 1000.0, "a tenth of the time, and of a link"


def test_a_job_that_wants_none_has_none(
    keeping: Keeping, make_spec: MakeSpec, a: FakePeer, b: FakePeer, c: FakePeer
) -> None:
    a.compute_s = b.compute_s = 50.0
    swarm = keeping(a, b, c)
    swarm.submit(make_spec(num_steps=10, save_steps=0, save_strategy=SaveStrategy.NO))
    swarm.settle()
    assert not swarm.said(SaveStage)
