"""Placements and divisions equal those of the first, slow form, see `tests.reference`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from types import MappingProxyType

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.reputation import Reputation
from swarm_ft.coordinator.facts.state import AttemptState, Member, Run, SwarmState
from swarm_ft.coordinator.plan.allocation import Allocation, allocate_members, makes_room
from swarm_ft.coordinator.plan.inputs import SAVED_AFTER_S, division_inputs
from swarm_ft.coordinator.plan.membership import eligible_members, find_placement
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import HeldStage, PeerHello, PeerLeaving
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.priority import NO_CLAIM, Claim
from tests.draws import draws
from tests.reasons import reason
from tests.reference import placement as first_placement
from tests.reference import sharing as first_sharing
from tests.unit.coordinator.conftest import _spec as make_spec

NOW_S = 10_000.0
OWNERS = ("ann", "bob", "cid", "")
DRAWN = st.integers(0, 1 << 32)


class Drawn:
    """A random swarm, drawn from a seed, with a bit of everything."""

    def __init__(self, seed: int, *, max_peers: int = 12, max_runs: int = 7) -> None:
        self.rng = Random(seed)
        self.blocks = self.rng.choice((2, 4, 6, 9))
        self.is_plain = self.rng.random() < 0.3
        members = [self._member(i) for i in range(self.rng.randrange(max_peers + 1))]
        runs = [self._run(i) for i in range(self.rng.randrange(max_runs + 1))]
        self.state = SwarmState(
            members=MappingProxyType({m.hello.peer_id: m for m in members}),
            runs=MappingProxyType({run.run_id: run for run in runs}),
        )
        self._begin_some()
        self._spoil_some()

    def _member(self, index: int) -> Member:
        rng, whole = self.rng, make_spec(num_blocks=self.blocks)
        enough = int(whole.memory_bytes(whole.model.layers))
        memory = rng.choice((enough // 9, enough // 3, enough // 2, enough, 3 * enough))
        layers = None
        if rng.random() < 0.3:
            layers = self._layers()
        hello = PeerHello(
            peer_id=PeerId(f"p{index}"),
            endpoint="peer.example:7001",
            layers=layers,
            memory_bytes=memory + (0 if self.is_plain else rng.randrange(3)),
            max_beside=rng.choice((0, 0, 1, 3)),
            max_up_bytes_per_s=rng.choice((0.0, 0.0, 0.0, 1e6)),
            held=() if rng.random() < 0.9 else (self._held(),),
        )
        grant = Grant()
        if not self.is_plain and rng.random() < 0.4:
            grant = Grant(
                replica_only=rng.random() < 0.3,
                sees_tokens=rng.random() < 0.6,
                layers=None if rng.random() < 0.5 else self._layers(),
            )
        leaving = PeerLeaving(reason="", stays=True) if rng.random() < 0.05 else None
        joined_s = NOW_S - (1.0 if rng.random() < 0.02 else rng.choice((100.0, 200.0 + index)))
        return Member(
            hello=hello, grant=grant, leaving=leaving, joined_at_s=joined_s, heard_at_s=NOW_S
        )

    def _layers(self) -> LayerRange:
        start = self.rng.randrange(self.blocks)
        return LayerRange(start, self.rng.randint(start + 1, self.blocks + 1))

    def _held(self) -> HeldStage:
        return HeldStage(
            run_id=RunId(f"r{self.rng.randrange(4)}"),
            spec_digest=bytes(16),
            layers=LayerRange(0, 1),
            committed_steps=0,
        )

    def _run(self, index: int) -> Run:
        rng = self.rng
        train: dict[str, object] = {}
        if rng.random() < 0.2:
            train["train_layers"] = f"{rng.randrange(self.blocks)}-"
        if rng.random() < 0.1:
            train["private_ends"] = f"p{rng.randrange(6)},p{rng.randrange(6)}"
        blocks = self.blocks if train else rng.choice((self.blocks, 2, 5))
        return Run(
            run_id=RunId(f"r{index}"),
            spec=make_spec(num_blocks=blocks, block_bytes=rng.choice((500, 1000, 1000)), **train),
            owner=rng.choice(OWNERS),
            claim=rng.choice((NO_CLAIM, Claim("one", 2), Claim("other", 5))),
            priority=rng.choice((1, 3, 9)),
            unplaced_since_s=rng.choice((math.inf, NOW_S, NOW_S - SAVED_AFTER_S - 1)),
        )

    def _begin_some(self) -> None:
        for run in tuple(self.state.runs.values()):
            busy = {peer for other in self.state.active_runs for peer in other.peers}
            if self.rng.random() < 0.2:
                busy = set()
            able = self.state.with_members(self.state.members.keys() - busy)
            able = eligible_members(able, run, NOW_S)
            placed = first_placement.arrangement(able, run, math.inf).assignments
            if self.rng.random() < 0.5 and placed:
                self.state = self.state.with_run(self._begun(run, placed))

    def _begun(self, run: Run, placed: Sequence[object]) -> Run:
        steps = self.rng.choice((0, 5))
        attempt = AttemptState(number=Attempt(1), assignments=tuple(placed))  # type: ignore[arg-type]
        phases = (RunPhase.LOADING, RunPhase.TRAINING, RunPhase.TRAINING, RunPhase.WAITING)
        run = replace(
            run,
            attempt=attempt,
            phase=self.rng.choice((*phases, RunPhase.FINISHED)),
            past=replace(run.past, committed_steps=steps),
        )
        holds = {peer: steps for peer in run.peers if self.rng.random() < 0.9}
        run = run.with_holds(holds)
        if run.phase is RunPhase.FINISHED:
            exported = MappingProxyType({p: None for p in run.peers if self.rng.random() < 0.8})
            run = replace(run, past=replace(run.past, exported=exported))
        return run

    def _spoil_some(self) -> None:
        for peer in self.state.members:
            if self.rng.random() < 0.08:
                aside = Reputation().suspend(
                    reason(Kind.PEER_ERROR), NOW_S - self.rng.choice((1.0, 100.0))
                )
                self.state = self.state.with_reputation(peer, aside)
        for run in tuple(self.state.runs.values()):
            misfits = {
                p: reason(Kind.PEER_MISFIT) for p in self.state.members if self.rng.random() < 0.05
            }
            doubts = {p: StepNumber(5) for p in run.peers if self.rng.random() < 0.05}
            run = replace(run, misfits=MappingProxyType(misfits), doubts=MappingProxyType(doubts))
            if self.rng.random() < 0.05:
                run = replace(run, steering=replace(run.steering, is_paused=True))
            self.state = self.state.with_run(run)

    def change(self) -> None:
        """Change one thing, as an event would."""
        rng, members = self.rng, tuple(self.state.members)
        what = rng.randrange(6)
        if what == 0 or not members:
            self.state = self.state.with_member(self._member(rng.randrange(20)))
        elif what == 1:
            self.state = self.state.without_member(rng.choice(members))
        elif what == 2:
            self.state = self.state.with_message_at(rng.choice(members), NOW_S)
        elif what == 3:
            self.state = self.state.with_run(self._run(rng.randrange(9)))
        elif what == 4:
            self._begin_some()
        else:
            self._spoil_some()


def same(sharing: Allocation, first: first_sharing.Sharing) -> bool:
    return (sharing.members, sharing.to_give) == (first.members, first.to_give)


@given(DRAWN)
@settings(max_examples=draws(400), deadline=None)
def test_members_are_divided_as_ever(seed: int) -> None:
    state = Drawn(seed).state
    assert same(allocate_members(state, NOW_S), first_sharing.shared(state, NOW_S))
    waiting = tuple(run.run_id for run in first_sharing.in_turn(replace(state, seen_at_s=NOW_S)))
    assert allocate_members(state, NOW_S).in_turn == waiting


@given(DRAWN)
@settings(max_examples=draws(400), deadline=None)
def test_placements_are_those_of_ever(seed: int) -> None:
    drawn = Drawn(seed, max_peers=20)
    for run in drawn.state.runs.values():
        for state in (drawn.state, eligible_members(drawn.state, run, NOW_S)):
            for now_s in (NOW_S, math.inf):
                placed = find_placement(state, run, now_s)
                expected = first_placement.arrangement(state, run, now_s)
                assert placed.assignments == expected.assignments
                assert placed.is_gathering == expected.is_gathering


@given(DRAWN)
@settings(max_examples=draws(150), deadline=None)
def test_room_is_made_as_ever(seed: int) -> None:
    state = Drawn(seed).state
    for run in state.active_runs:
        assert makes_room(state, run, NOW_S) == first_sharing.makes_room(state, run, NOW_S)


@given(DRAWN)
@settings(max_examples=draws(150), deadline=None)
def test_an_answer_that_is_remembered_is_the_one_that_would_be_found(seed: int) -> None:
    """Check successive states that share a memo, again and again."""
    drawn = Drawn(seed, max_peers=8, max_runs=5)
    for _ in range(8):
        now_s = NOW_S + drawn.rng.choice((0.0, 40.0, 2 * SAVED_AFTER_S))
        fresh = first_sharing.shared(drawn.state, now_s)
        assert same(allocate_members(drawn.state, now_s), fresh)
        drawn.change()


@given(DRAWN)
@settings(max_examples=draws(100), deadline=None)
def test_what_is_heard_of_members_changes_no_input(seed: int) -> None:
    state = Drawn(seed).state
    before = division_inputs(state, NOW_S)
    for peer in state.members:
        state = state.with_message_at(peer, NOW_S + 1.0)
    assert division_inputs(state, NOW_S) == before
