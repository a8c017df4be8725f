"""Division of the members among the runs: several train side by side. Pure.

A run keeps its peers. Of the free peers, waiting runs get as few as they need to begin, first the
run whose owner has least. Then each remaining peer goes, one by one, to the run whose owner has
least, among those that it helps. "Least" counts an owner's peers over the weight that its
invitation grants; all keys of one invitation are one owner. The runs of one owner come by their
priority, and then by submission. A run that cannot begin delays no other, except one that waited
for very long: see `SAVED_AFTER_S`.

Peers are given whole. A run that could only begin with peers that work, or keep a result, gets
stages *beside* these, where they lend the memory for it (`max_beside`): each run sees the part of a
member's memory that the others leave.

A training run never loses a peer that it needs. Its replicas beyond that go, at the end of their
step, to a run that could begin with them, if its owner has less. A run with more stages than it
needs makes room at its next snapshot, by a repartition.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from swarm_ft.coordinator.facts.state import AttemptState, Member, Run, SwarmState
from swarm_ft.coordinator.plan.hosting import refusal
from swarm_ft.coordinator.plan.inputs import (
    SAVED_AFTER_S,
    division_inputs,
    has_waited_for_long,
)
from swarm_ft.coordinator.plan.membership import (
    can_listen,
    could_begin,
    eligible_members,
    find_placement,
    has_stage,
    moved_stages,
    place_first_hosts,
    with_newcomers,
)
from swarm_ft.coordinator.plan.offers import Offers, may_host_ends
from swarm_ft.coordinator.plan.placement import ROUNDING, fits, open_stages
from swarm_ft.ids import NO_ATTEMPT, PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import stages_of
from swarm_ft.protocol.spec.bounds import MAX_HOSTED
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY

__all__ = [
    "SAVED_AFTER_S",
    "Allocation",
    "allocate_members",
    "makes_room",
    "share_of",
    "smallest_serving",
    "with_coresident_memory",
]


@dataclass(frozen=True, slots=True)
class Allocation:
    """Members of each run.

    Attributes:
        members: Members that each run may use now, for all runs that are not over.
        to_give: Replicas that another run gets at the end of the step, for each run with peers.
        in_turn: Runs without peers, in the order of the queue.
    """

    members: Mapping[RunId, frozenset[PeerId]]
    to_give: Mapping[RunId, frozenset[PeerId]] = field(default_factory=lambda: MappingProxyType({}))
    in_turn: tuple[RunId, ...] = ()

    def view_for(self, state: SwarmState, run: Run) -> SwarmState:
        """Return the state with only the members that the run may use."""
        return with_coresident_memory(
            state.with_members(self.members.get(run.run_id, frozenset())), run
        )


def with_coresident_memory(state: SwarmState, run: Run) -> SwarmState:
    """Return the state in which members lend the memory that other runs' stages leave.

    Members without a stage of the run, and without room for one, are left out.
    """
    hosted, members = state.hosted, dict(state.members)
    for peer in members.keys() & hosted.keys():
        others = {of: layers for of, layers in hosted[peer].items() if of != run.run_id}
        if not others:
            continue
        members[peer] = _with_what_is_left(state, members[peer], others)
        is_full = len(others) > members[peer].hello.max_beside or not _has_room(run, members[peer])
        if is_full and run.run_id not in hosted[peer]:
            del members[peer]
    return replace(state, members=MappingProxyType(members))


def _with_what_is_left(
    state: SwarmState, member: Member, others: Mapping[RunId, LayerRange]
) -> Member:
    """Return the member with the memory that these stages of other runs leave."""
    used_bytes = sum(state.runs[of].spec.memory_bytes(layers) for of, layers in others.items())
    left_bytes = max(0, math.floor(member.hello.memory_bytes - used_bytes))
    return replace(member, hello=replace(member.hello, memory_bytes=left_bytes))


def _has_room(run: Run, member: Member) -> bool:
    """Whether the layers that a member names fit; placement checks all other members."""
    layers, model = member.hello.layers, run.spec.model
    is_of_use = layers is None or layers.stop <= model.num_blocks
    return is_of_use and (layers is None or fits(run.spec, layers, member.hello))


def allocate_members(state: SwarmState, now_s: float, inputs: object = None) -> Allocation:
    """Return the division of the members, cached until an input changes.

    Args:
        state: Members and runs.
        now_s: Monotonic seconds.
        inputs: The state's `division_inputs`, if the caller has them.
    """
    going = state.going_runs
    if len(going) == 1 and not going[0].steering.is_paused:
        only = going[0].run_id
        in_turn = () if going[0].attempt.assignments else (only,)
        return Allocation({only: frozenset(state.members)}, in_turn=in_turn)
    answers = state.memo.of(inputs or division_inputs(state, now_s))
    if "sharing" not in answers:
        answers["sharing"] = _Division(state, now_s).divided()
    found: Allocation = answers["sharing"]
    return found


def share_of(state: SwarmState, run: Run, now_s: float) -> SwarmState:
    """Return the state with only the members that are eligible for the run, and its own or free."""
    return eligible_members(allocate_members(state, now_s).view_for(state, run), run, now_s)


def makes_room(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether a waiting run could begin if this one, whose owner has more, was repartitioned."""
    if all(one.attempt.assignments or one.steering.is_paused for one in state.going_runs):
        return False
    past, number = run.past.rolled_back, run.attempt.number
    answers = state.memo.of(division_inputs(state, now_s))
    question = ("makes room", run.run_id, past.committed_steps, number, bool(past.snapshots))
    if question not in answers:
        again = replace(run, past=past, attempt=AttemptState(number=number))
        answers[question] = _could_make_room(state, run, again, now_s)
    return bool(answers[question])


