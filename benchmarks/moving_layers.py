"""The speed of a run with a slow peer: before, while slow, and after layers have moved away.

    python -m benchmarks.moving_layers

One run: a coordinator, three peers that choose their layers, real gRPC, a small GPT-2 of random
weights. Peers' speeds are stated, not measured: each block of a microbatch takes 10 ms of sleep,
and at the slow one from a step on five times that. So what counts is the ratio of the three.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, StepCommitted
from swarm_ft.protocol.messages.events import EventKind, EventsRequest
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec, TrainSpec
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.local_swarm import LocalSwarm
from tests.paced_engine import paced

NUM_BLOCKS, ROOM = 6, 4
"""Of the model, and how many of them a peer has room for."""
NUM_STEPS, SLOW_AT = 110, 25
BLOCK_S, SLOWER = 0.01, 5.0
BATCH, TOKENS, VOCABULARY = 8, 16, 64


@dataclass
class Slow:
    """The peer that gets slow."""

    block_s: float = BLOCK_S

    def pace(self) -> float:
        """Return the present seconds of a block."""
        return self.block_s


def job(folder: Path) -> tuple[RunSpec, list[bytes]]:
    """Make a run and its samples."""
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=32, n_layer=NUM_BLOCKS, n_head=2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    train = TrainSpec(
        num_samples=64,
        num_steps=NUM_STEPS,
        seq_length=TOKENS,
        batch_size=BATCH,
        micro_batch_size=2,
        forward_codec="aq4",
        backward_codec="q4",
    )
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (64, TOKENS)).astype("<u4")
    spec = RunSpec(model=open_checkpoint(str(folder)).describe(), train=train)
    return spec, [row.tobytes() for row in tokens]


async def measured(folder: Path) -> None:
    """Run it, and print how fast it was."""
    spec, samples = job(folder / "model")
    room, slow = int(spec.memory_bytes(LayerRange(0, ROOM))), Slow()
    paces: dict[str, Callable[[], float]] = {
        "ada": Slow().pace,
        "bob": slow.pace,
        "eve": Slow().pace,
    }
    async with LocalSwarm(folder, [], num_keepers=2) as swarm:
        for name, pace in paces.items():
            await swarm.add_peer(PeerId(name), "auto", make_engine=paced(pace), memory_bytes=room)
        await swarm.all_joined()
        status = await swarm.client.submit(spec, samples)
        events: list[RunEvent] = []
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == SLOW_AT:
                slow.block_s = SLOWER * BLOCK_S
        happened = [one async for one in swarm.service.events(EventsRequest())]
    moves = [one for one in happened if one.kind is EventKind.RUN_MOVED]
    steps = [event for event in events if isinstance(event, StepCommitted)]
    moved_at = int(moves[0].to_step or 0)
    print(f"committed {len(steps)} steps of {NUM_STEPS}; moved {len(moves)} times")  # noqa: T201
    print(f"after step {moved_at}: {moves[0].words}")  # noqa: T201
    for words, some in (
        ("all alike", steps[5:SLOW_AT]),
        ("one is slow", steps[SLOW_AT + 2 : moved_at]),
        ("layers moved", steps[moved_at + 1 :]),
    ):
        rate = BATCH / (sum(step.seconds for step in some) / len(some))
        print(f"{words:12}  {rate:6.2f} samples/s over {len(some)} steps")  # noqa: T201


def main() -> None:
    """See the module's docstring."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measured(Path(folder)))


if __name__ == "__main__":
    main()
