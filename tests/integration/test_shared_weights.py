"""DeBERTa in a swarm: all stages train one table of relative positions, and keep the same bits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, DebertaV2Config

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import (
    Adapter,
    LrSchedule,
    ModelSpec,
    RunSpec,
    TaskKind,
    TrainOptions,
    TrainSpec,
)
from swarm_ft.protocol.spec.sample_rows import NO_LABEL, label_tokens, pad_rows
from swarm_ft.stage.base import Engine
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.engine import StageEngine
from swarm_ft.transport.base import Transport
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import LINK
from tests.doubles.faults import FaultyTransport
from tests.local_swarm import LocalSwarm, opened
from tests.states import state_digest

VOCAB_SIZE, SEQ_LENGTH, NUM_SAMPLES, STEPS, SEED = 96, 16, 16, 8, 5
RTOL = 1e-4
"""Of other microbatches' sums, see `test_replicas`."""
ONE, TWO, THREE = ["0-4"], ["0-2", "2-4"], ["0-1", "1-3", "3-4"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = DebertaV2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        relative_attention=True,
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        initializer_range=0.1,
    )
    torch.manual_seed(3)
    directory = tmp_path_factory.mktemp("deberta")
    AutoModelForMaskedLM.from_config(config).save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Job:
    spec: RunSpec
    samples: list[bytes]


MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def model_spec(model_dir: Path) -> ModelSpec:
    train = TrainOptions(task_kind=TaskKind.CLASSIFICATION, label_names="no,yes", seed=SEED)
    return open_checkpoint(str(model_dir), train).describe()


@pytest.fixture
def make_job(model_spec: ModelSpec) -> MakeJob:
    """Texts of all lengths, of the class of their first token."""

    def make(**changes: Any) -> Job:
        fields: dict[str, Any] = {
            "task_kind": TaskKind.CLASSIFICATION,
            "label_names": "no,yes",
            "num_samples": NUM_SAMPLES,
            "seq_length": SEQ_LENGTH,
            "batch_size": 8,
            "micro_batch_size": 2,
            "num_steps": STEPS,
            "learning_rate": 3e-3,
            "lr_schedule": LrSchedule.COSINE,
            "weight_decay": 0.1,
            "seed": SEED,
            "forward_codec": "none",
            "backward_codec": "none",
            "key_codec": "fp16",
        } | changes
        train = TrainSpec(**fields)
        random, samples = np.random.default_rng(1), []
        for _ in range(NUM_SAMPLES):
            ids = random.integers(1, VOCAB_SIZE, int(random.integers(3, SEQ_LENGTH + 1)))
            labels = np.full(len(ids), NO_LABEL)
            labels[-1] = ids[0] % 2
            samples += [row.tobytes() for row in pad_rows(label_tokens(ids, labels), SEQ_LENGTH)]
        return Job(RunSpec(model=model_spec, train=train), samples)

    return make


