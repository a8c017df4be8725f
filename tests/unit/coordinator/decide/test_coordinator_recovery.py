"""Interrupted runs end as quiet ones do: the same commits, each step applied once by every peer."""

from collections.abc import Callable
from functools import cache
from random import Random
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.events import PeerSaid, ResultCollected
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunPhase, StepCommitted
from tests.draws import draws
from tests.reasons import missing
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN = RunId("run-1")
LAYERS = {"a": "0-1", "b": "1-3", "c": "3-4"}
MAX_EVENTS = 500

Begin: TypeAlias = Callable[[], tuple[Swarm, list[FakePeer]]]
Quiet: TypeAlias = Callable[[], tuple[list[StepCommitted], int]]
Script: TypeAlias = dict[int, list[tuple[str, int, int]]]


@pytest.fixture(scope="module")
def begin(make_swarm: type[Swarm], make_peer: type[FakePeer], make_spec: MakeSpec) -> Begin:
    """Return a submitted run and its peers, with a journal of its own."""

    def make() -> tuple[Swarm, list[FakePeer]]:
        swarm = make_swarm(Journal(":memory:"))
        peers = [make_peer(name, layers) for name, layers in LAYERS.items()]
        swarm.submit(make_spec())
        swarm.join(*peers)
        return swarm, peers

    return make


@pytest.fixture(scope="module")
def quiet(begin: Begin) -> Quiet:
    """Return the commits of an undisturbed run, and its number of messages."""

    @cache
    def play() -> tuple[list[StepCommitted], int]:
        swarm, _ = begin()
        num_events = 0
        while swarm.pending:
            swarm.step()
            num_events += 1
        return swarm.steps(), num_events

    return play


def assert_like_quiet(swarm: Swarm, peers: list[FakePeer], quiet: Quiet) -> None:
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.steps() == quiet()[0]
    assert [peer.applied for peer in peers] == [[0, 1, 2]] * len(peers)
    assert all(peer.exported for peer in peers)
    assert swarm.num_rollbacks == 0
    assert swarm.journal is not None
    journalled = swarm.journal.steps(RUN, 0, 100)
    assert [step.step for step in journalled] == [step.step for step in swarm.history[RUN]]


@pytest.mark.parametrize("num_messages", [0, 1, 2, 99], ids=lambda n: f"{n}-messages")
def test_a_coordinator_killed_in_any_event_goes_on(
    begin: Begin, quiet: Quiet, num_messages: int
) -> None:
    for moment in range(quiet()[1]):
        swarm, peers = begin()
        for _ in range(moment):
            swarm.step()
        swarm.crash(PeerSaid(*swarm.pending.popleft()), num_messages)
        swarm.join(*reversed(peers))
        swarm.settle()
        assert_like_quiet(swarm, peers, quiet)


def test_a_coordinator_killed_between_events_forgets_only_what_was_on_its_way(
    begin: Begin, quiet: Quiet
) -> None:
    for moment in range(quiet()[1] + 1):
        swarm, peers = begin()
        for _ in range(moment):
            swarm.step()
        swarm.restart()
        swarm.join(*peers)
        swarm.settle()
        assert_like_quiet(swarm, peers, quiet)


@pytest.mark.parametrize("unheard", [0, 1, 2, 5])
@pytest.mark.parametrize("name", LAYERS)
def test_a_stream_that_breaks_at_any_event_changes_nothing(
    begin: Begin, quiet: Quiet, name: str, unheard: int
) -> None:
    for moment in range(quiet()[1]):
        swarm, peers = begin()
        peer = next(p for p in peers if p.peer_id == name)
        for _ in range(moment):
            swarm.step()
        swarm.deafen(peer)
        for _ in range(min(unheard, len(swarm.pending))):
            swarm.step()
        swarm.lose(peer)
        swarm.join(peer)
        swarm.settle()
        assert_like_quiet(swarm, peers, quiet)


