"""The known connectivity decides the order of peers in the pipeline, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.connectivity import Connectivity, NatInfo
from swarm_ft.coordinator.facts.events import Tick
from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.meeting import Way
from tests.draws import draws
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

MakePeer = type[FakePeer]


def ways_of(names: str, direct: Iterable[str]) -> Connectivity:
    """Return a connectivity in which these pairs connect directly, and all others over a relay."""
    met = dict.fromkeys(combinations(sorted(names), 2), Way.RELAYED)
    return Connectivity(met=met | {(pair[0], pair[1]): Way.PUNCHED for pair in direct})


def pipeline(swarm: Swarm) -> list[str]:
    return ["".join(stage.peers) for stage in swarm.run().stages]


@pytest.fixture
def four(swarm: Swarm, make_peer: MakePeer, make_spec: MakeSpec) -> Swarm:
    """Peers that take any layers, and whose connectivity is unknown yet."""
    swarm.submit(make_spec())
    swarm.join(*(make_peer(name, "auto") for name in "abcd"))
    return swarm


def test_peers_that_reach_each_other_become_neighbours(four: Swarm) -> None:
    four.handle(Tick(ways_of("abcd", ["ac", "ad", "bd"])))
    four.wait(SETTLE_S)
    assert pipeline(four) in (["c", "a", "d", "b"], ["b", "d", "a", "c"])
    four.settle()
    assert four.run().phase is RunPhase.FINISHED


def test_where_nothing_is_known_they_sit_as_they_came(four: Swarm) -> None:
    four.wait(SETTLE_S)
    assert pipeline(four) == ["a", "b", "c", "d"]


def test_what_is_learnt_later_moves_nobody_that_is_at_work(four: Swarm) -> None:
    four.wait(SETTLE_S)
    four.settle_until(lambda: four.run().committed_steps)
    attempt = four.run().attempt.number
    four.handle(Tick(ways_of("abcd", ["ac", "ad", "bd"])))
    four.settle()
    assert four.run().phase is RunPhase.FINISHED
    assert (pipeline(four), four.run().attempt.number) == (["a", "b", "c", "d"], attempt)


def test_a_tick_that_looked_at_nothing_leaves_what_is_known(swarm: Swarm) -> None:
    known = Connectivity(homes={"a": NatInfo(house="198.51.100.1")})
    swarm.handle(Tick(known))
    swarm.handle(Tick())
    assert swarm.state.ways == known
    swarm.handle(Tick(Connectivity()))
    assert swarm.state.ways == SwarmState().ways


def test_a_newcomer_helps_where_it_is_reached_if_it_helps_alike_elsewhere(
    swarm: Swarm, make_spec: MakeSpec, make_peer: MakePeer, a: FakePeer, b: FakePeer
) -> None:
    c = make_peer("c", "4-6")
    swarm.submit(make_spec(num_blocks=6, num_steps=8))
    swarm.join(a, b, c)
    swarm.settle_until(lambda: swarm.run().committed_steps)
    swarm.handle(Tick(ways_of("abcx", ["bx", "cx", "ab", "bc"])))
    swarm.join(make_peer("x", "auto"))
    swarm.settle_until(lambda: "x" in swarm.run().peers)
    assert pipeline(swarm) == ["a", "b", "cx"]


@settings(derandomize=True, max_examples=draws(12), deadline=None)
@given(data=st.data())
def test_no_word_about_ways_ends_a_run_or_changes_what_it_learns(
    make_swarm: type[Swarm], make_peer: MakePeer, make_spec: MakeSpec, data: st.DataObject
) -> None:
    swarm, names = make_swarm(), "abcdef"
    pairs = st.sampled_from(list(combinations(names, 2)))
    homes = st.builds(NatInfo, house=st.sampled_from("xy"), is_open=st.booleans())
    connectivity = st.builds(
        Connectivity,
        homes=st.dictionaries(st.sampled_from([*names, "stranger"]), homes),
        met=st.dictionaries(pairs, st.sampled_from(list(Way))),
    )
    swarm.submit(make_spec())
    for name in names:
        swarm.join(make_peer(name, "auto"))
        swarm.handle(Tick(data.draw(connectivity)))
    swarm.wait(SETTLE_S)
    while swarm.pending:
        swarm.step()
        swarm.handle(Tick(data.draw(connectivity)))
    assert swarm.run().phase is RunPhase.FINISHED
    assert sorted("".join(pipeline(swarm))) == list(names)