def _could_make_room(state: SwarmState, run: Run, again: Run, now_s: float) -> bool:
    waiting = _Division(state, now_s).that_may_take_from(run)
    if not waiting:
        return False
    division = _Division(state.with_run(again), now_s)
    members = division.divided().members
    goes_on = division.hosts(again, members[run.run_id])
    return goes_on and any(division.hosts(other, members[other.run_id]) for other in waiting)


class _Division:
    """Divides the members; see the module's docstring.

    Runs without peers need placements, and all of them try the same few sets of members: free ones,
    and those with room beside their stages. The offers of each set are sorted and summed once, see
    `Offers`, and a sum refuses most runs that fit nowhere.
    """

    def __init__(self, state: SwarmState, now_s: float) -> None:
        self._state, self._going, self._now_s = state, state.going_runs, now_s
        self.waiting = [
            run for run in self._going if not (run.attempt.assignments or run.steering.is_paused)
        ]
        self._active = state.active_runs
        self._places = {run.run_id: place for place, run in enumerate(self._going)}
        self._order = {peer: place for place, peer in enumerate(state.members)}
        self._shares = {
            run.run_id: {p for p in run.peers if p in state.members} for run in self._going
        }
        self._held: Counter[str] = Counter()
        for run in self._active:
            self._held[_owner(run)] += len(self._shares[run.run_id])
        self._hosted = state.hosted
        bound = state.result_keepers.union(*(run.peers for run in self._active))
        suspended = {peer for peer in state.members if state.is_suspended(peer, now_s)}
        self._free = [peer for peer in state.members if peer not in bound and peer not in suspended]
        self._open = {
            peer: member
            for peer, member in state.members.items()
            if peer not in suspended and member.leaving is None
        }
        self._donors = {
            peer: run
            for run in self._active
            for peer in self._spare(run)
            if len(self._hosted[peer]) == 1
        }
        self._given: set[PeerId] = set()
        self._beside: set[PeerId] = set()
        self._saved: frozenset[PeerId] | None = None
        self._offers: dict[object, Offers] = {}
        self._rooms: dict[int, tuple[int, Offers]] = {}
        self._helped: dict[object, bool] = {}

    def divided(self) -> Allocation:
        """Return the division."""
        in_turn = tuple(run.run_id for run in sorted(self.waiting, key=self.place_in_line))
        begun = self._with_runs_that_begin()
        self._give_the_rest([*self._active, *begun])
        to_give: dict[RunId, frozenset[PeerId]] = {}
        for peer in self._given:
            donor = self._donors[peer].run_id
            to_give[donor] = to_give.get(donor, frozenset()) | {peer}
        members = {
            run.run_id: frozenset(self._shares[run.run_id] - self._given)
            | to_give.get(run.run_id, frozenset())
            for run in self._going
        }
        return Allocation(members, to_give, in_turn)

    # ---- the queue

    def place_in_line(self, run: Run) -> tuple[bool, float, bool, int, int]:
        """Return the sort key: a long wait first, then the owner with least for its weight."""
        return (
            not has_waited_for_long(run, self._now_s),
            self._claim(run),
            run.attempt.number == NO_ATTEMPT,
            -run.priority,
            self._places[run.run_id],
        )

    def _claim(self, run: Run, more: int = 0) -> float:
        return _share(run, self._held[_owner(run)] + more)

    # ---- waiting runs

    def _with_runs_that_begin(self) -> list[Run]:
        """Give waiting runs the peers to begin with, and return those that can."""
        begun, waiting = [], sorted(self.waiting, key=self.place_in_line)
        while waiting:
            run = waiting.pop(0)
            need = self._need(run)
            if need:
                self._take(run, need)
                self._even_out(run, need)
                begun.append(run)
                waiting.sort(key=self.place_in_line)
            elif self._saved is None and has_waited_for_long(run, self._now_s):
                self._save_for(run)
        return begun

    def _need(self, run: Run) -> Sequence[PeerId]:
        """Return the fewest free or given peers that the run can begin with; empty: it cannot."""
        saved = self._saved or frozenset()
        free = [peer for peer in self._free if peer not in saved] if saved else self._free
        if run.moving is not None:
            moved = moved_stages(self._able(run, free), run)
            if moved:
                return [host.peer_id for host in moved]
        if free and could_begin(self._offers_of(run, free, "free"), run, math.inf):
            return self._least(run, free)
        given = [peer for peer in self._lent_to(run) if peer not in saved]
        if given and self.hosts(run, pool := [*free, *given]):
            return self._least(run, pool)
        return self._need_beside(run, free)

    def _need_beside(self, run: Run, free: Sequence[PeerId]) -> Sequence[PeerId]:
        """Return one peer per stage, free ones and those that hold other stages too.

        Peers that hold the least come first. Each gets a part, or a few would do all the work.
        """
        num_lenders = 0
        for num_held in range(1, MAX_HOSTED):
            before, (num_lenders, offers) = num_lenders, self._offers_beside(run, free, num_held)
            if num_lenders == before:
                continue  # the same members did not suffice before
            first = place_first_hosts(offers, run, math.inf)
            need = [stage.peers[0] for stage in stages_of(first.assignments)]
            if need:
                self._beside.update(peer for peer in need if peer not in self._free)
                return need
        return ()

    def _with_room(self, run: Run, num_held: int) -> Mapping[PeerId, Member]:
        """Return members with at most so many stages, all of other runs, and room for one more.

        Stages that a member gets in the same division are not known yet: the next division counts
        them.
        """
        barred = self._barred(run)
        return {
            peer: member
            for peer, member in self._lenders.items()
            if len(self._hosted[peer]) <= num_held
            and peer not in self._given
            and peer not in self._beside
            and peer not in barred
            and _has_room(run, member)
        }

    @cached_property
    def _lenders(self) -> Mapping[PeerId, Member]:
        """Members that may host more stages, with the memory that is left.

        A run without peers holds no part of it.
        """
        found: dict[PeerId, Member] = {}
        for peer in self._open.keys() & self._hosted.keys():
            member, others = self._open[peer], self._hosted[peer]
            if len(others) <= member.hello.max_beside:
                found[peer] = _with_what_is_left(self._state, member, others)
        return found

    def _lent_to(self, run: Run) -> list[PeerId]:
        """Return replicas that other owners' runs may give to this run."""
        donors = {donor.run_id: donor for donor in self._donors.values()}
        giving = {name for name, donor in donors.items() if self._may_take_from(donor, run)}
        if not giving:
            return []
        excluded = self._given | self._beside
        return [
            peer
            for peer, donor in self._donors.items()
            if donor.run_id in giving and peer not in excluded
        ]

    def hosts(self, run: Run, peers: Iterable[PeerId]) -> bool:
        """Whether these peers could host the run, once all that may come are there."""
        if not run.attempt.assignments:
            return could_begin(self._offers_of(run, peers), run, math.inf)
        able = self._able(run, peers)
        return bool(able.members) and bool(find_placement(able, run, math.inf).assignments)

    # ---- offers to runs without peers

    def _offers_of(self, run: Run, peers: Iterable[PeerId], name: str = "") -> Offers:
        """Return the offers of these peers to a run that has no peers of its own.

        Args:
            run: Run that would begin.
            peers: Members.
            name: Name of this set of members, if other runs use the same one.
        """
        is_cached = name and self._may_use_all(run)
        if is_cached and name in self._offers:
            return self._offers[name]
        barred = self._barred(run)
        peers = self._without_doubters(run, peers) if run.doubts else peers
        able = [p for p in peers if p in self._usable and p not in barred]
        offers = Offers(self._open[peer] for peer in sorted(able, key=self._order.__getitem__))
        if is_cached:
            self._offers[name] = offers
        return offers

    def _offers_beside(self, run: Run, free: Sequence[PeerId], num_held: int) -> tuple[int, Offers]:
        """Return the offers of free peers, and of peers that lend beside their stages."""
        is_cached = self._may_use_all(run) and self._may_lend_to_all
        if is_cached and num_held in self._rooms:
            return self._rooms[num_held]
        lenders = self._with_room(run, num_held)
        barred, peers = self._barred(run), {*free, *lenders}
        able = self._without_doubters(run, peers) if run.doubts else peers
        usable = [p for p in able if p in self._open and p not in barred]
        pool = sorted(usable, key=self._order.__getitem__)
        found = len(lenders), Offers(lenders.get(peer) or self._open[peer] for peer in pool)
        if is_cached:
            self._rooms[num_held] = found
        return found

    @cached_property
    def _may_lend_to_all(self) -> bool:
        """Whether all lenders leave the choice of layers to the coordinator."""
        return all(member.hello.layers is None for member in self._lenders.values())

    def _forget_offers(self) -> None:
        """Drop cached offers, because members were taken or reserved."""
        self._offers.clear()
        self._rooms.clear()

    def _may_use_all(self, run: Run) -> bool:
        """Whether no member is barred from the run."""
        return not run.doubts and self._barred(run).isdisjoint(self._open)

    def _barred(self, run: Run) -> frozenset[PeerId]:
        """Return peers that cannot host the run, and those that only it suspended."""
        if not (run.misfits or run.conducts):
            return frozenset()
        resting = (peer for peer in run.conducts if run.has_suspended(peer, self._now_s))
        return frozenset((*run.misfits, *resting))

    def _without_doubters(self, run: Run, peers: Iterable[PeerId]) -> list[PeerId]:
        """Return peers without those that doubt the open step, where others can do it."""
        members = self._state.with_members(frozenset(peers))
        return list(eligible_members(members, run, self._now_s).members)

    @cached_property
    def _usable(self) -> Collection[PeerId]:
        """Members for runs without peers; keepers of results only if they host several runs."""
        keepers = self._state.result_keepers
        return {p for p, m in self._open.items() if p not in keepers or m.hello.max_beside}

    def _least(self, run: Run, pool: Sequence[PeerId]) -> Sequence[PeerId]:
        """Return the fewest of them that can host the run, free ones and small lenders first."""

        def lends(peer: PeerId) -> int:
            return self._state.members[peer].hello.memory_bytes

        serve = self._serving(run, pool)
        newest_first = list(reversed(pool))
        found = [
            smallest_serving(
                sorted(newest_first, key=lambda p: (p not in self._donors, by * lends(p))), serve
            )
            for by in (-1, 1)
        ]
        return min(found, key=lambda peers: (len(peers), sum(map(lends, peers))))

    def _serving(self, run: Run, pool: Sequence[PeerId]) -> Callable[[Sequence[PeerId]], bool]:
        """Return a function that decides whether some of these peers could host the run.

        Where names and the order of joining make no difference, it decides once for all sets of
        peers with equal offers.
        """
        members = [self._state.members[peer] for peer in pool]
        is_bound = any(m.hello.layers is not None or m.grant.layers is not None for m in members)
        if is_bound or run.moving is not None or run.doubts:
            return lambda peers: self.hosts(run, peers)
        barred = self._barred(run)
        kinds = {
            m.hello.peer_id: (
                m.hello.memory_bytes,
                m.hello.max_up_bytes_per_s > 0 or m.hello.max_down_bytes_per_s > 0,
                may_host_ends(run.spec, m),
                m.grant.replica_only,
                m.hello.peer_id in barred or m.hello.peer_id not in self._open,
            )
            for m in members
        }
        known: dict[object, bool] = {}
        lent_bytes = {peer: kind[0] for peer, kind in kinds.items()}
        least_bytes = run.spec.memory_bytes(run.spec.model.layers) * (1 - ROUNDING)

        def serve(peers: Sequence[PeerId]) -> bool:
            if sum([lent_bytes[peer] for peer in peers]) < least_bytes:
                return False
            offered = tuple(sorted([kinds[peer] for peer in peers]))
            if offered not in known:
                known[offered] = self.hosts(run, peers)
            return known[offered]

        return serve

    def _take(self, run: Run, peers: Iterable[PeerId]) -> None:
        self._forget_offers()
        for peer in peers:
            self._shares[run.run_id].add(peer)
            self._held[_owner(run)] += 1
            donor = self._donors.get(peer)
            if peer in self._beside:
                continue
            if donor is None:
                self._free.remove(peer)
            else:
                self._given.add(peer)
                self._held[_owner(donor)] -= 1

    def _even_out(self, run: Run, need: Iterable[PeerId]) -> None:
        """Give a run that gets replicas more of them, until its owner has a fair share."""
        if not self._given.intersection(need):
            return
        for peer in self._lent_to(run):
            fair = self._claim(run, 1) <= self._claim(self._donors[peer], -1)
            if fair and self._helps(run, peer):
                self._take(run, [peer])

    def _save_for(self, run: Run) -> None:
        """Reserve peers for a run that waited for long; they begin no other run."""
        keepers = self._state.result_keepers
        members = [peer for peer in self._state.members if peer not in keepers]
        if could_begin(self._offers_of(run, members, "members"), run, math.inf):
            busy_first = sorted(members, key=self._free.__contains__)
            self._saved = frozenset(smallest_serving(busy_first, self._serving(run, members)))
            self._forget_offers()

    def that_may_take_from(self, donor: Run) -> list[Run]:
        """Return waiting runs whose owner has less than this one's."""
        return [run for run in self.waiting if self._may_take_from(donor, run)]

    def _may_take_from(self, donor: Run, run: Run) -> bool:
        return _owner(donor) != _owner(run) and self._claim(run) < self._claim(donor)

    # ---- remaining peers

    def _give_the_rest(self, runs: Sequence[Run]) -> None:
        while self._give_each_once(runs):
            pass  # A run with more peers has shorter stages, which fit into smaller peers too.
        broken = [run for run in self._active if run.phase is RunPhase.WAITING]
        if broken and self._free:
            # A peer that helps no run alone may do so where a run has to be placed again.
            in_turn = sorted(broken, key=self.place_in_line)
            rest = [run for run in in_turn if self.hosts(run, self._with_free(run))]
            self._take((*rest, *in_turn)[0], tuple(self._free))

    def _give_each_once(self, runs: Sequence[Run]) -> bool:
        """Give each free peer to a run that it helps; return whether stages may be shorter now."""
        in_turn, may_be_shorter = sorted(runs, key=self.place_in_line), False
        for peer in tuple(self._free):
            helped = next((run for run in in_turn if self._helps(run, peer)), None)
            if helped is not None:
                self._take(helped, [peer])
                in_turn.sort(key=self.place_in_line)
                may_be_shorter |= not helped.attempt.assignments
        return may_be_shorter and bool(self._free)

    def _with_free(self, run: Run) -> set[PeerId]:
        return self._shares[run.run_id].union(self._free)

    def _helps(self, run: Run, peer: PeerId) -> bool:
        """Whether the run has work for a peer beside its other members."""
        member = self._state.members[peer]
        if run.attempt.assignments:
            return self._may_join(run, member)
        if peer in (self._saved or ()):
            return False
        offers = self._offers_of(run, self._shares[run.run_id] | {peer})
        if offers.get(peer) is None:
            return False
        placed = place_first_hosts(offers, run, math.inf)
        if placed.is_by_speed or any(a.peer_id == peer for a in placed.assignments):
            return any(a.peer_id == peer for a in placed.assignments)
        stages = {a.layers: run.spec.memory_bytes(a.layers) for a in placed.assignments}
        return not member.grant.replica_only and bool(open_stages(run.spec, member, stages))

    def _may_join(self, run: Run, member: Member) -> bool:
        """Whether a free member could be a replica in the run, see `with_newcomers`."""
        hello, peer = member.hello, member.hello.peer_id
        if peer in self._barred(run) or peer not in self._open:
            return False
        if hello.held_of(run.run_id) is not None or run.doubts:
            able = self._able(run, self._shares[run.run_id] | {peer})
            return peer in with_newcomers(able, run).peers
        sees_ends = may_host_ends(run.spec, member)
        key = (run.run_id, hello.layers, hello.memory_bytes, member.grant, sees_ends)
        if key not in self._helped:
            self._helped[key] = (not member.grant.replica_only or can_listen(run)) and any(
                hello.layers == stage.layers
                or (hello.layers is None and fits(run.spec, stage.layers, hello))
                for stage in run.stages
                if not refusal(run.spec, member, stage.layers)
            )
        return self._helped[key]

    def _spare(self, run: Run) -> list[PeerId]:
        """Return replicas that the run can do without; none where each stage has one peer."""
        if len(run.peers) == len(run.stages):
            return []
        return _spare(self._able(run, run.peers), run)

    def _able(self, run: Run, peers: Iterable[PeerId]) -> SwarmState:
        """Return the run's eligible members; shared ones lend the memory that others leave."""
        own = self._state.with_members(frozenset(peers))
        if any(len(self._hosted.get(peer, ())) > 1 for peer in run.peers):
            own = with_coresident_memory(own, run)
        return eligible_members(own, run, self._now_s)


