"""The other systems on a lab's links, with a tiny work whose time and bytes are known before."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lab import Lab
from benchmarks.slow_network.emulated import EmulatedStage
from benchmarks.slow_network.hivemind_experts import (
    HivemindJob,
    RemoteExperts,
    measure_hivemind,
)
from benchmarks.slow_network.torch_pipeline import StageJob, TorchPipeline, measure_torch_pipeline
from benchmarks.slow_network.training import (
    CLIP_GRAD_NORM,
    LEARNING_RATE,
    WEIGHT_DECAY,
    random_tokens,
)
from benchmarks.slow_network.work import Measured, Network, Topology, Trial, Work
from swarm_ft.client.demo_input import write_demo_input
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.module import StageModule
from swarm_ft.stage.weights import StageWeights

WORK = Work(
    stages=3,
    tokens=512,
    channels=32,
    batch_size=4,
    micro_batch_size=1,
    forward_s=0.005,
    input_backward_s=0.003,
    weight_backward_s=0.002,
)
NETWORK = Network(up_mbps=50.0, down_mbps=50.0, topology=Topology.HOME)
TRIAL = Trial(work=WORK, network=NETWORK, steps=1)
OVERHEAD = 1.25
"""Of headers and what else travels, at most."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def compute_s(work: Work) -> float:
    """Return the seconds that a pipeline needs for compute alone, forward passes first."""
    return (work.stages + work.num_microbatches - 1) * (work.forward_s + work.backward_s)


def uplink_s(num_bytes: float) -> float:
    assert NETWORK.up_mbps is not None
    return num_bytes * 8 / (NETWORK.up_mbps * 1e6)


def check_took(measured: Measured, at_least_s: float) -> None:
    (step_s,), cpus = measured.step_s, os.cpu_count()
    assert at_least_s < step_s < 5 * at_least_s + 1.0
    assert cpus is not None
    assert 0 <= measured.cpus_used < cpus  # the kernel counts hundredths of a second


def test_emulated_stage_hands_on_what_it_was_given_as_dtype_in_time() -> None:
    stage = EmulatedStage(0.0, 0.0, torch.bfloat16)
    x = torch.randn(1, 4, 8, requires_grad=True)
    output = stage(x)
    gradient = torch.randn(1, 4, 8).bfloat16()
    output.backward(gradient)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, x.bfloat16())
    assert x.grad is not None
    assert stage.weight.grad is not None
    assert torch.equal(x.grad, gradient.float())
    assert torch.allclose(stage.weight.grad, gradient.float().sum())


def test_jobs_are_read_as_they_were_written() -> None:
    setting = TorchPipeline(schedule="1F1B", dtype="bfloat16", model="there")
    job = StageJob(rank=2, address="10.91.0.1", work=WORK, setting=setting)
    assert StageJob.from_json(job.to_json()) == job
    other = HivemindJob(address="10.91.0.2", work=WORK, compression="NONE", in_flight=2, rank=1)
    assert HivemindJob.from_json(other.to_json()) == other


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "value_bytes"),
    [
        (TorchPipeline(schedule="GPipe", dtype="float32"), 4),
        (TorchPipeline(schedule="InterleavedZeroBubble", dtype="bfloat16", receive_ahead=True), 2),
    ],
    ids=lambda value: value.name if isinstance(value, TorchPipeline) else "",
)
def test_torch_takes_the_time_of_the_work_and_sends_its_bytes(
    setting: TorchPipeline, value_bytes: int
) -> None:
    with Lab() as lab:
        measured = measure_torch_pipeline(lab, TRIAL, setting)
    way_bytes = WORK.num_microbatches * WORK.microbatch_bytes * value_bytes / 4
    notes: dict[str, Any] = measured.notes
    for sent, ways in zip(notes["sent_bytes"], (1, 2, 1), strict=True):
        assert ways * way_bytes < sent < OVERHEAD * ways * way_bytes
    overlapping = setting.schedule == "InterleavedZeroBubble"
    alone_s = WORK.num_microbatches * (WORK.forward_s + WORK.backward_s)
    check_took(measured, max(uplink_s(2 * way_bytes), alone_s if overlapping else compute_s(WORK)))


@needs_root
@pytest.mark.slow
def test_torch_trains_the_model_as_one_stage_of_ours_would(tmp_path: Path) -> None:
    sample = write_demo_input(tmp_path, seed=0, num_layers=3, hidden_size=32)
    work = replace(WORK, tokens=64)
    with Lab() as lab:
        setting = TorchPipeline(schedule="1F1B", model=sample.model_dir)
        measured = measure_torch_pipeline(lab, Trial(work=work, network=Network()), setting)
    assert measured.notes["losses"] == pytest.approx(losses_of(sample.model_dir, work), rel=1e-5)


def losses_of(model_dir: str, work: Work) -> list[float]:
    """Return the losses of three steps by one stage that has all layers."""
    checkpoint = open_checkpoint(model_dir)
    spec = checkpoint.describe()
    layers = LayerRange(0, spec.num_blocks)
    stage = StageModule(checkpoint.config, layers)
    stage.materialise(checkpoint.load(layers, spec), torch.device("cpu"))
    weights = StageWeights(stage.eval(), weight_decay=WEIGHT_DECAY)
    weights.linears.restore()
    tokens = random_tokens(work, spec.vocab_size)
    losses = []
    for _ in range(3):
        loss = stage.loss_sum(stage(tokens), tokens) / tokens[:, 1:].numel()
        torch.autograd.backward(loss)
        assert all(parameter.grad is not None for parameter in stage.parameters())
        norm = math.sqrt(weights.squared_grad_norm())
        weights.apply(min(1.0, CLIP_GRAD_NORM / norm), LEARNING_RATE)
        losses.append(loss.item())
    return losses


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize(("compression", "value_bytes"), [("UNIFORM_8BIT", 1)])
def test_hivemind_sends_all_through_its_client(compression: str, value_bytes: int) -> None:
    setting = RemoteExperts(compression=compression, in_flight=2)
    with Lab() as lab:
        measured = measure_hivemind(lab, TRIAL, setting)
    tensor_bytes = WORK.microbatch_bytes * value_bytes / 4
    one_stage_bytes = WORK.num_microbatches * tensor_bytes
    # Input, then input and gradient to a server; output, then the input's gradient from it.
    client_bytes = 3 * WORK.stages * one_stage_bytes
    notes: dict[str, Any] = measured.notes
    assert client_bytes < notes["client_sent_bytes"] < OVERHEAD * client_bytes
    for sent in notes["server_sent_bytes"]:
        assert 2 * one_stage_bytes < sent < OVERHEAD * 2 * one_stage_bytes
    in_turn = WORK.num_microbatches / setting.in_flight * WORK.stages
    seconds = in_turn * (2 * WORK.forward_s + WORK.backward_s)
    check_took(measured, max(uplink_s(client_bytes), seconds))
