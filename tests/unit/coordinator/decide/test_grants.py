"""Grants of invitations, and a job's trusted ends, hold for any sequence of events.

The fixture `Swarm` checks after every event that no peer hosts a forbidden stage.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.decide.blame import RETRY_S
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.reputation import MAX_FAILURES
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.lateness import LOAD_S
from swarm_ft.coordinator.plan.membership import GRACE_S
from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.coordinator.watching import overview, status_of
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerAlive, SaveStage
from swarm_ft.protocol.spec.grant import PROBATION, Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.draws import draws
from tests.reasons import may_return, missing, reason
from tests.specs import model_spec, train_spec
from tests.unit.coordinator.conftest import RUN, FakePeer, MakeSpec, Swarm

REPLICA = Grant(replica_only=True)
BLIND = Grant(sees_tokens=False)
MakePeer = type[FakePeer]
STEPS = 8


@pytest.fixture
def replica(make_peer: MakePeer) -> FakePeer:
    """A peer that may host the first stage beside others."""
    return make_peer("r", "0-2", grant=REPLICA)


def until_commits(swarm: Swarm, number: int) -> None:
    swarm.settle_until(lambda: swarm.run().committed_steps == number)


@pytest.fixture
def joined(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, replica: FakePeer) -> Swarm:
    """A replica that has copied the state of a's stage, and computes."""
    swarm.join(replica, a, b)
    swarm.submit(make_spec(num_steps=STEPS))
    swarm.settle_until(lambda: replica.peer_id in swarm.run().past.committers)
    return swarm


def details(swarm: Swarm) -> list[Reason]:
    return swarm.reasons()


def aside(swarm: Swarm) -> set[PeerId]:
    return {p for p in swarm.state.members if swarm.state.is_suspended(p, swarm.now_s)}


# ---- a replica on probation


def test_it_joins_as_a_listener_once_there_is_something_to_take_over(joined: Swarm) -> None:
    first = joined.told_of()[1].attempt.assignments
    assert [assigned.peer_id for assigned in first] == ["a", "b"]
    joined.settle()
    assert joined.run().phase is RunPhase.FINISHED
    assert joined.run().peers == ("a", "r", "b")
    assert joined.num_rollbacks == 0


def test_it_interrupts_nobody_who_loads(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, replica: FakePeer
) -> None:
    swarm.submit(make_spec())
    swarm.join(a, b)
    assert swarm.run().phase is RunPhase.LOADING
    swarm.join(replica)
    assert swarm.run().attempt.number == 1


def test_it_is_not_waited_for_where_nobody_listens(
    swarm: Swarm, a: FakePeer, b: FakePeer, replica: FakePeer
) -> None:
    model = model_spec(vocab_size=50, tied_embeddings=True)
    swarm.submit(RunSpec(model=model, train=train_spec(sync_tied_embeddings=True)))
    swarm.join(a, b, replica)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert replica.peer_id not in swarm.run().peers


def test_a_run_waits_for_the_last_one_that_may_carry_a_stage(
    joined: Swarm, a: FakePeer, replica: FakePeer
) -> None:
    steps = joined.run().committed_steps
    joined.lose(a)
    joined.settle()
    alone = reason(Kind.NO_CARRIER, others=(replica.peer_id,))
    parts = reason(Kind.PEER_DISCONNECTED), alone
    assert details(joined)[-2:] == [
        reason(Kind.PEER_LOST, "a", layers="0-2", parts=parts),
        may_return("0-2", 30),
    ]
    joined.wait(GRACE_S - 2)
    assert joined.run().phase is RunPhase.WAITING
    joined.join(a)
    joined.settle()
    assert joined.run().phase is RunPhase.FINISHED
    assert joined.num_rollbacks == 0
    assert len(joined.history[joined.run().run_id]) == STEPS > steps


def test_its_stage_is_begun_anew_by_others_if_that_one_stays_away(
    joined: Swarm, make_peer: MakePeer, a: FakePeer
) -> None:
    joined.lose(a)
    joined.wait(2 * GRACE_S)
    joined.settle()
    assert joined.run().detail == missing("0-2", reason(Kind.NOT_ALONE, "r"))
    assert joined.run().committed_steps == 0
    joined.join(make_peer("a2", "0-2"))
    joined.settle()
    assert joined.run().phase is RunPhase.FINISHED
    assert joined.num_rollbacks == 1


