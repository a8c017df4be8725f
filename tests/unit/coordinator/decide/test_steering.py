"""Requests of an owner: pause, resume, another learning rate."""

import pytest

from swarm_ft.coordinator.facts.events import (
    CodecsChanged,
    EmitEvent,
    RateChanged,
    RunCancelled,
    RunPaused,
    RunResumed,
    Tick,
)
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.state import Steering
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.watching import overview, status_of
from swarm_ft.ids import RunId, StepNumber
from swarm_ft.protocol.messages.client import MAX_STEERED, CodecChange, RunPhase
from swarm_ft.protocol.messages.control import CommitStep, PlanStep
from swarm_ft.protocol.messages.events import Actor, EventKind
from swarm_ft.protocol.spec.run_spec import Codecs, LrSchedule
from tests.reasons import reason
from tests.specs import USUAL_CODECS
from tests.unit.coordinator.conftest import RUN, FakePeer, MakeSpec, Swarm

OTHER = RunId("run-other")
AFTER, STEPS = 4, 9


@pytest.fixture
def swarm(make_swarm: type[Swarm]) -> Swarm:
    return make_swarm(Journal(":memory:"))


@pytest.fixture
def trained(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Swarm:
    """A swarm whose run has made some steps, with the next under way."""
    swarm.submit(make_spec(num_steps=STEPS, learning_rate=0.5, lr_schedule=LrSchedule.CONSTANT))
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().committed_steps == AFTER)
    return swarm


def reasons_of(swarm: Swarm, kind: EventKind) -> list[Reason | None]:
    return [one.reason for one in swarm.effects if isinstance(one, EmitEvent) and one.kind is kind]


def rates(swarm: Swarm) -> list[float]:
    return [step.learning_rate for step in swarm.steps()]


def test_a_paused_run_finishes_its_step_and_plans_no_other(trained: Swarm) -> None:
    trained.handle(RunPaused(RUN))
    trained.settle()
    run = trained.run()
    assert (run.phase, run.committed_steps, run.step) == (RunPhase.TRAINING, AFTER + 1, None)
    assert run.detail == reason(Kind.PAUSED, step=AFTER + 1)
    (found_reason,) = reasons_of(trained, EventKind.RUN_PAUSED)
    assert found_reason == reason(Kind.PAUSE_REQUESTED, step=AFTER, actor=Actor.CLIENT)
    (shown,) = overview(trained.state).runs
    assert shown.is_paused
    assert shown.eta_s is None


def test_nobody_is_late_in_a_pause(trained: Swarm) -> None:
    trained.handle(RunPaused(RUN))
    trained.settle()
    attempt = trained.run().attempt.number
    for _ in range(50):
        trained.wait(30.0)
    assert trained.run().attempt.number == attempt
    assert not trained.dismissals()


def test_a_run_that_resumes_is_as_if_it_was_never_paused(trained: Swarm) -> None:
    trained.handle(RunPaused(RUN))
    trained.settle()
    trained.handle(RunResumed(RUN))
    trained.settle()
    assert trained.run().phase is RunPhase.FINISHED
    assert [step.step for step in trained.steps()] == list(range(STEPS))
    assert not overview(trained.state).runs[0].is_paused
    assert reasons_of(trained, EventKind.RUN_RESUMED) == [
        reason(Kind.RESUME_REQUESTED, actor=Actor.CLIENT)
    ]


def test_asking_twice_says_nothing_more(trained: Swarm) -> None:
    trained.handle(RunResumed(RUN))
    for _ in range(2):
        trained.handle(RunPaused(RUN))
    assert len(reasons_of(trained, EventKind.RUN_PAUSED)) == 1
    assert not reasons_of(trained, EventKind.RUN_RESUMED)


def test_a_peer_that_comes_back_in_a_pause_holds_its_state_again(
    trained: Swarm, b: FakePeer
) -> None:
    trained.handle(RunPaused(RUN))
    trained.settle()
    trained.lose(b)
    trained.settle()
    assert trained.run().phase is RunPhase.WAITING
    trained.join(b)
    trained.settle()
    run = trained.run()
    assert (run.phase, run.committed_steps, run.step) == (RunPhase.TRAINING, AFTER + 1, None)
    trained.handle(RunResumed(RUN))
    trained.settle()
    assert trained.run().phase is RunPhase.FINISHED


