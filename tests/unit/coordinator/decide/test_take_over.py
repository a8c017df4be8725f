"""Decisions about a newcomer that copies its stage's state while the others train."""

from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.blame import RETRY_S
from swarm_ft.coordinator.facts.events import PeerJoined
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.lateness import LOAD_S
from swarm_ft.coordinator.plan.membership import GRACE_S
from swarm_ft.coordinator.watching import status_of
from swarm_ft.ids import Attempt, PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CaughtUp,
    ExportStage,
    PlanStep,
    SaveStage,
    StageReady,
)
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.reasons import may_return, reason
from tests.unit.coordinator.conftest import RUN, FakePeer, MakeSpec, Swarm

STEPS = 8


@pytest.fixture
def peers(make_peer: type[FakePeer]) -> tuple[FakePeer, FakePeer]:
    return make_peer("a", "0-2"), make_peer("b", "2-4")


@pytest.fixture
def newcomer(make_peer: type[FakePeer]) -> FakePeer:
    newcomer = make_peer("newcomer", "2-4")
    newcomer.is_slow_to_take = True
    return newcomer


def until_commits(swarm: Swarm, number: int) -> None:
    swarm.settle_until(lambda: swarm.run().committed_steps == number)


def begin(
    swarm: Swarm, spec: RunSpec, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    """Commit one step, after which the newcomer begins to listen."""
    swarm.join(*peers)
    swarm.submit(spec)
    until_commits(swarm, 1)
    swarm.join(newcomer)
    until_commits(swarm, 2)


@pytest.fixture
def listened(
    swarm: Swarm, make_spec: MakeSpec, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> Swarm:
    """A newcomer that began at step 2 and does not get the state; step 2 is under way."""
    begin(swarm, make_spec(num_steps=STEPS, save_steps=2), peers, newcomer)
    until_commits(swarm, 3)
    return swarm


def learners(swarm: Swarm) -> list[tuple[PeerId, StepNumber, tuple[PeerId, ...]]]:
    return [
        (learner.peer_id, learner.step, learner.sources)
        for _, assign in swarm.said(Assign)[-1:]
        for learner in assign.learners
    ]


def plans_of(swarm: Swarm, step: int) -> list[PlanStep]:
    return [plan for _, plan in swarm.said(PlanStep) if plan.step == step]


def replicas_used(swarm: Swarm, step: int) -> set[int]:
    """Return the replicas of the second stage on the plan's routes."""
    (*_, plan) = plans_of(swarm, step)
    return {batch.replica_at(1) for batch in plan.microbatches}


def reasons_of(swarm: Swarm) -> list[Reason]:
    return swarm.reasons()


def test_the_others_train_on_and_no_microbatch_passes_who_listens(
    listened: Swarm, newcomer: FakePeer
) -> None:
    assert listened.run().phase is RunPhase.TRAINING
    assert learners(listened) == [("newcomer", 2, ("b",))]
    attempt = listened.run().attempt.number
    until_commits(listened, 6)
    assert listened.run().attempt.number == attempt, "nobody stopped"
    assert listened.run().listeners == ("newcomer",)
    assert newcomer.applied == list(range(6)), "it heard every step"
    for step in (2, 3, 4, 5):
        assert replicas_used(listened, step) == {0}
        assert all(plan.listeners == ("newcomer",) for plan in plans_of(listened, step))


def test_who_has_caught_up_computes_from_the_next_plan_on_and_not_sooner(
    listened: Swarm, newcomer: FakePeer
) -> None:
    attempt, step = listened.run().attempt.number, listened.run().committed_steps
    listened.say(newcomer, newcomer.caught_up())
    assert listened.run().listeners == ("newcomer",), "the step under way is not its own"
    listened.settle()
    assert replicas_used(listened, step) == {0}
    assert replicas_used(listened, step + 1) == {0, 1}
    assert listened.run().attempt.number == attempt
    assert listened.run().phase is RunPhase.FINISHED
    assert newcomer.exported
    assert listened.history[listened.run().run_id][step].state_bytes == 7


def test_people_are_told_who_joins_and_who_has_caught_up(
    listened: Swarm, newcomer: FakePeer
) -> None:
    joins = reason(Kind.JOINING_STAGE, "newcomer", layers="2-4")
    assert joins in reasons_of(listened)
    assert listened.run().detail == joins
    assert status_of(listened.run()).joining == ("newcomer",)
    listened.say(newcomer, newcomer.caught_up())
    until_commits(listened, 4)
    caught_up = reason(Kind.CAUGHT_UP, "newcomer", layers="2-4", step=4)
    assert listened.run().detail == caught_up
    assert status_of(listened.run()).joining == ()
    until_commits(listened, 5)
    assert listened.run().detail is None


def test_who_listens_takes_part_in_no_snapshot_and_counts_for_no_norm(
    listened: Swarm, newcomer: FakePeer
) -> None:
    newcomer.squared_grad_norm = 1e9
    until_commits(listened, 5)
    assert {peer for peer, _ in listened.said(SaveStage)} == {"a", "b"}
    assert listened.steps()[4].grad_norm == pytest.approx(8.0**0.5)


def test_whoever_still_listens_at_the_end_is_let_go(
    listened: Swarm, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    listened.settle()
    assert listened.run().phase is RunPhase.FINISHED
    assert listened.run().peers == ("a", "b")
    assert {peer for peer, _ in listened.said(ExportStage)} == {"a", "b"}
    assert [peer for peer, _ in listened.said(Release)] == ["newcomer"]
    assert newcomer.assign is None


def test_a_listener_goes_on_in_the_next_attempt_with_what_it_heard(
    listened: Swarm, make_peer: type[FakePeer], newcomer: FakePeer
) -> None:
    twin = make_peer("twin", "0-2")
    listened.join(twin)
    until_commits(listened, 5)
    assert ("newcomer", 2, ("b",)) in learners(listened)
    assert listened.run().listeners == ("newcomer",)
    takes = [take for peer, take in listened.said(CatchUp) if peer == "newcomer"]
    assert [take.attempt for take in takes] == [2, 3], "the sources offer it again"
    listened.say(newcomer, newcomer.caught_up())
    listened.settle()
    assert listened.run().phase is RunPhase.FINISHED
    assert newcomer.applied == list(range(STEPS))


def test_a_listener_that_lost_a_sum_begins_anew(
    listened: Swarm, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    listened.pending.clear()
    newcomer.applied.pop()
    listened.say(peers[0], peers[0].failed("unavailable"))
    listened.wait(RETRY_S)
    assert learners(listened) == [("newcomer", 2, ("b",))]
    listened.settle_until(lambda: ("newcomer", 2, ("b",)) not in learners(listened))
    assert learners(listened) == [("newcomer", 3, ("b",))]
    newcomer.is_slow_to_take = False
    listened.settle()
    assert listened.run().phase is RunPhase.FINISHED
    assert newcomer.applied == list(range(STEPS))


def test_a_listener_whose_sources_are_gone_begins_anew_with_others(
    listened: Swarm, peers: tuple[FakePeer, FakePeer], make_peer: type[FakePeer], newcomer: FakePeer
) -> None:
    other = make_peer("other", "2-4")
    listened.join(other)
    until_commits(listened, 5)
    assert listened.run().listeners == ("newcomer",)
    listened.lose(peers[1])
    step = listened.run().committed_steps
    assert learners(listened) == [("newcomer", step, ("other",))]
    newcomer.is_slow_to_take = False
    listened.settle()
    assert listened.run().phase is RunPhase.FINISHED
    assert newcomer.applied == other.applied == list(range(STEPS))
    assert listened.num_rollbacks == 0


def test_who_listens_cannot_stand_in_for_the_last_that_computed(
    listened: Swarm, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    listened.lose(peers[1])
    assert listened.run().phase is RunPhase.WAITING
    assert listened.run().detail == may_return("2-4", 5)
    listened.wait(GRACE_S)
    assert listened.num_rollbacks == 1
    listened.settle()
    assert listened.run().phase is RunPhase.FINISHED
    assert listened.run().peers == ("a", "newcomer")
    assert newcomer.applied == list(range(STEPS))


def test_the_last_that_computed_comes_back_and_who_listened_goes_on(
    listened: Swarm, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    listened.lose(peers[1])
    listened.join(peers[1])
    assert learners(listened) == [("newcomer", 2, ("b",))]
    newcomer.is_slow_to_take = False
    listened.settle()
    assert listened.run().phase is RunPhase.FINISHED
    assert listened.num_rollbacks == 0
    assert newcomer.applied == peers[1].applied == list(range(STEPS))


def test_a_listener_that_dies_costs_an_attempt_and_is_named(
    listened: Swarm, newcomer: FakePeer
) -> None:
    listened.lose(newcomer)
    parts = reason(Kind.PEER_DISCONNECTED), reason(Kind.WAS_JOINING)
    assert reason(Kind.PEER_LOST, "newcomer", layers="2-4", parts=parts) in reasons_of(listened)
    assert learners(listened) == []
    listened.settle()
    assert listened.run().phase is RunPhase.FINISHED
    assert listened.run().peers == ("a", "b")
    assert listened.num_rollbacks == 0


def test_a_listener_that_comes_back_begins_anew(listened: Swarm, newcomer: FakePeer) -> None:
    listened.lose(newcomer)
    listened.join(newcomer)
    listened.settle_until(lambda: learners(listened))
    assert learners(listened) == [("newcomer", listened.run().committed_steps, ("b",))]


def test_who_catches_up_between_two_attempts_needs_no_source_any_more(
    listened: Swarm, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    listened.say(newcomer, newcomer.caught_up())
    listened.lose(peers[1])
    assert listened.run().phase is RunPhase.LOADING
    assert listened.run().peers == ("a", "newcomer")
    assert learners(listened) == []
    listened.settle()
    assert listened.run().phase is RunPhase.FINISHED
    assert listened.num_rollbacks == 0


def test_what_an_older_attempt_says_of_a_take_over_is_void(
    listened: Swarm, newcomer: FakePeer
) -> None:
    run = listened.run()
    old = replace(newcomer.caught_up(), attempt=Attempt(run.attempt.number - 1))
    assert listened.say(newcomer, old) == []
    assert listened.run().attempt.caught_up == frozenset()


def test_who_does_not_take_over_has_nothing_to_say_of_it(
    listened: Swarm, peers: tuple[FakePeer, FakePeer]
) -> None:
    run = listened.run()
    caught_up = CaughtUp(
        run_id=run.run_id, attempt=run.attempt.number, state_bytes=7, proof=bytes(16)
    )
    assert listened.say(peers[1], caught_up) == []
    assert listened.run().attempt.caught_up == frozenset()
    assert listened.run().measured.state_bytes == 0


def test_after_a_restart_of_the_coordinator_the_listener_begins_anew(
    make_swarm: type[Swarm],
    make_spec: MakeSpec,
    peers: tuple[FakePeer, FakePeer],
    newcomer: FakePeer,
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    begin(swarm, make_spec(num_steps=STEPS), peers, newcomer)
    until_commits(swarm, 4)
    swarm.restart()
    swarm.join(*peers, newcomer)
    assert learners(swarm) == [("newcomer", swarm.run().committed_steps, ("b",))]
    newcomer.is_slow_to_take = False
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().peers == ("a", "b", "newcomer")
    assert swarm.num_rollbacks == 0


@pytest.fixture
def tied(make_spec: MakeSpec) -> RunSpec:
    plain = make_spec(num_steps=STEPS)
    return RunSpec(
        model=replace(plain.model, tied_embeddings=True),
        train=replace(plain.train, sync_tied_embeddings=True),
    )


def test_who_cannot_show_the_state_that_it_says_it_took_is_no_replica(
    listened: Swarm, newcomer: FakePeer
) -> None:
    newcomer.is_honest = False
    listened.say(newcomer, newcomer.caught_up())
    wrong = reason(Kind.WRONG_STATE)
    suspended = reason(Kind.PEER_SUSPENDED, amount=30.0, parts=(wrong.of(RUN),))
    assert listened.idlers() == {"newcomer": suspended}
    parts = wrong, reason(Kind.WAS_JOINING)
    assert reason(Kind.PEER_LOST, "newcomer", layers="2-4", parts=parts) in reasons_of(listened)
    listened.settle()
    assert listened.run().phase is RunPhase.FINISHED
    assert listened.run().peers == ("a", "b")
    assert all(replicas_used(listened, step) == {0} for step in range(2, STEPS))


def test_who_says_that_it_took_what_no_source_offered_yet_is_no_replica(
    listened: Swarm, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    listened.pending.clear()
    listened.say(peers[0], peers[0].failed("unavailable"))
    listened.wait(RETRY_S)
    listened.forget_said(PeerId("b"))
    listened.say(newcomer, newcomer.caught_up())
    assert listened.state.is_suspended(PeerId("newcomer"), listened.now_s)


def test_who_comes_and_says_that_it_holds_the_last_commit_takes_it_over_all_the_same(
    swarm: Swarm, make_spec: MakeSpec, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    swarm.join(*peers)
    swarm.submit(make_spec(num_steps=STEPS))
    until_commits(swarm, 2)
    swarm.say(peers[0], peers[0].failed("unavailable"))
    swarm.pending.clear()
    swarm.connected[newcomer.peer_id] = newcomer
    stages = peers[1].hello().held
    swarm.handle(PeerJoined(replace(newcomer.hello(), held=stages)))
    swarm.wait(RETRY_S)
    assert learners(swarm) == [("newcomer", 2, ("b",))]
    until_commits(swarm, 4)
    assert replicas_used(swarm, 3) == {0}


def test_where_all_wait_for_a_newcomer_it_is_not_ready_before_it_shows_the_state(
    swarm: Swarm, tied: RunSpec, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    swarm.join(*peers)
    swarm.submit(tied)
    until_commits(swarm, 1)
    swarm.join(newcomer)
    swarm.settle()
    ready = StageReady(run_id=swarm.run().run_id, attempt=swarm.run().attempt.number)
    swarm.say(newcomer, ready)
    assert swarm.run().phase is RunPhase.LOADING
    swarm.wait(LOAD_S + 10.0)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().peers == ("a", "b")


def test_where_tied_embeddings_are_synchronised_all_wait_for_the_newcomer(
    swarm: Swarm, tied: RunSpec, peers: tuple[FakePeer, FakePeer], newcomer: FakePeer
) -> None:
    swarm.join(*peers)
    swarm.submit(tied)
    until_commits(swarm, 1)
    swarm.join(newcomer)
    swarm.settle()
    assert swarm.run().phase is RunPhase.LOADING
    assert swarm.run().listeners == ()
    newcomer.is_slow_to_take = False
    (take,) = (take for _, take in swarm.said(CatchUp))
    for reply in newcomer.hear(take):
        swarm.say(newcomer, reply)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert all(not plan.listeners for _, plan in swarm.said(PlanStep))
    assert newcomer.applied == list(range(STEPS))
