"""Outputs of frozen stages are computed once a sample, and again where they were lost."""

from __future__ import annotations

import pytest

from swarm_ft.coordinator.plan.membership import bypassed_stages
from swarm_ft.errors import BuffersLost
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PlanStep
from swarm_ft.protocol.spec.run_spec import EvalStrategy
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

STEPS_PER_EPOCH = 2


@pytest.fixture
def trained(swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Swarm:
    """A run of two stages, the first of which is frozen, after an epoch."""
    spec = make_spec(
        train_layers="2-",
        num_samples=4,
        batch_size=2,
        micro_batch_size=1,
        num_steps=3 * STEPS_PER_EPOCH,
        num_eval_samples=2,
        eval_strategy=EvalStrategy.EPOCH,
    )
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().committed_steps == STEPS_PER_EPOCH)
    return swarm


def entries(peer: FakePeer) -> list[tuple[list[int], list[int]]]:
    """Return the stages at which microbatches of each plan start, trained and evaluated ones."""
    plans = [message for message in peer.heard if isinstance(message, PlanStep)]
    return [([b.entry for b in p.microbatches], [b.entry for b in p.evaluation]) for p in plans]


def test_later_visits_begin_where_the_constants_are(trained: Swarm, a: FakePeer) -> None:
    assert [stage.layers.stop for stage in bypassed_stages(trained.run())] == [2]
    trained.settle()
    assert trained.run().phase is RunPhase.FINISHED
    again = [1, 1]
    nothing: list[int] = []
    assert entries(a) == [
        ([0, 0], [0, 0]),
        ([0, 0], nothing),
        *[(again, again), (again, nothing)] * 2,
        (nothing, again),
    ]


def test_what_a_peer_does_not_have_any_more_passes_the_frozen_stages_again(
    trained: Swarm, a: FakePeer, b: FakePeer
) -> None:
    lost = b.failed(BuffersLost.code)
    b.buffers = {boundary: set() for boundary in b.buffers}
    trained.say(b, lost)
    assert not trained.run().conduct(b.peer_id).standing.failed_in, "it is nobody's fault"
    trained.settle_until(lambda: trained.run().committed_steps == STEPS_PER_EPOCH + 1)
    assert entries(a)[-2:] == [([0, 0], [0, 0]), ([0, 0], [])]
    trained.settle()
    assert trained.run().phase is RunPhase.FINISHED
    assert entries(a)[-1] == ([], [1, 1])


def test_who_lacks_them_time_and_again_in_one_step_has_failed(trained: Swarm, b: FakePeer) -> None:
    trained.say(b, b.failed(BuffersLost.code))
    trained.wait(1.0)
    trained.say(b, b.failed(BuffersLost.code))
    assert trained.run().conduct(b.peer_id).standing.failed_in
