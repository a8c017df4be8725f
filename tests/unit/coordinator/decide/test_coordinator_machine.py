"""Runs as the coordinator decides them; the swarm of the conftest checks every effect."""

import math
from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.blame import RETRY_S
from swarm_ft.coordinator.facts.events import (
    Effect,
    PeerJoined,
    PeerSaid,
    Publish,
    ResultCollected,
    RollbackRecord,
    RunCancelled,
    SendMessage,
)
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.membership import GATHER_S, GRACE_S, SILENT_S
from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.coordinator.watching import overview
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase, StepCommitted
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CommitStep,
    ExportStage,
    FromPeer,
    HeldStage,
    PeerGoodbye,
    PlanStep,
    SaveStage,
    StageAssignment,
    StageReady,
)
from swarm_ft.protocol.messages.reports import ByteCounts
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.reasons import all_parts, may_return, missing, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN, SECOND = RunId("run-1"), RunId("run-2")


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec()


def until_commits(swarm: Swarm, number: int) -> None:
    swarm.settle_until(lambda: len(swarm.history[RUN]) == number)


# ---- the quiet run


def test_a_run_goes_from_queued_to_collected(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert a.applied == b.applied == [0, 1, 2]
    assert a.exported
    assert b.exported
    swarm.handle(ResultCollected(RUN))
    assert swarm.phases() == [
        RunPhase.QUEUED,
        RunPhase.WAITING,
        RunPhase.LOADING,
        RunPhase.TRAINING,
        RunPhase.EXPORTING,
        RunPhase.FINISHED,
        RunPhase.COLLECTED,
    ]
    assert a.assign is b.assign is None


def test_an_assignment_says_where_each_peer_is_reached_by_now(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    assert b.assign is not None
    assert [stage.endpoint for stage in b.assign.assignments] == [
        "a.example:7001",
        "b.example:7001",
    ]
    a.endpoint = "192.0.2.7:4000"
    swarm.lose(a)
    swarm.join(a)
    assert [stage.endpoint for stage in b.assign.assignments] == [
        "192.0.2.7:4000",
        "b.example:7001",
    ]
    assert swarm.run().attempt.assignments == b.assign.assignments


def test_peers_that_were_there_first_are_used(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.join(b, a)
    swarm.submit(spec)
    assert swarm.run().peers == ("a", "b")
    assert swarm.run().phase is RunPhase.LOADING


def test_only_first_and_last_stage_are_sent_tokens(
    swarm: Swarm, make_peer: type[FakePeer], make_spec: MakeSpec
) -> None:
    swarm.submit(make_spec(num_blocks=3))
    swarm.join(
        *(
            make_peer(name, layers)
            for name, layers in zip("abc", ("0-1", "1-2", "2-3"), strict=True)
        )
    )
    swarm.settle()
    plans = [
        e for e in swarm.effects if isinstance(e, SendMessage) and isinstance(e.message, PlanStep)
    ]
    assert {p.peer_id: bool(p.tokens_of) for p in plans} == {"a": True, "b": False, "c": True}


def test_a_step_plans_the_samples_of_its_batch(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle()
    planned = [[batch.samples for batch in plan.microbatches] for plan in swarm.plans]
    assert planned == [[(0, 1), (2, 3)], [(4, 5)], [(0, 1), (2, 3)]]
    first = next(m for m in a.heard if isinstance(m, PlanStep))
    assert [batch.samples for batch in first.microbatches] == [(0, 1), (2, 3)]


def test_a_step_is_planned_when_all_stages_are_loaded(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.step()
    assert swarm.run().phase is RunPhase.LOADING
    assert not swarm.plans
    swarm.step()
    assert swarm.run().phase is RunPhase.TRAINING
    assert [plan.step for plan in swarm.plans] == [0]


def test_a_commit_has_loss_norm_clip_factor_and_learning_rate(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    a.squared_grad_norm, b.squared_grad_norm = 9.0, 16.0
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle()
    steps = swarm.history[RUN]
    assert [step.loss for step in steps] == [10.0, 9.0, 8.0]
    assert [step.grad_norm for step in steps] == [5.0] * 3
    assert [step.num_samples for step in steps] == [4, 2, 4]
    assert [step.learning_rate for step in steps] == pytest.approx([0.5, 1 / 3, 1 / 6])
    commits = [m for m in a.heard if isinstance(m, CommitStep)]
    assert commits == [m for m in b.heard if isinstance(m, CommitStep)]
    assert [c.clip_factor for c in commits] == pytest.approx([1 / (5 + 1e-6)] * 3, rel=1e-12)
    assert [c.learning_rate for c in commits] == [step.learning_rate for step in steps]


@pytest.mark.parametrize(("num_targets", "loss"), [(3, 4.0), (5, 2.4), (0, 12.0)])
def test_a_loss_is_a_mean_over_what_was_learned(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, num_targets: int, loss: float
) -> None:
    """Check also that it is a number, whatever a peer reports."""
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.step()
    swarm.step()
    # Targets of other stages than the last are none.
    swarm.say(a, replace(a.step_ready(0), num_targets=100))
    swarm.say(b, replace(b.step_ready(0), loss_sum=12.0, num_targets=num_targets))
    assert [step.loss for step in swarm.history[RUN]] == [loss]


def test_without_clipping_the_factor_is_one(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(clip_grad_norm=0.0))
    swarm.join(a, b)
    swarm.settle()
    assert {m.clip_factor for m in a.heard if isinstance(m, CommitStep)} == {1.0}


def test_the_seconds_of_a_step_run_from_its_plan_to_its_commit(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    planned_s = swarm.now_s
    swarm.wait(7.0)
    until_commits(swarm, 1)
    assert swarm.history[RUN][0].seconds == swarm.now_s - planned_s


def test_traffic_of_both_sides_of_a_boundary_is_added(
    swarm: Swarm, make_peer: type[FakePeer], make_spec: MakeSpec
) -> None:
    swarm.submit(make_spec(num_blocks=3))
    swarm.join(
        *(
            make_peer(name, layers)
            for name, layers in zip("abc", ("0-1", "1-2", "2-3"), strict=True)
        )
    )
    swarm.settle()
    traffic = swarm.history[RUN][0].traffic
    assert [t.boundary for t in traffic] == [1, 2]
    assert {(t.forward_bytes, t.backward_bytes, t.key_frames) for t in traffic} == {(100, 30, 4)}
    assert {t.backward_uncompressed_bytes for t in traffic} == {120}


def test_watchers_see_every_step(swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle()
    seen = [e.event for e in swarm.effects if isinstance(e, Publish)]
    assert [s.step for s in seen if isinstance(s, StepCommitted)] == [0, 1, 2]


# ---- waiting for peers


def test_a_run_says_which_layers_it_waits_for(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(num_blocks=6))
    assert swarm.run().detail == missing("0-6")
    swarm.join(b)
    assert swarm.run().detail == missing("0-2, 4-6")
    swarm.join(a)
    assert swarm.run().detail == missing("4-6")
    assert swarm.run().phase is RunPhase.WAITING


def test_the_same_wait_is_written_once(swarm: Swarm, make_spec: MakeSpec, a: FakePeer) -> None:
    swarm.submit(make_spec())
    swarm.join(a)
    before = len(swarm.effects)
    for _ in range(5):
        swarm.wait(1.0)
    assert len(swarm.effects) == before


def test_automatic_peers_are_gathered_before_they_are_placed(
    swarm: Swarm, spec: RunSpec, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(make_peer("a", "auto"), make_peer("b", "auto"))
    assert swarm.run().detail == reason(Kind.GATHERING)
    swarm.wait(SETTLE_S)
    assert [str(stage.layers) for stage in swarm.run().stages] == ["0-2", "2-4"]


def test_a_second_run_is_queued_until_the_first_is_collected(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(a, b)
    until_commits(swarm, 2)
    assert swarm.run(SECOND).phase is RunPhase.QUEUED
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run(SECOND).phase is RunPhase.WAITING
    assert reason(Kind.RESULTS_KEPT, amount=2) in all_parts(swarm.run(SECOND).detail)
    swarm.handle(ResultCollected(RUN))
    swarm.settle()
    assert swarm.run(SECOND).phase is RunPhase.FINISHED


def test_other_peers_run_the_second_while_the_first_waits_to_be_collected(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(a, b)
    swarm.settle()
    swarm.join(make_peer("c", "0-4"))
    swarm.settle()
    assert swarm.run(SECOND).phase is RunPhase.FINISHED
    assert swarm.run(SECOND).peers == ("c",)
    assert a.exported


def test_a_peer_with_a_result_is_not_idle_for_its_layers(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec())
    swarm.join(a, b)
    swarm.submit(make_spec(num_blocks=2), SECOND)
    swarm.settle()
    swarm.lose(b)
    swarm.join(b)
    assert not swarm.idlers()
    swarm.handle(ResultCollected(RUN))
    assert swarm.idlers().keys() == {"b"}
    swarm.settle()
    assert swarm.run(SECOND).phase is RunPhase.FINISHED


def test_a_cancelled_first_run_makes_way_for_the_second(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.handle(RunCancelled(RUN))
    swarm.settle()
    assert swarm.run(SECOND).phase is RunPhase.FINISHED
    assert a.applied == [0, 1, 2]


# ---- who may join


def test_a_peer_outside_the_model_stays_and_is_idle(
    swarm: Swarm, spec: RunSpec, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(make_peer("far", "4-6"))
    outside = reason(Kind.OUTSIDE_MODEL, layers="4-6, 0-4", run_id=RUN)
    assert list(swarm.idlers().values()) == [outside]
    assert set(swarm.state.members) == {"far"}
    assert not swarm.dismissals()


def test_a_peer_that_matches_no_stage_stays_and_is_idle(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.join(make_peer("askew", "1-3"))
    no_stage = reason(Kind.NO_SUCH_STAGE, layers="1-3, 0-2, 2-4", run_id=RUN)
    assert swarm.idlers() == {"askew": no_stage}
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_a_spare_peer_of_a_stage_is_welcome(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b, make_peer("spare", "2-4"), make_peer("any", "auto"))
    assert not swarm.dismissals()
    assert set(swarm.state.members) == {"a", "b", "spare", "any"}


def test_misfits_are_told_when_a_run_is_submitted(
    swarm: Swarm, spec: RunSpec, a: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.join(a, make_peer("far", "4-6"))
    swarm.submit(spec)
    assert swarm.idlers().keys() == {"far"}
    assert set(swarm.state.members) == {"a", "far"}


def test_misfits_are_told_when_the_stages_are_chosen(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, make_peer("askew", "1-3"), b)
    assert swarm.idlers().keys() == {"askew"}
    assert swarm.run().phase is RunPhase.LOADING


def test_what_is_of_another_spec_is_let_go(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    stage = HeldStage(run_id=RUN, spec_digest=b"x" * 16, layers=LayerRange(2, 4), committed_steps=0)
    other = make_peer("other", "2-4")
    swarm.handle(PeerJoined(replace(other.hello(), held=(stage,))))
    assert [peer for peer, _ in swarm.said(Release)] == ["other"]
    assert set(swarm.state.members) == {"a", "b", "other"}


@pytest.mark.parametrize("phase", [None, RunPhase.CANCELLED, RunPhase.COLLECTED])
def test_a_peer_that_holds_a_run_that_is_over_is_released(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, phase: RunPhase | None
) -> None:
    if phase is not None:
        swarm.submit(spec)
        swarm.join(a, b)
        swarm.settle()
        end = RunCancelled(RUN) if phase is RunPhase.CANCELLED else ResultCollected(RUN)
        swarm.lose(b)
        swarm.handle(end)
        assert swarm.run().phase is phase
    else:
        b.assign = Assign(
            run_id=RunId("forgotten"),
            spec=spec,
            attempt=Attempt(1),
            assignments=(StageAssignment(peer_id=b.peer_id, layers=LayerRange(2, 4)),),
            committed_steps=0,
            fresh=True,
            spec_digest=spec.digest(),
        )
    assert b.assign is not None
    swarm.join(b)
    assert b.assign is None


def test_a_peer_that_holds_a_void_history_begins_anew(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.lose(b)
    swarm.join(make_peer("c", "2-4"))
    swarm.wait(GRACE_S)
    assert swarm.run().peers == ("a", "c")
    swarm.join(b)
    assert swarm.run().peers == ("a", "c", "b")
    assert b.applied == []
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert b.applied == [0, 1, 2]


def test_a_void_history_of_equal_length_is_not_taken_for_the_runs_own(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec(num_steps=4))
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.lose(b)
    swarm.join(make_peer("c", "2-4"))
    swarm.wait(GRACE_S)
    until_commits(swarm, 1)
    assert b.applied == [0]
    swarm.join(b)
    assert b.assign is None, "what it holds is of no use"
    until_commits(swarm, 2)
    assert swarm.run().peers == ("a", "c", "b")
    assert [take.sources for _, take in swarm.said(CatchUp)] == []
    swarm.settle()
    assert [take.sources for _, take in swarm.said(CatchUp)] == [("c",)]
    assert swarm.run().phase is RunPhase.FINISHED
    assert b.applied == [0, 1, 2, 3]


# ---- peers that come and go


def test_a_broken_stream_repeats_the_step_and_commits_it_once(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.lose(b)
    assert swarm.run().phase is RunPhase.WAITING
    assert swarm.run().detail == may_return("2-4", 30)
    swarm.join(b)
    swarm.settle()
    assert [(p.step, p.attempt) for p in swarm.plans] == [(0, 1), (1, 1), (1, 2), (2, 2)]
    assert swarm.run().phase is RunPhase.FINISHED
    assert b.applied == [0, 1, 2]
    assert swarm.num_rollbacks == 0


def test_a_peer_that_missed_the_commit_is_told_again(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.settle_until(lambda: b.gradients_of_step == 1)
    ready = b.step_ready(1)
    swarm.deafen(b)
    swarm.say(b, ready)
    until_commits(swarm, 2)
    assert (a.applied, b.applied) == ([0, 1], [0])
    swarm.lose(b)
    num_received = len(b.heard)
    swarm.join(b)
    commit, assign = b.heard[num_received : num_received + 2]
    assert isinstance(commit, CommitStep)
    assert commit.step == 1
    assert isinstance(assign, Assign)
    assert (assign.fresh, assign.committed_steps) == (False, 2)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert b.applied == [0, 1, 2]
    assert swarm.num_rollbacks == 0


def test_all_peers_may_be_away_at_once(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 2)
    swarm.lose(a, b)
    assert swarm.run().detail == may_return("0-2, 2-4", 30)
    swarm.wait(GRACE_S / 2)
    swarm.join(b, a)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_a_peer_that_stays_away_is_replaced_and_the_run_begins_again(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 2)
    swarm.lose(b)
    swarm.wait(GRACE_S - 1.0)
    assert swarm.run().committed_steps == 2
    swarm.wait(1.0)
    assert RollbackRecord(RUN, StepNumber(0)) in swarm.effects
    assert swarm.run().detail == missing("2-4")
    assert swarm.run().committed_steps == 0
    assert a.assign is None, "what it holds is of no use any more"
    newcomer = make_peer("c", "2-4")
    swarm.join(newcomer)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert a.applied == newcomer.applied == [0, 1, 2]
    assert [step.step for step in swarm.history[RUN]] == [0, 1, 2]


def test_a_peer_that_slept_through_a_rollback_loads_afresh(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 2)
    swarm.deafen(b)
    swarm.leave(a)
    swarm.join(make_peer("c", "0-2"))
    assert swarm.run().peers == ("c", "b")
    assert len(b.applied) == 2
    swarm.lose(b)
    swarm.join(b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert b.applied == [0, 1, 2]


def test_a_result_of_before_a_rollback_does_not_count(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: "a" in swarm.run().past.exported)
    swarm.leave(b)
    newcomer = make_peer("c", "2-4")
    swarm.join(newcomer)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.EXPORTING)
    swarm.forget_said(a.peer_id)
    swarm.settle()
    assert newcomer.exported
    assert swarm.run().phase is RunPhase.EXPORTING


def test_a_peer_that_comes_back_without_its_weights_begins_the_run_again(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.lose(b)
    b.forget()
    swarm.join(b)
    assert swarm.num_rollbacks == 1
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_a_peer_that_restarts_before_the_first_commit_costs_nothing(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    swarm.lose(b)
    b.forget()
    swarm.join(b)
    assert swarm.num_rollbacks == 0
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_a_peer_that_comes_back_with_other_layers_is_placed_anew(
    swarm: Swarm, make_peer: type[FakePeer], spec: RunSpec, a: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, make_peer("b", "2-4"))
    swarm.lose(swarm.connected[PeerId("b")])
    swarm.join(make_peer("b", "2-3"))
    assert swarm.run().detail == missing("3-4")
    swarm.join(make_peer("c", "3-4"))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_a_goodbye_needs_no_grace(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.join(make_peer("spare", "2-4"))
    swarm.leave(b)
    assert swarm.run().peers == ("a", "spare")
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 1


def test_a_goodbye_of_a_stranger_or_a_spare_changes_no_run(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    spare = make_peer("spare", "2-4")
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.join(spare)
    run = swarm.run()
    swarm.handle(PeerSaid(PeerId("stranger"), PeerGoodbye()))
    swarm.leave(spare)
    assert swarm.run() == run


def test_a_loss_while_exporting_exports_again(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.EXPORTING)
    swarm.lose(a)
    swarm.join(a)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_a_peer_that_joins_again_before_its_loss_is_noticed(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.deafen(b)
    swarm.deaf.clear()
    swarm.join(b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().attempt.number == 2


# ---- what does not count


def test_messages_of_an_older_attempt_are_ignored(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    ready = StageReady(run_id=RUN, attempt=Attempt(1))
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    stale: list[tuple[FakePeer, FromPeer]] = [
        (peer, message) for peer in (a, b) for message in (ready, peer.step_ready(0))
    ]
    stale += [(a, a.failed("non-finite")), (b, b.failed("internal"))]
    swarm.lose(b)
    swarm.join(b)
    assert_ignored(swarm, stale)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    assert swarm.run().attempt.number == 2
    assert_ignored(swarm, stale)


def assert_ignored(swarm: Swarm, messages: list[tuple[FakePeer, FromPeer]]) -> None:
    run = swarm.run()
    for peer, message in messages:
        assert swarm.say(peer, message) == []
    assert swarm.run() == run


def test_a_step_ready_of_another_step_is_ignored(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    swarm.pending.clear()
    for step in (StepNumber(1), StepNumber(2)):
        assert swarm.say(a, replace(a.step_ready(0), step=step)) == []
        assert swarm.say(b, replace(b.step_ready(0), step=step)) == []
    assert swarm.run().committed_steps == 0


def test_one_peer_cannot_be_ready_for_all(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    swarm.pending.clear()
    for _ in range(3):
        assert swarm.say(a, a.step_ready(0)) == []


def test_a_spare_has_no_say(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    spare = make_peer("spare", "2-4")
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.join(spare)
    run = swarm.run()
    assert set(run.peers) == {"a", "b"}
    assert swarm.say(spare, StageReady(run_id=RUN, attempt=run.attempt.number)) == []
    assert swarm.run() == run


# ---- failures


def fail(swarm: Swarm, peer: FakePeer, code: str) -> list[Effect]:
    swarm.forget_said(peer.peer_id)
    return swarm.say(peer, peer.failed(code))


def test_an_unreachable_neighbour_is_tried_again(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    fail(swarm, a, "unavailable")
    assert swarm.run().attempt.number == 1, "after a rest, not in a tight loop"
    swarm.wait(RETRY_S)
    assert swarm.run().attempt.number == 2
    assert swarm.run().committed_steps == 1
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_why_an_attempt_failed_is_published(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    effects = fail(swarm, a, "unavailable")
    statuses = [e.event for e in effects if isinstance(e, Publish)]
    error = reason(Kind.PEER_ERROR, "a", code="unavailable", text="oh")
    assert error in [run.reason for run in statuses if isinstance(run, Run)]


def test_weights_that_do_not_fit_the_history_begin_the_run_again(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 2)
    swarm.lose(b)
    swarm.join(b)
    fail(swarm, b, "out-of-turn")
    assert swarm.num_rollbacks == 1
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_a_neighbour_out_of_turn_does_not_cost_the_weights(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 2)
    fail(swarm, a, "out-of-turn")
    swarm.wait(RETRY_S)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_a_code_that_nobody_knows_is_tried_again(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    fail(swarm, a, "of-a-later-version")
    swarm.wait(RETRY_S)
    assert swarm.run().attempt.number == 2
    assert swarm.run().phase is RunPhase.LOADING


# ---- cancelling


@pytest.mark.parametrize(
    "phase", [RunPhase.LOADING, RunPhase.TRAINING, RunPhase.EXPORTING, RunPhase.FINISHED]
)
def test_cancel_releases_the_peers(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, phase: RunPhase
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().phase is phase)
    swarm.handle(RunCancelled(RUN))
    assert swarm.run().phase is RunPhase.CANCELLED
    assert a.assign is b.assign is None
    swarm.settle()
    assert swarm.run().phase is RunPhase.CANCELLED


def test_cancel_while_a_peer_is_away_releases_it_when_it_comes_back(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.lose(b)
    swarm.handle(RunCancelled(RUN))
    assert a.assign is None
    swarm.join(b)
    assert b.assign is None


def test_cancel_after_a_rollback_leaves_nobody_with_a_stage(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.leave(b)
    swarm.handle(RunCancelled(RUN))
    assert a.assign is None


def test_cancel_of_a_queued_run_leaves_the_other_alone(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(a, b)
    swarm.handle(RunCancelled(SECOND))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run(SECOND).phase is RunPhase.CANCELLED


def test_what_is_over_or_unknown_cannot_be_cancelled_or_collected(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    assert swarm.handle(ResultCollected(RUN)) == []
    swarm.handle(RunCancelled(RUN))
    for event in (RunCancelled, ResultCollected):
        for run_id in (RUN, RunId("unknown")):
            assert swarm.handle(event(run_id)) == []


# ---- messages and their receivers


def test_export_and_release_go_to_every_stage(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b, make_peer("spare", "0-2"))
    swarm.settle()
    swarm.handle(ResultCollected(RUN))
    assert [peer for peer, _ in swarm.said(ExportStage)] == ["a", "spare", "b"]
    assert {peer for peer, _ in swarm.said(Release)} == {"a", "spare", "b"}


def test_when_a_run_is_over_all_hear_it_who_may_have_something_of_it(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle()
    swarm.join(make_peer("late", "auto"))
    swarm.handle(ResultCollected(RUN))
    assert {peer for peer, _ in swarm.said(Release)} == {"a", "b", "late"}
    assert not swarm.state.runs[RUN].storage_key


@pytest.mark.parametrize("is_over", [True, False])
def test_who_comes_later_is_told_of_which_kept_runs_are_over(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer], is_over: bool
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle()
    if is_over:
        swarm.handle(RunCancelled(RUN))
    hello = replace(make_peer("late", "auto").hello(), kept_runs=(RUN, RunId("of-others")))
    swarm.handle(PeerJoined(hello))
    released = [message.run_id for peer, message in swarm.said(Release) if peer == "late"]
    assert released == [RUN] * is_over, "of what the coordinator does not know it says nothing"


def test_status_lists_members_and_runs(
    swarm: Swarm, spec: RunSpec, a: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(spec)
    swarm.join(a, make_peer("any", "auto"))
    status = overview(swarm.state)
    assert {m.peer_id: m.layers for m in status.members} == {"a": LayerRange(0, 2), "any": None}
    assert [(run.run_id, run.phase) for run in status.runs] == [(RUN, RunPhase.WAITING)]


def test_decide_leaves_the_old_state_as_it_was(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    before = swarm.state
    shown = repr(before)
    swarm.join(a, b)
    swarm.settle()
    assert repr(before) == shown


def test_the_grace_is_counted_from_the_loss(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    until_commits(swarm, 1)
    swarm.wait(10 * GRACE_S)
    swarm.lose(b)
    swarm.wait(GRACE_S / 2)
    assert swarm.run().stages
    assert math.isfinite(swarm.run().attempt.away_since_s[b.peer_id])


# ---- replicas


@pytest.fixture
def twin(make_peer: type[FakePeer]) -> FakePeer:
    """Another peer with the layers of b."""
    return make_peer("twin", "2-4")


def test_all_replicas_take_part_and_one_norm_counts_a_stage(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.join(a, b, twin)
    swarm.submit(make_spec(micro_batch_size=1))
    swarm.settle()
    assert swarm.run().peers == ("a", "b", "twin")
    assert a.applied == b.applied == twin.applied == [0, 1, 2]
    assert swarm.steps()[0].grad_norm == pytest.approx((4.0 + 4.0) ** 0.5)
    routes = [batch.route for _, plan in swarm.said(PlanStep) for batch in plan.microbatches]
    assert {route[1] for route in routes} == {0, 1}


def test_each_last_replica_gets_the_tokens_of_its_own_microbatches(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.join(a, b, twin)
    swarm.submit(make_spec(micro_batch_size=1))
    swarm.settle()
    first = {
        e.peer_id: set(e.tokens_of)
        for e in swarm.effects
        if isinstance(e, SendMessage) and isinstance(e.message, PlanStep) and e.message.step == 0
    }
    assert first[b.peer_id] | first[twin.peer_id] == first[a.peer_id]
    assert first[b.peer_id] & first[twin.peer_id] == set()
    assert first[b.peer_id]
    assert first[twin.peer_id]


def test_a_lost_replica_costs_an_attempt_and_no_step(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.join(a, b, twin)
    swarm.submit(spec)
    until_commits(swarm, 1)
    swarm.lose(b)
    assert swarm.run().phase is RunPhase.LOADING
    assert swarm.run().peers == ("a", "twin")
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert a.applied == twin.applied == [0, 1, 2]
    assert swarm.num_rollbacks == 0


def test_a_replica_that_comes_back_at_once_takes_part_in_the_new_attempt(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.join(a, b, twin)
    swarm.submit(make_spec(num_steps=6))
    until_commits(swarm, 1)
    swarm.lose(b)
    assert swarm.run().peers == ("a", "twin")
    swarm.join(b)
    assert swarm.run().peers == ("a", "twin", "b")
    swarm.settle()
    assert a.applied == b.applied == twin.applied == list(range(6))


def test_a_replica_that_missed_a_step_takes_the_state_from_the_others(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.join(a, b, twin)
    swarm.submit(make_spec(num_steps=6))
    until_commits(swarm, 1)
    swarm.lose(b)
    until_commits(swarm, 2)
    swarm.join(b)
    assert b.assign is None
    swarm.settle()
    assert [(peer, take.sources) for peer, take in swarm.said(CatchUp)] == [("b", ("twin",))]
    assert swarm.run().peers == ("a", "twin", "b")
    assert a.applied == b.applied == twin.applied == list(range(6))


def test_a_newcomer_that_dies_while_it_takes_over_costs_an_attempt(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec(num_steps=6))
    swarm.join(a, b)
    until_commits(swarm, 1)
    newcomer = make_peer("newcomer", "2-4")
    swarm.join(newcomer)
    swarm.settle_until(lambda: swarm.said(CatchUp))
    swarm.lose(newcomer)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().peers == ("a", "b")
    assert a.applied == b.applied == list(range(6))


def test_a_stage_whose_sources_die_while_they_give_goes_back(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec(num_steps=6, save_steps=2))
    swarm.join(a, b)
    until_commits(swarm, 3)
    newcomer = make_peer("newcomer", "2-4")
    swarm.join(newcomer)
    swarm.settle_until(lambda: swarm.said(Assign)[-1][1].learners)
    swarm.leave(b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().peers == ("a", "newcomer")
    assert newcomer.applied == list(range(6))
    assert swarm.num_rollbacks == 1


# ---- snapshots


def test_every_stage_is_saved_every_few_steps_and_at_the_end(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.join(a, b, twin)
    swarm.submit(make_spec(num_steps=5, save_steps=2))
    swarm.settle()
    assert [(peer, save.step) for peer, save in swarm.said(SaveStage)] == [
        ("a", 2),
        ("b", 2),
        ("a", 4),
        ("b", 4),
        ("a", 5),
        ("b", 5),
    ]
    snapshot = swarm.run().past.snapshot
    assert snapshot is not None
    assert snapshot.step == 5
    assert [str(stage.layers) for stage in snapshot.stages] == ["0-2", "2-4"]


def test_a_lost_stage_is_taken_up_from_the_newest_snapshot(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec(num_steps=6, save_steps=2))
    swarm.join(a, b)
    until_commits(swarm, 5)
    swarm.lose(b)
    swarm.wait(GRACE_S)
    assert swarm.run().detail == missing("2-4")
    assert swarm.run().committed_steps == 4
    newcomer = make_peer("newcomer", "2-4")
    swarm.join(newcomer)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert a.applied == newcomer.applied == list(range(6))
    assert swarm.num_rollbacks == 1
    counted = (step.sent for step in swarm.history[RUN])
    assert swarm.run().past.sent == sum(counted, ByteCounts()), "what was voided does not count"


def test_a_manifest_that_is_written_late_names_no_snapshot_of_a_voided_history(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.has_slow_disk = True
    swarm.submit(make_spec(num_steps=6, save_steps=2))
    swarm.join(a, b)
    until_commits(swarm, 3)
    (void,) = swarm.unwritten
    swarm.leave(b)
    swarm.join(make_peer("newcomer", "2-4"))
    swarm.settle_until(lambda: len(swarm.unwritten) == 2)
    swarm.handle(void)
    assert swarm.run().past.snapshot is None
    own = swarm.unwritten[-1]
    assert own.snapshot.step == void.snapshot.step == 2
    swarm.handle(own)
    assert swarm.run().past.snapshot == own.snapshot


def test_manifests_may_be_written_in_any_order(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.has_slow_disk = True
    swarm.submit(make_spec(num_steps=6, save_steps=2))
    swarm.join(a, b)
    swarm.settle()
    first, second, third = swarm.unwritten
    for written in (second, first, third):
        swarm.handle(written)
        assert (
            swarm.run().past.snapshot == max((second, written), key=swarm.unwritten.index).snapshot
        )


def test_peers_with_other_layers_than_the_snapshots_go_on_from_it(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec(num_steps=6, save_steps=2))
    swarm.join(a, b)
    until_commits(swarm, 3)
    swarm.lose(b)
    swarm.wait(GRACE_S)
    swarm.join(make_peer("other", "1-4"))
    assert not swarm.idlers()
    assert swarm.run().detail == missing("0-1")
    swarm.join(make_peer("first", "0-1"))
    assert swarm.run().peers == ("first", "other")
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert [step.step for step in swarm.history[RUN]] == list(range(6))


def test_a_lone_peer_with_room_goes_on_with_all_layers_from_the_snapshot(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec(num_steps=6, save_steps=2))
    swarm.join(*(others := [make_peer("x", "auto"), make_peer("y", "auto")]))
    swarm.wait(SETTLE_S)
    until_commits(swarm, 3)
    assert len(swarm.run().stages) == 2
    swarm.leave(others[1])
    assert swarm.run().peers == ("x",)
    assert swarm.run().phase is RunPhase.LOADING
    assert swarm.run().committed_steps == 2
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_peers_that_host_the_snapshots_stages_are_asked_for_these(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec(num_steps=6, save_steps=2))
    swarm.join(a, b)
    until_commits(swarm, 3)
    swarm.lose(a, b)
    swarm.join(*(make_peer(name, "auto") for name in "xyz"))
    swarm.wait(GRACE_S)
    assert {str(stage.layers) for stage in swarm.run().stages} == {"0-2", "2-4"}


def test_tied_ends_that_one_peer_had_stay_with_one_peer(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]
) -> None:
    """Check a snapshot that lacks the last stage's name of the one shared weight."""
    spec = make_spec(num_steps=6, save_steps=2)
    train = replace(spec.train, sync_tied_embeddings=True)
    spec = replace(spec, model=replace(spec.model, tied_embeddings=True), train=train)
    swarm.submit(spec)
    swarm.join(whole := make_peer("whole", "0-4"))
    until_commits(swarm, 3)
    swarm.leave(whole)
    swarm.join(make_peer("first", "0-2"), make_peer("last", "2-4"))
    assert swarm.run().detail == missing("0-4")
    swarm.join(make_peer("again", "0-4"))
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_after_a_restart_the_newest_snapshot_is_known(
    make_swarm: type[Swarm],
    make_spec: MakeSpec,
    a: FakePeer,
    b: FakePeer,
    make_peer: type[FakePeer],
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    swarm.submit(make_spec(num_steps=6, save_steps=2))
    swarm.join(a, b)
    until_commits(swarm, 3)
    before = swarm.run().past.snapshot
    swarm.restart()
    assert swarm.run().past.snapshot == before
    swarm.join(a, make_peer("newcomer", "2-4"))
    swarm.wait(GRACE_S)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert a.applied == list(range(6))


def test_a_replica_that_missed_only_the_last_commit_hears_it_and_joins(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.join(a, b, twin)
    swarm.submit(make_spec(num_steps=6))
    until_commits(swarm, 1)
    swarm.settle_until(lambda: (step := swarm.run().step) and len(step.ready) == 2)
    swarm.deafen(b)
    swarm.settle_until(lambda: swarm.run().committed_steps == 2)
    assert b.applied == [0]
    swarm.lose(b)
    swarm.join(b)
    assert b.applied == [0, 1]
    assert swarm.run().peers == ("a", "twin", "b")
    swarm.settle()
    assert set(swarm.run().peers) == {"a", "b", "twin"}
    assert a.applied == b.applied == twin.applied == list(range(6))


def test_a_replica_that_joins_before_the_first_commit_takes_part(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.lose(a)
    swarm.join(twin)
    swarm.join(a)
    swarm.settle()
    assert swarm.run().peers == ("a", "b", "twin")
    assert twin.applied == [0, 1, 2]


def test_a_stage_is_waited_for_only_when_its_last_replica_is_gone(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.join(a, b, twin)
    swarm.submit(spec)
    until_commits(swarm, 1)
    swarm.lose(b, twin)
    assert swarm.run().detail == may_return("2-4", 30)
    swarm.join(twin)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0


def test_a_silent_peer_is_given_up(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm.join(a, b, twin)
    swarm.submit(spec)
    until_commits(swarm, 1)
    swarm.deafen(b)
    swarm.wait(SILENT_S - 1.0)
    assert "b" in swarm.run().peers
    swarm.wait(1.0)
    assert swarm.run().peers == ("a", "twin")
    assert swarm.dismissals() == {"b": "unavailable"}


def test_after_a_restart_replicas_are_gathered_before_the_run_goes_on(
    make_swarm: type[Swarm], spec: RunSpec, a: FakePeer, b: FakePeer, twin: FakePeer
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    swarm.join(a, b, twin)
    swarm.submit(spec)
    until_commits(swarm, 1)
    swarm.restart()
    swarm.join(a, b)
    assert swarm.run().phase is RunPhase.WAITING
    swarm.wait(GATHER_S)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.run().peers == ("a", "b")