def test_a_step_that_was_begun_is_finished_by_those_who_are_left(
    trained: Swarm, b: FakePeer
) -> None:
    trained.handle(RunPaused(RUN))
    trained.lose(b)
    trained.join(b)
    trained.settle()
    assert trained.run().committed_steps == AFTER + 1


def test_a_newcomer_is_taken_in_as_the_run_resumes(trained: Swarm, newcomer: FakePeer) -> None:
    trained.handle(RunPaused(RUN))
    trained.settle()
    trained.join(newcomer)
    trained.settle()
    assert newcomer.peer_id not in trained.run().peers
    trained.handle(RunResumed(RUN))
    trained.settle()
    assert newcomer.peer_id in trained.run().peers
    assert trained.run().phase is RunPhase.FINISHED


def test_it_stays_paused_over_a_restart(trained: Swarm, a: FakePeer, b: FakePeer) -> None:
    trained.handle(RateChanged(RUN, 0.125))
    trained.handle(RunPaused(RUN))
    trained.settle()
    steering = trained.run().steering
    trained.restart()
    trained.join(a, b)
    trained.settle()
    run = trained.run()
    assert run.steering == steering
    assert (run.phase, run.committed_steps) == (RunPhase.TRAINING, AFTER + 1)


def test_one_that_waits_for_its_turn_is_passed_by(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(num_steps=3))
    swarm.handle(RunPaused(RUN))
    swarm.submit(make_spec(num_steps=3), OTHER)
    swarm.join(a, b)
    swarm.settle()
    assert swarm.run(OTHER).phase is RunPhase.FINISHED
    assert not swarm.run().attempt.assignments


def test_a_paused_run_can_be_cancelled(trained: Swarm) -> None:
    trained.handle(RunPaused(RUN))
    trained.settle()
    trained.handle(RunCancelled(RUN))
    assert trained.run().phase is RunPhase.CANCELLED


def test_another_learning_rate_holds_from_the_next_step_on(trained: Swarm) -> None:
    trained.handle(RateChanged(RUN, 0.25))
    trained.settle()
    assert rates(trained) == [0.5] * (AFTER + 1) + [0.25] * (STEPS - AFTER - 1)
    commits = {commit.step: commit.learning_rate for _, commit in trained.said(CommitStep)}
    assert commits[StepNumber(AFTER + 1)] == 0.25
    (found_reason,) = reasons_of(trained, EventKind.RUN_STEERED)
    assert found_reason == reason(
        Kind.RATE_CHANGED, step=AFTER + 1, value=0.25, value_before=0.5, actor=Actor.CLIENT
    )


def test_in_a_pause_the_next_step_is_the_first_with_it(trained: Swarm) -> None:
    trained.handle(RunPaused(RUN))
    trained.settle()
    trained.handle(RateChanged(RUN, 0.125))
    trained.handle(RateChanged(RUN, 0.25))
    trained.handle(RunResumed(RUN))
    trained.settle()
    assert rates(trained)[AFTER + 1 :] == [0.25] * (STEPS - AFTER - 1)
    assert len(trained.run().steering.rates) == 1


def test_the_schedule_goes_on_with_another_peak(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(num_steps=4, learning_rate=0.5, lr_schedule=LrSchedule.LINEAR))
    swarm.handle(RateChanged(RUN, 1.0))
    swarm.join(a, b)
    swarm.settle()
    assert rates(swarm) == [1.0, 0.75, 0.5, 0.25]


def test_a_step_that_is_made_again_has_the_rate_that_it_had(
    trained: Swarm, b: FakePeer, newcomer: FakePeer
) -> None:
    trained.handle(RateChanged(RUN, 0.25))
    trained.settle_until(lambda: trained.run().committed_steps == AFTER + 3)
    trained.leave(b)
    trained.join(newcomer)
    trained.settle()
    assert trained.run().phase is RunPhase.FINISHED
    assert rates(trained)[-STEPS:] == [0.5] * (AFTER + 1) + [0.25] * (STEPS - AFTER - 1)


def test_a_run_that_is_over_is_steered_no_more(trained: Swarm) -> None:
    trained.settle()
    before = trained.run()
    for event in (RunPaused(RUN), RunResumed(RUN), RateChanged(RUN, 0.1), RunPaused(OTHER)):
        trained.handle(event)
    trained.handle(Tick())
    assert trained.run().steering == before.steering
    assert not trained.said(PlanStep)[STEPS * 2 :]


