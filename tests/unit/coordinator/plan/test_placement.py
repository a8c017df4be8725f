from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.state import Member
from swarm_ft.coordinator.plan.offers import Offers
from swarm_ft.coordinator.plan.placement import (
    SETTLE_S,
    Placement,
    first_hosts_on,
    grown,
    place,
)
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.control import PeerHello, stages_of
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers
from swarm_ft.protocol.spec.run_spec import COPIES_PER_WEIGHT, Adapter, RunSpec
from tests.draws import draws
from tests.reasons import missing, reason
from tests.unit.coordinator.conftest import MakeSpec

LATER_S = 1000.0
PLENTY = 1 << 60
MakeModel: TypeAlias = Callable[..., RunSpec]


def member(
    name: str,
    layers: str,
    *,
    memory_bytes: int = PLENTY,
    joined_at_s: float = 0.0,
    grant: Grant | None = None,
) -> Member:
    hello = PeerHello(
        peer_id=PeerId(name),
        endpoint="peer.example:7001",
        layers=parse_layers(layers),
        memory_bytes=memory_bytes,
    )
    return Member(
        hello=hello, joined_at_s=joined_at_s, heard_at_s=joined_at_s, grant=grant or Grant()
    )


def place_on(
    cuts: Sequence[LayerRange], spec: RunSpec, members: Sequence[Member], now_s: float
) -> Placement:
    """Place a run on the stages of a snapshot."""
    offers = Offers(members)
    return grown(spec, first_hosts_on(cuts, spec, offers, now_s), offers)


@pytest.fixture(scope="module")
def model(make_spec: MakeSpec) -> MakeModel:
    """Return a spec of a model with so many blocks."""
    return lambda num_blocks, **others: make_spec(num_blocks=num_blocks, **others)


def placed(spec: RunSpec, *members: Member, now_s: float = LATER_S) -> str | Reason | None:
    """Return `peer:layers` of every stage, or the reason why there is none."""
    placement = place(spec, members, now_s)
    hosts = [f"{a.peer_id}:{a.layers}" for a in placement.assignments]
    return " ".join(hosts) or placement.reason


# ---- peers that name their layers


def test_an_exact_tiling_is_taken_in_the_order_of_the_layers(model: MakeModel) -> None:
    members = member("c", "3-4"), member("a", "0-1"), member("b", "1-3")
    assert placed(model(4), *members) == "a:0-1 b:1-3 c:3-4"


def test_one_peer_may_host_all(model: MakeModel) -> None:
    assert placed(model(4), member("a", "0-4")) == "a:0-4"


def test_peers_with_the_same_layers_are_replicas_side_by_side(model: MakeModel) -> None:
    members = member("a", "0-1"), member("b", "1-2"), member("c", "0-1")
    assert placed(model(2), *members) == "a:0-1 c:0-1 b:1-2"


def test_peers_that_overlap_are_left_out_of_a_tiling(model: MakeModel) -> None:
    members = member("askew", "1-3"), member("a", "0-2"), member("b", "2-4")
    assert placed(model(4), *members) == "a:0-2 b:2-4"


def test_a_greedy_first_choice_does_not_hide_a_tiling(model: MakeModel) -> None:
    members = member("long", "0-3"), member("a", "0-2"), member("b", "2-4")
    assert placed(model(4), *members) == "a:0-2 b:2-4"


def test_fewer_stages_are_preferred(model: MakeModel) -> None:
    members = member("a", "0-1"), member("b", "1-4"), member("all", "0-4")
    assert placed(model(4), *members) == "all:0-4"


def test_missing_layers_are_named(model: MakeModel) -> None:
    assert placed(model(8)) == missing("0-8")
    assert placed(model(8), member("a", "2-4")) == missing("0-2, 4-8")


def test_of_overlapping_peers_those_with_the_smallest_gap_count(model: MakeModel) -> None:
    members = member("a", "0-3"), member("b", "2-4"), member("c", "2-6")
    assert placed(model(8), *members) == missing("0-2, 6-8")


def test_layers_outside_the_model_are_ignored(model: MakeModel) -> None:
    assert placed(model(4), member("far", "2-6"), member("a", "0-2")) == missing("2-4")


def test_a_thousand_stages_are_placed(model: MakeModel) -> None:
    members = [member(f"p{i}", f"{i}-{i + 1}") for i in range(1200)]
    assert len(place(model(1200), members, LATER_S).assignments) == 1200


