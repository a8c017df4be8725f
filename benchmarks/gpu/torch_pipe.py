"""torch.distributed.pipelining on the same GPU, model and links: a process a stage, on Gloo.

    python -m benchmarks.gpu.torch_pipe JSON

Stages are this project's own modules without its codecs and links, computing where the swarm's do;
what they send travels as it is, over links that are paced by whoever sends. Reads lines
`{"system": NAME, "mbps": X, "steps": N}`; the last stage answers each with its steps' seconds.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from benchmarks.gpu.paced_link import Pace, Rate
from benchmarks.slow_network.torch_pipeline import StageJob, TorchPipeline
from benchmarks.slow_network.torch_stages import Training
from benchmarks.slow_network.torch_worker import step_of
from benchmarks.slow_network.work import Work
from swarm_ft.proto import run_pb2
from swarm_ft.protocol.spec.layers import LayerRange, split_evenly
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.device import DTYPES
from swarm_ft.stage.engine import StageEngine

STEP_TIMEOUT_S = 600.0
SYSTEMS = {
    "torch 1F1B bfloat16": TorchPipeline(schedule="1F1B", dtype="bfloat16"),
    "torch 1F1B bfloat16, receives ahead": TorchPipeline(
        schedule="Interleaved1F1B", dtype="bfloat16", receive_ahead=True
    ),
    "torch GPipe float32": TorchPipeline(schedule="GPipe"),
}


def main() -> None:
    """Run the command: an argument, then lines of JSON."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, stages = order["rank"], order["stages"]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{order['port']}",
        rank=rank,
        world_size=stages,
        timeout=timedelta(seconds=STEP_TIMEOUT_S),
    )
    rate = Rate()
    schedules._batch_p2p = paced(rate)  # noqa: SLF001 - torch has no other place for a link
    spec = RUN_SPEC.from_wire(run_pb2.RunSpec.FromString(bytes.fromhex(order["spec"])))
    engine = _engine(order, spec)
    steps: dict[str, Callable[[], list[float]]] = {}
    for line in sys.stdin:
        words = json.loads(line)
        rate.set_mbps(words["mbps"])
        name = words["system"]
        if name not in steps:
            setting = SYSTEMS[name]
            job = StageJob(rank=rank, address="", work=_work(order, spec), setting=setting)
            training = _training(engine, order, spec, getattr(torch, setting.dtype))
            steps[name] = step_of(job, training)
        seconds = [_timed(steps[name]) for _ in range(words["steps"])]
        if rank == stages - 1:
            sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")
            sys.stdout.flush()


def _timed(step: Callable[[], list[float]]) -> float:
    dist.barrier()
    began_s = time.monotonic()
    step()
    dist.barrier()
    return time.monotonic() - began_s


def _work(order: Mapping[str, Any], spec: RunSpec) -> Work:
    return Work(
        stages=order["stages"],
        tokens=spec.train.seq_length,
        channels=spec.model.hidden_size,
        batch_size=spec.train.batch_size,
        micro_batch_size=1,
        forward_s=0.0,
        input_backward_s=0.0,
        weight_backward_s=0.0,
    )


def _engine(order: Mapping[str, Any], spec: RunSpec) -> StageEngine:
    """Load the swarm's own stage, whose module and optimizer torch's pipeline uses."""
    layers = split_evenly(LayerRange(0, spec.model.num_blocks), order["stages"])[order["rank"]]
    device, dtype = torch.device(order["device"]), DTYPES[order["dtype"]]
    checkpoint = open_checkpoint(spec.model.reference, spec.train)
    engine = StageEngine(checkpoint, spec, layers, device=device, dtype=dtype)
    engine.load()
    if not spec.train.adapts:  # torch's own backward passes
        engine.weights.linears.restore()
    return engine


def _training(
    engine: StageEngine, order: Mapping[str, Any], spec: RunSpec, sent: torch.dtype
) -> Training:
    generator = torch.Generator().manual_seed(0)
    shape = spec.train.batch_size, spec.train.seq_length
    tokens = torch.randint(spec.model.vocab_size, shape, generator=generator)
    num_targets = tokens.shape[0] * (tokens.shape[1] - 1)
    module, device = engine.weights.module, torch.device(order["device"])
    return Training(
        module=_Stage(engine, device, DTYPES[order["dtype"]], sent),
        inputs=tokens,
        target=tokens,
        loss=lambda hidden, target: module.loss_sum(hidden, target.to(device)) / num_targets,
        optimizer_step=lambda: _step(engine),
    )


def _step(engine: StageEngine) -> None:
    # Of adapters: their base may be in a form that only these layers unpack.
    for product in engine.weights.linears.take():
        product.accumulate()
    engine.weights.squared_grad_norm()
    engine.weights.apply(1.0, 1e-4)
    engine.weights.zero_grad()


class _Stage(nn.Module):
    """A stage from tokens [B, T] or hidden [B, T, C] on the CPU to hidden there, in its dtype."""

    def __init__(
        self, engine: StageEngine, device: torch.device, computes: torch.dtype, sent: torch.dtype
    ) -> None:
        super().__init__()
        self._stage, self._device, self._sent = engine.weights.module, device, sent
        self._is_narrow = computes is torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, self._is_narrow):
            hidden: Tensor = self._stage(x if self._stage.is_first else x.float())
        hidden = hidden.float()
        return hidden if self._stage.is_last else hidden.to(self._sent).cpu()


# ---- links


class _Sender:
    """The sends to one neighbour, one after the other, no faster than the rate."""

    def __init__(self, rate: Rate) -> None:
        self._pace = Pace(rate)
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], _Sent]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, send: Callable[[], Any], num_bytes: int) -> _Sent:
        """Send it when all before it is sent."""
        sent = _Sent(num_bytes)
        self._waiting.put((send, sent))
        return sent

    def _run(self) -> None:
        while True:
            was_idle = self._waiting.empty()
            send, sent = self._waiting.get()
            wait_s = self._pace.wait_s(sent.num_bytes, time.monotonic(), was_idle=was_idle)
            time.sleep(max(0.0, wait_s))
            send().wait()
            sent.done.set()


class _Sent:
    """A pending send with the part of torch's own interface that pipelining uses."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.done = threading.Event()

    def wait(self) -> None:
        """Wait until it is sent."""
        self.done.wait()


def paced(rate: Rate) -> Callable[..., list[Any]]:
    """Make a substitute for torch's batches of sends and receives that paces the sends."""
    senders: dict[int, _Sender] = {}

    def begin(ops: Sequence[dist.P2POp], desc: str | None = None) -> list[Any]:
        works = []
        for op in ops:
            run = partial(op.op, op.tensor, op.peer, group=op.group, tag=op.tag)
            if op.op is not dist.isend:
                works.append(run())
                continue
            sender = senders.setdefault(op.peer, _Sender(rate))
            works.append(sender.put(run, op.tensor.numel() * op.tensor.element_size()))
        return works

    return begin


if __name__ == "__main__":
    main()