def _owner(run: Run) -> str:
    """Return the name that claims peers for a run."""
    return run.owner_name


def _share(run: Run, num_peers: int) -> float:
    """Return peers over the claim's weight; where clients have no keys, over a run's priority.

    A run of the default priority has the claim of an invitation of the default weight.
    """
    if run.claim.name or run.owner:
        return num_peers / run.claim.weight
    return num_peers * DEFAULT_PRIORITY / run.priority


def _spare(state: SwarmState, run: Run) -> list[PeerId]:
    """Return replicas that a run can do without: all but one of each stage, and listeners."""
    spare: list[PeerId] = []
    for stage in run.stages:
        carriers = [peer for peer in stage.peers if state.may_host_alone(peer)]
        able = [peer for peer in carriers if has_stage(state, run, peer, stage.layers)]
        bound = [peer for peer in able if state.members[peer].hello.layers is not None]
        stays = next(iter(bound or able), None)
        if stays is not None:
            spare += [peer for peer in carriers if peer != stays]
    return spare


def smallest_serving(
    peers: Sequence[PeerId], serve: Callable[[Sequence[PeerId]], bool]
) -> Sequence[PeerId]:
    """Return as few of these peers as serve; the first are left out first."""
    chosen, num_together = list(peers), len(peers)
    while num_together:
        at = 0
        while at < len(chosen):
            remaining = [*chosen[:at], *chosen[at + num_together :]]
            if remaining and serve(remaining):
                chosen = remaining
            else:
                at += num_together
        num_together //= 2
    return chosen