def test_others_stand_in_for_each_other_beside_it(
    joined: Swarm, make_peer: MakePeer, a: FakePeer
) -> None:
    second = make_peer("a2", "0-2")
    joined.join(second)
    joined.settle_until(lambda: second.peer_id in joined.run().past.committers)
    joined.lose(a)
    taken_over = reason(Kind.TAKEN_OVER, others=(PeerId("r"), PeerId("a2")))
    assert taken_over in details(joined)[-2].parts
    joined.settle()
    assert joined.run().phase is RunPhase.FINISHED
    assert joined.num_rollbacks == 0


def test_nobody_takes_a_stage_over_from_it_and_it_saves_none(
    swarm: Swarm, make_spec: MakeSpec, make_peer: MakePeer, b: FakePeer, replica: FakePeer
) -> None:
    first, second = make_peer("a", "0-2"), make_peer("a2", "0-2")
    swarm.join(first, b, replica)
    swarm.submit(make_spec(num_steps=STEPS, save_steps=1))
    swarm.settle_until(lambda: replica.peer_id in swarm.run().past.committers)
    swarm.join(second)
    swarm.settle_until(lambda: second.peer_id in swarm.run().past.committers)
    swarm.lose(first)
    swarm.settle()
    assert swarm.run().peers == ("r", "a2", "b")
    assert swarm.run().phase is RunPhase.FINISHED
    assert {peer for peer, _ in swarm.said(SaveStage)} == {"a", "a2", "b"}