@dataclass
class Copies:
    """The different copies of the shared weights that peers had after each step."""

    after: defaultdict[int, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    applied: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def engine(self, spec: RunSpec, layers: LayerRange) -> Engine:
        """Make the engine that peers compute with."""
        checkpoint = opened(spec)
        copies, shared = self, checkpoint.architecture.shared

        class Watched(StageEngine):
            def apply(self, clip_factor: float, learning_rate: float) -> None:
                step = self.open_step.number
                super().apply(clip_factor, learning_rate)
                own = dict(self.weights.module.named_parameters())
                table = {name: own[name] for name in own if name.startswith(shared)}
                copies.after[step].add(state_digest(table))
                copies.applied[step] += 1

        device = torch.device("cpu")
        return Watched(checkpoint, spec, layers, device=device, dtype=torch.float32)


@asynccontextmanager
async def swarm_of(
    directory: Path, layers: list[str], copies: Copies, transport: Transport | None = None
) -> AsyncIterator[LocalSwarm]:
    await asyncio.to_thread(directory.mkdir)
    async with LocalSwarm(directory, [], transport=transport) as swarm:
        for index, own in enumerate(layers):
            await swarm.add_peer(PeerId(f"peer-{index}"), own, make_engine=copies.engine)
        yield swarm


def losses_of(events: list[RunEvent]) -> list[float]:
    losses = {event.step: event.loss for event in events if isinstance(event, StepCommitted)}
    return [losses[step] for step in sorted(losses)]


def last_status(events: list[RunEvent]) -> RunStatus:
    return [event for event in events if isinstance(event, RunStatus)][-1]


class Quiet(Protocol):
    """See `quiet`."""

    async def __call__(self, job: Job, layers: list[str]) -> tuple[list[float], Copies]: ...


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    """`await quiet(job, layers)`: losses and copies of a run that nothing happens to; made once."""
    trained: dict[tuple[bytes, ...], tuple[list[float], Copies]] = {}

    async def train(job: Job, layers: list[str]) -> tuple[list[float], Copies]:
        key = (job.spec.digest(), *(part.encode() for part in layers))
        if key not in trained:
            copies = Copies()
            async with swarm_of(
                tmp_path_factory.mktemp("quiet") / "swarm", layers, copies
            ) as swarm:
                events = await swarm.train(job.spec, job.samples)
            trained[key] = losses_of(events), copies
        return trained[key]

    return train


@pytest.mark.parametrize(
    "layers",
    [
        TWO,
        THREE,
        ["0-2", "0-2", "2-4"],
        ["0-1", "1-3", "1-3", "3-4"],
        ["0-1", "0-1", "0-1", "1-3", "1-3", "3-4", "3-4"],
    ],
    ids="_".join,
)
async def test_all_copies_stay_one_and_train_as_a_whole_model_does(
    make_job: MakeJob, quiet: Quiet, layers: list[str]
) -> None:
    job = make_job()
    whole, alone = await quiet(job, ONE)
    losses, copies = await quiet(job, layers)
    assert losses == pytest.approx(whole, rel=RTOL)
    assert losses[-1] < losses[0]
    assert {step: len(found) for step, found in copies.after.items()} == dict.fromkeys(
        range(STEPS), 1
    )
    assert copies.applied == dict.fromkeys(range(STEPS), len(layers))
    assert len(set.union(*alone.after.values())) == STEPS, "the table trains"


async def test_lossy_sums_of_replicas_leave_the_copies_of_all_stages_one(
    make_job: MakeJob, quiet: Quiet
) -> None:
    job = make_job(dp_codec="q4", forward_codec="aq4", backward_codec="q8")
    losses, copies = await quiet(job, ["0-2", "0-2", "2-4", "2-4", "2-4"])
    assert len(losses) == STEPS
    assert all(len(found) == 1 for found in copies.after.values())


@pytest.mark.parametrize("adapter", [Adapter.LORA, Adapter.DORA])
@pytest.mark.thorough
async def test_beside_adapters_all_stages_hold_them_as_they_were(
    make_job: MakeJob, quiet: Quiet, adapter: Adapter
) -> None:
    job = make_job(adapter=adapter, lora_r=4)
    whole, _ = await quiet(job, ONE)
    losses, copies = await quiet(job, ["0-1", "1-3", "1-3", "3-4"])
    assert losses == pytest.approx(whole, rel=RTOL)
    assert losses[-1] < losses[0]
    assert len(set.union(*copies.after.values())) == 1


async def test_streams_that_break_change_no_bit(
    make_job: MakeJob, tmp_path: Path, quiet: Quiet
) -> None:
    job = make_job()
    losses, copies = await quiet(job, THREE)
    transport = FaultyTransport(
        GrpcTransport(), cut_sends={LINK: [9, 21, 40]}, cut_receives={LINK: [12, 33, 45]}
    )
    broken = Copies()
    async with swarm_of(tmp_path / "faulty", THREE, broken, transport) as swarm:
        events = await swarm.train(job.spec, job.samples)
    assert transport.num_cuts == 6
    assert losses_of(events) == losses
    assert broken.after == copies.after


@pytest.mark.thorough
async def test_a_replica_that_dies_leaves_a_swarm_that_trains_on(
    make_job: MakeJob, tmp_path: Path, quiet: Quiet
) -> None:
    job, layers = make_job(), ["0-2", "0-2", "2-4", "2-4"]
    losses, _ = await quiet(job, layers)
    copies, events = Copies(), list[RunEvent]()
    async with swarm_of(tmp_path / "dies", layers, copies) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == 2:
                await swarm.kill_peer(PeerId("peer-1"))
    assert last_status(events).phase is RunPhase.FINISHED
    assert losses_of(events) == pytest.approx(losses, rel=RTOL)
    assert all(len(found) == 1 for found in copies.after.values())


@pytest.mark.thorough
async def test_a_newcomer_takes_a_copy_over_and_stands_in_for_who_dies(
    make_job: MakeJob, tmp_path: Path, quiet: Quiet
) -> None:
    job = make_job(num_steps=2 * STEPS)
    losses, _ = await quiet(job, TWO)
    copies, events, has_died = Copies(), list[RunEvent](), False
    async with swarm_of(tmp_path / "joins", TWO, copies) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == 1:
                await swarm.add_peer(PeerId("newcomer"), "2-4", make_engine=copies.engine)
            is_step = isinstance(event, StepCommitted) and not last_status(events).joining
            if is_step and len(last_status(events).assignments) == 3 and not has_died:
                has_died = True
                await swarm.kill_peer(PeerId("peer-1"))
    assert has_died
    assert last_status(events).phase is RunPhase.FINISHED
    assert [s.peer_id for s in last_status(events).assignments] == ["peer-0", "newcomer"]
    assert losses_of(events) == pytest.approx(losses, rel=RTOL)
    assert all(len(found) == 1 for found in copies.after.values())


@pytest.mark.thorough
async def test_a_stage_whose_only_peer_is_lost_begins_again_and_ends_with_the_same_bits(
    make_job: MakeJob, tmp_path: Path, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    job = make_job(forward_codec="aq4", backward_codec="q8")
    losses, quiet_copies = await quiet(job, THREE)
    copies, events, waited = Copies(), list[RunEvent](), asyncio.Event()
    async with swarm_of(tmp_path / "lost", THREE, copies) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step == 3 and not waited.is_set():
                await swarm.kill_peer(PeerId("peer-1"))
            if isinstance(event, RunStatus) and event.detail == "waiting for layers 1-3":
                waited.set()
                await swarm.add_peer(PeerId("newcomer"), "1-3", make_engine=copies.engine)
    assert waited.is_set()
    assert last_status(events).phase is RunPhase.FINISHED
    assert losses_of(events) == losses
    assert copies.after == quiet_copies.after
