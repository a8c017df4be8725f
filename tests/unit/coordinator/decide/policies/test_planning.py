from swarm_ft.coordinator.decide.policies.planning import Plan, plan_next
from swarm_ft.coordinator.facts.events import PlanRecord, SendMessage, Transition
from swarm_ft.protocol.messages.control import PlanStep
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.unit.coordinator.decide.policies.between import STEPS, between_steps, receivers, train


def test_a_plan_is_written_before_it_is_sent_with_the_tokens_of_the_ends(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    train(swarm, make_spec(num_steps=STEPS), a, b)
    state, run, now_s = between_steps(swarm)
    assert plan_next(state, run, now_s) == Plan()
    turn = Transition(state, now_s)
    Plan().apply(turn, run)
    after = turn.state.runs[run.run_id]
    assert after.step is not None
    assert after.attempt.awaited.since_s == after.step.began_s == now_s
    record, *sends = turn.effects
    assert isinstance(record, PlanRecord)
    assert (record.step, record.microbatches) == (2, after.step.microbatches)
    assert receivers(turn, PlanStep) == ["a", "b"]
    samples = {sample for batch in after.step.microbatches for sample in batch.samples}
    assert all(isinstance(send, SendMessage) and set(send.tokens_of) == samples for send in sends)