# ---- peers that leave the choice


def test_automatic_peers_share_evenly(model: MakeModel) -> None:
    members = member("a", "auto"), member("b", "auto"), member("c", "auto")
    assert placed(model(6), *members) == "a:0-2 b:2-4 c:4-6"


def test_automatic_peers_fill_the_gaps_between_the_others(model: MakeModel) -> None:
    members = member("a", "auto"), member("mid", "2-4"), member("b", "auto")
    assert placed(model(8), *members) == "b:0-2 mid:2-4 a:4-8"


def test_the_longer_gap_gets_more_peers(model: MakeModel) -> None:
    autos = (member(name, "auto") for name in "abc")
    assert placed(model(8), member("mid", "2-4"), *autos) == "a:0-2 mid:2-4 b:4-6 c:6-8"


def test_the_longest_part_goes_to_the_largest_memory(model: MakeModel) -> None:
    small, large = member("s", "auto", memory_bytes=PLENTY - 1), member("l", "auto")
    assert placed(model(5), small, large) == "s:0-2 l:2-5"


def test_automatic_peers_that_are_left_over_are_replicas(model: MakeModel) -> None:
    autos = [member(name, "auto") for name in "abcde"]
    assert placed(model(2), *autos) == "a:0-1 c:0-1 e:0-1 b:1-2 d:1-2"


def test_automatic_peers_help_where_most_blocks_fall_to_a_peer(model: MakeModel) -> None:
    members = member("a", "0-1"), member("b", "1-4"), member("x", "auto"), member("y", "auto")
    assert placed(model(4), *members) == "a:0-1 b:1-4 x:1-4 y:1-4"


def test_a_peer_without_the_memory_is_no_replica(model: MakeModel) -> None:
    small = member("x", "auto", memory_bytes=3 * 1000 * COPIES_PER_WEIGHT - 1)
    assert placed(model(4), member("a", "0-1"), member("b", "1-4"), small) == "a:0-1 x:0-1 b:1-4"


def test_automatic_peers_are_gathered_before_they_are_replicas(model: MakeModel) -> None:
    members = member("any", "auto", joined_at_s=LATER_S), member("a", "0-4")
    assert placed(model(4), *members) == reason(Kind.GATHERING)


def test_fewer_peers_than_gaps_wait(model: MakeModel) -> None:
    members = member("mid", "1-2"), member("a", "auto")
    assert placed(model(3), *members) == reason(Kind.TOO_FEW_PEERS, layers="0-1, 2-3", amount=1)


def test_memory_holds_weights_gradients_and_two_moments(model: MakeModel) -> None:
    needed = 2 * 1000 * COPIES_PER_WEIGHT
    pair = [member(name, "auto", memory_bytes=needed) for name in "ab"]
    assert placed(model(4), *pair) == "a:0-2 b:2-4"
    pair[1] = member("b", "auto", memory_bytes=needed - 1)
    assert placed(model(4), *pair) == (reason(Kind.NO_MEMORY, layers="2-4"))


def test_frozen_blocks_take_their_weights_alone(model: MakeModel) -> None:
    def with_memory(num_bytes: int, **train: Any) -> str | Reason | None:
        pair = [member(name, "auto", memory_bytes=num_bytes) for name in "ab"]
        weighed = replace(model(4).model, adapter_bytes=50)
        return placed(RunSpec(model=weighed, train=replace(model(4).train, **train)), *pair)

    assert with_memory(2 * 1000, train_layers="0-2") == (reason(Kind.NO_MEMORY, layers="0-2"))
    needed = 2 * (1000 + 50 * COPIES_PER_WEIGHT)
    assert with_memory(needed, adapter=Adapter.LORA) == "a:0-2 b:2-4"
    assert isinstance(with_memory(needed - 1, adapter=Adapter.LORA), Reason)


@pytest.mark.parametrize(
    ("train", "hosts"),
    [
        ({"train_layers": "6-"}, "a:0-6 b:6-8 c:8-10 d:10-12"),
        ({"train_layers": "6-", "adapter": Adapter.LORA}, "a:0-3 b:3-6 c:6-9 d:9-12"),
        ({"train_layers": "9-"}, "b:0-4 a:4-9 d:9-10 c:10-12"),
        ({"train_layers": "0-6"}, "a:0-3 b:3-6 c:6-9 d:9-12"),
    ],
)
def test_fewer_share_what_is_frozen_below_all_that_trains(
    model: MakeModel, train: dict[str, Any], hosts: str
) -> None:
    assert placed(model(12, **train), *(member(name, "auto") for name in "abcd")) == hosts


