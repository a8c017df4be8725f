"""Submits a job for emulated stages and prints its steps as lines of JSON.

python -m benchmarks.slow_network.job --initial-peers ADDRESS --spec JSON
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import aclosing
from typing import Any

import numpy as np

from swarm_ft.cli.client import connected
from swarm_ft.cli.running import run_async
from swarm_ft.protocol.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec
from swarm_ft.protocol.status import RunPhase, StepCommitted

VOCAB_SIZE = 256


def main() -> None:
    """Submit, watch, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--initial-peers", required=True)
    parser.add_argument("--spec", required=True, help="arguments of `run_spec` as JSON")
    options = parser.parse_args()
    spec = run_spec(**json.loads(options.spec))
    run_async(lambda: _run(options.initial_peers, spec))


def run_spec(*, blocks: int, channels: int, train: dict[str, Any]) -> RunSpec:
    """A run over `blocks` blocks of a model that nobody has."""
    digests = tuple(bytes([block % 256] * 16) for block in range(blocks))
    model = ModelSpec(
        reference="emulated",
        architecture="gpt2",
        num_blocks=blocks,
        hidden_size=channels,
        vocab_size=VOCAB_SIZE,
        block_bytes=1,
        embed_digest=bytes(16),
        block_digests=digests,
        head_digest=bytes(16),
        tied_embeddings=False,
    )
    fixed = TrainSpec(
        learning_rate=0.0,
        lr_schedule=LrSchedule.CONSTANT,
        warmup_steps=0,
        weight_decay=0.0,
        clip_grad_norm=1.0,
        seed=0,
        shuffle=False,
        dropout=False,
        sync_tied_embeddings=False,
        **train,
    )
    return RunSpec(model=model, train=fixed)


async def _run(initial_peers: str, spec: RunSpec) -> None:
    tokens = np.zeros(spec.train.seq_length, "<u4").tobytes()
    async with connected((initial_peers,), "swarm-ft") as client:
        run = await client.submit(spec, [tokens] * spec.train.num_samples)
        async with aclosing(client.watch(run.run_id, _say)) as events:
            async for event in events:
                if isinstance(event, StepCommitted):
                    sent = event.sent
                    _print(
                        step=event.step,
                        seconds=event.seconds,
                        forward_bytes=sent.forward_bytes,
                        backward_bytes=sent.backward_bytes,
                        gradient_bytes=sent.gradient_bytes,
                        key_frames=sum(t.key_frames for t in event.traffic),
                    )
                elif event.phase is RunPhase.FAILED:
                    raise SystemExit(event.detail)
                elif event.phase is RunPhase.FINISHED:
                    return


def _print(**fields: object) -> None:
    sys.stdout.write(f"{json.dumps(fields)}\n")
    sys.stdout.flush()


def _say(trouble: str) -> None:
    sys.stderr.write(f"{trouble}\n")


if __name__ == "__main__":
    main()
