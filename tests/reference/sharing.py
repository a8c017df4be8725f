"""The first form of `swarm_ft.coordinator.plan.allocation`, to which the present one is compared.

It computes each placement anew, so it is slow, and what it decides is what all later forms decide.
Its own text follows.

Which members each run may work with: several train side by side. Pure.

A run keeps the peers that it has. Of those that are free, runs that wait get as few as they need to
begin, the run of whoever has least in front; then each that is left goes, one by one, to the run of
whoever has least, of those that it helps. What an owner has is counted by the priority of the run
in question; the runs of one owner keep the order of submission. A run that cannot begin holds
nobody up, but for one that waited for very long: see `SAVED_AFTER_S`.

Peers are given whole. A run that could begin with none but peers at work, or that keep a result,
gets stages *beside* what these hold, where they lend the memory for it (`max_beside`): each run
sees of a member's memory what the others leave it.

Who trains is not robbed of a peer that it needs to exist. Replicas beside that one are given, when
their step ends, to a run that could begin with them, if its owner has less. One that has more
stages than it needs makes room by being cut anew, from its next snapshot.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from swarm_ft.coordinator.facts.state import AttemptState, Member, Run, SwarmState
from swarm_ft.coordinator.plan.membership import (
    eligible_members,
    has_stage,
    with_newcomers,
)
from swarm_ft.ids import NO_ATTEMPT, PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import stages_of
from swarm_ft.protocol.spec.bounds import MAX_HOSTED
from swarm_ft.protocol.spec.priority import DEFAULT_PRIORITY
from tests.reference.placement import arrangement, fits, moved_stages

SAVED_AFTER_S = 3600.0
"""After so long, peers that a run could begin with, were all of them free, begin no other run: else
one that needs many could wait for ever while small ones come and go."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The division of members among runs.

    Attributes:
        members: of each run that is not over, whom it may work with now.
        to_give: of runs with peers, replicas that another run is to have when the step ends.
    """

    members: Mapping[RunId, frozenset[PeerId]]
    to_give: Mapping[RunId, frozenset[PeerId]] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, state: SwarmState, run: Run) -> SwarmState:
        """The state with those members alone that the run may work with."""
        return with_coresident_memory(
            state.with_members(self.members.get(run.run_id, frozenset())), run
        )


def with_coresident_memory(state: SwarmState, run: Run) -> SwarmState:
    """The state in which members lend what other runs' stages leave of their memory.

    Left out are those where the run has no stage, and none has room.
    """
    hosted, members = state.hosted, dict(state.members)
    for peer in members.keys() & hosted.keys():
        others = {of: layers for of, layers in hosted[peer].items() if of != run.run_id}
        if not others:
            continue
        taken = sum(state.runs[of].spec.memory_bytes(layers) for of, layers in others.items())
        hello = members[peer].hello
        left_bytes = max(0, math.floor(hello.memory_bytes - taken))
        members[peer] = replace(members[peer], hello=replace(hello, memory_bytes=left_bytes))
        is_full = len(others) > hello.max_beside or not _has_room(run, members[peer])
        if is_full and run.run_id not in hosted[peer]:
            del members[peer]
    return replace(state, members=MappingProxyType(members))


def _has_room(run: Run, member: Member) -> bool:
    """Whether the layers that a member insists on fit; of others placement sees to it."""
    layers, model = member.hello.layers, run.spec.model
    is_of_use = layers is None or layers.stop <= model.num_blocks
    return is_of_use and (layers is None or fits(run.spec, layers, member.hello))


def shared(state: SwarmState, now_s: float) -> Sharing:
    """Return the present division of members among runs."""
    going = state.going_runs
    if len(going) == 1 and not going[0].steering.is_paused:
        return Sharing({going[0].run_id: frozenset(state.members)})
    return _Division(state, going, now_s).divided()


def share_of(state: SwarmState, run: Run, now_s: float) -> SwarmState:
    """The state with those members alone that may work for the run, and are its own or free."""
    return eligible_members(shared(state, now_s).of(state, run), run, now_s)


def makes_room(state: SwarmState, run: Run, now_s: float) -> bool:
    """Whether a run that waits could begin if this one, whose owner has more, was cut anew."""
    waiting = _Division(state, state.going_runs, now_s).that_may_take_from(run)
    if not waiting:
        return False
    past, number = run.past.rolled_back, run.attempt.number
    again = replace(run, past=past, attempt=AttemptState(number=number))
    after = state.with_run(again)
    division = _Division(after, after.going_runs, now_s)
    members = division.divided().members
    goes_on = division.hosts(again, members[run.run_id])
    return goes_on and any(division.hosts(other, members[other.run_id]) for other in waiting)


def in_turn(state: SwarmState) -> list[Run]:
    """Runs without peers, in the order in which they are given some."""
    division = _Division(state, state.going_runs, state.seen_at_s)
    return sorted(division.waiting, key=division.place_in_line)


class _Division:
    """Divides the members; see the module's docstring."""

    def __init__(self, state: SwarmState, going: Sequence[Run], now_s: float) -> None:
        self._state, self._going, self._now_s = state, going, now_s
        self.waiting = [
            run for run in going if not (run.attempt.assignments or run.steering.is_paused)
        ]
        self._active = [run for run in going if run.attempt.assignments]
        self._places = {run.run_id: place for place, run in enumerate(going)}
        self._shares = {run.run_id: {p for p in run.peers if p in state.members} for run in going}
        self._held: Counter[str] = Counter()
        for run in self._active:
            self._held[_owner(run)] += len(self._shares[run.run_id])
        self._hosted = state.hosted
        bound = state.result_keepers.union(*(run.peers for run in self._active))
        self._free = [
            peer
            for peer in state.members
            if peer not in bound and not state.is_suspended(peer, now_s)
        ]
        self._donors = {
            peer: run
            for run in self._active
            for peer in _spare(self._able(run, run.peers), run)
            if len(self._hosted[peer]) == 1
        }
        self._given: set[PeerId] = set()
        self._beside: set[PeerId] = set()
        self._saved: frozenset[PeerId] | None = None

    def divided(self) -> Sharing:
        """Return the division of members among runs."""
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
        return Sharing(members, to_give)

    # ---- whose turn it is

    def place_in_line(self, run: Run) -> tuple[bool, float, bool, int, int]:
        """Return the sort key of a run: a long wait comes first, then the smallest share."""
        return (
            not self._has_waited_for_long(run),
            self._claim(run),
            run.attempt.number == NO_ATTEMPT,
            -run.priority,
            self._places[run.run_id],
        )

    def _claim(self, run: Run, more: int = 0) -> float:
        return _share(run, self._held[_owner(run)] + more)

    def _has_waited_for_long(self, run: Run) -> bool:
        return self._now_s - run.unplaced_since_s >= SAVED_AFTER_S

    # ---- runs that wait

    def _with_runs_that_begin(self) -> list[Run]:
        """Give runs that can begin their members, and return these runs."""
        begun, waiting = [], list(self.waiting)
        while waiting:
            run = min(waiting, key=self.place_in_line)
            waiting.remove(run)
            need = self._need(run)
            if need:
                self._take(run, need)
                self._even_out(run, need)
                begun.append(run)
            elif self._saved is None and self._has_waited_for_long(run):
                self._save_for(run)
        return begun

    def _need(self, run: Run) -> Sequence[PeerId]:
        """Return the fewest available peers that the run can begin with; empty if it cannot."""
        saved = self._saved or frozenset()
        free = [peer for peer in self._free if peer not in saved]
        peers = [peer for peer in self._lent_to(run) if peer not in saved]
        moved = moved_stages(self._able(run, free), run)
        if moved:
            return [host.peer_id for host in moved]
        for pool in (free, [*free, *peers]):
            if self.hosts(run, pool):
                return self._least(run, pool)
        return self._need_beside(run, free)

    def _need_beside(self, run: Run, free: Sequence[PeerId]) -> Sequence[PeerId]:
        """One for each stage, of those that are free and of those that hold something else too.

        Those that hold the least come first. All of them have a part, or a few would do all.
        """
        for num_held in range(1, MAX_HOSTED):
            pool = {*free, *self._with_room(run, num_held)}
            able = with_coresident_memory(self._able(run, pool), run)
            stages = stages_of(arrangement(able, run, math.inf).assignments) if pool else ()
            need = [stage.peers[0] for stage in stages]
            if need:
                self._beside.update(peer for peer in need if peer not in self._free)
                return need
        return ()

    def _with_room(self, run: Run, num_held: int) -> Iterator[PeerId]:
        """Members that hold so many stages at most, each of another run, and lend for one more.

        What one is given in the same division is not known yet: the next one is its turn.
        """
        for peer in self._state.members.keys() & self._hosted.keys():
            is_taken = peer in self._given or peer in self._beside
            if len(self._hosted[peer]) <= num_held and not is_taken:
                yield peer

    def _lent_to(self, run: Run) -> list[PeerId]:
        """Replicas that other owners' runs may give it."""
        return [
            peer
            for peer, donor in self._donors.items()
            if not {peer} & (self._given | self._beside) and self._may_take_from(donor, run)
        ]

    def hosts(self, run: Run, peers: Iterable[PeerId]) -> bool:
        """Whether these could host it, once all who may come are there."""
        able = self._able(run, peers)
        return bool(able.members) and bool(arrangement(able, run, math.inf).assignments)

    def _least(self, run: Run, pool: Sequence[PeerId]) -> Sequence[PeerId]:
        """Return the fewest peers that can host it, those that lend least and free ones first."""

        def lends(peer: PeerId) -> int:
            return self._state.members[peer].hello.memory_bytes

        def serve(peers: Sequence[PeerId]) -> bool:
            return self.hosts(run, peers)

        newest_first = list(reversed(pool))
        found = [
            least(sorted(newest_first, key=lambda p: (p not in self._donors, by * lends(p))), serve)
            for by in (-1, 1)
        ]
        return min(found, key=lambda peers: (len(peers), sum(map(lends, peers))))

    def _take(self, run: Run, peers: Iterable[PeerId]) -> None:
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
        """A run that is given replicas gets more of them, until its owner has a fair share."""
        if not self._given.intersection(need):
            return
        for peer in self._lent_to(run):
            fair = self._claim(run, 1) <= self._claim(self._donors[peer], -1)
            if fair and self._helps(run, peer):
                self._take(run, [peer])

    def _save_for(self, run: Run) -> None:
        """Peers that are free now, of those with which it could begin, begin no other run."""
        keepers = self._state.result_keepers
        members = [peer for peer in self._state.members if peer not in keepers]
        if self.hosts(run, members):
            busy_first = sorted(members, key=self._free.__contains__)
            self._saved = frozenset(least(busy_first, lambda peers: self.hosts(run, peers)))

    def that_may_take_from(self, donor: Run) -> list[Run]:
        """Runs that wait, and whose owner has less than this one's."""
        return [run for run in self.waiting if self._may_take_from(donor, run)]

    def _may_take_from(self, donor: Run, run: Run) -> bool:
        return _owner(donor) != _owner(run) and self._claim(run) < self._claim(donor)

    # ---- who is left

    def _give_the_rest(self, runs: Sequence[Run]) -> None:
        num_free = -1
        while len(self._free) != num_free:
            num_free = len(self._free)
            for peer in tuple(self._free):
                in_turn = sorted(runs, key=self.place_in_line)
                helped = next((run for run in in_turn if self._helps(run, peer)), None)
                if helped is not None:
                    self._take(helped, [peer])
        broken = [run for run in self._active if run.phase is RunPhase.WAITING]
        if broken and self._free:
            # Who helps nobody alone may yet do so where a run has to be placed anew.
            in_turn = sorted(broken, key=self.place_in_line)
            rest = [run for run in in_turn if self.hosts(run, self._with_free(run))]
            self._take((*rest, *in_turn)[0], tuple(self._free))

    def _with_free(self, run: Run) -> set[PeerId]:
        return self._shares[run.run_id].union(self._free)

    def _helps(self, run: Run, peer: PeerId) -> bool:
        """Whether the run has something to do for a peer beside those that it may work with."""
        if peer in (self._saved or ()) and not run.attempt.assignments:
            return False
        able = self._able(run, self._shares[run.run_id] | {peer})
        if run.attempt.assignments:
            return peer in with_newcomers(able, run).peers
        return any(a.peer_id == peer for a in arrangement(able, run, math.inf).assignments)

    def _able(self, run: Run, peers: Iterable[PeerId]) -> SwarmState:
        """Members that are there for it; those that it shares already lend what others leave."""
        own = self._state.with_members(frozenset(peers))
        if any(len(self._hosted.get(peer, ())) > 1 for peer in run.peers):
            own = with_coresident_memory(own, run)
        return eligible_members(own, run, self._now_s)