def test_as_many_share_it_as_it_fits_into(model: MakeModel) -> None:
    spec, needed = model(12, train_layers="6-"), 2 * COPIES_PER_WEIGHT * 1000
    five = [member(name, "auto", memory_bytes=needed) for name in "abcde"]
    assert placed(spec, *five[:4]) == "a:0-6 b:6-8 c:8-10 d:10-12"
    assert placed(spec, *five) == "a:0-3 b:3-6 c:6-8 d:8-10 e:10-12"
    heavy = replace(spec.model, block_bytes=2000)
    two_of_these = replace(spec, model=heavy, train=replace(spec.train, train_layers="10-"))
    assert placed(two_of_these, *five) == "b:0-3 c:3-6 a:6-10 d:10-11 e:11-12"


def test_a_peer_that_is_too_small_does_not_keep_the_others_from_working(model: MakeModel) -> None:
    small = member("small", "auto", memory_bytes=1)
    large = member("large", "auto", memory_bytes=4 * 1000 * COPIES_PER_WEIGHT)
    assert placed(model(4), small, large) == "large:0-4"


def test_automatic_peers_are_gathered_until_nobody_came_for_a_while(model: MakeModel) -> None:
    early, late = member("a", "auto"), member("b", "auto", joined_at_s=5.0)
    assert placed(model(4), early, late, now_s=5.0 + SETTLE_S - 0.1) == reason(Kind.GATHERING)
    assert placed(model(4), early, late, now_s=5.0 + SETTLE_S) == "a:0-2 b:2-4"


def test_a_gap_that_only_named_layers_can_fill_is_not_gathered_for(model: MakeModel) -> None:
    assert placed(model(4), member("a", "0-2"), now_s=0.0) == missing("2-4")


# ---- what invitations grant, and whom the job trusts

BLIND = Grant(sees_tokens=False)
REPLICA = Grant(replica_only=True)


def bound(start: int, stop: int) -> Grant:
    return Grant(layers=LayerRange(start, stop))


def test_who_may_not_see_tokens_hosts_neither_end(model: MakeModel) -> None:
    blind = member("blind", "0-2", grant=BLIND)
    ends = member("a", "0-2"), member("b", "2-4")
    assert placed(model(4), blind, ends[1]) == missing("0-2", reason(Kind.NO_TOKENS, "blind"))
    assert placed(model(4), blind, *ends) == "a:0-2 b:2-4"
    middle = member("blind", "2-4", grant=BLIND)
    assert placed(model(6), member("a", "0-2"), middle, member("b", "4-6")) == (
        "a:0-2 blind:2-4 b:4-6"
    )


def test_a_stage_of_the_whole_model_has_both_ends(model: MakeModel) -> None:
    assert placed(model(4), member("blind", "auto", grant=BLIND)) == (
        missing("0-4", reason(Kind.NO_TOKENS, "blind"))
    )


def test_automatic_peers_that_may_not_see_tokens_are_given_the_middle(model: MakeModel) -> None:
    autos = member("a", "auto"), member("blind", "auto", grant=BLIND), member("b", "auto")
    assert placed(model(6), *autos) == "a:0-2 blind:2-4 b:4-6"


def test_where_ends_are_few_the_others_are_left_out(model: MakeModel) -> None:
    autos = member("a", "auto"), *(member(f"blind{i}", "auto", grant=BLIND) for i in range(3))
    assert placed(model(6), *autos) == "a:0-6"


def test_a_replica_only_peer_carries_nothing_and_is_no_part_of_a_beginning(
    model: MakeModel,
) -> None:
    for layers in ("0-4", "auto"):
        replica = member("r", layers, grant=REPLICA)
        assert placed(model(4), replica) == (missing("0-4", reason(Kind.NOT_ALONE, "r")))
        assert placed(model(4), replica, member("a", "0-4")) == "a:0-4"


def test_nobody_is_gathered_who_carries_nothing(model: MakeModel) -> None:
    late = member("r", "auto", joined_at_s=LATER_S, grant=REPLICA)
    assert placed(model(4), late, member("a", "0-4")) == "a:0-4"


