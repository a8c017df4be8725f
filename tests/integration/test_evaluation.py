"""The swarm evaluates held-out samples on the way, as the whole model would in one process."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import Evaluated, RunEvent, RunStatus, StepCommitted
from swarm_ft.protocol.messages.reports import ByteCounts
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import EvalCompression, EvalStrategy, RunSpec
from swarm_ft.stage.base import Engine, Lengths, LossAndCounts
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.integration.test_parity import exported_weights, losses_of, plain_loop
from tests.local_swarm import LocalSwarm

RTOL = 1e-4
HELD_OUT = 7
"""Not a whole number of microbatches."""


def evaluations_of(events: Iterable[RunEvent]) -> list[Evaluated]:
    return [event for event in events if isinstance(event, Evaluated)]


def sent_for(events: Iterable[RunEvent]) -> list[ByteCounts]:
    """Return the bytes that each step sent to train."""
    return [event.sent for event in events if isinstance(event, StepCommitted)]


def held_out_loss(model: Any, job: Job) -> float:
    """Return the held-out loss of the whole model, in one process."""
    tokens = job.tokens[job.spec.train.num_samples :]
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


@pytest.mark.parametrize("layers", [["0-6"], ["0-2", "2-5", "5-6"], ["0-3", "3-6", "0-3", "3-6"]])
async def test_every_evaluation_is_that_of_the_whole_model(
    make_job: MakeJob, tmp_path: Path, layers: list[str]
) -> None:
    job = make_job(num_steps=5, num_eval_samples=HELD_OUT, eval_steps=2, dropout=True)
    async with LocalSwarm(tmp_path, layers) as swarm:
        events = await swarm.train(job.spec, job.samples)
        weights = await exported_weights(swarm, events, tmp_path / "shards")
        repeated = await swarm.watch()
    found = evaluations_of(events)
    assert [one.step for one in found] == [0, 2, 4, 5]
    assert {one.num_samples for one in found} == {HELD_OUT}
    assert evaluations_of(repeated) == found
    _, model = plain_loop(job, untie=True, steps=0)
    assert found[0].eval_loss == pytest.approx(held_out_loss(model, job), rel=1e-6)
    model.load_state_dict(weights)
    assert found[-1].eval_loss == pytest.approx(held_out_loss(model, job), rel=1e-6)


async def test_evaluation_changes_nothing_of_the_training(
    make_job: MakeJob, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"num_steps": 6, "forward_codec": "aq4", "backward_codec": "q8"}
    layers = ["0-3", "3-6"]
    quiet = make_job(**changes)
    job = make_job(**changes, num_eval_samples=HELD_OUT, eval_steps=1)
    async with LocalSwarm(tmp_path, layers) as swarm:
        without = await swarm.train(quiet.spec, quiet.samples)
        status = [event for event in without if isinstance(event, RunStatus)][-1]
        await swarm.client.acknowledge_result(status.run_id)
        events = await swarm.train(job.spec, job.samples)
    assert losses_of(events) == losses_of(without)
    assert sent_for(events) == sent_for(without)
    for found in evaluations_of(events):
        (traffic,) = found.traffic
        plain = HELD_OUT * job.spec.train.seq_length * job.spec.model.hidden_size * 4
        assert traffic.evaluation_uncompressed_bytes == plain
        assert plain < traffic.evaluation_bytes < 1.1 * plain
    assert [one.step for one in evaluations_of(events)] == list(range(7))
    for step in (2, 4):
        _, model = plain_loop(job, untie=True, steps=step)
        loss = evaluations_of(events)[step].eval_loss
        assert loss == pytest.approx(held_out_loss(model, job), rel=0.01)


async def test_both_ways_of_evaluating_tell_what_compression_costs(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(
        num_steps=3,
        num_eval_samples=HELD_OUT,
        eval_compression=EvalCompression.BOTH,
        eval_strategy=EvalStrategy.EPOCH,
        num_samples=4,
        forward_codec="aq4",
        key_codec="q4",
    )
    async with LocalSwarm(tmp_path, ["0-3", "3-6"]) as swarm:
        events = await swarm.train(job.spec, job.samples)
    found = evaluations_of(events)
    assert [one.step for one in found] == [0, 1, 2, 3]
    _, model = plain_loop(job, untie=True, steps=0)
    assert found[0].eval_loss == pytest.approx(held_out_loss(model, job), rel=1e-6)
    for one in found:
        assert one.eval_loss is not None
        assert one.compressed_eval_loss != one.eval_loss
        assert one.compressed_eval_loss == pytest.approx(one.eval_loss, rel=0.05)


class DyingEngine(StageEngine):
    """An engine that evaluates so many microbatches, sets an event, and stands still."""

    is_there: asyncio.Event
    left: int
    loop: asyncio.AbstractEventLoop

    def evaluate(self, x: Tensor, labels: Tensor, lengths: Lengths = None) -> LossAndCounts:
        """See `Engine`."""
        if self.left == 0:
            self.loop.call_soon_threadsafe(self.is_there.set)
        self.left -= 1
        return super().evaluate(x, labels, lengths)


@pytest.mark.parametrize("num_evaluated", [0, 2, 5, 9])
async def test_a_peer_that_dies_in_an_evaluation_leaves_no_trace_in_it(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path, num_evaluated: int
) -> None:
    job = make_job(num_steps=3, num_eval_samples=HELD_OUT, micro_batch_size=1, eval_steps=1)
    layers = ["0-2", "2-4", "4-6"]
    quiet = await quiet_events(job, layers)
    async with LocalSwarm(tmp_path, layers) as swarm:
        is_there = asyncio.Event()

        def dying(spec: RunSpec, of: LayerRange) -> Engine:
            checkpoint = open_checkpoint(spec.model.reference)
            engine = DyingEngine(
                checkpoint, spec, of, device=torch.device("cpu"), dtype=torch.float32
            )
            engine.left, engine.is_there = num_evaluated, is_there
            engine.loop = loop
            return engine

        loop = asyncio.get_running_loop()
        name = PeerId("peer-dying")
        await swarm.add_peer(name, "4-6", make_engine=dying)
        await swarm.all_joined()
        spec = replace(job.spec, train=replace(job.spec.train, seed=6))
        submitted = await swarm.client.submit(spec, job.samples)
        watching = asyncio.create_task(swarm.watch(submitted.run_id))
        await is_there.wait()
        await swarm.kill_peer(name)
        events = await watching
    assert len(losses_of(events)) == 3
    found, expected = evaluations_of(events), evaluations_of(quiet)
    assert [one.step for one in found] == [one.step for one in expected] == [0, 1, 2, 3]
    for one, other in zip(found, expected, strict=True):
        assert one.eval_loss == pytest.approx(other.eval_loss, rel=1e-6)
