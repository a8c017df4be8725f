"""Silent peers, and a coordinator that stood still and received nothing."""

from typing import TypeAlias

import pytest

from swarm_ft.coordinator.decide.losses import NOTICED_S, STALLED_S
from swarm_ft.coordinator.facts.events import Publish, Record
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.membership import GATHER_S, GRACE_S, SILENT_S
from swarm_ft.coordinator.reason_texts import as_text
from swarm_ft.coordinator.watching import overview
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerAlive
from tests.reasons import ranges_of, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN = RunId("run-1")
Peers: TypeAlias = tuple[FakePeer, FakePeer, FakePeer]


@pytest.fixture
def peers(make_peer: type[FakePeer]) -> Peers:
    return make_peer("a", "0-2"), make_peer("b", "2-4"), make_peer("twin", "2-4")


@pytest.fixture
def training(make_swarm: type[Swarm], make_spec: MakeSpec, peers: Peers) -> Swarm:
    """A swarm in which a step has begun; effects are those from then on."""
    swarm = make_swarm(Journal(":memory:"))
    swarm.join(*peers)
    swarm.submit(make_spec())
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    swarm.effects.clear()
    return swarm


# ---- silent peers


def silent(peer: str, seconds: float) -> Reason:
    return reason(Kind.PEER_SILENT, peer, layers="2-4", amount=seconds)


def test_a_silent_peer_is_told_of_before_it_is_given_up(training: Swarm, peers: Peers) -> None:
    training.deafen(peers[1])
    training.wait(NOTICED_S)
    (event,) = training.told_of()
    assert event.reason == silent("b", NOTICED_S)
    assert event.phase is RunPhase.TRAINING
    assert overview(training.state).runs[0].detail == as_text(event.reason)
    training.wait(SILENT_S - NOTICED_S)
    lost = next(one for one in training.reasons() if one.kind is Kind.PEER_LOST)
    assert (lost.peers, lost.layers) == (("b",), ranges_of("2-4"))
    cause, follows = lost.parts
    assert cause.kind is Kind.PEER_SILENT
    assert SILENT_S <= (cause.amount or 0) < SILENT_S + 1.0
    assert follows == reason(Kind.TAKEN_OVER, others=(PeerId("twin"),))
    assert training.run().notice is None


def test_a_peer_that_speaks_again_is_told_of_no_more(training: Swarm, peers: Peers) -> None:
    training.deafen(peers[1])
    training.wait(NOTICED_S)
    training.deaf.clear()
    training.say(peers[1], PeerAlive())
    training.wait(1.0)
    assert [run.reason for run in training.told_of()][1:] == [None]


def test_a_silence_is_told_once_and_not_written_down(training: Swarm, peers: Peers) -> None:
    training.deafen(peers[1])
    while training.now_s < training.state.members[peers[1].peer_id].heard_at_s + SILENT_S - 1.0:
        training.wait(0.1)
    assert sum(isinstance(effect, Publish) for effect in training.effects) == 1
    assert not any(isinstance(effect, Record) for effect in training.effects)


def test_all_who_are_silent_are_named(training: Swarm, peers: Peers) -> None:
    for peer in peers[1:]:
        training.deafen(peer)
    training.wait(NOTICED_S)
    last_reason = training.told_of()[-1].reason
    assert last_reason is not None
    assert last_reason.parts == (silent("b", NOTICED_S), silent("twin", NOTICED_S))


def test_a_silent_peer_that_has_no_part_in_the_run_is_not_told_of(
    training: Swarm, make_peer: type[FakePeer]
) -> None:
    spare = make_peer("spare", "2-4")
    training.join(spare)
    training.effects.clear()
    training.deafen(spare)
    training.wait(NOTICED_S)
    assert training.told_of() == []


def test_what_a_run_is_told_at_its_end_is_not_hidden(training: Swarm, peers: Peers) -> None:
    training.deafen(peers[1])
    training.wait(NOTICED_S)
    training.forget_said(peers[0].peer_id)
    training.say(peers[0], peers[0].failed("non-finite"))
    assert training.run().reason == reason(Kind.PEER_ERROR, "a", code="non-finite", text="oh")


# ---- a coordinator that stood still


@pytest.mark.parametrize("seconds", [STALLED_S, SILENT_S, 20.0, 3600.0])
def test_a_coordinator_that_stood_still_dismisses_nobody(training: Swarm, seconds: float) -> None:
    training.stand_still(seconds)
    assert training.effects == []
    training.settle()
    assert training.run().phase is RunPhase.FINISHED
    assert training.run().attempt.number == 1


def test_whoever_is_silent_from_then_on_is_given_up(training: Swarm, peers: Peers) -> None:
    training.deafen(peers[1])
    training.stand_still(100.0)
    training.wait(SILENT_S - 2.0)
    assert training.dismissals() == {}
    training.wait(2.0)
    assert training.dismissals() == {"b": "unavailable"}


def test_time_in_which_nobody_could_come_back_does_not_count(training: Swarm, peers: Peers) -> None:
    training.settle_until(lambda: training.run().committed_steps == 1)
    training.lose(peers[0])
    training.wait(GRACE_S / 2)
    training.stand_still(10 * GRACE_S)
    training.join(peers[0])
    training.settle()
    assert training.run().phase is RunPhase.FINISHED
    assert training.num_rollbacks == 0


def test_replicas_are_still_gathered_after_it(training: Swarm, peers: Peers) -> None:
    training.settle_until(lambda: training.run().committed_steps == 1)
    training.restart()
    training.join(*peers[:2])
    training.stand_still(10 * GATHER_S)
    assert training.run().phase is RunPhase.WAITING
    training.join(peers[2])
    assert set(training.run().peers) == {"a", "b", "twin"}


def test_a_slow_tick_or_two_hide_no_silence(training: Swarm, peers: Peers) -> None:
    training.deafen(peers[1])
    for _ in range(8):
        training.stand_still(STALLED_S - 0.5)
    assert "b" in training.dismissals()