def _owner(run: Run) -> str:
    """Return the owner; where clients have no keys, each run has an owner of its own."""
    return run.claim.name or run.owner or f"run {run.run_id}"


def _share(run: Run, num_peers: int) -> float:
    """Return peers over the claim's weight; where clients have no keys, over a run's priority.

    A run of the default priority has the claim of an invitation of the default weight.
    """
    if run.claim.name or run.owner:
        return num_peers / run.claim.weight
    return num_peers * DEFAULT_PRIORITY / run.priority


def _spare(state: SwarmState, run: Run) -> list[PeerId]:
    """Replicas without which a run goes on: all but one of each stage, and who only listens."""
    spare: list[PeerId] = []
    for stage in run.stages:
        peers = [peer for peer in stage.peers if state.may_host_alone(peer)]
        able = [peer for peer in peers if has_stage(state, run, peer, stage.layers)]
        bound = [peer for peer in able if state.members[peer].hello.layers is not None]
        stays = next(iter(bound or able), None)
        if stays is not None:
            spare += [peer for peer in peers if peer != stays]
    return spare


def least(peers: Sequence[PeerId], serve: Callable[[Sequence[PeerId]], bool]) -> Sequence[PeerId]:
    """Return a minimal set of peers that serve; the first ones are left out first."""
    chosen, num_together = list(peers), len(peers)
    while num_together:
        at = 0
        while at < len(chosen):
            rest = [*chosen[:at], *chosen[at + num_together :]]
            if rest and serve(rest):
                chosen = rest
            else:
                at += num_together
        num_together //= 2
    return chosen
