from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType

from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.state import AttemptState, Member, Run, SwarmState
from swarm_ft.coordinator.plan.allocation import (
    SAVED_AFTER_S,
    Allocation,
    allocate_members,
    smallest_serving,
)
from swarm_ft.coordinator.plan.membership import eligible_members, find_placement, with_newcomers
from swarm_ft.coordinator.plan.placement import open_stages
from swarm_ft.ids import Attempt, PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerHello
from swarm_ft.protocol.spec.layers import parse_layers
from swarm_ft.protocol.spec.priority import Claim
from tests.draws import draws
from tests.unit.coordinator.conftest import _spec as make_spec

LATER_S = 1000.0
PLENTY = 1 << 40


def member(name: str, layers: str = "auto", memory_bytes: int = PLENTY) -> Member:
    hello = PeerHello(
        peer_id=PeerId(name),
        endpoint="peer.example:7001",
        layers=parse_layers(layers),
        memory_bytes=memory_bytes,
    )
    return Member(hello=hello, joined_at_s=0.0, heard_at_s=0.0)


def waiting(name: str, owner: str, *, priority: int = 3, num_blocks: int = 4) -> Run:
    spec = make_spec(num_blocks=num_blocks)
    return Run(run_id=RunId(name), spec=spec, owner=owner, priority=priority)


def swarm(runs: Sequence[Run], members: Sequence[Member]) -> SwarmState:
    return SwarmState(
        runs=MappingProxyType({run.run_id: run for run in runs}),
        members=MappingProxyType({one.hello.peer_id: one for one in members}),
    )


def begun(state: SwarmState, run: Run, peers: Sequence[str]) -> SwarmState:
    """Return the run at work on these peers."""
    able = state.with_members(frozenset(map(PeerId, peers)))
    return on_its_way(state, run, able)


def on_its_way(state: SwarmState, run: Run, able: SwarmState) -> SwarmState:
    assignments = find_placement(able, run, LATER_S).assignments
    assert assignments
    attempt = AttemptState(number=Attempt(run.attempt.number + 1), assignments=assignments)
    return state.with_run(replace(run, attempt=attempt, phase=RunPhase.TRAINING))


def texts_of(sharing: Allocation) -> dict[str, str]:
    return {run: " ".join(sorted(peers)) for run, peers in sharing.members.items()}


# ---- who begins


def test_of_two_runs_that_wait_each_gets_what_it_needs_and_a_fair_part_of_the_rest() -> None:
    runs = waiting("a", "ann"), waiting("b", "bob")
    sharing = allocate_members(swarm(runs, [member(f"p{i}") for i in range(4)]), LATER_S)
    assert sorted(map(len, sharing.members.values())) == [2, 2]


def test_between_owners_what_their_invitations_grant_weighs() -> None:
    runs = (
        replace(waiting("a", "ann"), claim=Claim("one", 1)),
        replace(waiting("b", "bob"), claim=Claim("other", 3)),
    )
    sharing = allocate_members(swarm(runs, [member(f"p{i}") for i in range(4)]), LATER_S)
    assert [len(sharing.members[RunId(name)]) for name in "ab"] == [1, 3]


def test_a_high_priority_takes_nothing_from_other_owners() -> None:
    runs = waiting("a", "ann", priority=1), waiting("b", "bob", priority=9)
    sharing = allocate_members(swarm(runs, [member(f"p{i}") for i in range(4)]), LATER_S)
    assert [len(sharing.members[RunId(name)]) for name in "ab"] == [2, 2]


def test_without_keys_priorities_weigh() -> None:
    runs = waiting("a", "", priority=1), waiting("b", "", priority=3)
    sharing = allocate_members(swarm(runs, [member(f"p{i}") for i in range(4)]), LATER_S)
    assert [len(sharing.members[RunId(name)]) for name in "ab"] == [1, 3]


def test_keys_of_one_invitation_share_its_claim() -> None:
    """Check that a third key of one invitation comes after the first key of another."""
    shares = Claim("of three", 1)
    runs = [replace(waiting(f"a{i}", f"ann {i}"), claim=shares) for i in range(3)]
    state = swarm(runs, [member(f"p{i}", "0-4") for i in range(3)])
    for run, peer in zip(runs, ("p0", "p1"), strict=False):
        state = begun(state, run, [peer])
    state = state.with_run(replace(waiting("b", "bob"), claim=Claim("of one", 1)))
    sharing = texts_of(allocate_members(state, LATER_S))
    assert sharing == {"a0": "p0", "a1": "p1", "a2": "", "b": "p2"}


