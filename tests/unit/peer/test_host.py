"""One stage of a run on a peer: steps, commits, results; a real engine over a whole small model."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from swarm_ft.errors import (
    MalformedMessage,
    NonFinite,
    OutOfTurn,
    RunMismatch,
    SwarmError,
    Unavailable,
)
from swarm_ft.ids import Attempt, BlockIndex, PeerId, RunId, StepNumber
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.host import StageHost
from swarm_ft.peer.links import Links, LinkStream
from swarm_ft.peer.state.stage_state import EngineMaker, StageState
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.boundary import BoundaryHello
from swarm_ft.protocol.messages.control import (
    Assign,
    CatchUp,
    CommitStep,
    FromPeer,
    HeldStage,
    Learner,
    PlanStep,
    SaveStage,
    StageAssignment,
    StageExported,
    StageFailed,
    StageOffered,
    StageReady,
    StepReady,
)
from swarm_ft.protocol.messages.shard import ShardName
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Codecs, RunSpec
from swarm_ft.protocol.spec.training_plan import step_microbatches
from swarm_ft.snapshots.local_files import chunks_of
from swarm_ft.snapshots.shard import write_shard
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.stage.base import Engine
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.stage.model_access import UNAVAILABLE
from swarm_ft.transport.methods import LINK
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.memory_transport import MemoryTransport
from tests.states import weights_digest
from tests.unit.peer.conftest import MakeTrain
from tests.unit.peer.hands import Caller, Hand

Sent = TypeVar("Sent")

RUN, ME = RunId("run"), PeerId("me")
SEQ_LENGTH = 6

Stages: TypeAlias = tuple[tuple[str, int, int], ...]
MakePeer: TypeAlias = "Callable[..., Peer]"


@pytest.fixture(scope="session")
def spec(model_dir: Path, make_train: MakeTrain) -> RunSpec:
    return RunSpec(model=open_checkpoint(str(model_dir)).describe(), train=make_train())


class Peer:
    """A host on a transport of its own, and its messages to the coordinator."""

    def __init__(
        self,
        spec: RunSpec,
        shard_dir: Path,
        *,
        make_engine: EngineMaker | None = None,
        snapshots: SnapshotStore | None = None,
    ) -> None:
        self.spec = spec
        self.sent: asyncio.Queue[FromPeer] = asyncio.Queue()
        self.engines: list[StageEngine] = []
        self.transport = MemoryTransport()
        self.compute, self.codecs = ThreadPoolExecutor(1), ThreadPoolExecutor(2)
        self.directory = StaticDirectory(Board(), ManualClock())
        self.links = Links(ME, transport=self.transport, clock=ManualClock(), rng=Random(0))
        context = self.context = PeerContext(
            peer_id=ME,
            directory=self.directory,
            transport=self.transport,
            clock=ManualClock(),
            links=self.links,
            compute=self.compute,
            codecs=self.codecs,
            send_to_coordinator=self.sent.put_nowait,
            timeline=Timeline(ManualClock(), self.sent.put_nowait),
            memory_bytes=1 << 30,
        )
        state = StageState(context, RUN, spec, make_engine or self._make_engine)
        self.host = StageHost(
            context, RUN, spec, state=state, shard_dir=shard_dir, snapshots=snapshots
        )

    def _make_engine(self, spec: RunSpec, layers: LayerRange) -> StageEngine:
        checkpoint = open_checkpoint(spec.model.reference)
        device = torch.device("cpu")
        engine = StageEngine(checkpoint, spec, layers, device=device, dtype=torch.float32)
        self.engines.append(engine)
        return engine

    async def assign(
        self,
        *,
        attempt: int = 1,
        stages: Stages = ((ME, 0, 2),),
        committed_steps: int = 0,
        fresh: bool = True,
        learners: tuple[Learner, ...] = (),
    ) -> None:
        assigned = tuple(
            StageAssignment(peer_id=PeerId(p), layers=LayerRange(a, b), endpoint=f"{p}:1")
            for p, a, b in stages
        )
        await self.host.assign(
            Assign(
                run_id=RUN,
                spec=self.spec,
                attempt=Attempt(attempt),
                assignments=assigned,
                committed_steps=committed_steps,
                fresh=fresh,
                spec_digest=self.spec.digest(),
                learners=learners,
            )
        )

    async def ready(self, **assign: Any) -> None:
        """Assigned, and loaded."""
        await self.assign(**assign)
        assert isinstance(await self.sent.get(), StageReady)

    async def step(self, step: int = 0, *, attempt: int = 1) -> StepReady:
        self.host.plan(plan_of(self.spec, step, attempt=attempt))
        ready = await self.sent.get()
        assert isinstance(ready, StepReady), ready
        return ready

    async def expect(self, kind: type[Sent]) -> Sent:
        """Return its next message, which must be of this kind."""
        message = await self.sent.get()
        assert isinstance(message, kind), message
        return message

    @property
    def held(self) -> HeldStage:
        """Return the stage that it reports."""
        stage = self.host.reported_state
        assert stage is not None
        return stage

    async def weights(self) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.compute, weights_digest, self.engines[-1])

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """The compute thread has other things to do meanwhile."""
        gate = threading.Event()
        try:
            self.compute.submit(gate.wait)
            yield
        finally:
            gate.set()

    @asynccontextmanager
    async def called(self) -> AsyncIterator[Hand]:
        """The stage before this one, driven by hand."""
        server = await self.transport.serve("me", 1, {LINK: self.links.answer})
        caller = Caller(self.transport, "before", "me")
        caller.endpoint = server.endpoint
        try:
            yield await caller.link()
        finally:
            await caller.close()
            await server.stop()

    async def close(self) -> None:
        await self.host.stop()
        await self.links.close()
        self.compute.shutdown()
        self.codecs.shutdown()


def plan_of(spec: RunSpec, step: int, *, attempt: int = 1) -> PlanStep:
    batches = step_microbatches(spec.train, StepNumber(step))
    tokens = {
        sample: (np.arange(SEQ_LENGTH, dtype="<u4") + sample).tobytes()
        for batch in batches
        for sample in batch.samples
    }
    return PlanStep(
        run_id=RUN,
        attempt=Attempt(attempt),
        step=StepNumber(step),
        microbatches=batches,
        tokens=tokens,
        num_targets=len(tokens) * (SEQ_LENGTH - 1),
        lengths=(SEQ_LENGTH,) * len(tokens),
    )


def commit_of(step: int, *, attempt: int = 1) -> CommitStep:
    return CommitStep(
        run_id=RUN,
        attempt=Attempt(attempt),
        step=StepNumber(step),
        clip_factor=1.0,
        learning_rate=0.05,
    )


@pytest.fixture
async def make_peer(spec: RunSpec, tmp_path: Path) -> AsyncIterator[MakePeer]:
    made: list[Peer] = []

    def make(*, run_spec: RunSpec = spec, shard_dir: Path = tmp_path, **changes: Any) -> Peer:
        made.append(Peer(run_spec, shard_dir, **changes))
        return made[-1]

    yield make
    for peer in made:
        await peer.close()


@pytest.fixture
async def peer(make_peer: MakePeer) -> Peer:
    return make_peer()


# ---- commits


async def test_a_committed_step_changes_the_weights_and_the_next_one_runs(peer: Peer) -> None:
    await peer.ready()
    before = await peer.weights()
    first = await peer.step(0)
    assert first.squared_grad_norm > 0
    assert await peer.weights() == before, "gradients wait for their commit"
    await peer.host.commit(commit_of(0))
    assert await peer.weights() != before
    assert peer.held.committed_steps == 1
    assert (await peer.step(1)).step == 1


async def test_a_commit_that_comes_twice_changes_nothing(peer: Peer) -> None:
    await peer.ready()
    await peer.step(0)
    await peer.host.commit(commit_of(0))
    once = await peer.weights()
    await peer.host.commit(commit_of(0))
    assert await peer.weights() == once
    await peer.step(1)
    await peer.host.commit(commit_of(0))
    assert await peer.weights() == once
    assert peer.held.committed_steps == 1


async def test_a_commit_of_another_step_is_refused_and_changes_nothing(peer: Peer) -> None:
    await peer.ready()
    before = await peer.weights()
    await peer.step(0)
    with pytest.raises(OutOfTurn, match="expected a commit of step 0, got 1"):
        await peer.host.commit(commit_of(1))
    assert await peer.weights() == before
    await peer.host.commit(commit_of(0))
    assert peer.held.committed_steps == 1


async def test_numbers_that_the_optimizer_refuses_leave_no_half_stepped_weights(
    peer: Peer,
) -> None:
    await peer.ready()
    await peer.step(0)
    with pytest.raises(NonFinite, match=r"^step 0: adamw cannot step layers "):
        await peer.host.commit(replace(commit_of(0), learning_rate=1e38))
    assert peer.host.reported_state is None, "its weights are stepped in part"
    await peer.assign(attempt=2)
    await peer.expect(StageReady)
    assert peer.held.committed_steps == 0


async def test_a_commit_without_gradients_is_refused(peer: Peer) -> None:
    with pytest.raises(OutOfTurn):
        await peer.host.commit(commit_of(0))
    await peer.ready()
    with pytest.raises(OutOfTurn, match="attempt 1 here, got none"):
        await peer.host.commit(commit_of(0))
    assert peer.held.committed_steps == 0


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError)


async def assert_counted_once(peer: Peer) -> None:
    assert peer.held.committed_steps == 1
    once = await peer.weights()
    await peer.ready(attempt=2, committed_steps=1, fresh=False)
    assert await peer.weights() == once
    await peer.step(1, attempt=2)


async def test_a_commit_that_is_cancelled_in_the_queue_still_counts_once(peer: Peer) -> None:
    await peer.ready()
    await peer.step(0)
    async with peer.busy():
        commit = asyncio.create_task(peer.host.commit(commit_of(0)))
        await asyncio.sleep(0)
        await cancelled(commit)
        again = asyncio.create_task(peer.host.commit(commit_of(0)))
    await again
    await assert_counted_once(peer)


@asynccontextmanager
async def commit_cancelled_at_work(peer: Peer) -> AsyncIterator[threading.Event]:
    """The caller is gone, the engine still applies; it ends with the block, or sooner."""
    (engine,) = peer.engines
    apply, begun, gate = engine.apply, threading.Event(), threading.Event()

    def slowly(*args: Any) -> None:
        begun.set()
        gate.wait()
        apply(*args)

    pytest.MonkeyPatch().setattr(engine, "apply", slowly)
    commit = asyncio.create_task(peer.host.commit(commit_of(0)))
    await asyncio.get_running_loop().run_in_executor(peer.codecs, begun.wait)
    await cancelled(commit)
    try:
        yield gate
    finally:
        gate.set()


async def test_a_commit_that_is_cancelled_at_work_still_counts_once(peer: Peer) -> None:
    await peer.ready()
    await peer.step(0)
    async with commit_cancelled_at_work(peer):
        again = asyncio.create_task(peer.host.commit(commit_of(0)))
    await again
    await assert_counted_once(peer)


async def test_a_host_that_is_closed_has_ended_its_commit(peer: Peer) -> None:
    await peer.ready()
    await peer.step(0)
    async with commit_cancelled_at_work(peer) as gate:
        closing = asyncio.create_task(peer.host.close())
        await asyncio.get_running_loop().run_in_executor(peer.codecs, int)
        assert not closing.done(), "its threads are still needed"
        gate.set()
        await closing
        assert peer.held.committed_steps == 1


async def test_gradients_outlive_an_attempt_that_ends_before_their_commit(peer: Peer) -> None:
    await peer.ready()
    await peer.step(0)
    await peer.host.stop()
    await peer.host.commit(commit_of(0))
    await peer.ready(attempt=2, committed_steps=1, fresh=False)
    assert (await peer.step(1, attempt=2)).step == 1


async def test_a_step_that_is_planned_again_gives_the_same_gradients(peer: Peer) -> None:
    await peer.ready()
    first = await peer.step(0)
    await peer.ready(attempt=2, fresh=False)
    again = await peer.step(0, attempt=2)
    assert (again.squared_grad_norm, again.loss_sum) == (first.squared_grad_norm, first.loss_sum)


# ---- plans


async def test_a_plan_of_an_older_attempt_is_void(peer: Peer) -> None:
    await peer.ready(attempt=1)
    await peer.ready(attempt=2, fresh=False)
    peer.host.plan(plan_of(peer.spec, 0, attempt=1))
    assert (await peer.step(0, attempt=2)).attempt == 2
    assert peer.sent.empty()


async def test_plans_before_and_after_an_attempt_are_void(peer: Peer) -> None:
    peer.host.plan(plan_of(peer.spec, 0))
    await peer.ready()
    await peer.host.stop()
    peer.host.plan(plan_of(peer.spec, 0))
    assert peer.sent.empty()


async def test_a_plan_while_another_waits_is_out_of_turn(peer: Peer) -> None:
    await peer.ready()
    peer.host.plan(plan_of(peer.spec, 0))
    with pytest.raises(OutOfTurn, match="step 1 was planned while another one waits"):
        peer.host.plan(plan_of(peer.spec, 1))


async def test_a_plan_without_tokens_fails_the_attempt(peer: Peer) -> None:
    await peer.ready()
    whole = plan_of(peer.spec, 0)
    peer.host.plan(
        PlanStep(
            run_id=RUN, attempt=Attempt(1), step=StepNumber(0), microbatches=whole.microbatches
        )
    )
    failed = await peer.expect(StageFailed)
    assert failed.code == "malformed-message"
    await peer.ready(attempt=2, fresh=False)
    await peer.step(0, attempt=2)


@pytest.mark.parametrize("codecs", [("zip", "q4"), ("q4", "q4"), ("aq4", ""), ("aq4", "q4+ef")])
async def test_a_plan_by_codecs_that_cannot_follow_is_refused(
    peer: Peer, codecs: tuple[str, str]
) -> None:
    await peer.ready()
    with pytest.raises(MalformedMessage, match=r"plan of step 0: --[fb]w: codec '"):
        peer.host.plan(replace(plan_of(peer.spec, 0), codecs=Codecs(*codecs)))
    await peer.step(0)


# ---- assignments


async def test_nothing_is_held_until_the_stage_is_loaded(peer: Peer) -> None:
    assert peer.host.reported_state is None
    await peer.ready()
    stage = peer.held
    assert (str(stage.layers), stage.committed_steps, stage.exported) == ("0-2", 0, None)
    assert stage.spec_digest == peer.spec.digest()


async def test_a_fresh_assignment_goes_back_to_the_first_weights(peer: Peer) -> None:
    await peer.ready()
    first = await peer.weights()
    await peer.step(0)
    await peer.host.commit(commit_of(0))
    await peer.ready(attempt=2, fresh=True)
    assert await peer.weights() == first
    assert peer.held.committed_steps == 0
    assert len(peer.engines) == 2


async def test_an_assignment_that_counts_other_steps_than_are_here_fails(peer: Peer) -> None:
    await peer.ready()
    await peer.assign(attempt=2, committed_steps=3, fresh=False)
    failed = await peer.expect(StageFailed)
    assert (failed.code, failed.attempt) == ("out-of-turn", 2)
    assert "expected 3 committed steps here, got 0" in failed.message


async def test_gradients_of_another_attempt_are_not_applied(peer: Peer) -> None:
    await peer.ready()
    await peer.step(0)
    await peer.ready(attempt=2, fresh=False)
    await peer.step(0, attempt=2)
    before = await peer.weights()
    with pytest.raises(OutOfTurn, match="of attempt 1 here, got attempt 2"):
        await peer.host.commit(commit_of(0, attempt=1))
    assert await peer.weights() == before
    await peer.host.commit(commit_of(0, attempt=2))
    assert peer.held.committed_steps == 1


async def test_a_client_learns_nothing_of_why_a_model_cannot_be_opened(
    make_peer: MakePeer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "nowhere"
    peer = make_peer(make_engine=lambda spec, layers: open_checkpoint(str(missing)))
    await peer.assign()
    failed = await peer.expect(StageFailed)
    assert failed.code == "model-unavailable"
    assert failed.message == UNAVAILABLE
    assert str(missing) in caplog.text
    assert peer.host.reported_state is None


async def test_other_weights_than_the_runs_are_told(make_peer: MakePeer, spec: RunSpec) -> None:
    other = replace(spec, model=replace(spec.model, block_digests=(bytes(16),) * 2))
    peer = make_peer(run_spec=other)
    await peer.assign()
    failed = await peer.expect(StageFailed)
    assert failed.code == "model-differs"
    assert "the model differs in its block 0" in failed.message
    assert spec.model.reference not in failed.message


async def test_a_bug_is_told_without_its_detail_and_logged_with_it(
    make_peer: MakePeer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(spec: RunSpec, layers: LayerRange) -> Engine:
        raise KeyError("secret detail")

    peer = make_peer(make_engine=broken)
    await peer.assign()
    failed = await peer.expect(StageFailed)
    assert failed.code == "internal"
    assert "secret" not in failed.message
    assert "secret detail" in caplog.text


# ---- neighbours


def hello(peer: Peer, **changes: Any) -> BoundaryHello:
    fields: dict[str, Any] = {
        "run_id": RUN,
        "spec_digest": peer.spec.digest(),
        "boundary": BlockIndex(1),
        "peer_id": PeerId("before"),
        "attempt": Attempt(1),
        "window_frames": 8,
    }
    return BoundaryHello(**fields | changes)


# ---- newcomers

TWO = ((ME, 0, 2), ("other", 0, 2))


async def test_a_source_offers_its_state_beside_and_no_longer_than_somebody_takes_it(
    peer: Peer, tmp_path: Path
) -> None:
    learners = (Learner(peer_id=PeerId("other"), step=StepNumber(0), sources=(ME,)),)
    await peer.assign(stages=TWO, learners=learners)
    offered = await peer.sent.get()
    assert isinstance(offered, StageOffered), "before the other one is even connected"
    name = ShardName(run_id=RUN, step=StepNumber(0), layers=LayerRange(0, 2))
    path = peer.context.offers[name].path
    assert path.exists()
    assert offered.proofs.keys() == {"other"}

    await peer.assign(attempt=2, stages=TWO, learners=learners)
    again = await peer.sent.get()
    assert again == replace(offered, attempt=Attempt(2)), (
        "the next attempt's learner hears of it too"
    )

    later = replace(learners[0], peer_id=PeerId("third"))
    await peer.assign(attempt=2, stages=(*TWO, ("third", 0, 2)), learners=(*learners, later))
    both = await peer.sent.get()
    assert isinstance(both, StageOffered)
    assert both.proofs.keys() == {"other", "third"}
    assert both.proofs[PeerId("other")] == offered.proofs[PeerId("other")]
    assert both.proofs[PeerId("third")] != offered.proofs[PeerId("other")]

    await peer.ready(attempt=3)
    assert name not in peer.context.offers
    assert not path.exists()


async def test_who_takes_over_holds_nothing_and_begins_anew_if_it_did_not_hear_all(
    peer: Peer,
) -> None:
    async with peer.called():
        learners = (Learner(peer_id=ME, step=StepNumber(3), sources=(PeerId("other"),)),)
        await peer.assign(stages=TWO, committed_steps=3, fresh=False, learners=learners)
        assert peer.host.reported_state is None
        await peer.assign(attempt=2, stages=TWO, committed_steps=4, fresh=False, learners=learners)
        failed = await peer.expect(StageFailed)
        assert failed.code == "out-of-turn"
        assert "the sums of all 4 committed steps" in failed.message


async def test_a_state_that_is_offered_before_the_learner_has_begun_is_fetched_nevertheless(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.peer.state.learner.RETRY_S", 0.0)
    learners = (Learner(peer_id=ME, step=StepNumber(3), sources=(PeerId("other"),)),)
    async with peer.called(), peer.busy():
        await peer.assign(stages=TWO, committed_steps=3, fresh=False, learners=learners)
        take = CatchUp(
            run_id=RUN,
            attempt=Attempt(1),
            digest=bytes(16),
            total_bytes=1,
            sources=(PeerId("other"),),
        )
        peer.host.start_catch_up(take)
    failed = await peer.expect(StageFailed)
    assert "no source has a list" in failed.message, "it tried"


async def test_a_step_is_not_computed_by_who_has_not_caught_up(peer: Peer) -> None:
    learners = (Learner(peer_id=ME, step=StepNumber(3), sources=(PeerId("other"),)),)
    await peer.ready(stages=((ME, 0, 2),), committed_steps=3, fresh=False, learners=learners)
    peer.host.plan(plan_of(peer.spec, 3, attempt=1))
    failed = await peer.expect(StageFailed)
    assert "over a peer that has not caught up" in failed.message


# ---- neighbours

BEHIND = (("before", 0, 1), (ME, 1, 2))


async def test_a_neighbour_that_hears_of_an_attempt_first_is_kept_waiting(peer: Peer) -> None:
    async with peer.called() as hand:
        await hand.send(hello(peer, attempt=2))
        await peer.assign(attempt=1, stages=BEHIND)
        assert (await hand.expect(BoundaryHello)).attempt == 1
        await peer.assign(attempt=2, stages=BEHIND)
        assert (await hand.expect(BoundaryHello)).attempt == 2
        assert isinstance(await peer.sent.get(), StageReady)


async def test_a_neighbour_waits_as_long_as_the_stage_takes_to_load(peer: Peer) -> None:
    async with peer.called() as hand:
        async with peer.busy():
            await peer.assign(stages=BEHIND)
            await hand.send(hello(peer))
            answer = asyncio.create_task(hand.receive())
            await asyncio.wait({answer}, timeout=0.05)
            assert not answer.done()
        answered = await answer
        assert isinstance(answered, BoundaryHello)
        assert answered.peer_id == ME
        assert isinstance(await peer.sent.get(), StageReady)


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"spec_digest": bytes(16)}, RunMismatch), ({"boundary": 2}, OutOfTurn)],
    ids=str,
)
async def test_a_stranger_is_not_let_in(
    peer: Peer, changes: dict[str, Any], error: type[SwarmError]
) -> None:
    await peer.assign(stages=BEHIND)
    async with peer.called() as stranger:
        assert (await stranger.expect(BoundaryHello)).peer_id == ME
        with pytest.raises(error):
            await stranger.fails(hello(peer, **changes))
    async with peer.called() as neighbour:
        await neighbour.send(hello(peer))
        assert isinstance(await peer.sent.get(), StageReady)


async def test_the_next_attempt_goes_on_over_the_stream_that_stands(peer: Peer) -> None:
    async with peer.called() as hand:
        for attempt in (1, 2, 3):
            await peer.assign(attempt=attempt, stages=BEHIND)
            await hand.send(hello(peer, attempt=attempt))
            assert (await hand.expect(BoundaryHello)).attempt == attempt
            assert isinstance(await peer.sent.get(), StageReady)
            await peer.host.stop()


async def test_a_neighbour_that_is_nowhere_fails_the_attempt(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.peer.links.UNREACHABLE_AFTER_S", 0.0)
    await peer.assign(stages=((ME, 0, 1), ("next", 1, 2)))
    failed = await peer.expect(StageFailed)
    assert failed.code == "unavailable"
    assert "peer next cannot be reached" in failed.message
    assert failed.about == "next"


async def test_another_spec_at_the_neighbour_behind_fails_the_attempt(peer: Peer) -> None:
    async def refuse(stream: LinkStream) -> None:
        await stream.receive()
        raise RunMismatch("digests differ")

    server = await peer.transport.serve("next", 1, {LINK: refuse})
    await peer.assign(stages=((ME, 0, 1), ("next", 1, 2)))
    assert (await peer.expect(StageFailed)).code == "unavailable"
    await server.stop()


# ---- results


async def test_an_export_without_a_stage_is_out_of_turn(peer: Peer) -> None:
    with pytest.raises(OutOfTurn, match="nothing is loaded"):
        await peer.host.export()


async def test_exported_weights_are_offered_until_the_run_is_released(
    peer: Peer, tmp_path: Path
) -> None:
    await peer.ready()
    assert peer.context.offers == {}
    await peer.host.export()
    exported = await peer.sent.get()
    assert isinstance(exported, StageExported)
    had_result = peer.host.has_result
    assert had_result
    assert peer.held.exported == exported.file
    name = ShardName(run_id=RUN, step=StepNumber(0), layers=LayerRange(0, 2), is_result=True)
    offered = peer.context.offers[name]
    assert chunks_of(offered.path).file == offered.chunks.file == exported.file
    assert "transformer.h.1.ln_1.weight" in load_file(offered.path)
    await peer.host.release()
    assert not offered.path.exists()
    assert peer.context.offers == {}
    assert not peer.host.has_result
    assert peer.host.reported_state is None
    await peer.host.release()


async def test_a_result_that_the_run_went_back_from_is_offered_no_more(peer: Peer) -> None:
    await peer.ready()
    await peer.step(0)
    await peer.host.commit(commit_of(0))
    await peer.host.export()
    assert isinstance(await peer.sent.get(), StageExported)
    (offered,) = peer.context.offers.values()
    await peer.ready(attempt=2, committed_steps=0)
    assert not peer.host.has_result
    assert peer.context.offers == {}
    assert not offered.path.exists()


class Gate:
    """A function that waits in its thread, once it was called, until it may go on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *args: object) -> Any:
        self.begun.set()
        self.may_go_on.wait()
        return self.function(*args)


