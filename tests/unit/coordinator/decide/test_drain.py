"""Peers that leave: nothing is lost, as long as another peer can take over."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.decide.drain import RETOLD_AFTER_S
from swarm_ft.coordinator.facts.events import ResultCollected, RunPaused, RunResumed
from swarm_ft.coordinator.facts.messages import Progress, Release
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.plan.lateness import state_bytes
from swarm_ft.coordinator.plan.succession import SAVE_S
from swarm_ft.coordinator.watching import overview
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import MemberState, RunPhase
from swarm_ft.protocol.messages.control import PeerResumed, SaveStage
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.draws import draws
from tests.reasons import kinds_in, part_of, ranges_of, reason
from tests.unit.coordinator.conftest import EVENT_S, RUN, FakePeer, MakeSpec, Swarm

STEPS = 8


@pytest.fixture
def a(make_peer: type[FakePeer]) -> FakePeer:
    return make_peer("a", "0-2")


@pytest.fixture
def b(make_peer: type[FakePeer]) -> FakePeer:
    return make_peer("b", "2-4")


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec(num_steps=STEPS)


def until_commits(swarm: Swarm, number: int) -> None:
    swarm.settle_until(lambda: swarm.run().committed_steps == number)


def reasons_sent_to(swarm: Swarm, peer: FakePeer) -> list[Reason]:
    reasons = (progress.reason for to, progress in swarm.said(Progress) if to == peer.peer_id)
    return [reason for reason in reasons if reason is not None]


def begin(swarm: Swarm, spec: RunSpec, *peers: FakePeer, steps: int = 2) -> None:
    swarm.join(*peers)
    swarm.submit(spec)
    until_commits(swarm, steps)


def goes(swarm: Swarm, peer: FakePeer) -> None:
    """Let the peer leave once it may."""
    swarm.settle_until(lambda: swarm.may_go(peer))
    swarm.leave(peer)


# ---- to whom


def test_an_idle_peer_takes_over_from_the_last_of_a_stage_while_all_train_on(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    begin(swarm, spec, a, b)
    heir = make_peer("heir", "auto")
    heir.is_slow_to_take = True
    swarm.would_leave(b)
    assert not swarm.may_go(b)
    swarm.join(heir)
    until_commits(swarm, 5)
    assert swarm.run().listeners == ("heir",)
    assert not swarm.may_go(b), "nobody else has the state yet"
    copies = reason(Kind.SUCCESSOR_COPIES, layers="2-4", others=(PeerId("heir"),), run_id=RUN)
    assert reasons_sent_to(swarm, b)[-1] == copies
    swarm.say(heir, heir.caught_up())
    goes(swarm, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert [step.step for step in swarm.steps()] == list(range(STEPS))
    assert swarm.num_rollbacks == 0
    assert swarm.run().peers == ("a", "heir")


@pytest.mark.parametrize("rejoins", [False, True])
def test_a_spare_replica_of_another_stage_moves(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer], rejoins: bool
) -> None:
    one, two, three = (make_peer(name, "auto") for name in ("one", "two", "three"))
    swarm.join(one, two)
    swarm.submit(make_spec(num_steps=16))
    swarm.wait(3)
    until_commits(swarm, 2)
    swarm.join(three)
    until_commits(swarm, 4)
    peers = {one.peer_id: one, two.peer_id: two, three.peer_id: three}
    (last,) = next(stage.peers for stage in swarm.run().stages if len(stage.peers) == 1)
    for spare in sorted(peers.keys() - {last}) if rejoins else ():
        swarm.lose(peers[spare])
        swarm.join(peers[spare])  # its hello lists its stages
        until_commits(swarm, swarm.run().committed_steps + 1)
    swarm.would_leave(peers[last])
    attempt = swarm.run().attempt.number
    goes(swarm, peers[last])
    assert swarm.run().attempt.number <= attempt + 2, "one to take over, one without it"
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0
    assert set(swarm.run().peers) == peers.keys() - {last}
    assert any(Kind.PEER_MOVES in kinds_in(reason) for reason in swarm.reasons())


def test_who_would_leave_too_or_is_on_probation_or_has_no_room_takes_nothing_over(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    begin(swarm, spec, a, b)
    leaver, small = make_peer("leaver", "auto"), make_peer("small", "auto", memory_bytes=1)
    swarm.join(leaver, small)
    swarm.would_leave(leaver)
    assert swarm.may_go(leaver), "it has nothing"
    swarm.would_leave(b)
    until_commits(swarm, 5)
    assert set(swarm.run().peers) == {"a", "b"}
    progress = reasons_sent_to(swarm, b)[-1]
    assert (progress.kind, progress.run_id, progress.layers) == (
        Kind.STEPS_AT_RISK,
        RUN,
        ranges_of("2-4"),
    )
    assert progress.parts == (reason(Kind.NO_SNAPSHOTS),)


def test_a_replica_that_is_not_the_last_goes_at_the_end_of_the_step(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    twin = make_peer("twin", "2-4")
    begin(swarm, spec, a, b, twin, steps=2)
    attempt = swarm.run().attempt.number
    swarm.would_leave(twin)
    assert not swarm.may_go(twin)
    assert swarm.run().attempt.number == attempt, "the step under way is not interrupted"
    goes(swarm, twin)
    assert swarm.run().committed_steps == 3
    assert (PeerId("twin"), Release) in [(p, type(m)) for p, m in swarm.said(Release)]
    until_commits(swarm, 5)
    assert swarm.run().attempt.number == attempt + 1
    assert "twin" not in swarm.run().peers


def test_who_leaves_before_the_first_commit_has_nothing_to_lose(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.join(a, b)
    swarm.submit(spec)
    assert swarm.run().phase is RunPhase.LOADING
    swarm.would_leave(b)
    assert swarm.may_go(b)
    assert swarm.run().phase is RunPhase.WAITING


# ---- to nobody


def test_who_else_leaves_does_not_begin_the_limit_of_a_snapshot_anew(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    swarm.has_slow_disk = True
    begin(swarm, spec, a, b)
    swarm.would_leave(b)
    swarm.settle()
    assert part_of(swarm.run().detail, Kind.SAVES_BEFORE_LEAVE).peers == ("b",)
    swarm.wait(SAVE_S / 2)
    swarm.would_leave(a)
    assert part_of(swarm.run().detail, Kind.SAVES_BEFORE_LEAVE).peers == ("a",)
    swarm.wait(SAVE_S / 2 - 5.0)
    assert swarm.run().step is None, "it waits for the snapshot"
    swarm.wait(10.0)
    assert swarm.run().step is not None, "it has waited for as long as it may"


def test_without_anybody_a_snapshot_is_written_and_the_run_goes_on_from_it(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    swarm.has_slow_disk = True
    begin(swarm, spec, a, b)
    swarm.would_leave(b)
    swarm.settle()
    assert swarm.run().committed_steps == 3, "no step follows that would be lost"
    assert {peer for peer, _ in swarm.said(SaveStage)} == {"a", "b"}
    assert not swarm.may_go(b)
    assert reasons_sent_to(swarm, b)[-1].kind is Kind.SNAPSHOT_IS_WRITTEN
    swarm.has_slow_disk = False
    swarm.handle(swarm.unwritten.pop())
    assert swarm.may_go(b)
    swarm.leave(b)
    swarm.wait(5)
    assert swarm.run().committed_steps == 3
    swarm.join(make_peer("c", "2-4"))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert [step.step for step in swarm.steps()] == list(range(STEPS))


def test_a_snapshot_that_fails_is_not_tried_again_after_every_step(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    b.saves = False
    begin(swarm, spec, a, b)
    swarm.would_leave(b)
    until_commits(swarm, 6)
    assert len(swarm.said(SaveStage)) == 2
    impossible = part_of(reasons_sent_to(swarm, b)[-1], Kind.SNAPSHOT_IMPOSSIBLE)
    assert [part.text for part in impossible.parts] == ["full"]
    assert not swarm.may_go(b)


def test_nobody_and_no_snapshots_leaves_the_choice_to_the_peer(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begin(swarm, spec, a, b)
    swarm.would_leave(b)
    until_commits(swarm, 5)
    assert len(reasons_sent_to(swarm, b)) == 1, "a step more is no news at once"
    swarm.wait(RETOLD_AFTER_S)
    assert (reasons_sent_to(swarm, b)[-1].kind, reasons_sent_to(swarm, b)[-1].amount) == (
        Kind.STEPS_AT_RISK,
        5,
    )
    swarm.leave(b)  # it insists
    swarm.wait(40)
    assert swarm.num_rollbacks == 1


def test_of_a_run_that_waits_for_others_no_snapshot_is_promised(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    begin(swarm, spec, a, b)
    swarm.lose(a)
    swarm.would_leave(b)
    assert not swarm.may_go(b)
    progress = reasons_sent_to(swarm, b)[-1]
    assert (progress.kind, progress.amount, progress.limit) == (Kind.STEPS_AT_RISK, 2, 4 * EVENT_S)
    assert progress.parts == (reason(Kind.RUN_AWAITS_OTHERS),)


# ---- while the owner pauses the run


@pytest.mark.parametrize("keeps_snapshots", [False, True])
@pytest.mark.parametrize("comes_later", [False, True])
def test_of_a_run_that_is_paused_an_idle_peer_takes_over_too(
    swarm: Swarm,
    spec: RunSpec,
    a: FakePeer,
    b: FakePeer,
    make_peer: type[FakePeer],
    keeps_snapshots: bool,
    comes_later: bool,
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=keeps_snapshots)
    swarm.has_slow_disk = True
    begin(swarm, spec, a, b)
    heir, other = make_peer("heir", "auto"), make_peer("other", "0-2")
    swarm.handle(RunPaused(RUN))
    swarm.settle()
    swarm.join(other)
    if comes_later:
        swarm.would_leave(b)
        swarm.settle()
        swarm.join(heir)
    else:
        swarm.join(heir)
        swarm.settle()
        assert swarm.run().peers == ("a", "b"), "who is not needed waits until it resumes"
        swarm.would_leave(b)
    swarm.settle()
    goes(swarm, b)
    swarm.settle()
    assert swarm.run().committed_steps == 3, "it is paused still"
    assert swarm.run().detail == reason(Kind.PAUSED, step=3)
    assert swarm.run().stages[1].peers == ("heir",)
    swarm.handle(RunResumed(RUN))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_of_a_run_that_is_paused_the_last_one_leaves_a_snapshot(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    begin(swarm, spec, a, b)
    swarm.handle(RunPaused(RUN))
    swarm.settle()
    swarm.would_leave(b)
    goes(swarm, b)
    swarm.handle(RunResumed(RUN))
    swarm.join(make_peer("c", "2-4"))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert [step.step for step in swarm.steps()] == list(range(STEPS))


def test_of_a_run_that_is_paused_nobody_and_no_snapshots_leaves_the_choice_to_the_peer(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begin(swarm, spec, a, b)
    swarm.handle(RunPaused(RUN))
    swarm.settle()
    swarm.would_leave(b)
    assert not swarm.may_go(b)
    assert (reasons_sent_to(swarm, b)[-1].kind, reasons_sent_to(swarm, b)[-1].amount) == (
        Kind.STEPS_AT_RISK,
        3,
    )


# ---- pauses


def test_the_run_waits_for_its_last_peer_that_pauses(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begin(swarm, spec, a, b)
    swarm.would_leave(b, stays=True)
    swarm.settle()
    assert swarm.may_go(b)
    assert swarm.run().committed_steps == 3
    waits = part_of(swarm.run().detail, Kind.AWAITS_PAUSED)
    assert (waits.peers, waits.layers) == (("b",), ranges_of("2-4"))
    swarm.wait(300)
    assert swarm.run().committed_steps == 3
    swarm.say(b, PeerResumed())
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_somebody_who_comes_meanwhile_takes_over_from_who_pauses(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    begin(swarm, spec, a, b)
    swarm.would_leave(b, stays=True)
    swarm.settle()
    swarm.join(make_peer("c", "auto"))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().peers == ("a", "c")
    assert swarm.num_rollbacks == 0
    assert b.assign is None, "it was released, and is given nothing"


def test_who_paused_is_given_work_again_when_it_works(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    auto = make_peer("auto", "auto")
    swarm.join(a, b, auto)
    swarm.would_leave(auto, stays=True)
    swarm.submit(spec)
    until_commits(swarm, 2)
    assert "auto" not in swarm.run().peers
    swarm.wait(1)
    assert swarm.state.members[auto.peer_id].idle == reason(Kind.IS_PAUSED, text="Ctrl-C")
    swarm.say(auto, PeerResumed())
    until_commits(swarm, 4)
    assert "auto" in swarm.run().peers


def test_a_status_has_the_state_of_each_peer(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    def states() -> dict[str, MemberState]:
        return {one.peer_id: one.state for one in overview(swarm.state).members}

    begin(swarm, spec, a, b)
    assert states() == {"a": MemberState.WORKING, "b": MemberState.WORKING}
    swarm.would_leave(b, stays=True)
    assert states()["b"] is MemberState.PAUSING
    swarm.join(make_peer("c", "auto"), make_peer("far", "6-8"))
    swarm.settle()
    assert states()["b"] is MemberState.PAUSED
    assert states()["far"] is MemberState.IDLE
    swarm.would_leave(a)
    assert states()["a"] is MemberState.LEAVING


# ---- what has to last


def test_a_leaver_is_one_still_after_its_stream_broke(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    begin(swarm, spec, a, b)
    swarm.would_leave(b)
    leaving = swarm.state.members[b.peer_id].leaving
    swarm.lose(b)
    b.leaving = leaving
    swarm.join(b, make_peer("c", "auto"))
    goes(swarm, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_the_last_one_with_a_part_of_a_result_waits_for_the_client(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    twin = make_peer("twin", "2-4")
    begin(swarm, spec, a, b, twin)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    swarm.would_leave(twin)
    assert swarm.may_go(twin), "its replica has the same"
    swarm.would_leave(a)
    assert not swarm.may_go(a)
    progress = reasons_sent_to(swarm, a)[-1]
    lost = reason(Kind.RESULT_NOT_COLLECTED, layers="0-2", amount=STEPS, run_id=RUN)
    assert progress == lost


def test_the_last_one_with_a_part_of_a_result_leaves_a_snapshot_of_which_it_is_made_again(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    swarm.has_slow_disk = True
    begin(swarm, spec, a, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert not swarm.said(SaveStage), "it costs nothing as long as all stay"
    swarm.would_leave(b)
    swarm.settle()
    assert not swarm.may_go(b)
    assert reasons_sent_to(swarm, b)[-1] == reason(
        Kind.RESULT_NOT_COLLECTED, layers="2-4", run_id=RUN
    )
    assert [peer for peer, _ in swarm.said(SaveStage)] == ["a", "b"]
    swarm.has_slow_disk = False
    swarm.handle(swarm.unwritten.pop())
    goes(swarm, b)
    swarm.join(make_peer("c", "2-4"))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert set(swarm.run().past.exported) == {"a", "c"}
    assert [step.step for step in swarm.steps()] == list(range(STEPS)), "none is made again"


def test_a_client_that_is_faster_than_the_snapshot_lets_the_leaver_go(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    swarm.has_slow_disk = True
    begin(swarm, spec, a, b)
    swarm.settle()
    swarm.would_leave(b)
    swarm.settle()
    assert not swarm.may_go(b)
    swarm.handle(ResultCollected(RUN))
    assert swarm.may_go(b)


def test_who_pauses_stays_with_its_part_of_a_result(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    begin(swarm, spec, a, b)
    swarm.settle()
    swarm.would_leave(b, stays=True)
    assert swarm.may_go(b)
    assert not swarm.said(SaveStage)


def test_a_snapshot_of_a_result_that_fails_is_not_tried_again(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.state = replace(swarm.state, keeps_snapshots=True)
    b.saves = False
    begin(swarm, spec, a, b)
    swarm.settle()
    swarm.would_leave(b)
    swarm.settle()
    swarm.wait(5)
    assert len(swarm.said(SaveStage)) == 2
    assert not swarm.may_go(b)
    assert reasons_sent_to(swarm, b)[-1].amount == STEPS


def test_the_time_is_estimated_from_the_state_and_the_link(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    b.max_up_bytes_per_s = state_bytes(spec, LayerRange(2, 4)) / 60
    begin(swarm, spec, a, b)
    heir = make_peer("heir", "auto")
    heir.is_slow_to_take = True
    swarm.join(heir)
    swarm.would_leave(b)
    until_commits(swarm, 4)
    first, *_ = [progress.seconds for _, progress in swarm.said(Progress)]
    assert 59 < first < 65, "a minute at the rate that it lends, and a step or two"
    swarm.wait(20)
    swarm.say(heir, heir.caught_up())
    until_commits(swarm, 5)
    assert swarm.may_go(b)


# ---- whoever comes and leaves, and however

NAMES = ("p", "q", "r", "s", "t")
wishes = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from(["comes", "leaves", "pauses", "works", "goes", "is held", "is let go on"]),
        st.integers(0, 12),
    ),
    max_size=25,
)


def do(swarm: Swarm, peer: FakePeer, wish: str) -> None:
    """Do one action that a peer or the run's owner may do now; leave only with permission."""
    member = swarm.state.members.get(peer.peer_id)
    if wish in ("is held", "is let go on"):
        swarm.handle(RunPaused(RUN) if wish == "is held" else RunResumed(RUN))
        return
    if wish == "comes" and member is None:
        peer.forget()
        swarm.join(peer)
    elif member is None:
        return
    elif wish == "works":
        swarm.say(peer, PeerResumed())
    elif wish in ("leaves", "pauses"):
        swarm.would_leave(peer, stays=wish == "pauses")
    elif member.leaving and not member.leaving.stays and member.told and member.told.may_go:
        swarm.leave(peer)


