"""What a run's watchers are told when a peer is lost: who, what, and what happens now."""

from typing import TypeAlias

import pytest

from swarm_ft.coordinator.facts.events import Publish
from swarm_ft.coordinator.plan.membership import SILENT_S
from swarm_ft.errors import BadLayers
from swarm_ft.protocol.messages.client import RunPhase, RunStatus
from swarm_ft.protocol.messages.control import StageFailed
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

A_STEP = 1
Peers: TypeAlias = tuple[FakePeer, FakePeer, FakePeer]


@pytest.fixture
def peers(make_peer: type[FakePeer]) -> Peers:
    return make_peer("a", "0-2"), make_peer("b", "2-4"), make_peer("twin", "2-4")


@pytest.fixture
def trained(swarm: Swarm, make_spec: MakeSpec, peers: Peers) -> Swarm:
    """A swarm with one step behind it; what it says from then on is looked at."""
    swarm.join(*peers)
    swarm.submit(make_spec())
    swarm.settle_until(lambda: swarm.run().committed_steps == A_STEP)
    swarm.effects.clear()
    return swarm


def told(swarm: Swarm) -> list[str]:
    statuses = [e.event for e in swarm.effects if isinstance(e, Publish)]
    waiting = [s for s in statuses if isinstance(s, RunStatus) and s.phase is RunPhase.WAITING]
    return [status.detail for status in waiting]


def test_a_lost_replica_is_named_with_its_layers_and_those_that_stand_in(
    trained: Swarm, peers: Peers
) -> None:
    trained.lose(peers[1])
    assert told(trained) == ["peer b (layers 2-4) is gone; its part goes to twin"]


def test_a_lost_stage_is_waited_for(trained: Swarm, peers: Peers) -> None:
    trained.lose(peers[0])
    assert told(trained) == [
        "peer a (layers 0-2) is gone",
        "waiting for layers 0-2: their peer may come back (30 s)",
    ]


def test_a_peer_that_left_or_fell_silent_is_said_to_have_done_so(
    trained: Swarm, peers: Peers
) -> None:
    trained.deafen(peers[1])
    trained.wait(SILENT_S)
    silent = f"peer b (layers 2-4) said nothing for {SILENT_S:.0f} s; its part goes to twin"
    assert told(trained) == [silent]
    trained.leave(peers[2])
    assert "peer twin (layers 2-4) left" in told(trained)


def test_a_peer_that_cannot_host_its_layers_is_named_with_the_reason(
    trained: Swarm, peers: Peers
) -> None:
    error = BadLayers("too little memory")
    failed = StageFailed(
        run_id=trained.run().run_id,
        attempt=trained.run().attempt.number,
        code=error.code,
        message=error.message,
    )
    trained.say(peers[1], failed)
    first = "peer b (layers 2-4) cannot host them: too little memory; its part goes to twin"
    assert told(trained) == [first]


def test_who_joins_is_named(trained: Swarm, peers: Peers, make_peer: type[FakePeer]) -> None:
    trained.join(make_peer("late", "2-4"))
    trained.settle_until(lambda: trained.run().committed_steps == A_STEP + 1)
    assert told(trained) == ["joined by late"]
    trained.lose(peers[2])
    trained.effects.clear()
    trained.join(peers[2])
    assert told(trained) == ["joined by twin"]
