"""Waiting runs cost nothing: counts of divisions and placements per event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.coordinator_cost import TICK_S, Swarm, busy_swarm, hello_of
from swarm_ft.coordinator.facts.events import Event, PeerJoined, PeerLost, PeerSaid, Tick
from swarm_ft.coordinator.plan import allocation, membership, placement
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerAlive, StepReady
from swarm_ft.protocol.spec.grant import Grant

NUM_JOBS = 16
NUM_PEERS = 24

Counts = Callable[[Swarm, Event], Counter[str]]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Decide an event, and return how often each of the costly functions was called."""
    called: Counter[str] = Counter()

    def counted(where: Any, name: str) -> None:
        whole = getattr(where, name)

        def call(*args: Any, **options: Any) -> Any:
            called[name] += 1
            return whole(*args, **options)

        monkeypatch.setattr(where, name, call)

    counted(vars(allocation)["_Division"], "divided")
    counted(membership, "first_hosts")
    counted(placement, "_fill")
    counted(membership, "why_idle")

    def decide(swarm: Swarm, event: Event) -> Counter[str]:
        called.clear()
        swarm.decide(event, TICK_S)
        return Counter(called)

    return decide


@pytest.fixture(params=["large", "behind"])
def swarm(request: pytest.FixtureRequest) -> Swarm:
    """Peers and waiting jobs, at rest."""
    swarm = busy_swarm(NUM_PEERS, NUM_JOBS, request.param, limit_s=60.0)
    swarm.begin_training()
    swarm.set_heartbeats()
    for _ in range(3):
        swarm.decide(Tick(), TICK_S)
    return swarm


def test_a_tick_places_nobody_while_nothing_changes(swarm: Swarm, counts: Counts) -> None:
    assert not counts(swarm, Tick())


def test_a_heartbeat_places_nobody(swarm: Swarm, counts: Counts) -> None:
    assert not counts(swarm, PeerSaid(PeerId("peer-001"), PeerAlive()))
    assert not counts(swarm, Tick()), "nor does the tick after it"


def test_a_join_divides_once_and_asks_each_job_twice(swarm: Swarm, counts: Counts) -> None:
    found = counts(swarm, PeerJoined(hello_of(900), Grant()))
    assert found["divided"] == 1
    assert found["first_hosts"] <= 2 * NUM_JOBS
    assert found["_fill"] <= 2 * NUM_JOBS
    assert found["why_idle"] == 0


def test_a_peer_that_is_lost_divides_at_most_twice(swarm: Swarm, counts: Counts) -> None:
    found = counts(swarm, PeerLost(PeerId("peer-001")))
    assert found["divided"] <= 2, "as it goes, and once its run is stopped"
    assert found["_fill"] <= 4 * NUM_JOBS


def test_a_tick_after_a_change_asks_members_once_for_all_that_offer_alike(
    swarm: Swarm, counts: Counts
) -> None:
    counts(swarm, PeerJoined(hello_of(900), Grant()))
    idle = [peer for peer in swarm.state.members if not swarm.state.runs_of(peer)]
    at_work = len(swarm.state.members) - len(idle)
    assert counts(swarm, Tick())["why_idle"] <= at_work + 1


def test_a_commit_divides_at_most_once(counts: Counts) -> None:
    swarm = busy_swarm(NUM_PEERS, NUM_JOBS, "behind", limit_s=60.0)
    swarm.begin_training()
    swarm.decide(Tick(), TICK_S)
    run = next(run for run in swarm.state.runs.values() if run.phase is RunPhase.TRAINING)
    found: Counter[str] = Counter()
    for step in range(3):
        for peer in run.peers:
            ready = StepReady(
                run_id=run.run_id,
                attempt=run.attempt.number,
                step=StepNumber(step),
                squared_grad_norm=1.0,
                compute_s=0.0,
            )
            found = counts(swarm, PeerSaid(peer, ready))
        assert swarm.state.runs[run.run_id].committed_steps == step + 1
        assert found["divided"] <= 1
    assert not found, "after the first step commits change nothing that a division depends on"
