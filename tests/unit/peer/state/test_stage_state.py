"""A stage's open step is gone on with over attempts, however often they end."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from swarm_ft.ids import PeerId, RunId
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.testing.clock import ManualClock
from tests.simulation.engine import TinyEngine

RUN, STEP = RunId("run"), 0


@pytest.fixture
def state(make_spec):
    """Of a stage that has all blocks."""
    with ThreadPoolExecutor(1) as compute, ThreadPoolExecutor(2) as codecs:
        context = PeerContext(
            peer_id=PeerId("peer"),
            directory=None,
            transport=None,
            clock=ManualClock(),
            links=None,
            compute=compute,
            codecs=codecs,
            say=[].append,
            timeline=Timeline(ManualClock(), [].append),
            memory_bytes=1 << 30,
        )
        yield StageState(context, RUN, make_spec(dp_codec="none"), TinyEngine)


async def test_what_attempts_count_one_after_the_other_is_all_in_the_gradient(state, make_spec):
    """The first one gets as far as the sum over replicas, the second does more and ends early."""
    spec = make_spec(dp_codec="none")
    await state.load(LayerRange(0, spec.model.num_blocks))
    tokens = torch.arange(spec.train.seq_length)[None] % spec.model.vocab_size

    def compute(microbatch):
        state.engine.forward_backward(microbatch, tokens, tokens)
        state.engine.weight_gradients(microbatch)
        state.progress.done[microbatch] = (microbatch,)

    await state.begin_step(STEP, 100)
    compute(0)
    one = state.progress.gradient = state.engine.flat_gradient()
    state.engine.take_sum(torch.zeros_like(one))

    await state.resume_step(state.progress)
    compute(1)
    both = state.engine.flat_gradient()
    assert not torch.equal(both, one)

    await state.resume_step(state.progress)
    assert torch.equal(state.engine.flat_gradient(), both)
