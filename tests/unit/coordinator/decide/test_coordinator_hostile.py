"""No message makes the coordinator raise, or count a step twice."""

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.events import (
    PeerLost,
    PeerSaid,
    ResultCollected,
    RunCancelled,
    RunSubmitted,
    Tick,
)
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.errors import BY_CODE
from swarm_ft.ids import Attempt, BlockIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import (
    CaughtUp,
    FromPeer,
    HeldStage,
    PeerGoodbye,
    PeerHello,
    PeerLeaving,
    PeerResumed,
    StageExported,
    StageFailed,
    StageOffered,
    StageReady,
    StepReady,
)
from swarm_ft.protocol.messages.reports import BufferCounts, HeldBuffers, SampleSet, Traffic
from swarm_ft.protocol.messages.shard import ShardFile
from swarm_ft.protocol.spec.layers import LayerRange
from tests.draws import draws
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUNS = (RunId("run-1"), RunId("run-2"))
RESULT = ShardFile(digest=bytes(16), total_bytes=1 << 20)
OFFERS = {
    PeerId("a"): LayerRange(0, 2),
    PeerId("b"): LayerRange(2, 4),
    PeerId("c"): LayerRange(2, 4),
    PeerId("d"): None,
}
ODD_OFFERS = (None, *(LayerRange(*ends) for ends in ((0, 4), (1, 3), (2, 6))))

peer_ids = st.sampled_from(sorted(OFFERS))
run_ids = st.sampled_from(RUNS)
offset = st.sampled_from([0, 0, 0, 0, -1, 1])
samples = st.lists(st.sampled_from([0, 1, 4, 5, 6, 2**24 - 1]), min_size=1, unique=True)
codes = st.sampled_from([*sorted(BY_CODE), "of-a-later-version"])

# Peers' messages are drawn as (kind, peer, details) and made to fit the run as it stands, since
# messages of random attempts and steps would all be void.
disturbances = st.one_of(
    st.tuples(st.just("hello"), peer_ids, st.none(), offset, st.booleans()),
    st.tuples(st.just("hello"), peer_ids, st.sampled_from(ODD_OFFERS), offset, st.booleans()),
    st.tuples(st.just("lost"), peer_ids),
    st.tuples(st.just("leaving"), peer_ids, st.booleans()),
    st.tuples(st.just("works"), peer_ids),
    st.tuples(st.just("goodbye"), peer_ids),
    st.tuples(st.just("stage_ready"), peer_ids, offset),
    st.tuples(st.just("step_ready"), peer_ids, offset, offset, st.floats(0.0, 1e200)),
    st.tuples(st.just("buffers"), peer_ids, st.sampled_from([2, 2, 3]), samples, st.booleans()),
    st.tuples(st.just("offered"), peer_ids, offset, offset),
    st.tuples(st.just("caught_up"), peer_ids, offset),
    st.tuples(st.just("exported"), peer_ids, run_ids),
    st.tuples(st.just("failed"), peer_ids, offset, codes),
    st.tuples(st.just("submit"), run_ids, st.integers(1, 6)),
    st.tuples(st.just("cancel"), run_ids),
    st.tuples(st.just("collected"), run_ids),
    st.tuples(st.just("time"), st.sampled_from([0.0, 1.0, 3.0, 11.0])),
    st.tuples(st.just("all_hello")),
)
# Between two disturbances the run gets some way, or it would never get anywhere.
scripts = st.lists(st.tuples(st.integers(0, 3), disturbances), max_size=25)
Script: TypeAlias = list[tuple[int, tuple[Any, ...]]]
"""Numbers of steps of progress, each with the disturbance that follows."""