def test_a_run_that_waits_for_what_nobody_has_holds_back_nobody() -> None:
    members = [member("p0", "0-4"), member("p1", "0-2")]
    runs = waiting("large", "ann", num_blocks=8), waiting("b", "bob")
    assert texts_of(allocate_members(swarm(runs, members), LATER_S)) == {"large": "", "b": "p0"}


def test_runs_of_one_owner_begin_as_they_came_unless_their_priority_says_otherwise() -> None:
    members = [member("p0", "0-4")]
    first, second = waiting("1", "ann"), waiting("2", "ann")
    assert texts_of(allocate_members(swarm([first, second], members), LATER_S)) == {
        "1": "p0",
        "2": "",
    }
    second = replace(second, priority=4)
    assert texts_of(allocate_members(swarm([first, second], members), LATER_S)) == {
        "1": "",
        "2": "p0",
    }


def test_of_owners_the_one_who_has_less_comes_first() -> None:
    runs = waiting("1", "ann"), waiting("2", "ann"), waiting("3", "bob")
    state = swarm(runs, [member("p0", "0-4"), member("p1", "0-4")])
    state = begun(state, runs[0], ["p0"])
    assert texts_of(allocate_members(state, LATER_S)) == {"1": "p0", "2": "", "3": "p1"}


def test_a_run_takes_no_more_memory_than_it_needs() -> None:
    small, large = (
        int(make_spec(num_blocks=n).memory_bytes(make_spec(num_blocks=n).model.layers))
        for n in (4, 8)
    )
    runs = waiting("small", "ann"), waiting("large", "bob", num_blocks=8)
    members = [member("much", memory_bytes=2 * large), member("little", memory_bytes=small)]
    assert texts_of(allocate_members(swarm(runs, members), LATER_S)) == {
        "small": "little",
        "large": "much",
    }


# ---- who gives


def test_a_run_gives_replicas_to_one_that_waits_but_none_that_it_needs() -> None:
    runs = waiting("a", "ann"), waiting("b", "bob"), waiting("c", "cid")
    state = swarm(runs, [member(f"p{i}", "0-4") for i in range(2)])
    state = begun(state, runs[0], ["p0", "p1"])
    sharing = allocate_members(state, LATER_S)
    assert len(sharing.to_give[RunId("a")]) == 1
    assert not sharing.members[RunId("b")], "they come when the step ends"
    assert not sharing.members[RunId("c")]


def test_replicas_are_given_until_both_have_a_fair_share() -> None:
    runs = waiting("a", "ann"), waiting("b", "bob")
    state = swarm(runs, [member(f"p{i}", "0-4") for i in range(6)])
    state = begun(state, runs[0], [f"p{i}" for i in range(6)])
    assert len(allocate_members(state, LATER_S).to_give[RunId("a")]) == 3


def test_an_owners_second_run_takes_no_replicas_of_the_first() -> None:
    runs = waiting("a", "ann"), waiting("b", "ann")
    state = swarm(runs, [member(f"p{i}", "0-4") for i in range(2)])
    state = begun(state, runs[0], ["p0", "p1"])
    assert not allocate_members(state, LATER_S).to_give


def test_who_comes_helps_whoever_has_less() -> None:
    runs = waiting("a", "ann"), waiting("b", "bob")
    members = [member(f"p{i}", "0-4") for i in range(4)]
    state = begun(swarm(runs, members), runs[0], ["p0", "p1"])
    state = begun(state, runs[1], ["p2"])
    assert texts_of(allocate_members(state, LATER_S)) == {"a": "p0 p1", "b": "p2 p3"}


# ---- what always holds


