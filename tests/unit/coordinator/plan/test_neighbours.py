"""Peers swap seats so that fewer bytes go over relays, and only where they may sit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.connectivity import Connectivity, NatInfo
from swarm_ft.coordinator.facts.state import Member
from swarm_ft.coordinator.plan.neighbours import MAX_SEARCHED, with_better_neighbours
from swarm_ft.coordinator.plan.placement import place
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import PeerHello, StageAssignment, stages_of
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import parse_layers
from swarm_ft.protocol.spec.run_spec import COPIES_PER_WEIGHT, RunSpec
from tests.draws import draws
from tests.specs import run_spec

LATER_S = 1000.0
PLENTY = 1 << 60
WAYS = (Way.DIRECT, Way.RELAYED)


def member(
    name: str, layers: str = "auto", *, memory_bytes: int = PLENTY, grant: Grant | None = None
) -> Member:
    hello = PeerHello(
        peer_id=PeerId(name),
        endpoint="peer.example:7001",
        layers=parse_layers(layers),
        memory_bytes=memory_bytes,
    )
    return Member(hello=hello, joined_at_s=0.0, heard_at_s=0.0, grant=grant or Grant())


def names_of(num_peers: int) -> list[str]:
    return [f"p{i:02}" for i in range(num_peers)]


def reaching(*pairs: str, among: str) -> Connectivity:
    """Return a connectivity of one-letter peers: these pairs directly, others by relay."""
    met = dict.fromkeys(combinations(sorted(among), 2), Way.RELAYED)
    return Connectivity(met=met | {(min(pair), max(pair)): Way.DIRECT for pair in pairs})


def better(
    spec: RunSpec, members: Sequence[Member], ways: Connectivity
) -> tuple[StageAssignment, ...]:
    placed = place(spec, members, LATER_S).assignments
    assert placed
    return with_better_neighbours(spec, placed, {m.hello.peer_id: m for m in members}, ways)


def in_words(placed: Sequence[StageAssignment]) -> str:
    return " ".join(f"{one.peer_id}:{one.layers}" for one in placed)


def relayed_links(placed: Sequence[StageAssignment], ways: Connectivity) -> int:
    """Return the relayed share of links between neighbouring stages, in percent of one."""
    pairs = pairwise(stages_of(placed))
    links = (link for one, other in pairs for link in product(one.peers, other.peers))
    return sum(ways.relayed_percent(a, b) for a, b in links)


@st.composite
def homes(draw: st.DrawFn, names: Sequence[str]) -> Mapping[str, NatInfo]:
    kinds = st.sampled_from(["open", "cone", "varying", "unknown"])
    drawn = {name: draw(kinds) for name in names}
    return {
        name: NatInfo(house=name, is_open=kind == "open", mapping_varies=kind == "varying")
        for name, kind in drawn.items()
        if kind != "unknown"
    }


@st.composite
def some_ways(draw: st.DrawFn, names: Sequence[str]) -> Connectivity:
    pairs = list(combinations(sorted(names), 2))
    met = draw(
        st.dictionaries(st.sampled_from(pairs), st.sampled_from(WAYS)) if pairs else st.just({})
    )
    return Connectivity(homes=draw(homes(names)), met=met)


# ---- how good


@settings(derandomize=True, max_examples=draws(60), deadline=None)
@given(st.data(), st.lists(st.booleans(), min_size=1, max_size=6))
def test_among_few_stages_no_order_is_better(data: st.DataObject, are_free: list[bool]) -> None:
    names = names_of(len(are_free))
    ways = data.draw(some_ways(names))
    members = [
        member(name, "auto" if is_free else f"{block}-{block + 1}")
        for block, (name, is_free) in enumerate(zip(names, are_free, strict=True))
    ]
    placed = better(run_spec(num_blocks=len(names)), members, ways)
    assert sorted(one.peer_id for one in placed) == names
    others = (
        [replace(one, peer_id=peer) for one, peer in zip(placed, order, strict=True)]
        for order in permutations(one.peer_id for one in placed)
        if all(are_free[b] or peer == names[b] for b, peer in enumerate(order))
    )
    assert relayed_links(placed, ways) == min(relayed_links(other, ways) for other in others)


@settings(derandomize=True, max_examples=draws(40), deadline=None)
@given(st.data(), st.integers(1, MAX_SEARCHED + 8), st.integers(1, 8))
def test_an_order_is_never_worse_than_the_given_one_and_the_same_each_time(
    data: st.DataObject, num_peers: int, num_blocks: int
) -> None:
    names = names_of(num_peers)
    ways = data.draw(some_ways(names))
    spec = run_spec(num_blocks=num_blocks, num_samples=64, batch_size=64, seq_length=100)
    members = [member(name) for name in names]
    before, after = place(spec, members, LATER_S).assignments, better(spec, members, ways)
    assert [one.layers for one in after] == [one.layers for one in before]
    assert sorted(one.peer_id for one in after) == sorted(one.peer_id for one in before)
    assert after == better(spec, members, ways)
    if num_peers <= num_blocks:
        assert relayed_links(after, ways) <= relayed_links(before, ways)


@pytest.mark.parametrize("num_peers", [1, 5, 8, 12, 40])
@pytest.mark.parametrize("num_blocks", [1, 8, 40])
def test_where_nothing_tells_them_apart_all_stay_where_they_are(
    num_peers: int, num_blocks: int
) -> None:
    members = [member(name) for name in names_of(num_peers)]
    spec = run_spec(num_blocks=num_blocks)
    before = place(spec, members, LATER_S).assignments
    names = [one.hello.peer_id for one in members]
    for kind in (NatInfo(house="x"), NatInfo(house="x", is_open=True), None):
        ways = Connectivity(homes={name: kind for name in names if kind is not None})
        assert better(spec, members, ways) == before


def test_a_hundred_peers_are_seated_better_than_they_came() -> None:
    names = names_of(100)
    kinds = [
        NatInfo(house=n, is_open=i % 5 == 0, mapping_varies=i % 5 == 2) for i, n in enumerate(names)
    ]
    ways = Connectivity(homes=dict(zip(names, kinds, strict=True)))
    members = [member(name) for name in names]
    spec = run_spec(num_blocks=100)
    before = place(spec, members, LATER_S).assignments
    assert relayed_links(better(spec, members, ways), ways) < 0.7 * relayed_links(before, ways)


# ---- who may sit where


def test_who_is_reached_by_one_only_sits_beside_it_and_at_an_end() -> None:
    ways = reaching("ab", "bc", "cd", among="abcd")
    members = [member(name) for name in "acbd"]
    placed = better(run_spec(num_blocks=4), members, ways)
    assert relayed_links(placed, ways) == 0


def test_peers_that_name_their_layers_keep_them() -> None:
    ways = reaching("ac", "bc", among="abc")
    members = member("a", "0-2"), member("b", "2-4"), member("c", "4-6")
    assert in_words(better(run_spec(num_blocks=6), members, ways)) == "a:0-2 b:2-4 c:4-6"
    members = member("a", "0-2"), member("b"), member("c")
    assert in_words(better(run_spec(num_blocks=6), members, ways)) == "a:0-2 c:2-4 b:4-6"


def test_nobody_is_given_more_than_fits_into_its_memory() -> None:
    ways = reaching("ac", "bc", among="abc")
    small = member("c", memory_bytes=1 * 1000 * COPIES_PER_WEIGHT)
    members = member("a"), member("b"), small
    spec = run_spec(num_blocks=5)
    assert in_words(place(spec, members, LATER_S).assignments) == "c:0-1 a:1-3 b:3-5"
    assert in_words(better(spec, members, ways)) == "c:0-1 a:1-3 b:3-5"
    large = replace(small, hello=replace(small.hello, memory_bytes=PLENTY))
    assert relayed_links(better(spec, (*members[:2], large), ways), ways) == 0


def test_nobody_is_given_what_it_may_not_host() -> None:
    ways = reaching("ab", "ac", among="abc")
    blind = member("b", grant=Grant(sees_tokens=False))
    members = member("a"), blind, member("c")
    spec = run_spec(num_blocks=3)
    assert in_words(better(spec, members, ways)) == "a:0-1 b:1-2 c:2-3"
    seeing = replace(blind, grant=Grant())
    assert relayed_links(better(spec, (members[0], seeing, members[2]), ways), ways) == 0


def test_replicas_that_reach_each_other_share_a_stage_where_gradients_are_large() -> None:
    ways = reaching("ad", "bc", among="abcd")
    members = [member(name) for name in "abcd"]
    spec = run_spec(num_blocks=2, batch_size=1, micro_batch_size=1)
    large = replace(spec, model=replace(spec.model, block_bytes=1 << 30))
    stages = {frozenset(stage.peers) for stage in stages_of(better(large, members, ways))}
    assert stages == {frozenset("ad"), frozenset("bc")}
    tiny = replace(
        spec, model=replace(spec.model, block_bytes=4), train=replace(spec.train, seq_length=64)
    )
    stages = {frozenset(stage.peers) for stage in stages_of(better(tiny, members, ways))}
    assert all(len(stage & set("ad")) == 1 for stage in stages), "neighbours reach each other"
