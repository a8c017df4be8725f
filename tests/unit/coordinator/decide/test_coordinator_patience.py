"""Patience with a stage's last peer: as long as a rollback would cost."""

from typing import Any, Protocol

import pytest

from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.membership import GRACE_S, SHORT_GRACE_S
from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunPhase
from tests.reasons import may_return
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN = RunId("run-1")


class Train(Protocol):
    """Maker of a swarm with a trained run; keywords are options of the training."""

    def __call__(self, num_steps: int, *, seconds: float = 0.0, **options: Any) -> Swarm: ...


@pytest.fixture
def train(make_swarm: type[Swarm], make_spec: MakeSpec, a: FakePeer, b: FakePeer) -> Train:
    """Maker such that `train(2, seconds=4.0)` is a swarm after at least two steps of 4 s each."""

    def make(num_steps: int, *, seconds: float = 0.0, **options: Any) -> Swarm:
        swarm = make_swarm(Journal(":memory:"))
        swarm.submit(make_spec(num_steps=20, **options))
        swarm.join(a, b)
        swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
        for number in range(1, num_steps + 1):
            step = swarm.run().step
            assert step is not None
            swarm.wait(step.began_s + seconds - swarm.now_s)
            while swarm.run().committed_steps != number:
                swarm.step()
        return swarm

    return make


def away_s(swarm: Swarm, peer: FakePeer) -> float:
    return swarm.now_s - swarm.run().attempt.away_since_s[peer.peer_id]


def wait_until_away(swarm: Swarm, peer: FakePeer, seconds: float) -> None:
    """Wait until just before the peer has been away for so long."""
    swarm.wait(seconds - away_s(swarm, peer) - 1.0)


def test_where_nobody_else_could_host_the_layers_the_whole_grace_is_waited(
    train: Train, b: FakePeer
) -> None:
    swarm = train(2)
    swarm.lose(b)
    wait_until_away(swarm, b, GRACE_S)
    assert swarm.num_rollbacks == 0
    swarm.wait(1.0)
    assert swarm.num_rollbacks == 1


def test_a_run_with_little_to_lose_waits_only_for_a_reconnect(
    train: Train, b: FakePeer, newcomer: FakePeer
) -> None:
    swarm = train(2)
    swarm.lose(b)
    swarm.join(newcomer)
    assert swarm.run().detail == may_return("2-4", round(SHORT_GRACE_S))
    wait_until_away(swarm, b, SHORT_GRACE_S)
    assert swarm.num_rollbacks == 0
    swarm.wait(1.0)
    assert swarm.num_rollbacks == 1
    assert swarm.run().peers == ("a", "newcomer")
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_a_run_waits_as_long_as_going_back_would_cost(
    train: Train, b: FakePeer, newcomer: FakePeer
) -> None:
    swarm = train(3, seconds=4.0)
    swarm.lose(b)
    swarm.join(newcomer)
    redone_s = 3 * swarm.run().measured.step_seconds[1]
    assert 12.0 < redone_s < 15.0
    assert swarm.run().detail == may_return("2-4", round(redone_s))
    wait_until_away(swarm, b, redone_s)
    assert swarm.num_rollbacks == 0
    swarm.wait(1.0)
    assert swarm.num_rollbacks == 1


def test_a_peer_that_comes_back_in_that_time_keeps_the_work(
    train: Train, b: FakePeer, newcomer: FakePeer
) -> None:
    swarm = train(3, seconds=4.0)
    swarm.lose(b)
    swarm.join(newcomer)
    wait_until_away(swarm, b, 12.0)
    swarm.join(b)
    swarm.settle()
    assert swarm.num_rollbacks == 0
    assert swarm.run().phase is RunPhase.FINISHED


def test_only_steps_since_the_snapshot_would_be_done_again(
    train: Train, b: FakePeer, newcomer: FakePeer
) -> None:
    swarm = train(5, seconds=6.0, save_steps=4)
    swarm.lose(b)
    swarm.join(newcomer)
    assert swarm.run().detail == may_return("2-4", 7)


def test_nobody_is_waited_for_longer_than_the_grace(
    train: Train, b: FakePeer, newcomer: FakePeer
) -> None:
    swarm = train(5, seconds=100.0)
    swarm.lose(b)
    swarm.join(newcomer)
    wait_until_away(swarm, b, GRACE_S)
    assert swarm.num_rollbacks == 0
    swarm.wait(1.0)
    assert swarm.num_rollbacks == 1


def test_one_slow_step_changes_nothing(train: Train, b: FakePeer, newcomer: FakePeer) -> None:
    swarm = train(3)
    step = swarm.run().step
    assert step is not None
    swarm.wait(1000.0)
    swarm.settle_until(lambda: swarm.run().committed_steps == 4)
    swarm.lose(b)
    swarm.join(newcomer)
    assert swarm.run().detail == may_return("2-4", round(SHORT_GRACE_S))


def test_an_automatic_peer_counts_once_it_is_known_who_came(
    train: Train, b: FakePeer, make_peer: type[FakePeer]
) -> None:
    swarm = train(2)
    swarm.lose(b)
    swarm.join(make_peer("auto", "auto"))
    assert swarm.run().detail == may_return("2-4", round(GRACE_S))
    swarm.wait(SETTLE_S)
    assert swarm.run().detail == may_return("2-4", round(SHORT_GRACE_S))


def test_the_wait_is_told_once(train: Train, b: FakePeer, newcomer: FakePeer) -> None:
    swarm = train(3, seconds=4.0)
    swarm.lose(b)
    swarm.join(newcomer)
    before = len(swarm.effects)
    for _ in range(5):
        swarm.wait(0.5)
    assert len(swarm.effects) == before


def test_after_a_restart_it_is_known_how_long_steps_take(train: Train) -> None:
    swarm = train(7, seconds=4.0)
    before = swarm.run().measured.step_seconds
    assert len(before) == 5
    swarm.restart()
    assert swarm.run().measured.step_seconds == before