# ---- who requested what


def test_readers_of_a_run_get_each_request_with_its_actor(
    trained: Swarm, a: FakePeer, b: FakePeer
) -> None:
    trained.handle(RunPaused(RUN, Actor.OPERATOR))
    trained.handle(RateChanged(RUN, 0.25, Actor.OPERATOR))
    trained.handle(RunResumed(RUN, Actor.OWNER))
    steered = status_of(trained.run()).steered
    by_operator = "by the swarm's operator on the coordinator's page"
    assert [(one.number, one.kind, one.actor, one.step, one.words) for one in steered] == [
        (
            1,
            EventKind.RUN_PAUSED,
            Actor.OPERATOR,
            AFTER,
            f"paused {by_operator}, once step {AFTER} is committed",
        ),
        (
            2,
            EventKind.RUN_STEERED,
            Actor.OPERATOR,
            AFTER,
            f"learning rate 0.25 from step {AFTER + 1} on, 0.5 before; set {by_operator}",
        ),
        (3, EventKind.RUN_RESUMED, Actor.OWNER, AFTER, "resumed by the run's owner"),
    ]
    trained.restart()
    assert status_of(trained.run()).steered == steered


def test_a_run_remembers_its_newest_requests(trained: Swarm) -> None:
    for _ in range(MAX_STEERED):
        trained.handle(RunPaused(RUN))
        trained.handle(RunResumed(RUN))
    numbers = [one.number for one in status_of(trained.run()).steered]
    assert numbers == list(range(MAX_STEERED + 1, 2 * MAX_STEERED + 1))


@pytest.mark.parametrize(
    ("actor", "words"),
    [
        (Actor.OPERATOR, "cancelled by the swarm's operator on the coordinator's page"),
        (Actor.OWNER, "cancelled by the run's owner"),
        (Actor.CLIENT, "cancelled by a client"),
    ],
)
def test_a_cancelled_run_names_the_actor(trained: Swarm, actor: Actor, words: str) -> None:
    trained.handle(RunCancelled(RUN, actor))
    status = status_of(trained.run())
    assert status.phase.in_words(status.detail) == words


# ---- codecs

LESS, LEAST = Codecs("aq2", "q2+z"), Codecs("aq1", "q2+z")


def planned(swarm: Swarm) -> dict[int, Codecs | None]:
    """Return the codecs of each step in its newest plan."""
    return {plan.step: plan.codecs for _, plan in swarm.said(PlanStep)}


def test_plans_name_other_codecs_from_the_next_step_on(trained: Swarm) -> None:
    trained.handle(CodecsChanged(RUN, LESS))
    before = trained.run().spec.train.codecs
    (found_reason,) = reasons_of(trained, EventKind.RUN_STEERED)
    assert found_reason == reason(
        Kind.CODECS_CHANGED,
        step=AFTER + 1,
        text=str(LESS),
        text_before=str(before),
        actor=Actor.CLIENT,
    )
    trained.settle()
    assert planned(trained) == {
        **dict.fromkeys(range(AFTER + 1)),
        **dict.fromkeys(range(AFTER + 1, STEPS), LESS),
    }
    assert status_of(trained.run()).codecs == (CodecChange(StepNumber(AFTER + 1), LESS),)


def test_a_step_is_shown_with_the_codecs_that_it_goes_by(trained: Swarm) -> None:
    trained.handle(CodecsChanged(RUN, LESS))
    before = trained.run().spec.train.codecs
    (shown,) = overview(trained.state).runs
    assert shown.codecs == LESS
    (boundary,) = shown.boundaries
    assert Codecs(boundary.forward_codec, boundary.backward_codec) == before
    trained.settle_until(lambda: trained.run().committed_steps == AFTER + 1)
    (boundary,) = overview(trained.state).runs[0].boundaries
    assert Codecs(boundary.forward_codec, boundary.backward_codec) == LESS


def test_in_a_pause_the_next_step_is_the_first_with_other_codecs(trained: Swarm) -> None:
    trained.handle(RunPaused(RUN))
    trained.settle()
    for codecs in (LESS, LESS, LEAST):
        trained.handle(CodecsChanged(RUN, codecs))
    assert len(reasons_of(trained, EventKind.RUN_STEERED)) == 2
    trained.handle(RunResumed(RUN))
    trained.settle()
    assert [planned(trained)[step] for step in range(AFTER, STEPS)] == [
        None,
        *[LEAST] * (STEPS - AFTER - 1),
    ]


