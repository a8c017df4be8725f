"""A stage's open step is gone on with over attempts, however often they end, and counts once."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.messages.control import CommitStep, FromPeer
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.doubles.clock import ManualClock
from tests.doubles.directory import Board, StaticDirectory
from tests.doubles.memory_transport import MemoryTransport
from tests.simulation.engine import TinyEngine
from tests.states import weights_digest
from tests.unit.peer.conftest import links_of

RUN, STEP, BATCH = RunId("run"), StepNumber(0), MicrobatchIndex(0)


class FailsOnce(BufferStore):
    """Its first commit fails, as on a machine that is out of memory."""

    failure: Exception | None = MemoryError("no room for the order of the next epoch")

    def commit(self, step: StepNumber | None = None) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        super().commit(step)


@pytest.fixture
def state(make_spec: Callable[..., RunSpec]) -> Iterator[StageState]:
    """Make the state of a stage that has all blocks."""
    yield from made_state(make_spec(dp_codec="none"), BufferStore())


@pytest.fixture
def failing_once(make_spec: Callable[..., RunSpec]) -> Iterator[StageState]:
    """The same, with a store whose first commit fails."""
    yield from made_state(make_spec(dp_codec="none"), FailsOnce())


def made_state(spec: RunSpec, store: BufferStore) -> Iterator[StageState]:
    sent: list[FromPeer] = []
    transport = MemoryTransport()
    with ThreadPoolExecutor(1) as compute, ThreadPoolExecutor(2) as codecs:
        context = PeerContext(
            peer_id=PeerId("peer"),
            directory=StaticDirectory(Board(), ManualClock()),
            transport=transport,
            clock=ManualClock(),
            links=links_of("peer", transport),
            compute=compute,
            codecs=codecs,
            send_to_coordinator=sent.append,
            timeline=Timeline(ManualClock(), sent.append),
            memory_bytes=1 << 30,
        )
        yield StageState(context, RUN, spec, TinyEngine, store)


async def test_what_attempts_count_one_after_the_other_is_all_in_the_gradient(
    state: StageState, make_spec: Callable[..., RunSpec]
) -> None:
    """The first one gets as far as the sum over replicas, the second does more and ends early."""
    spec = make_spec(dp_codec="none")
    await state.load(LayerRange(0, spec.model.num_blocks))
    tokens = torch.arange(spec.train.seq_length)[None] % spec.model.vocab_size

    def compute(number: int) -> None:
        microbatch = MicrobatchIndex(number)
        state.engine.forward_backward(microbatch, tokens, tokens)
        state.engine.weight_gradients(microbatch)
        progress.done[microbatch] = (SampleId(number),)

    progress = await state.begin_step(STEP, 100)
    compute(0)
    one = progress.gradient = state.engine.flat_gradient()
    state.engine.take_sum(torch.zeros_like(one))

    await state.resume_step(progress)
    compute(1)
    both = state.engine.flat_gradient()
    assert not torch.equal(both, one)

    await state.resume_step(progress)
    assert torch.equal(state.engine.flat_gradient(), both)


def commit_of(step: int) -> CommitStep:
    return CommitStep(
        run_id=RUN, attempt=Attempt(1), step=StepNumber(step), clip_factor=1.0, learning_rate=0.05
    )


async def test_a_step_whose_buffers_cannot_be_kept_counts_once_and_costs_the_buffers(
    failing_once: StageState, make_spec: Callable[..., RunSpec]
) -> None:
    state, spec = failing_once, make_spec(dp_codec="none")
    await state.load(LayerRange(0, spec.model.num_blocks))
    tokens = torch.arange(spec.train.seq_length)[None] % spec.model.vocab_size
    key = BufferKey(RUN, BlockIndex(1), End.SENT, SampleId(0))
    other = BufferKey(RUN, BlockIndex(1), End.SENT, SampleId(1))
    record = BufferRecord(digest=bytes(16), tokens=1, channels=1, payload=b"older")
    for record_key in (key, other):
        state.store.put(record_key, record)

    async def train(step: int) -> None:
        progress = await state.begin_step(StepNumber(step), 100)
        state.engine.forward_backward(BATCH, tokens, tokens)
        state.engine.weight_gradients(BATCH)
        progress.done[BATCH] = (SampleId(0),)
        state.gradient_attempt = Attempt(1)
        made = BufferRecord(digest=bytes(16), tokens=1, channels=1, payload=b"step %d" % step)
        state.store.stage(key, made)

    await train(0)
    await state.commit(commit_of(0))
    assert (state.committed_steps, state.last_attempt) == (1, 1)
    assert (state.store.get(key), state.store.get(other)) == (None, record)
    assert state.store.take_lost() == [key]
    once = weights_digest(state.engine)
    await state.commit(commit_of(0))  # the coordinator repeats it to whoever joins again
    assert weights_digest(state.engine) == once

    await train(1)
    await state.commit(commit_of(1))
    assert state.committed_steps == 2
    stored = state.store.get(key)
    assert stored is not None
    assert stored.payload == b"step 1"
