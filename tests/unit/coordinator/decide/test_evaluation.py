"""Held-out samples: the times of their evaluation, their routes, and the records."""

import pytest

from swarm_ft.coordinator.facts.events import EvaluationRecord, Publish, SendMessage
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.ids import MicrobatchIndex
from swarm_ft.protocol.messages.client import Evaluated, RunPhase
from swarm_ft.protocol.messages.control import PlanStep
from swarm_ft.protocol.spec.run_spec import EvalCompression
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

NUM_SAMPLES, HELD_OUT = 6, 5
MEAN = NUM_SAMPLES + (HELD_OUT - 1) / 2
"""Mean of the losses, which are the held-out samples' numbers."""


def evaluations(swarm: Swarm) -> list[Evaluated]:
    """Return the evaluations in records, each of which was published as well."""
    events = [e.event for e in swarm.effects if isinstance(e, Publish)]
    written = [e.evaluated for e in swarm.effects if isinstance(e, EvaluationRecord)]
    assert [event for event in events if isinstance(event, Evaluated)] == written
    return written


def last_plan(peer: FakePeer) -> PlanStep:
    return [message for message in peer.heard if isinstance(message, PlanStep)][-1]


@pytest.fixture
def peers() -> list[FakePeer]:
    """Two replicas of each of two stages."""
    return [FakePeer(f"{name}{i}", of) for of, name in (("0-2", "a"), ("2-4", "b")) for i in (1, 2)]


def test_it_is_planned_with_the_steps_that_it_is_due_at_and_once_more_at_the_end(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(num_eval_samples=HELD_OUT, eval_steps=2))
    swarm.join(a, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert [one.step for one in evaluations(swarm)] == [0, 2, 3]
    assert {one.eval_loss for one in evaluations(swarm)} == {MEAN}
    plans = [message for message in a.heard if isinstance(message, PlanStep)]
    assert [bool(plan.evaluation) for plan in plans] == [True, False, True, True]
    assert [bool(plan.microbatches) for plan in plans] == [True, True, True, False]
    assert swarm.run().committed_steps == 3
    assert swarm.run().past.judged.step == 3


def test_each_pass_has_a_loss_of_its_own(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    spec = make_spec(num_eval_samples=HELD_OUT, eval_compression=EvalCompression.BOTH)
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle()
    for one in evaluations(swarm):
        assert (one.eval_loss, one.compressed_eval_loss) == (MEAN, MEAN + HELD_OUT)


def test_the_ends_get_the_tokens_of_what_they_evaluate(
    swarm: Swarm, make_spec: MakeSpec, peers: list[FakePeer]
) -> None:
    swarm.submit(make_spec(num_eval_samples=HELD_OUT, micro_batch_size=1, batch_size=4))
    swarm.join(*peers)
    swarm.settle()
    reports = [
        (e.message.step, e.peer_id, e.tokens_of)
        for e in swarm.effects
        if isinstance(e, SendMessage) and isinstance(e.message, PlanStep)
    ]
    held_out = set(range(NUM_SAMPLES, NUM_SAMPLES + HELD_OUT))
    for number in (0, 3):
        of_step = {peer: tokens_of for step, peer, tokens_of in reports if step == number}
        for ends in (("a1", "a2"), ("b1", "b2")):
            sent = [s for peer, some in of_step.items() if peer in ends for s in some]
            assert sorted(s for s in sent if s >= NUM_SAMPLES) == sorted(held_out)


@pytest.mark.parametrize("step", [0, 3])
def test_what_the_last_stage_evaluated_stays_so_and_all_else_begins_anew(
    swarm: Swarm, make_spec: MakeSpec, peers: list[FakePeer], step: int
) -> None:
    a1, _, b1, b2 = peers
    swarm.submit(make_spec(num_eval_samples=HELD_OUT, micro_batch_size=1, batch_size=4))
    swarm.join(*peers)
    swarm.settle_until(lambda: a1.heard and last_plan_is(a1, step))
    before = last_plan(a1)
    for peer in peers:
        swarm.forget_said(peer.peer_id)
    own = [batch.index for batch in before.evaluation if batch.route[1] == 0]
    b1.done = frozenset(own[:2])
    a1.done = frozenset({before.evaluation[0].index})
    swarm.lose(b2)
    swarm.settle_until(lambda: last_plan(a1) is not before)
    again = last_plan(a1)
    assert [b.samples for b in again.evaluation] == [b.samples for b in before.evaluation]
    assert {b.index for b in again.evaluation if b.done} == b1.done
    assert all(b.done in (frozenset(), frozenset({0, 1})) for b in again.evaluation)
    sends = [e for e in swarm.effects if isinstance(e, SendMessage) and e.message is again]
    wanted = {s for b in again.evaluation if not b.done for s in b.samples}
    held_out = [s for e in sends if e.peer_id in ("a1", "a2") for s in e.tokens_of]
    assert {s for s in held_out if s >= NUM_SAMPLES} == wanted
    b1.done = a1.done = frozenset()
    swarm.settle()
    assert [one.step for one in evaluations(swarm)] == [0, 3]
    assert {one.eval_loss for one in evaluations(swarm)} == {MEAN}


def last_plan_is(peer: FakePeer, step: int) -> bool:
    plans = [message for message in peer.heard if isinstance(message, PlanStep)]
    return bool(plans) and plans[-1].step == step


def test_claims_of_what_is_no_microbatch_are_not_believed(
    swarm: Swarm, make_spec: MakeSpec, peers: list[FakePeer]
) -> None:
    a1, _, b1, b2 = peers
    swarm.submit(make_spec(num_eval_samples=HELD_OUT, micro_batch_size=1, batch_size=4))
    swarm.join(*peers)
    swarm.settle_until(lambda: last_plan_is(a1, 0))
    before = last_plan(a1)
    for peer in peers:
        swarm.forget_said(peer.peer_id)
    b1.done = frozenset({MicrobatchIndex(before.evaluation[-1].index + 1)})
    swarm.lose(b2)
    swarm.settle_until(lambda: last_plan(a1) is not before)
    assert not any(batch.done for batch in last_plan(a1).evaluation)


def test_a_coordinator_that_is_killed_in_the_last_evaluation_does_it_again(
    make_swarm: type[Swarm], make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    swarm.submit(make_spec(num_eval_samples=HELD_OUT))
    swarm.join(a, b)
    swarm.settle_until(lambda: last_plan_is(a, 3))
    swarm.restart()
    assert swarm.run().past.judged.step == 0
    swarm.join(a, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert [one.step for one in evaluations(swarm)] == [0, 3]
    swarm.restart()
    assert swarm.run().past.judged.step == 3


def test_a_run_that_goes_back_is_evaluated_again(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(num_eval_samples=HELD_OUT, eval_steps=1))
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().committed_steps == 2)
    swarm.lose(a)
    a.forget()
    swarm.join(a)
    swarm.settle()
    assert swarm.num_rollbacks == 1
    assert [one.step for one in evaluations(swarm)] == [0, 1, 0, 1, 2, 3]
