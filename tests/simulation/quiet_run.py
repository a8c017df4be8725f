"""The data of a simulated run, and what the run makes of it where nothing can go wrong."""

from __future__ import annotations

import math

import numpy as np
import torch

from swarm_ft.ids import StepNumber
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.training_plan import clip_factor, learning_rate_at, step_microbatches
from tests.simulation.engine import MODULUS, TinyEngine


def sample_tokens(sample: int, seq_length: int) -> bytes:
    """Tokens of a sample: its id, then numbers that follow from it; little-endian uint32."""
    tokens = [sample, *((sample * 5 + t * 3 + 1) % MODULUS for t in range(1, seq_length))]
    return np.array(tokens, "<u4").tobytes()


def quiet_run(spec: RunSpec) -> list[dict[int, bytes]]:
    """Every block's weights before step 0, after it, and so on: one engine, nothing to go wrong."""
    engine = TinyEngine(spec, spec.model.layers)
    engine.load()
    history = [engine.weights()]
    train = spec.train
    for number in range(train.num_steps):
        step = StepNumber(number)
        engine.begin_step(step, 1)
        for batch in step_microbatches(train, step):
            rows = [np.frombuffer(sample_tokens(s, train.seq_length), "<u4") for s in batch.samples]
            tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
            engine.forward_backward(batch.index, tokens, tokens)
            engine.weight_gradients(batch.index)
        norm = math.sqrt(engine.squared_grad_norm())
        engine.apply(clip_factor(train, norm), learning_rate_at(train, step))
        history.append(engine.weights())
    return history
