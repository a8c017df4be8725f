"""The job of the honest client, which has to come out the same whatever happens beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.utils.logging import disable_progress_bar

from swarm_ft.proto import run_pb2
from swarm_ft.protocol.spec.run_spec import LrSchedule, RunSpec, TrainSpec
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.stage.checkpoint import open_checkpoint

VOCAB_SIZE, SEQ_LENGTH, NUM_BLOCKS = 96, 24, 6
NUM_SAMPLES = 20
NUM_STEPS = 24


@dataclass(frozen=True, slots=True)
class Job:
    """A run to submit, and its tokens."""

    spec: RunSpec
    samples: tuple[bytes, ...]


def make_job(work_dir: Path) -> Job:
    """A small model, and tokens of which there is something to learn.

    A step has two microbatches, and nothing is compressed. A sum of two is the same to the last bit
    in any order, and from any peers, so losses do not depend on the members.
    """
    torch.manual_seed(3)
    disable_progress_bar()
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=32,
        n_embd=32,
        n_layer=NUM_BLOCKS,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(work_dir / "model")
    train = TrainSpec(
        num_samples=NUM_SAMPLES,
        seq_length=SEQ_LENGTH,
        batch_size=4,
        micro_batch_size=2,
        num_steps=NUM_STEPS,
        learning_rate=3e-3,
        lr_schedule=LrSchedule.CONSTANT,
        seed=5,
        forward_codec="none",
        backward_codec="none",
        key_codec="fp16",
    )
    rng = np.random.default_rng(1)
    shape = (NUM_SAMPLES, SEQ_LENGTH // 4)
    tokens = rng.integers(0, VOCAB_SIZE, shape).repeat(4, axis=1).astype("<u4")
    model = open_checkpoint(str(work_dir / "model")).describe()
    return Job(RunSpec(model=model, train=train), tuple(row.tobytes() for row in tokens))


# ---- what hostile clients make of it


def with_blocks(spec: RunSpec, num_blocks: int) -> RunSpec:
    """Return the spec with another model, which has so many blocks."""
    digests = spec.model.block_digests
    digests = (digests * (num_blocks // len(digests) + 1))[:num_blocks]
    return replace(spec, model=replace(spec.model, num_blocks=num_blocks, block_digests=digests))


def of_model(spec: RunSpec, reference: str) -> RunSpec:
    """Return the spec with a model at another place."""
    return replace(spec, model=replace(spec.model, reference=reference))


def spec_message(spec: RunSpec) -> run_pb2.RunSpec:
    """Convert a spec to the message on the wire."""
    return run_pb2.RunSpec.FromString(RUN_SPEC.to_bytes(spec))