def test_after_a_restart_it_is_no_more_than_it_was(
    make_swarm: type[Swarm],
    make_spec: MakeSpec,
    a: FakePeer,
    b: FakePeer,
    replica: FakePeer,
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    swarm.join(a, b, replica)
    swarm.submit(make_spec(num_steps=STEPS))
    swarm.settle_until(lambda: replica.peer_id in swarm.run().past.committers)
    swarm.restart()
    swarm.join(b, replica)
    swarm.wait(GRACE_S - 2)
    assert swarm.run().phase is RunPhase.WAITING
    assert swarm.num_rollbacks == 0
    swarm.join(a)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_it_outvotes_nobody(
    joined: Swarm, make_peer: MakePeer, a: FakePeer, replica: FakePeer
) -> None:
    more = make_peer("r2", "0-2", grant=PROBATION), make_peer("r3", "0-2", grant=REPLICA)
    joined.join(*more)
    joined.settle_until(lambda: more[1].peer_id in joined.run().past.committers)
    assert more[0].peer_id not in joined.run().peers, "the first stage sees tokens"
    for liar in (replica, more[1]):
        liar.squared_grad_norm = 5.0
    joined.settle()
    assert aside(joined) == {"r", "r3"}
    assert joined.run().phase is RunPhase.FINISHED
    assert a.peer_id in joined.run().peers


def test_its_result_outvotes_no_other(
    joined: Swarm, make_peer: MakePeer, replica: FakePeer
) -> None:
    more = make_peer("r2", "0-2", grant=REPLICA)
    joined.join(more)
    joined.settle_until(lambda: more.peer_id in joined.run().past.committers)
    for liar in (replica, more):
        liar.result = b"another"
    joined.settle()
    assert joined.run().phase is RunPhase.FINISHED
    assert [result.peer_id for result in status_of(joined.run()).results] == ["a", "b"]


def test_its_word_ends_no_run(
    joined: Swarm, make_peer: MakePeer, a: FakePeer, b: FakePeer, replica: FakePeer
) -> None:
    more = make_peer("r2", "0-2", grant=REPLICA)
    joined.join(more)
    joined.settle_until(lambda: more.peer_id in joined.run().past.committers)
    for doubter in (replica, more):
        joined.say(doubter, doubter.failed("non-finite"))
    assert all(joined.run().has_suspended(PeerId(name), joined.now_s) for name in ("r", "r2"))
    joined.settle()
    assert not aside(joined), "each failed once"
    assert all(joined.state.reputation(PeerId(name)).failed_in for name in ("r", "r2"))
    assert joined.run().phase is RunPhase.FINISHED


def test_nobody_is_left_out_of_a_step_that_it_alone_would_be_left_with(
    joined: Swarm, a: FakePeer
) -> None:
    joined.say(a, a.failed("non-finite"))
    joined.wait(2 * RETRY_S)
    joined.settle()
    assert joined.run().phase is RunPhase.FINISHED
    assert joined.num_rollbacks == 0


def test_a_run_does_not_fail_because_nobody_but_it_is_there(
    joined: Swarm, a: FakePeer, b: FakePeer, replica: FakePeer
) -> None:
    failed = replica.failed("bad-model")
    joined.leave(a)
    joined.leave(b)
    joined.say(replica, failed)
    joined.settle()
    assert joined.run().phase is RunPhase.WAITING
    joined.join(a, b)
    joined.settle()
    assert joined.run().phase is RunPhase.FINISHED


@pytest.fixture
def crowd(joined: Swarm, make_peer: MakePeer) -> list[FakePeer]:
    """The first stage with several peers on probation, and a second one that is not."""
    second = make_peer("a2", "0-2")
    crowd = [make_peer(f"r{i}", "0-2", grant=REPLICA) for i in range(3)]
    joined.join(second, *crowd)
    joined.settle_until(lambda: crowd[-1].peer_id in joined.run().past.committers)
    return crowd


def test_many_of_them_blame_nobody_else(joined: Swarm, crowd: list[FakePeer]) -> None:
    for liar in 2 * crowd:
        if liar.peer_id not in aside(joined):
            failed = replace(liar.failed("unavailable"), about=PeerId("a"))
            joined.say(liar, failed)
            joined.wait(2 * RETRY_S)
            joined.settle_until(lambda: joined.run().phase is RunPhase.TRAINING)
    assert PeerId("a") not in aside(joined)
    joined.settle()
    assert joined.run().phase is RunPhase.FINISHED


def test_whom_many_of_them_wait_for_is_not_late(
    joined: Swarm, a: FakePeer, crowd: list[FakePeer], replica: FakePeer
) -> None:
    joined.settle_until(lambda: joined.run().step is not None)
    idlers = [replica, *crowd]
    for idler in idlers:
        joined.forget_said(idler.peer_id)
    joined.settle()
    run = joined.run()
    alive = PeerAlive(
        run_id=run.run_id,
        attempt=run.attempt.number,
        step=StepNumber(run.committed_steps),
        waits_for=(a.peer_id,),
    )
    while not aside(joined):
        for idler in idlers:
            joined.say(idler, alive)
        joined.wait(1.0)
    assert aside(joined) <= {idler.peer_id for idler in idlers}


def test_with_it_alone_nobody_is_set_aside_for_being_late(
    joined: Swarm, a: FakePeer, b: FakePeer, replica: FakePeer
) -> None:
    joined.settle_until(lambda: joined.run().step is not None)
    joined.pending.clear()
    run = joined.run()
    alive = PeerAlive(
        run_id=run.run_id,
        attempt=run.attempt.number,
        step=StepNumber(run.committed_steps),
        waits_for=(a.peer_id,),
    )
    for _ in range(round(4 * LOAD_S)):
        for peer in (b, replica):
            joined.say(peer, alive)
        joined.wait(1.0)
        joined.pending.clear()
    assert a.peer_id not in aside(joined)
    assert joined.num_rollbacks == 0


def test_what_it_says_of_a_result_after_a_restart_is_not_taken_for_one(
    make_swarm: type[Swarm],
    make_spec: MakeSpec,
    a: FakePeer,
    b: FakePeer,
    replica: FakePeer,
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    swarm.join(a, b, replica)
    swarm.submit(make_spec(num_steps=STEPS))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    swarm.restart()
    swarm.join(replica, b)
    assert [result.peer_id for result in status_of(swarm.run()).results] == ["b"]
    swarm.join(a)
    assert [result.peer_id for result in status_of(swarm.run()).results] == ["a", "b"]


def test_status_tells_what_a_member_may_host(swarm: Swarm, replica: FakePeer) -> None:
    swarm.join(replica)
    (member,) = overview(swarm.state).members
    assert member.grant == REPLICA


# ---- tokens, layers, private ends


def test_who_names_layers_that_it_was_not_invited_for_is_refused(
    swarm: Swarm, make_peer: MakePeer
) -> None:
    narrow = Grant(layers=LayerRange(1, 3))
    peer, inside, auto = (
        make_peer(name, layers, grant=narrow)
        for name, layers in (("wide", "0-2"), ("inside", "1-2"), ("auto", "auto"))
    )
    swarm.join(peer, inside, auto)
    assert swarm.dismissals() == {"wide": "not-allowed"}
    assert set(swarm.state.members) == {"inside", "auto"}


def test_who_may_host_no_stage_of_the_run_is_told_why(
    swarm: Swarm, make_spec: MakeSpec, make_peer: MakePeer, a: FakePeer, b: FakePeer
) -> None:
    blind, auto = make_peer("blind", "0-2", grant=BLIND), make_peer("auto", "auto", grant=BLIND)
    swarm.join(a, b, blind, auto)
    swarm.wait(SETTLE_S)
    swarm.submit(make_spec())
    why = (reason(Kind.NO_TOKENS),)
    refused = {
        "blind": reason(Kind.REFUSED_LAYERS, layers="0-2", parts=why),
        "auto": reason(Kind.REFUSED_LAYERS, layers="0-2, 2-4", parts=why),
    }
    assert swarm.idlers() == {
        name: reason(Kind.NOT_GRANTED, parts=(one,), run_id=RUN) for name, one in refused.items()
    }
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert set(swarm.run().peers) == {"a", "b"}


def test_newcomers_and_stand_ins_of_the_ends_are_those_that_the_job_trusts(
    swarm: Swarm, make_spec: MakeSpec, make_peer: MakePeer, a: FakePeer
) -> None:
    middle, end = make_peer("m", "2-4"), make_peer("z", "4-6")
    swarm.submit(make_spec(num_blocks=6, num_steps=STEPS, private_ends="a,a2,z"))
    swarm.join(a, middle, end)
    until_commits(swarm, 1)
    others = make_peer("x", "0-2"), make_peer("x2", "auto"), make_peer("a2", "0-2")
    swarm.join(*others)
    until_commits(swarm, 5)
    assert swarm.run().peers == ("a", "a2", "m", "x2", "z")
    swarm.lose(a)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().peers == ("a2", "m", "x2", "z")
    assert swarm.num_rollbacks == 0


def test_a_run_waits_for_those_whom_it_trusts_with_its_ends(
    swarm: Swarm, make_spec: MakeSpec, make_peer: MakePeer, a: FakePeer, b: FakePeer
) -> None:
    stranger = make_peer("x", "0-2")
    swarm.submit(make_spec(private_ends="a,b"))
    swarm.join(stranger, b)
    assert swarm.run().detail == missing("0-2", reason(Kind.NOT_TRUSTED, "x"))
    swarm.join(a)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert set(swarm.run().peers) == {"a", "b"}


# ---- whatever happens

LAYERS = ("0-2", "2-4", "4-6", "0-6", "auto")
grants = st.builds(
    Grant,
    replica_only=st.booleans(),
    sees_tokens=st.sampled_from([True, True, False]),
    layers=st.sampled_from([None, None, LayerRange(0, 4), LayerRange(2, 6)]),
)
newcomers = st.tuples(st.just("join"), st.sampled_from(LAYERS), grants)
others = st.tuples(
    st.sampled_from(["lose", "leave", "settle", "step", "wait", "fail"]),
    st.integers(0, 7),
    st.integers(1, 40),
)


@settings(
    derandomize=True,
    max_examples=draws(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    story=st.lists(st.one_of(newcomers, others), max_size=30),
    trusted=st.sampled_from(["", "", "p0,p1,p2"]),
    save_steps=st.sampled_from([0, 1]),
)
def test_no_story_ends_with_more_than_was_granted(
    make_swarm: type[Swarm],
    make_spec: MakeSpec,
    make_peer: MakePeer,
    story: list[tuple[str, object, object]],
    trusted: str,
    save_steps: int,
) -> None:
    swarm = make_swarm()
    swarm.submit(
        make_spec(num_blocks=6, num_steps=STEPS, private_ends=trusted, save_steps=save_steps)
    )
    num_joined = 0
    for kind, which, what in story:
        if kind == "join":
            peer = make_peer(f"p{num_joined}", str(which), grant=as_grant(what))
            num_joined += 1
            swarm.join(peer)
        else:
            happens(swarm, kind, as_int(which), as_int(what))
    enough = [make_peer(f"p{n}", "0-6") for n in range(3)]
    for peer in list(swarm.connected.values()):
        swarm.leave(peer)
    swarm.join(*enough)
    swarm.wait(MAX_FAILURES * GRACE_S)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def as_grant(value: object) -> Grant:
    assert isinstance(value, Grant)
    return value


def as_int(value: object) -> int:
    assert isinstance(value, int)
    return value


def few_steps(swarm: Swarm, number: int) -> None:
    for _ in range(min(number, len(swarm.pending))):
        swarm.step()


def happens(swarm: Swarm, kind: str, which: int, amount: int) -> None:
    peers = sorted(swarm.connected)
    peer = swarm.connected[peers[which % len(peers)]] if peers else None
    deeds: dict[str, Callable[[], object]] = {
        "settle": swarm.settle,
        "wait": lambda: swarm.wait(float(amount)),
        "step": lambda: few_steps(swarm, amount),
    }
    if kind in deeds:
        deeds[kind]()
    elif peer is not None and kind == "lose":
        swarm.lose(peer)
    elif peer is not None and kind == "leave":
        swarm.leave(peer)
    elif peer is not None and peer.assign is not None:
        swarm.say(peer, peer.failed("unavailable"))
