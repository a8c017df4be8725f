"""A job for a swarm on this machine: its default model and data, and the layers of its peers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_ft.client.options import JobOptions
from swarm_ft.errors import BadOption, RunFailed
from swarm_ft.protocol.spec.layers import LayerRange, split_evenly
from swarm_ft.protocol.spec.options import build

if TYPE_CHECKING:
    from swarm_ft.client.swarm import SwarmClient

SAMPLE_LR = 2e-3
"""Learning rate of the demo's model with random weights; a trained model needs a far lower one."""
SAMPLE = {"model": "a small GPT-2 with random weights", "dataset": "Python's own source text"}
"""Descriptions of the default model and data."""
JOIN_TIMEOUT_S, JOIN_POLL_S = 60.0, 0.05


def local_job_options(given: Mapping[str, Any]) -> JobOptions:
    """Build a job's options; a missing model or dataset has an empty name.

    Raises:
        BadInput: An option is out of its bounds.
    """
    own = {name: given.get(name) or "" for name in SAMPLE}
    if not own["model"] and given.get("learning_rate") is None:
        own["learning_rate"] = SAMPLE_LR
    return build(JobOptions, {**given, **own})


def with_sample(asked: JobOptions, folder: Path) -> JobOptions:
    """Write the default model and data into `folder`, if the options name none."""
    from swarm_ft.client.demo_input import write_demo_input

    if asked.model and asked.datasets:
        return asked
    made = write_demo_input(folder, seed=asked.train.seed)
    evaluation = asked.evaluation
    if not asked.datasets and evaluation.eval_dataset is None:
        evaluation = replace(evaluation, eval_dataset=made.eval_file)
    return replace(
        asked,
        model=asked.model or made.model_dir,
        dataset=asked.datasets or made.train_file,
        evaluation=evaluation,
    )


def check_stages(options: JobOptions, stages: int) -> LayerRange:
    """Return the blocks of the job's model.

    Raises:
        BadOption: The model has fewer blocks than stages.
    """
    from swarm_ft.stage.checkpoint import open_checkpoint

    num_blocks = open_checkpoint(options.model, options.train).config.num_hidden_layers
    if stages > num_blocks:
        raise BadOption(
            f"--stages: expected at most {num_blocks}, the model's layers, got {stages}"
        )
    return LayerRange(0, num_blocks)


def peer_names(stages: int, replicas: int) -> tuple[str, ...]:
    """Name the peers by stage and replica, as `stage-2`, or `stage-2.1` with several replicas."""
    return tuple(
        f"stage-{stage}" + f".{replica}" * (replicas > 1)
        for replica in range(1, replicas + 1)
        for stage in range(1, stages + 1)
    )


def layers_by_peer(layers: LayerRange, stages: int, replicas: int) -> dict[str, str]:
    """Return the layers of each peer, by the peer's name, as equal parts for the stages."""
    parts = [str(part) for part in split_evenly(layers, stages)]
    return dict(zip(peer_names(stages, replicas), parts * replicas, strict=True))


async def wait_for_peers(client: SwarmClient, num_peers: int) -> None:
    """Wait for all peers, since a peer that joins after the first step must fetch weights.

    Raises:
        RunFailed: Some peers did not join in time.
    """
    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            while len((await client.status()).members) < num_peers:  # noqa: ASYNC110
                await asyncio.sleep(JOIN_POLL_S)
    except TimeoutError:
        raise RunFailed(
            f"expected {num_peers} peers to join within {JOIN_TIMEOUT_S:g} s; see their logs"
        ) from None
