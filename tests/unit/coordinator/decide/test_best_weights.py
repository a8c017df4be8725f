"""Runs that stop early, and runs whose result is the best of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.decide.commits import SAVE_S
from swarm_ft.coordinator.facts.events import (
    EvaluationRecord,
    PeerSaid,
    SnapshotLost,
    SnapshotRecord,
)
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.watching import status_of
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import Assign, EvalSum, SaveStage, StageUnsaved, StepReady
from swarm_ft.protocol.messages.reports import ByteCounts
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from tests.draws import draws
from tests.reasons import reason
from tests.unit.coordinator.conftest import RUN, FakePeer, MakeSpec, Swarm

HELD_OUT = 2
STEPS = 8
BEST_OPTIONS: dict[str, object] = {
    "num_steps": STEPS,
    "num_eval_samples": HELD_OUT,
    "eval_steps": 1,
    "save_steps": 1,
    "load_best_model_at_end": True,
}

Begin = Callable[..., tuple[Swarm, list[FakePeer]]]


@pytest.fixture(scope="module")
def begin(make_swarm: type[Swarm], make_peer: type[FakePeer], make_spec: MakeSpec) -> Begin:
    """Start a run with its own journal, and these losses of the weights after 0, 1, ... steps."""

    def make(losses: Sequence[float], **options: object) -> tuple[Swarm, list[FakePeer]]:
        swarm = make_swarm(Journal(":memory:"))
        peers = [make_peer("a", "0-2"), make_peer("b", "2-4")]
        peers[-1].eval_losses = losses
        swarm.submit(make_spec(**{**BEST_OPTIONS, **options}))
        swarm.join(*peers)
        return swarm, peers

    return make


class Outcome(NamedTuple):
    """The end of a run."""

    phase: RunPhase
    trained_steps: int
    result_step: int
    evaluated: list[int]
    num_commits: int


def outcome(swarm: Swarm) -> Outcome:
    status = status_of(swarm.run())
    assert swarm.journal is not None
    found = swarm.journal.evaluations(RUN, 0, STEPS + 1)
    return Outcome(
        phase=status.phase,
        trained_steps=status.committed_steps,
        result_step=status.steps_in_result,
        evaluated=[one.step for one in found],
        num_commits=len(swarm.journal.steps(RUN, 0, 100)),
    )


def expected(losses: Sequence[float], patience: int) -> tuple[int, int]:
    """Return the trained steps, and the steps in the result, by an independent form of the rule."""
    worse = 0
    for step in range(1, STEPS + 1):
        worse = 0 if losses[step] < min([*losses[1:step], math.inf]) else worse + 1
        if patience and worse == patience:
            break
    return step, min(range(1, step + 1), key=lambda of: losses[of])


LOSSES = [9.0, 5.0, 4.0, 3.0, 4.0, 3.5, 6.0, 7.0, 8.0]


def test_a_run_stops_and_what_was_made_beside_the_evaluation_does_not_count(begin: Begin) -> None:
    swarm, peers = begin(LOSSES, early_stopping_patience=2, load_best_model_at_end=False)
    swarm.settle()
    assert outcome(swarm) == (RunPhase.FINISHED, 5, 5, list(range(6)), 5)
    assert [peer.applied for peer in peers] == [list(range(5))] * 2
    assert status_of(swarm.run()).result_step is None
    assert swarm.num_rollbacks == 0
    sent = status_of(swarm.run()).sent
    assert sent.evaluation_bytes == 6 * HELD_OUT
    assert sent.forward_bytes == 5 * 100
    swarm.restart()
    assert status_of(swarm.run()).sent == sent


def test_the_best_weights_are_the_result(begin: Begin) -> None:
    swarm, peers = begin(LOSSES)
    swarm.settle()
    assert outcome(swarm) == (RunPhase.FINISHED, STEPS, 3, list(range(STEPS + 1)), STEPS)
    assert [peer.applied for peer in peers] == [[0, 1, 2]] * 2
    assert all(peer.exported for peer in peers)
    loading = next(assign for _, assign in swarm.said(Assign) if assign.saved)
    assert (loading.fresh, loading.committed_steps) == (True, 3)
    assert reason(Kind.LOADING_BEST, step=3, text="loss", value=3.0) in swarm.reasons()
    counted = sum((step.sent for step in swarm.history[RUN]), ByteCounts())
    evaluations = ByteCounts(evaluation_bytes=(STEPS + 1) * HELD_OUT)
    assert swarm.run().past.sent == counted + evaluations
    assert sum(one.evaluation_bytes for one in swarm.run().past.traffic) == 18


def test_where_the_last_weights_are_the_best_nothing_is_loaded(begin: Begin) -> None:
    swarm, _ = begin([9.0 - step for step in range(STEPS + 1)], early_stopping_patience=1)
    swarm.settle()
    assert outcome(swarm)[:3] == (RunPhase.FINISHED, STEPS, STEPS)
    assert status_of(swarm.run()).result_step is None
    assert not any(assign.saved for _, assign in swarm.said(Assign))


def test_of_two_that_are_as_good_the_first_counts(begin: Begin) -> None:
    swarm, _ = begin([1.0, 5.0, 4.0, 4.0, 4.0, 9.0], early_stopping_patience=2)
    swarm.settle()
    assert outcome(swarm)[:3] == (RunPhase.FINISHED, 4, 2)


def test_what_is_better_by_no_more_than_the_threshold_wears_patience_out(begin: Begin) -> None:
    losses = [9.0, 5.0, 4.5, 4.25, 4.0, 3.0]
    swarm, _ = begin(losses, early_stopping_patience=3, early_stopping_threshold=0.5)
    swarm.settle()
    assert outcome(swarm)[:3] == (RunPhase.FINISHED, 4, 4)


@settings(max_examples=draws(40))
@given(data=st.data())
def test_a_coordinator_that_is_killed_at_any_moment_ends_with_the_same(
    begin: Begin, data: st.DataObject
) -> None:
    values = st.sampled_from([1.0, 2.0, 3.0, 4.0])
    losses = data.draw(st.lists(values, min_size=STEPS + 1, max_size=STEPS + 1))
    patience = data.draw(st.integers(0, 3))
    limit = data.draw(st.integers(1, 3))
    swarm, peers = begin(losses, early_stopping_patience=patience, save_total_limit=limit)
    for moment in data.draw(st.lists(st.integers(0, 25), max_size=4)):
        for _ in range(moment):
            if swarm.pending:
                swarm.step()
        swarm.restart()
        swarm.join(*peers)
    swarm.settle()
    trained, best = expected(losses, patience)
    evaluated = list(range(trained + 1))
    assert outcome(swarm) == (RunPhase.FINISHED, trained, best, evaluated, trained)
    assert [peer.applied for peer in peers] == [list(range(best))] * 2
    assert swarm.num_rollbacks == 0
    assert len(swarm.run().past.snapshots) <= max(limit, 2)


def test_a_coordinator_killed_in_every_single_event_ends_with_the_same(begin: Begin) -> None:
    for num_reports in (0, 1, 99):
        moment, is_over = 0, False
        while not is_over:
            swarm, peers = begin(LOSSES, early_stopping_patience=2)
            for _ in range(moment):
                if swarm.pending:
                    swarm.step()
            is_over = not swarm.pending
            if not is_over:
                swarm.crash(PeerSaid(*swarm.pending.popleft()), num_reports)
                swarm.join(*peers)
            swarm.settle()
            assert outcome(swarm) == (RunPhase.FINISHED, 5, 3, list(range(6)), 5), moment
            moment += 1
        assert moment > 20


@pytest.mark.parametrize("loads_best", [False, True])
def test_snapshots_beyond_the_limit_are_let_go_but_not_the_best(
    begin: Begin, loads_best: bool
) -> None:
    swarm, _ = begin(
        [9.0, 1.0, *range(2, STEPS + 1)],
        save_total_limit=3,
        load_best_model_at_end=loads_best,
    )
    swarm.settle()
    steps = [sorted(e.kept) for e in swarm.effects if isinstance(e, SnapshotRecord)]
    assert max(map(len, steps)) == 3
    newest = 7 if loads_best else 8  # what follows from the best needs no snapshot of the last
    assert steps[-1] == ([1, newest - 1, newest] if loads_best else [6, 7, 8])
    assert swarm.run().past.snapshots[-1].step == newest


def test_of_a_limit_of_one_the_newest_and_the_best_are_left(begin: Begin) -> None:
    swarm, _ = begin([9.0, 1.0, *range(2, STEPS + 1)], save_total_limit=1)
    swarm.settle()
    assert [one.step for one in swarm.run().past.snapshots] == [1, 7]


def test_a_step_waits_until_what_it_judges_is_saved(begin: Begin) -> None:
    swarm, _ = begin(LOSSES)
    swarm.has_slow_disk = True
    swarm.settle()
    assert swarm.run().committed_steps == 1
    assert evaluated(swarm) == [0]
    swarm.wait(30.0)
    assert swarm.run().phase is RunPhase.TRAINING
    swarm.has_slow_disk = False
    swarm.handle(swarm.unwritten.pop(0))
    swarm.settle()
    assert outcome(swarm)[:3] == (RunPhase.FINISHED, STEPS, 3)


def evaluated(swarm: Swarm) -> list[StepNumber]:
    return [e.evaluated.step for e in swarm.effects if isinstance(e, EvaluationRecord)]


def test_what_cannot_be_saved_is_not_the_best_and_is_told(begin: Begin) -> None:
    swarm, _ = begin(LOSSES)
    swarm.has_slow_disk = True
    for step in (1, 2, 3):
        swarm.settle()
        written = swarm.unwritten.pop(0)
        assert written.snapshot.step == step
        lost = SnapshotLost(RUN, written.snapshot, "no room")
        swarm.handle(lost if step == 3 else written)
    failed = reason(Kind.MANIFEST_FAILED, text="no room")
    assert reason(Kind.BEST_NOT_SAVED, step=3, parts=(failed,)) in swarm.reasons()
    swarm.has_slow_disk = False
    swarm.settle()
    assert outcome(swarm)[:3] == (RunPhase.FINISHED, STEPS, 5)


def test_a_peer_that_cannot_save_keeps_nobody_waiting(begin: Begin) -> None:
    swarm, (_, b) = begin(LOSSES)
    b.saves = False
    swarm.settle()
    assert outcome(swarm)[:3] == (RunPhase.FINISHED, STEPS, STEPS)
    failed = reason(Kind.SAVE_FAILED, "b", text="full")
    assert any(failed in published.parts for published in swarm.reasons())


def test_a_snapshot_that_never_comes_is_not_waited_for_forever(begin: Begin) -> None:
    swarm, _ = begin(LOSSES)
    swarm.has_slow_disk = True
    swarm.settle()
    swarm.wait(SAVE_S + 2.0)
    assert swarm.run().committed_steps == 2


def test_a_stage_that_is_not_saved_since_its_peer_died_is_saved_by_another(
    begin: Begin, make_peer: type[FakePeer]
) -> None:
    swarm, (_, b) = begin(LOSSES)
    twin = make_peer("twin", "2-4")
    twin.eval_losses = b.eval_losses
    swarm.join(twin)
    swarm.settle_until(lambda: [1 for _, s in swarm.said(SaveStage) if s.step == 3])
    saver = swarm.said(SaveStage)[-1][0]
    dying = b if saver == "b" else twin
    swarm.lose(dying)
    swarm.settle()
    assert outcome(swarm)[:3] == (RunPhase.FINISHED, STEPS, 3)


def test_a_peer_that_dies_while_the_best_is_loaded_costs_no_step(begin: Begin) -> None:
    swarm, peers = begin(LOSSES)
    swarm.settle_until(lambda: swarm.run().past.trained_steps)
    for peer in peers:
        swarm.forget_said(peer.peer_id)
    b = peers[-1]
    swarm.lose(b)
    b.forget()
    swarm.join(b)
    swarm.wait(40.0)
    swarm.settle()
    assert outcome(swarm) == (RunPhase.FINISHED, STEPS, 3, list(range(STEPS + 1)), STEPS)
    assert swarm.num_rollbacks == 0


def test_a_best_result_that_is_lost_is_loaded_again(begin: Begin) -> None:
    swarm, peers = begin(LOSSES)
    swarm.settle()
    b = peers[-1]
    swarm.leave(b)
    b.forget()
    swarm.join(b)
    swarm.settle()
    assert outcome(swarm) == (RunPhase.FINISHED, STEPS, 3, list(range(STEPS + 1)), STEPS)
    assert (b.applied, swarm.num_rollbacks) == ([0, 1, 2], 0)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("save_steps", [4, 100])
def test_a_last_result_that_is_lost_is_given_again_and_not_judged_again(
    begin: Begin, save_steps: int, restarts: bool
) -> None:
    changes = {"load_best_model_at_end": False, "save_steps": save_steps}
    swarm, peers = begin(LOSSES, early_stopping_patience=2, **changes)
    swarm.settle()
    before = outcome(swarm)
    assert before == (RunPhase.FINISHED, 5, 5, list(range(6)), 5)
    b = peers[-1]
    if restarts:
        swarm.restart()
        swarm.join(*peers)
        swarm.settle()
    num_evaluated = len(evaluated(swarm))
    swarm.leave(b)
    b.forget()
    swarm.join(b)
    swarm.settle()
    assert outcome(swarm) == before
    assert (b.applied, swarm.num_rollbacks) == (list(range(5)), 1)
    assert len(evaluated(swarm)) == num_evaluated
    swarm.restart()
    assert outcome(swarm) == before


def test_a_run_that_goes_back_is_judged_as_of_then(begin: Begin) -> None:
    swarm, peers = begin(LOSSES, early_stopping_patience=2, save_steps=2, eval_steps=1)
    swarm.settle_until(lambda: swarm.run().committed_steps == 5)
    b = peers[-1]
    swarm.leave(b)
    b.forget()
    swarm.join(b)
    assert swarm.run().past.judged.step == 3
    assert swarm.run().past.judged.num_worse == 0
    swarm.settle()
    assert swarm.num_rollbacks == 1
    assert outcome(swarm)[:3] == (RunPhase.FINISHED, 5, 2)


def test_what_is_kept_of_evaluations_does_not_grow(begin: Begin) -> None:
    swarm, _ = begin([1.0 + 1 / (1 + step) for step in range(200)], num_steps=190)
    sizes: dict[int, int] = {}
    while swarm.pending:
        swarm.step()
        if swarm.run().committed_steps in (20, 180):
            sizes.setdefault(swarm.run().committed_steps, len(repr(swarm.run().past)))
    assert swarm.run().past.judged.step == 190
    assert sizes[180] < 1.1 * sizes[20]


def test_counts_of_another_number_of_classes_are_refused(begin: Begin) -> None:
    swarm, (_, b) = begin(LOSSES)
    swarm.settle_until(lambda: swarm.run().committed_steps == 1)
    ready = StepReady(
        run_id=RUN,
        attempt=swarm.run().attempt.number,
        step=StepNumber(1),
        squared_grad_norm=1.0,
        evaluation=(EvalSum(counts=(1, 2)),),
    )
    swarm.say(b, ready)
    assert swarm.dismissals() == {"b": "malformed-message"}


def test_words_about_a_snapshot_of_another_step_mean_nothing(begin: Begin) -> None:
    swarm, (_, b) = begin(LOSSES)
    swarm.settle_until(lambda: swarm.run().committed_steps == 3)
    before = swarm.run()
    name = ShardName(run_id=RUN, step=StepNumber(7), layers=LayerRange(2, 4))
    swarm.say(b, StageUnsaved(name=name, reason="oh"))
    assert swarm.run().saving == before.saving