def test_a_step_that_is_made_again_goes_by_the_codecs_that_it_had(
    trained: Swarm, b: FakePeer, newcomer: FakePeer
) -> None:
    trained.handle(CodecsChanged(RUN, LESS))
    trained.settle_until(lambda: trained.run().committed_steps == AFTER + 3)
    trained.handle(CodecsChanged(RUN, LEAST))
    trained.lose(b)
    trained.join(b)
    plans = trained.said(PlanStep)
    trained.settle_until(lambda: trained.run().committed_steps == AFTER + 4)
    again = [plan for _, plan in trained.said(PlanStep)[len(plans) :] if plan.step == AFTER + 3]
    assert again
    assert {plan.codecs for plan in again} == {LESS}
    trained.leave(b)
    trained.join(newcomer)
    first = len(trained.said(PlanStep))
    trained.settle()
    assert trained.run().phase is RunPhase.FINISHED
    made_again = {plan.step: plan.codecs for _, plan in trained.said(PlanStep)[first:]}
    assert made_again == {
        **dict.fromkeys(range(AFTER + 1)),
        **dict.fromkeys(range(AFTER + 1, AFTER + 4), LESS),
        **dict.fromkeys(range(AFTER + 4, STEPS), LEAST),
    }


def test_codecs_stay_changed_over_a_restart(trained: Swarm, a: FakePeer, b: FakePeer) -> None:
    trained.handle(CodecsChanged(RUN, LESS))
    steering = trained.run().steering
    trained.restart()
    trained.join(a, b)
    trained.settle()
    assert trained.run().steering == steering
    assert planned(trained)[AFTER] is None
    assert planned(trained)[STEPS - 1] == LESS


def test_codecs_of_a_run_that_is_over_are_changed_no_more(trained: Swarm) -> None:
    trained.settle()
    trained.handle(CodecsChanged(RUN, LESS))
    assert status_of(trained.run()).codecs == ()


# ---- codecs that follow a quality


QUALITY_OPTIONS = {"num_steps": STEPS, "quality": 0.01, **USUAL_CODECS}


@pytest.fixture
def measured(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> Swarm:
    """A swarm in which each step measures far too coarse or too fine a codec, in turn."""
    monkeypatch.setattr("swarm_ft.coordinator.plan.steps.casts_shadows", lambda *_: False)
    monkeypatch.setattr(
        "swarm_ft.coordinator.decide.commits.compression_excess",
        lambda run, _step: (run.committed_steps % 2) * 1.0,
    )
    return swarm


def goes_back(swarm: Swarm, lost: FakePeer, newcomer: FakePeer, to_step: int) -> None:
    swarm.leave(lost)
    swarm.join(newcomer)
    swarm.settle_until(lambda: swarm.run().committed_steps == to_step)


def test_codecs_of_steps_before_the_oldest_snapshot_are_forgotten(
    measured: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    measured.submit(make_spec(**QUALITY_OPTIONS, save_steps=3, save_total_limit=1))
    measured.join(a, b)
    measured.settle_until(lambda: measured.run().committed_steps == STEPS - 1)
    before = planned(measured)
    assert len({*map(str, before.values())}) > 2, "it changes all the time"
    first_steps = [change.first_step for change in measured.run().steering.codecs]
    assert first_steps == [6, 7, 8], "the last snapshot is of step 6"
    goes_back(measured, b, newcomer, to_step=6)
    measured.settle()
    assert measured.run().phase is RunPhase.FINISHED
    assert planned(measured) == before


def test_a_run_that_begins_anew_is_measured_anew(
    measured: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    measured.submit(make_spec(**QUALITY_OPTIONS))
    measured.join(a, b)
    measured.settle_until(lambda: measured.run().committed_steps == STEPS - 1)
    before, quality = planned(measured), measured.run().quality
    assert len(measured.run().steering.codecs) == 1, "no step before is made alone again"
    goes_back(measured, b, newcomer, to_step=0)
    assert measured.run().steering == Steering()
    measured.settle_until(lambda: measured.run().committed_steps == STEPS - 1)
    assert planned(measured) == before
    assert measured.run().quality == quality
