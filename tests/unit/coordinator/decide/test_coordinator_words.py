"""Notices to a run's watchers about a lost peer: its name, the cause and the consequence."""

from typing import TypeAlias

import pytest

from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.plan.membership import SILENT_S
from swarm_ft.errors import BadLayers
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import StageFailed
from tests.reasons import may_return, part_of, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

A_STEP = 1
Peers: TypeAlias = tuple[FakePeer, FakePeer, FakePeer]


@pytest.fixture
def peers(make_peer: type[FakePeer]) -> Peers:
    return make_peer("a", "0-2"), make_peer("b", "2-4"), make_peer("twin", "2-4")


@pytest.fixture
def trained(swarm: Swarm, make_spec: MakeSpec, peers: Peers) -> Swarm:
    """A swarm after one step; its effects are those from then on."""
    swarm.join(*peers)
    swarm.submit(make_spec())
    swarm.settle_until(lambda: swarm.run().committed_steps == A_STEP)
    swarm.effects.clear()
    return swarm


def reasons_of(swarm: Swarm) -> list[Reason | None]:
    return [run.reason for run in swarm.told_of() if run.phase is RunPhase.WAITING]


def lost(peer: str, layers: str, cause: Reason, *, heir: str = "") -> Reason:
    parts = (reason(Kind.TAKEN_OVER, others=(PeerId(heir),)),) if heir else ()
    return reason(Kind.PEER_LOST, peer, layers=layers, parts=(cause, *parts))


def test_a_lost_replica_is_named_with_its_layers_and_those_that_stand_in(
    trained: Swarm, peers: Peers
) -> None:
    trained.lose(peers[1])
    assert reasons_of(trained) == [lost("b", "2-4", reason(Kind.PEER_DISCONNECTED), heir="twin")]


def test_a_lost_stage_is_waited_for(trained: Swarm, peers: Peers) -> None:
    trained.lose(peers[0])
    assert reasons_of(trained) == [
        lost("a", "0-2", reason(Kind.PEER_DISCONNECTED)),
        may_return("0-2", 30),
    ]


def test_a_peer_that_left_or_fell_silent_is_said_to_have_done_so(
    trained: Swarm, peers: Peers
) -> None:
    trained.deafen(peers[1])
    trained.wait(SILENT_S)
    (silent,) = reasons_of(trained)
    cause = part_of(silent, Kind.PEER_SILENT)
    assert SILENT_S <= (cause.amount or 0) < SILENT_S + 1.0
    assert silent == lost("b", "2-4", cause, heir="twin")
    trained.leave(peers[2])
    assert lost("twin", "2-4", reason(Kind.PEER_LEFT)) in reasons_of(trained)


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
    cause = reason(Kind.CANNOT_HOST, code=error.code, text="too little memory")
    assert reasons_of(trained) == [lost("b", "2-4", cause, heir="twin")]


def test_who_joins_is_named(trained: Swarm, peers: Peers, make_peer: type[FakePeer]) -> None:
    trained.join(make_peer("late", "2-4"))
    trained.settle_until(lambda: trained.run().committed_steps == A_STEP + 1)
    assert reasons_of(trained) == [reason(Kind.PEERS_JOIN, "late")]
    trained.lose(peers[2])
    trained.effects.clear()
    trained.join(peers[2])
    assert reasons_of(trained) == [reason(Kind.PEERS_JOIN, "twin")]
