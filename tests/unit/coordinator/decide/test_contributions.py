"""Sent bytes of members: counted once, over restarts of members and of the coordinator."""

import pytest

from swarm_ft.coordinator.decide import contributions
from swarm_ft.coordinator.facts.events import EmitEvent
from swarm_ft.coordinator.facts.state import SentTraffic
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.reason_texts import event_in_words
from swarm_ft.coordinator.watching import overview
from swarm_ft.protocol.messages.contribution import (
    MAX_GIVEN_BYTES,
    Contribution,
    ContributionRequest,
)
from swarm_ft.protocol.messages.control import PeerAlive
from swarm_ft.protocol.messages.events import EventKind
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm


@pytest.fixture
def swarm(make_swarm: type[Swarm]) -> Swarm:
    return make_swarm(Journal(":memory:"))


def all_bytes(swarm: Swarm, peer: FakePeer) -> int:
    return swarm.state.contribution_of(peer.peer_id).all_bytes


def test_a_session_is_counted_once_however_often_it_is_reported(swarm: Swarm, a: FakePeer) -> None:
    a.session = 7
    swarm.join(a)
    for sent_bytes in (100, 100, 250, 40):
        swarm.say(a, PeerAlive(sent_bytes=sent_bytes))
    swarm.say(a, ContributionRequest(sent_bytes=300))
    assert all_bytes(swarm, a) == 300
    swarm.lose(a)
    swarm.join(a)  # its connection broke: the same process
    swarm.say(a, PeerAlive(sent_bytes=310))
    assert all_bytes(swarm, a) == 310
    swarm.leave(a)
    a.session = 8  # another process counts from 0
    swarm.join(a)
    swarm.say(a, PeerAlive(sent_bytes=5))
    assert all_bytes(swarm, a) == 315


def test_it_survives_a_restart_of_the_coordinator(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    a.session = 7
    swarm.submit(make_spec(num_steps=9))
    swarm.join(a, b)
    swarm.say(a, PeerAlive(sent_bytes=100))
    swarm.settle_until(lambda: swarm.run().committed_steps == 3)
    swarm.say(a, PeerAlive(sent_bytes=140))  # nothing is written after it
    swarm.restart()
    assert all_bytes(swarm, a) == 100
    swarm.join(a, b)
    swarm.say(a, PeerAlive(sent_bytes=150))
    assert all_bytes(swarm, a) == 150
    swarm.leave(a)
    swarm.restart()
    assert all_bytes(swarm, a) == 150


def test_status_and_the_event_of_its_end_have_the_same_digits(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    a.session = 7
    swarm.submit(make_spec(num_steps=9))
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().committed_steps == 3)
    swarm.say(a, PeerAlive(sent_bytes=5_000_000))
    contribution = overview(swarm.state).members[0].given
    assert (contribution.steps, contribution.all_bytes) == (3, 5_000_000)
    (one, _) = overview(swarm.state).contributors
    assert one.given == contribution
    swarm.leave(a)
    (left,) = (
        e for e in swarm.effects if isinstance(e, EmitEvent) and e.kind is EventKind.PEER_LEFT
    )
    assert event_in_words(left.kind, left.reason) == f"peer a left; it gave {contribution}"


def test_a_peer_that_gave_nothing_just_leaves(swarm: Swarm, a: FakePeer) -> None:
    swarm.join(a)
    swarm.leave(a)
    (left,) = (
        e for e in swarm.effects if isinstance(e, EmitEvent) and e.kind is EventKind.PEER_LEFT
    )
    assert event_in_words(left.kind, left.reason) == "peer a left"


def test_names_that_gave_nothing_are_bounded(
    swarm: Swarm, make_peer: type[FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "MAX_CONTRIBUTIONS", 2)
    for number in range(9):
        peer = make_peer(f"peer-{number}", "0-2")
        peer.session = 1
        swarm.join(peer)
        swarm.say(peer, PeerAlive(sent_bytes=100))
        swarm.leave(peer)
    assert list(swarm.state.sent_traffic) == [f"peer-{number}" for number in (5, 6, 7, 8)]


def test_a_claim_has_a_bound() -> None:
    first = SentTraffic().counted(1, MAX_GIVEN_BYTES)
    assert first.counted(2, MAX_GIVEN_BYTES).all_bytes == MAX_GIVEN_BYTES


@pytest.mark.parametrize(
    ("contribution", "words"),
    [
        (
            Contribution(samples=1, steps=1, seconds=9.4, sent_bytes=500),
            "1 sample in 1 step, 9 s, 500 bytes sent for training",
        ),
        (
            Contribution(
                samples=6678,
                steps=931,
                seconds=720.0,
                sent_bytes=50_300_000,
                all_bytes=293_700_000,
            ),
            "6,678 samples in 931 steps, 12 min, 50.3 MB sent for training, 293.7 MB in all",
        ),
        (
            Contribution(samples=2, steps=2, seconds=7380.0, sent_bytes=1_234_000_000),
            "2 samples in 2 steps, 2 h 3 min, 1.2 GB sent for training",
        ),
    ],
)
def test_one_sentence_is_for_all_places(contribution: Contribution, words: str) -> None:
    assert str(contribution) == words