def test_automatic_peers_are_placed_within_their_layers(model: MakeModel) -> None:
    low, high = member("low", "auto", grant=bound(0, 2)), member("high", "auto", grant=bound(2, 8))
    assert placed(model(8), high, low) == "low:0-2 high:2-8"
    assert placed(model(8), low, member("any", "auto")) == "low:0-2 any:2-8"
    assert placed(model(8), low) == missing("0-8", reason(Kind.GRANT_LAYERS, "low", layers="0-2"))


def test_replicas_keep_to_their_layers(model: MakeModel) -> None:
    fixed = member("a", "0-3"), member("b", "3-4")
    assert placed(model(4), *fixed, member("x", "auto", grant=bound(2, 4))) == "a:0-3 b:3-4 x:3-4"
    assert placed(model(4), *fixed, member("x", "auto", grant=BLIND)) == "a:0-3 b:3-4"


def test_private_ends_are_for_those_whom_the_job_names(model: MakeModel) -> None:
    spec = model(6, private_ends="a,b")
    others = member("x", "0-2"), member("m", "2-4"), member("b", "4-6")
    assert placed(spec, *others) == (missing("0-2", reason(Kind.NOT_TRUSTED, "x")))
    assert placed(spec, *others, member("a", "0-2")) == "a:0-2 m:2-4 b:4-6"
    autos = [member(name, "auto") for name in "xab"]
    assert placed(spec, *autos) == "a:0-2 x:2-4 b:4-6"


def test_of_many_who_may_not_a_few_are_named(model: MakeModel) -> None:
    many = [member(f"r{i}", "auto", grant=REPLICA) for i in range(5)]
    named = [reason(Kind.NOT_ALONE, name) for name in ("r0", "r1", "r2")]
    assert placed(model(4), *many) == missing("0-4", *named, num_more=2)


def test_a_snapshots_stages_are_given_to_those_who_may_host_them(model: MakeModel) -> None:
    cuts = [LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6)]
    autos = [member("a", "auto"), member("blind", "auto", grant=BLIND), member("b", "auto")]
    found = place_on(cuts, model(6), autos, LATER_S)
    assert [(a.peer_id, a.layers.start) for a in found.assignments] == [
        ("a", 0),
        ("blind", 2),
        ("b", 4),
    ]
    refused = place_on(cuts, model(6), [*autos[:2], member("r", "4-6", grant=REPLICA)], LATER_S)
    assert refused.reason == missing(
        "4-6", reason(Kind.NO_TOKENS, "blind"), reason(Kind.NOT_ALONE, "r")
    )


# ---- whatever is offered

NUM_BLOCKS = 6
ranges = st.tuples(st.integers(0, NUM_BLOCKS), st.integers(1, NUM_BLOCKS + 2)).filter(
    lambda ends: ends[0] < ends[1]
)
offers = st.lists(st.one_of(st.none(), ranges), max_size=8)


def members_of(offered: Sequence[tuple[int, int] | None], memories: list[int]) -> list[Member]:
    return [
        Member(
            hello=PeerHello(
                peer_id=PeerId(f"p{i}"),
                endpoint=f"p{i}.example:7001",
                layers=LayerRange(*ends) if ends else None,
                memory_bytes=memories[i % len(memories)],
            ),
            joined_at_s=float(i),
            heard_at_s=float(i),
        )
        for i, ends in enumerate(offered)
    ]


def smallest_gap(offered: Sequence[tuple[int, int] | None]) -> int:
    """Return the number of blocks that no peer can host, by trying all sets of named ranges."""
    named = {ends for ends in offered if ends and ends[1] <= NUM_BLOCKS}
    sizes = []
    for chosen in product((False, True), repeat=len(named)):
        parts = sorted(ends for ends, is_in in zip(named, chosen, strict=True) if is_in)
        if all(left[1] <= right[0] for left, right in pairwise(parts)):
            sizes.append(NUM_BLOCKS - sum(stop - start for start, stop in parts))
    return min(sizes)


@settings(derandomize=True, max_examples=draws(300), deadline=None)
@given(offered=st.lists(ranges, max_size=8))
def test_what_is_waited_for_is_the_smallest_gap(
    model: MakeModel, offered: Sequence[tuple[int, int] | None]
) -> None:
    placement = place(model(NUM_BLOCKS), members_of(offered, [PLENTY]), LATER_S)
    gap = smallest_gap(offered)
    assert bool(placement.assignments) == (gap == 0)
    if gap:
        assert placement.reason is not None
        assert sum(map(len, placement.reason.layers)) == gap


