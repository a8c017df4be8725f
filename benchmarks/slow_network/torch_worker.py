"""One stage of torch.distributed.pipelining.

The last stage takes a step for every line of its input, the others with it, and prints its seconds
and loss as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    RECV_B,
    RECV_F,
    PipelineScheduleSingle,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from benchmarks.slow_network.torch_pipeline import STEP_TIMEOUT_S, StageJob
from benchmarks.slow_network.torch_stages import Training, emulated_training, real_training

PORT = 29500
RECEIVES = (RECV_F, RECV_B)


def main() -> None:
    """Run the command."""
    job = StageJob.from_json(sys.argv[1])
    torch.set_num_threads(1)
    _join(job)
    training = real_training(job) if job.setting.model else emulated_training(job)
    step = step_of(job, training)
    is_last = job.rank == job.work.stages - 1
    for _ in sys.stdin if is_last else repeat(None):
        dist.barrier()
        began_s = time.monotonic()
        losses = step()
        dist.barrier()
        if is_last:
            words = {"seconds": time.monotonic() - began_s, "loss": sum(losses)}
            sys.stdout.write(json.dumps(words) + "\n")
            sys.stdout.flush()


def _join(job: StageJob) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{job.address}:{PORT}",
        rank=job.rank,
        world_size=job.work.stages,
        timeout=timedelta(seconds=STEP_TIMEOUT_S),
    )


def step_of(job: StageJob, training: Training) -> Callable[[], list[float]]:
    """Make a function that runs a step and returns its losses; only the last stage has any."""
    stages, is_first = job.work.stages, job.rank == 0
    stage = PipelineStage(
        training.module, job.rank, stages, torch.device("cpu"), dw_builder=training.weight_backward
    )
    kind = get_schedule_class(job.setting.schedule)
    schedule = kind(
        stage if issubclass(kind, PipelineScheduleSingle) else [stage],
        n_microbatches=job.work.num_microbatches,
        loss_fn=training.loss,
        scale_grads=False,
    )
    if job.setting.receive_ahead:
        _receive_ahead(schedule)

    def step() -> list[float]:
        inputs = (training.inputs,) if is_first else ()
        target = training.target if stage.is_last else None
        losses: list[Tensor] = []
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        training.optimizer_step()
        return [loss.item() for loss in losses]

    return step


def _receive_ahead(schedule: object) -> None:
    """Post all receives of a step at its beginning; the order of all else stays."""
    if not isinstance(schedule, _PipelineScheduleRuntime):
        raise TypeError(f"{type(schedule).__name__} receives when it needs an input, not ahead")
    order = schedule.pipeline_order_with_comms
    for rank, actions in order.items():
        order[rank] = sorted(actions, key=lambda action: action.computation_type not in RECEIVES)


if __name__ == "__main__":
    main()