class Interruptions:
    """A run that a script of (event, kind, peer, number) interrupts."""

    def __init__(
        self, swarm: Swarm, peers: list[FakePeer], draw_index: Callable[[int], int]
    ) -> None:
        self.swarm, self.peers, self.draw_index = swarm, peers, draw_index
        self.returning: dict[FakePeer, int] = {}

    def play(self, script: Script) -> None:
        for moment in range(MAX_EVENTS):
            for kind, index, number in script.get(moment, ()):
                self.interrupt(kind, self.peers[index], number, moment)
            for peer in [p for p, due in self.returning.items() if due <= moment]:
                self.come_back(peer)
            if self.swarm.pending:
                self.shuffle()
                self.swarm.step()
            elif self.returning:
                self.come_back(next(iter(self.returning)))
            elif moment > max(script, default=0):
                return
        raise AssertionError("the run does not end")

    def interrupt(self, kind: str, peer: FakePeer, number: int, moment: int) -> None:
        if kind == "break":
            self.swarm.deafen(peer)
            self.returning[peer] = moment + number
        elif self.swarm.pending:
            self.swarm.crash(PeerSaid(*self.swarm.pending.popleft()), number)
            self.all_come_back()
        else:
            self.swarm.restart()
            self.all_come_back()

    def come_back(self, peer: FakePeer) -> None:
        del self.returning[peer]
        self.swarm.lose(peer)
        self.swarm.join(peer)

    def all_come_back(self) -> None:
        self.returning.clear()
        first = self.draw_index(len(self.peers))
        self.swarm.join(*self.peers[first:], *self.peers[:first])

    def shuffle(self) -> None:
        """Messages of different peers overtake each other; those of one peer do not."""
        pending = self.swarm.pending
        chosen = pending[self.draw_index(len(pending))][0]
        index = next(i for i, (peer_id, _) in enumerate(pending) if peer_id == chosen)
        message = pending[index]
        del pending[index]
        pending.appendleft(message)


interruption = st.tuples(
    st.sampled_from(["break", "kill"]), st.integers(0, len(LAYERS) - 1), st.integers(0, 6)
)
scripts = st.dictionaries(
    st.integers(0, 40), st.lists(interruption, min_size=1, max_size=2), max_size=6
)


@settings(derandomize=True, max_examples=draws(120), deadline=None)
@given(script=scripts, random=st.randoms(use_true_random=False))
def test_any_number_of_interruptions_leaves_the_commits_as_they_were(
    begin: Begin, quiet: Quiet, script: Script, random: Random
) -> None:
    swarm, peers = begin()
    Interruptions(swarm, peers, random.randrange).play(script)
    assert_like_quiet(swarm, peers, quiet)


def test_attempts_rise_over_restarts(begin: Begin) -> None:
    swarm, peers = begin()
    for _ in range(3):
        swarm.restart()
        swarm.join(*peers)
    assert swarm.run().attempt.number == 4


def test_a_result_survives_a_restart(begin: Begin) -> None:
    swarm, peers = begin()
    swarm.settle()
    swarm.restart()
    swarm.join(*peers)
    assert swarm.run().phase is RunPhase.FINISHED
    assert all(peer.exported for peer in peers)
    assert peers[0].peer_id in swarm.state.result_keepers
    swarm.handle(ResultCollected(RUN))
    assert not any(peer.exported for peer in peers)


def test_a_result_is_safe_from_the_next_run_after_a_restart(
    begin: Begin, make_spec: MakeSpec
) -> None:
    swarm, peers = begin()
    swarm.settle()
    swarm.restart()
    swarm.submit(make_spec(), RunId("run-2"))
    swarm.join(*peers)
    assert all(peer.exported for peer in peers)
    assert swarm.run(RunId("run-2")).phase is RunPhase.WAITING


def test_a_queued_run_is_queued_after_a_restart(begin: Begin, make_spec: MakeSpec) -> None:
    swarm, peers = begin()
    swarm.submit(make_spec(), RunId("run-2"))
    swarm.restart()
    assert swarm.run(RunId("run-2")).phase is RunPhase.QUEUED
    swarm.join(*peers)
    swarm.settle()
    swarm.handle(ResultCollected(RUN))
    swarm.settle()
    assert swarm.run(RunId("run-2")).phase is RunPhase.FINISHED


def test_peers_that_stay_away_after_a_restart_are_replaced(
    begin: Begin, make_peer: type[FakePeer]
) -> None:
    swarm, peers = begin()
    swarm.settle_until(lambda: len(swarm.history[RUN]) == 2)
    swarm.restart()
    swarm.join(*peers[:2])
    swarm.wait(60.0)
    assert swarm.run().detail == missing("3-4")
    newcomer = make_peer("d", "3-4")
    swarm.join(newcomer)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert newcomer.applied == [0, 1, 2]