@dataclass
class Drawn:
    """A random swarm in which some runs train, and the others wait."""

    rng: Random
    num_runs: int = 0
    state: SwarmState = field(default_factory=SwarmState)

    def draw(self) -> SwarmState:
        rng = self.rng
        members = [self._member(f"p{i}") for i in range(rng.randrange(9))]
        runs = [self.new_run() for _ in range(rng.randrange(6))]
        self.state = swarm(runs, members)
        self.begin_some()
        return self.state

    def new_run(self) -> Run:
        self.num_runs += 1
        owner = self.rng.choice(("ann", "bob", "cid"))
        blocks, priority = self.rng.choice((2, 4, 6)), self.rng.choice((1, 3, 9))
        return waiting(f"r{self.num_runs}", owner, priority=priority, num_blocks=blocks)

    def begin_some(self) -> None:
        """Start some runs, as if each had been alone with the free peers."""
        for run in self.state.going_runs:
            busy = {peer for other in self.state.active_runs for peer in other.peers}
            able = self.state.with_members(self.state.members.keys() - busy)
            if self.rng.random() < 0.6 and find_placement(able, run, LATER_S).assignments:
                self.state = on_its_way(self.state, run, able)

    def _member(self, name: str) -> Member:
        start = self.rng.choice((0, 2, 4))
        layers = f"{start}-{start + self.rng.choice((2, 4))}"
        whole = make_spec(num_blocks=6)
        enough = int(whole.memory_bytes(whole.model.layers))
        memory = self.rng.choice((enough // 3, enough, 2 * enough))
        return member(name, self.rng.choice((layers, "auto", "auto")), memory)


def drawn(seed: int) -> SwarmState:
    return Drawn(Random(seed)).draw()


@given(st.integers(0, 1 << 32))
@settings(max_examples=draws(300), deadline=None)
def test_nobody_works_for_two_and_who_trains_keeps_what_it_needs(seed: int) -> None:
    state = drawn(seed)
    sharing = allocate_members(state, LATER_S)
    everybody = [peer for peers in sharing.members.values() for peer in peers]
    assert len(everybody) == len(set(everybody))
    assert sharing == allocate_members(drawn(seed), LATER_S), "the same each time"
    for run in state.active_runs:
        assert set(run.peers) <= sharing.members[run.run_id]
        given_away = sharing.to_give.get(run.run_id, frozenset())
        assert given_away <= set(run.peers)
        for stage in run.stages:
            assert set(stage.peers) - given_away, "somebody stays with each stage"


@given(st.integers(0, 1 << 32))
@settings(max_examples=draws(300), deadline=None)
@example(1823)
@example(3368)
def test_all_who_can_help_somebody_are_used(seed: int) -> None:
    """Check that idle members can neither host a run that cannot begin, nor help one that can.

    Two sets of members may each host a run, on stages of other layers. Then one set stays idle.
    """
    state = drawn(seed)
    sharing = allocate_members(state, LATER_S)
    used = frozenset().union(*sharing.members.values())
    idle = state.with_members(state.members.keys() - used)
    for run in state.going_runs:
        own = sharing.members[run.run_id]
        if run.attempt.assignments:
            able = eligible_members(state.with_members(own | idle.members.keys()), run, LATER_S)
            assert not idle.members.keys() & set(with_newcomers(able, run).peers)
        elif len(state.going_runs) > 1:
            able = eligible_members(idle, run, LATER_S)
            placed = find_placement(
                eligible_members(sharing.view_for(state, run), run, LATER_S), run, LATER_S
            )
            is_lent = any(sharing.to_give.values())
            assert placed.assignments or is_lent or not own, "who is kept is not kept in vain"
            stages = {a.layers: run.spec.memory_bytes(a.layers) for a in placed.assignments}
            assert not any(open_stages(run.spec, one, stages) for one in able.members.values())
            assert placed.assignments or not find_placement(able, run, LATER_S).assignments


@given(st.integers(0, 1 << 32))
@settings(max_examples=draws(60), deadline=None)
def test_nobody_starves(seed: int) -> None:
    """Check that a run that needs all peers begins, though small runs come all the time."""
    rng, whole = Random(seed), make_spec(num_blocks=6)
    half = -(-int(whole.memory_bytes(whole.model.layers)) // 2)
    members = [member(f"p{i}", "auto", half) for i in range(rng.choice((2, 3)))]
    large, now_s = waiting("large", "ann", priority=1, num_blocks=6), LATER_S
    state = swarm([replace(large, unplaced_since_s=now_s)], members)
    small = 0
    for _ in range(60):
        while len(state.going_runs) < 6:
            small += 1
            new = waiting(f"small {small}", f"bob {small}", priority=9, num_blocks=2)
            state = state.with_run(replace(new, unplaced_since_s=now_s))
        sharing = allocate_members(state, now_s)
        for run in state.going_runs:
            able = eligible_members(sharing.view_for(state, run), run, now_s)
            if not run.attempt.assignments and find_placement(able, run, now_s).assignments:
                state = on_its_way(state, run, able)
        if state.runs[RunId("large")].attempt.assignments:
            return
        now_s += SAVED_AFTER_S / 8
        over = rng.choice(state.active_runs)
        state = state.with_run(replace(over, phase=RunPhase.COLLECTED))
    raise AssertionError("it never began")


# ---- as few as serve


@given(st.sets(st.integers(0, 40)), st.integers(0, 1 << 32))
def test_of_those_that_serve_none_is_left_that_is_not_needed(needed: set[int], seed: int) -> None:
    peers = [PeerId(str(i)) for i in range(41)]
    Random(seed).shuffle(peers)
    wanted = {PeerId(str(i)) for i in needed}
    smallest = smallest_serving(peers, lambda some: wanted <= set(some))
    assert set(smallest) == wanted or (not wanted and len(smallest) == 1)