@pytest.mark.parametrize("moment", ["written", "put"])
async def test_who_was_released_saves_no_more(
    make_peer: MakePeer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """Neither into its folder, which goes, nor into the run's snapshots."""
    store = SnapshotStore(str(tmp_path / "snapshots"))
    gate = Gate(write_shard if moment == "written" else store.put_shard)
    if moment == "written":
        monkeypatch.setattr("swarm_ft.peer.state.exchange.write_shard", gate)
    else:
        monkeypatch.setattr(store, "put_shard", gate)
    peer = make_peer(snapshots=store)
    await peer.ready()
    await peer.host.save(SaveStage(run_id=RUN, step=StepNumber(0)))
    await asyncio.get_running_loop().run_in_executor(peer.codecs, gate.begun.wait)
    releasing = asyncio.create_task(peer.host.release())
    # What is being written cannot be stopped: a release that does not wait for it is over by now.
    done, _ = await asyncio.wait({releasing}, timeout=0.3)
    gate.may_go_on.set()
    assert not done
    await releasing
    assert list((tmp_path / "saved").iterdir()) == []
    assert (tmp_path / "snapshots").exists() == (moment == "put")
    assert peer.sent.empty()


async def test_a_disk_that_cannot_be_written_is_unavailable(
    make_peer: MakePeer, tmp_path: Path
) -> None:
    peer = make_peer(shard_dir=tmp_path / "missing")
    await peer.ready()
    with pytest.raises(Unavailable, match="cannot be written"):
        await peer.host.export()
    assert not peer.host.has_result