@settings(derandomize=True, max_examples=draws(300), deadline=None)
@given(
    offered=offers,
    memories=st.lists(st.sampled_from([1, 4000, 8000, 24000]), min_size=1, max_size=4),
)
def test_stages_tile_the_model_and_use_each_peer_once(
    model: MakeModel, offered: Sequence[tuple[int, int] | None], memories: list[int]
) -> None:
    members = members_of(offered, memories)
    placement = place(model(NUM_BLOCKS), members, LATER_S)
    if smallest_gap(offered) == 0:
        assert placement.assignments
    if not placement.assignments:
        assert placement.reason
        return
    edges = [(0, 0), *((s.layers.start, s.layers.stop) for s in stages_of(placement.assignments))]
    assert all(left[1] == right[0] for left, right in pairwise(edges))
    assert edges[-1][1] == NUM_BLOCKS
    assert len({a.peer_id for a in placement.assignments}) == len(placement.assignments)
    hellos = {m.hello.peer_id: m.hello for m in members}
    for assignment in placement.assignments:
        hello = hellos[assignment.peer_id]
        if hello.layers is None:
            assert len(assignment.layers) * 1000 * COPIES_PER_WEIGHT <= hello.memory_bytes
        else:
            assert hello.layers == assignment.layers


grants = st.builds(
    Grant,
    replica_only=st.booleans(),
    sees_tokens=st.booleans(),
    layers=st.none() | ranges.map(lambda ends: LayerRange(*ends)),
)


@settings(derandomize=True, max_examples=draws(500), deadline=None)
@given(
    offered=st.lists(st.tuples(st.one_of(st.none(), ranges), grants), max_size=8),
    trusted=st.sets(st.sampled_from(["p0", "p1", "p2", "p3"])),
    cuts=st.sampled_from([(), (2, 4), (3,)]),
)
def test_no_assignment_is_more_than_was_granted(
    model: MakeModel,
    offered: Sequence[tuple[tuple[int, int] | None, Grant]],
    trusted: set[str],
    cuts: tuple[int, ...],
) -> None:
    spec = model(NUM_BLOCKS, private_ends=",".join(sorted(trusted)))
    plain = members_of([ends for ends, _ in offered], [PLENTY])
    members = [replace(m, grant=grant) for m, (_, grant) in zip(plain, offered, strict=True)]
    stages = [LayerRange(a, b) for a, b in pairwise((0, *cuts, NUM_BLOCKS))]
    placement = place_on(stages, spec, members, LATER_S) if cuts else place(spec, members, LATER_S)
    assert placement.assignments or placement.reason
    granted = {m.hello.peer_id: m.grant for m in members}
    for host in placement.assignments:
        grant, layers = granted[host.peer_id], host.layers
        assert not grant.replica_only
        if grant.layers is not None:
            assert set(range(layers.start, layers.stop)) <= set(
                range(grant.layers.start, grant.layers.stop)
            )
        if layers.start == 0 or layers.stop == NUM_BLOCKS:
            assert grant.sees_tokens
            assert not trusted or host.peer_id in trusted


@settings(derandomize=True, max_examples=draws(200), deadline=None)
@given(blind=st.lists(st.booleans(), min_size=1, max_size=8), num_blocks=st.integers(1, 12))
def test_one_automatic_peer_that_sees_tokens_is_enough(
    model: MakeModel, blind: list[bool], num_blocks: int
) -> None:
    plain = members_of([None] * len(blind), [PLENTY])
    members = [
        replace(m, grant=BLIND if is_blind else Grant())
        for m, is_blind in zip(plain, blind, strict=True)
    ]
    placement = place(model(num_blocks), members, LATER_S)
    assert bool(placement.assignments) == (not all(blind))


@settings(derandomize=True, max_examples=draws(100), deadline=None)
@given(num_blocks=st.integers(1, 40), num_peers=st.integers(1, 12))
def test_shares_of_equal_peers_differ_by_one_block_at_most(
    model: MakeModel, num_blocks: int, num_peers: int
) -> None:
    members = members_of([None] * num_peers, [PLENTY])
    placement = place(model(num_blocks), members, LATER_S)
    sizes = [len(stage.layers) for stage in stages_of(placement.assignments)]
    assert sum(sizes) == num_blocks
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == min(num_blocks, num_peers)
    assert len(placement.assignments) == num_peers
