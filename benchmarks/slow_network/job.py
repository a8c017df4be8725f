"""Submits a job that visits all of its samples in every step; prints steps as lines of JSON.

python -m benchmarks.slow_network.job --invite INVITE --work JSON --train JSON
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.slow_network.training import (
    CLIP_GRAD_NORM,
    LEARNING_RATE,
    WEIGHT_DECAY,
    random_tokens,
)
from benchmarks.slow_network.way import add_way, way_of
from benchmarks.slow_network.work import Work
from swarm_ft.api.connections import SwarmAddress, connect
from swarm_ft.cli.running import run_async
from swarm_ft.client.trace import TraceFile
from swarm_ft.protocol.messages.client import Evaluated, RunPhase, StepCommitted
from swarm_ft.protocol.messages.events import Rollback
from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec
from swarm_ft.stage.checkpoint import open_checkpoint

VOCAB_SIZE = 256


def main() -> None:
    """Submit, watch, print."""
    options = _parser().parse_args()
    work = Work(**json.loads(options.work))
    model = open_checkpoint(options.model).describe() if options.model else emulated_model(work)
    spec = RunSpec(model=model, train=_train_spec(work, json.loads(options.train)))
    tokens = random_tokens(work, model.vocab_size).numpy().astype("<u4")
    run_async(lambda: _run(way_of(options), spec, tokens, options.trace))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_way(parser)
    parser.add_argument("--work", required=True, help="a Work as JSON")
    parser.add_argument("--train", required=True, help="other fields of a TrainSpec as JSON")
    parser.add_argument("--model", help="directory; none is emulated")
    parser.add_argument("--trace", type=Path, help="write a trace there")
    return parser


def emulated_model(work: Work) -> ModelSpec:
    """Describe a model without weights, of one block a stage."""
    return ModelSpec(
        reference="emulated",
        architecture="gpt2",
        num_blocks=work.stages,
        hidden_size=work.channels,
        vocab_size=VOCAB_SIZE,
        block_bytes=1,
        embed_digest=bytes(16),
        block_digests=(bytes(16),) * work.stages,
        head_digest=bytes(16),
        nonce=bytes(16),
        tied_embeddings=False,
    )


def _train_spec(work: Work, fields: dict[str, Any]) -> TrainSpec:
    """Every step visits all samples, so the first is a whole epoch."""
    return TrainSpec(
        num_samples=work.batch_size,
        seq_length=work.tokens,
        batch_size=work.batch_size,
        micro_batch_size=work.micro_batch_size,
        learning_rate=LEARNING_RATE,
        lr_schedule=LrSchedule.CONSTANT,
        weight_decay=WEIGHT_DECAY,
        clip_grad_norm=CLIP_GRAD_NORM,
        seed=0,
        **fields,
    )


async def _run(
    way: SwarmAddress, spec: RunSpec, tokens: NDArray[np.uint32], trace: Path | None
) -> None:
    async with connect(way) as client:
        run = await client.submit(spec, [row.tobytes() for row in tokens])
        with TraceFile(trace, _print_trouble) if trace else nullcontext() as file:
            watching = client.watch(run.run_id, _print_trouble, file.add if file else None)
            async with aclosing(watching) as events:
                async for event in events:
                    if isinstance(event, StepCommitted):
                        _print_step(event)
                    elif isinstance(event, Evaluated | Rollback):
                        continue
                    elif event.phase is RunPhase.FAILED:
                        raise SystemExit(event.detail)
                    elif event.phase is RunPhase.FINISHED:
                        return


def _print_step(step: StepCommitted) -> None:
    sent = step.sent
    fields = {
        "step": step.step,
        "seconds": step.seconds,
        "loss": step.loss,
        "forward_bytes": sent.forward_bytes,
        "backward_bytes": sent.backward_bytes,
        "gradient_bytes": sent.gradient_bytes,
    }
    sys.stdout.write(f"{json.dumps(fields)}\n")
    sys.stdout.flush()


def _print_trouble(trouble: str) -> None:
    sys.stderr.write(f"{trouble}\n")


if __name__ == "__main__":
    main()