@settings(max_examples=draws(40))
@given(wishes=wishes, keeps_snapshots=st.booleans(), slow=st.sets(st.sampled_from(NAMES)))
def test_as_long_as_all_wait_until_they_may_go_no_step_is_lost(
    make_spec: MakeSpec,
    make_peer: type[FakePeer],
    wishes: list[tuple[str, str, int]],
    keeps_snapshots: bool,
    slow: set[str],
) -> None:
    swarm = Swarm()
    swarm.state = replace(swarm.state, keeps_snapshots=keeps_snapshots)
    peers = {name: make_peer(name, "auto") for name in NAMES}
    for name in slow:
        peers[name].is_slow_to_take = True
    swarm.join(peers["p"], peers["q"])
    swarm.submit(make_spec(num_steps=24))
    swarm.wait(3)
    committed = 0
    for name, wish, num_messages in wishes:
        do(swarm, peers[name], wish)
        for _ in range(min(num_messages, len(swarm.pending))):
            swarm.step()
            assert swarm.run().committed_steps >= committed
            committed = swarm.run().committed_steps
    for name in NAMES:
        peers[name].is_slow_to_take = False
        do(swarm, peers[name], "comes")
        do(swarm, peers[name], "works")
    swarm.handle(RunResumed(RUN))
    swarm.wait(5)
    for _ in range(8):
        for peer in peers.values():
            taking = [t for t in swarm.run().attempt.learners if t.peer_id == peer.peer_id]
            if taking and not peer.has_state and swarm.run().attempt.proofs.get(peer.peer_id):
                swarm.say(peer, peer.caught_up())
        swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().past.all_steps == 24
