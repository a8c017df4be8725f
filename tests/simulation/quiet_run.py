"""The data of a simulated run, and what the run makes of it where nothing can go wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def quiet_run(spec: RunSpec) -> tuple[list[dict[int, bytes]], list[float]]:
    """Every block's weights before step 0, after it, and so on: one engine, nothing to go wrong.

    Beside them, the loss of the held-out samples with these weights.
    """
    engine = TinyEngine(spec, spec.model.layers)
    engine.load()
    history, losses = [engine.weights()], [_held_out_loss(engine, spec)]
    train = spec.train
    for number in range(train.num_steps):
        step = StepNumber(number)
        engine.begin_step(step, 1)
        for batch in step_microbatches(train, step):
            tokens = _tokens(batch.samples, train.seq_length)
            engine.forward_backward(batch.index, tokens, tokens)
            engine.weight_gradients(batch.index)
        norm = math.sqrt(engine.squared_grad_norm())
        engine.apply(clip_factor(train, norm), learning_rate_at(train, step))
        history.append(engine.weights())
        losses.append(_held_out_loss(engine, spec))
    return history, losses


def _held_out_loss(engine: TinyEngine, spec: RunSpec) -> float:
    train = spec.train
    tokens = [_tokens([row], train.seq_length) for row in range(train.num_samples, train.num_rows)]
    loss_sum = sum(engine.evaluate(one, one).loss_sum for one in tokens)
    return loss_sum / max(1, len(tokens) * (train.seq_length - 1))


def _tokens(samples: Sequence[int], seq_length: int) -> torch.Tensor:
    rows = [np.frombuffer(sample_tokens(s, seq_length), "<u4") for s in samples]
    return torch.from_numpy(np.stack(rows).astype(np.int64))
