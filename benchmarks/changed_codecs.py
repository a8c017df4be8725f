"""A run whose owner changes its codecs on the way: bytes a step and losses, before and after.

    python -m benchmarks.changed_codecs --codecs aq2+z/q2+z,aq8/fp16 [--steps 30]

Three peers in one process train the demo's model over gRPC; every `--steps` steps, from the second
epoch on, the owner requests the next codecs, as on the page.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from swarm_ft.api.local_job import local_job_options, with_sample
from swarm_ft.client.job import Job, prepare_job
from swarm_ft.client.options import JobOptions
from swarm_ft.protocol.messages.client import RunStatus, StepCommitted
from swarm_ft.protocol.messages.reports import summed_by_boundary
from swarm_ft.protocol.spec.options import by_names
from swarm_ft.protocol.spec.run_spec import Codecs
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]


def main() -> None:
    """Train, and print a line for each pair of codecs."""
    options = _parser().parse_args()
    wanted = [Codecs(*pair.split("/")) for pair in options.codecs.split(",")]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="changed-") as folder:
        asyncio.run(_measure(Path(folder), wanted, options.steps))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--codecs", default="aq2+z/q2+z,aq8/fp16", help="down/up, with commas")
    parser.add_argument("--steps", type=int, default=30, help="by each pair")
    return parser


def _job(folder: Path) -> Job:
    options = {"max_samples": 64, "seq_length": 64, "batch_size": 8, "epochs": 100}
    return prepare_job(
        with_sample(local_job_options(by_names(JobOptions, options)), folder / "input")
    )


async def _measure(folder: Path, wanted: Sequence[Codecs], steps: int) -> None:
    job, left = _job(folder), list(wanted)
    change_at = job.spec.train.steps_per_epoch + steps
    made: list[StepCommitted] = []
    status: RunStatus | None = None
    async with LocalSwarm(folder, LAYERS) as swarm:
        await swarm.all_joined()
        run_id = (await swarm.client.submit(job.spec, job.samples)).run_id
        async for event in swarm.client.watch(run_id, lambda _trouble: None):
            status = event if isinstance(event, RunStatus) else status
            if not isinstance(event, StepCommitted):
                continue
            made.append(event)
            if len(made) >= change_at and left:
                codecs = left.pop(0)
                swarm.service.change_codecs(run_id, codecs.forward, codecs.backward)
                change_at = len(made) + steps
            elif len(made) >= change_at:
                break
    _show(job, made, status)


def _show(job: Job, made: Sequence[StepCommitted], status: RunStatus | None) -> None:
    for first, last, codecs in _in_turn(job, len(made), status):
        part = [event for event in made if first <= event.step < last]
        (one, *others) = part
        traffic = summed_by_boundary(t for event in part for t in event.traffic)
        sent = sum(t.forward_bytes + t.backward_bytes for t in traffic)
        plain = sum(t.forward_uncompressed_bytes + t.backward_uncompressed_bytes for t in traffic)
        keys = sum(t.key_frames for t in traffic)
        sys.stdout.write(
            f"steps {first:>3} to {last - 1:>3}  {codecs!s:<12} {sent / len(part):9,.0f} bytes a "
            f"step, {plain / sent:4.1f} times fewer; {keys} key frames; loss {one.loss:.3f} to "
            f"{(others or part)[-1].loss:.3f}\n"
        )


def _in_turn(
    job: Job, num_steps: int, status: RunStatus | None
) -> Iterator[tuple[int, int, Codecs]]:
    """Yield the epoch of key frames, then the range of steps of each pair of codecs."""
    begun, codecs = 0, job.spec.train.codecs
    changes = [(job.spec.train.steps_per_epoch, codecs)]
    changes += [(one.first_step, one.codecs) for one in (status.codecs if status else ())]
    for first_step, following in [*changes, (num_steps, codecs)]:
        if begun < first_step <= num_steps:
            yield begun, first_step, codecs
        begun, codecs = first_step, following


if __name__ == "__main__":
    main()