class Mob:
    """A maker of hostile events, which it gives to the coordinator."""

    def __init__(self, swarm: Swarm, make_spec: MakeSpec) -> None:
        self.swarm, self.make_spec = swarm, make_spec

    def play(self, script: Script) -> None:
        self.all_hello()
        for num_progress, (kind, *details) in script:
            for _ in range(num_progress):
                self.progress()
            getattr(self, kind)(*details)

    @property
    def _now(self) -> tuple[RunId, Attempt, StepNumber, tuple[PeerId, ...]]:
        """Return run, attempt and step as the coordinator knows them."""
        run = next(iter(self.swarm.state.active_runs), None)
        if run is None:
            return RUNS[0], Attempt(0), StepNumber(0), ()
        return run.run_id, run.attempt.number, StepNumber(run.committed_steps), run.peers

    def _said(self, peer_id: PeerId, message: FromPeer) -> None:
        self.swarm.handle(PeerSaid(peer_id, message))

    def hello(
        self, peer_id: PeerId, layers: LayerRange | None, steps_off: int, holds: bool
    ) -> None:
        run_id, _, step, _ = self._now
        run = self.swarm.state.runs.get(run_id)
        stage = HeldStage(
            run_id=run_id,
            spec_digest=run.spec.digest() if run else bytes(16),
            layers=layers or LayerRange(0, 4),
            committed_steps=max(0, step + steps_off),
            last_attempt=self._last_attempt(run),
            exported=RESULT if steps_off == 0 else None,
        )
        hello = PeerHello(
            peer_id=peer_id,
            endpoint="peer.example:7001",
            layers=layers or OFFERS[peer_id],
            memory_bytes=1 << 20,
            held=(stage,) if holds else (),
        )
        self._said(peer_id, hello)

    def _last_attempt(self, run: Run | None) -> Attempt:
        return run.past.last_commit.attempt if run and run.past.last_commit else Attempt(0)

    def lost(self, peer_id: PeerId) -> None:
        self.swarm.handle(PeerLost(peer_id))

    def goodbye(self, peer_id: PeerId) -> None:
        self._said(peer_id, PeerGoodbye())

    def leaving(self, peer_id: PeerId, stays: bool) -> None:
        self._said(peer_id, PeerLeaving(stays=stays))

    def works(self, peer_id: PeerId) -> None:
        self._said(peer_id, PeerResumed())

    def all_hello(self) -> None:
        for peer_id in OFFERS:
            if peer_id not in self.swarm.state.members:
                self.hello(peer_id, None, 0, True)

    def progress(self) -> None:
        """Send the messages that the run waits for."""
        run_id, _, _, peers = self._now
        phase = self.swarm.state.runs[run_id].phase
        for peer_id in peers:
            if phase is RunPhase.LOADING:
                self.stage_ready(peer_id, 0)
            elif phase is RunPhase.TRAINING:
                self.step_ready(peer_id, 0, 0, 1.0)
            else:
                self.exported(peer_id, run_id)

    def stage_ready(self, peer_id: PeerId, off: int) -> None:
        run_id, attempt, _, _ = self._now
        self._said(peer_id, StageReady(run_id=run_id, attempt=Attempt(attempt + off)))

    def offered(self, peer_id: PeerId, off: int, steps_off: int) -> None:
        run_id, attempt, step, _ = self._now
        offer = StageOffered(
            run_id=run_id,
            attempt=Attempt(attempt + off),
            step=StepNumber(max(0, step + steps_off)),
            digest=bytes(16),
            total_bytes=1,
            proofs=dict.fromkeys(OFFERS, bytes(16)),
        )
        self._said(peer_id, offer)

    def caught_up(self, peer_id: PeerId, off: int) -> None:
        run_id, attempt, _, _ = self._now
        attempt = Attempt(attempt + off)
        caught_up = CaughtUp(run_id=run_id, attempt=attempt, state_bytes=1, proof=bytes(16))
        self._said(peer_id, caught_up)

    def step_ready(self, peer_id: PeerId, off: int, steps_off: int, number: float) -> None:
        run_id, attempt, step, _ = self._now
        ready = StepReady(
            run_id=run_id,
            attempt=Attempt(attempt + off),
            step=StepNumber(step + steps_off),
            squared_grad_norm=number,
            loss_sum=number,
            traffic=(
                Traffic(boundary=BlockIndex(99), key_frames=2**32 - 1),
                Traffic(boundary=BlockIndex(2)),
            ),
        )
        self._said(peer_id, ready)

    def buffers(
        self, peer_id: PeerId, boundary: BlockIndex, samples: list[SampleId], is_inventory: bool
    ) -> None:
        run_id, attempt, step, _ = self._now
        buffers = (HeldBuffers(boundary=boundary, samples=SampleSet.of(samples)),)
        if is_inventory:
            self._said(peer_id, StageReady(run_id=run_id, attempt=attempt, buffers=buffers))
        else:
            counts = (BufferCounts(boundary=boundary, misses=2**50),)
            ready = StepReady(
                run_id=run_id,
                attempt=attempt,
                step=step,
                squared_grad_norm=1.0,
                lost=buffers,
                buffers=counts,
            )
            self._said(peer_id, ready)

    def exported(self, peer_id: PeerId, run_id: RunId) -> None:
        self._said(peer_id, StageExported(run_id=run_id, file=RESULT))

    def failed(self, peer_id: PeerId, off: int, code: str) -> None:
        run_id, attempt, _, _ = self._now
        attempt = Attempt(attempt + off)
        self._said(peer_id, StageFailed(run_id=run_id, attempt=attempt, code=code, message="no"))

    def submit(self, run_id: RunId, num_blocks: int) -> None:
        if run_id not in self.swarm.state.runs:
            spec = self.make_spec(num_blocks=num_blocks, num_steps=5, seq_length=64, buffer_bits=4)
            self.swarm.handle(RunSubmitted(run_id, spec))

    def cancel(self, run_id: RunId) -> None:
        self.swarm.handle(RunCancelled(run_id))

    def collected(self, run_id: RunId) -> None:
        self.swarm.handle(ResultCollected(run_id))

    def time(self, seconds: float) -> None:
        self.swarm.now_s += seconds
        self.swarm.handle(Tick())


MakeMob: TypeAlias = Callable[[], Mob]


@pytest.fixture(scope="module")
def make_mob(make_swarm: type[Swarm], make_spec: MakeSpec) -> MakeMob:
    return lambda: Mob(make_swarm(), make_spec)


@settings(derandomize=True, max_examples=draws(250), deadline=None)
@given(script=scripts, num_blocks=st.sampled_from([2, 4, 4, 4]))
def test_no_order_of_events_breaks_the_coordinator(
    make_mob: MakeMob, script: Script, num_blocks: int
) -> None:
    mob = make_mob()
    mob.submit(RUNS[0], num_blocks)
    mob.play(script)


@settings(derandomize=True, max_examples=draws(100), deadline=None)
@given(script=scripts)
def test_honest_peers_can_still_train_after_any_order_of_events(
    make_mob: MakeMob,
    make_peer: type[FakePeer],
    script: Script,
) -> None:
    mob = make_mob()
    mob.submit(RUNS[0], 4)
    mob.play(script)
    swarm = mob.swarm
    for run_id in RUNS:
        mob.submit(run_id, 4)
        mob.cancel(run_id)
    for peer_id in OFFERS:
        mob.lost(peer_id)
    last = RunId("run-3")
    mob.submit(last, 4)
    swarm.join(make_peer("x", "0-2"), make_peer("y", "2-4"))
    swarm.settle()
    assert len(swarm.history[last]) == 5
