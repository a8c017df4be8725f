"""A newcomer takes its stage over while the others train, whoever dies meanwhile."""

import asyncio
from pathlib import Path
from typing import Protocol

import pytest

from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import FETCH_CHUNKS
from tests.doubles.faults import FaultyTransport
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

NEWCOMER = PeerId("newcomer")
STEPS, JOINS_AT, HELD_STEPS = 24, 2, 6
CAUGHT_UP = "peer newcomer (layers 0-3) has caught up at step"


class QuietLosses(Protocol):
    """See `quiet_losses`."""

    async def __call__(self, job: Job) -> list[float]: ...


class Story:
    """A run that a newcomer joins, whose fetch is held for a few steps.

    Args:
        layers: of the peers that begin.
        dies: who dies when half of those steps are committed.
    """

    def __init__(
        self, job: Job, directory: Path, layers: list[str], dies: PeerId | None = None
    ) -> None:
        self.job = job
        self.directory = directory
        self.layers = layers
        self.dies = dies
        self.released = asyncio.Event()
        self.events: list[RunEvent] = []
        self.received: list[int] = []

    async def play(self) -> dict[str, bytes]:
        self.directory.mkdir()
        transport = FaultyTransport(GrpcTransport(), waits={FETCH_CHUNKS: self.released.wait})
        async with LocalSwarm(self.directory, self.layers, transport=transport) as swarm:
            await swarm.all_joined()
            status = await swarm.client.submit(self.job.spec, self.job.samples)
            async for event in swarm.client.watch(status.run_id, lambda _trouble: None):
                self.events.append(event)
                await self.react(swarm, event)
            return self.exported()

    async def react(self, swarm: LocalSwarm, event: RunEvent) -> None:
        if not isinstance(event, StepCommitted):
            return
        if event.step == JOINS_AT:
            await swarm.add_peer(NEWCOMER, "0-3")
        if NEWCOMER in self.status().joining:
            self.received.append(event.step)
        if len(self.received) == HELD_STEPS // 2 and self.dies in swarm.peers:
            await swarm.kill_peer(self.dies)
        if len(self.received) == HELD_STEPS:
            self.released.set()

    def status(self) -> RunStatus:
        return [event for event in self.events if isinstance(event, RunStatus)][-1]

    def exported(self) -> dict[str, bytes]:
        """The bytes of the first stage as each of its replicas wrote it down."""
        return {
            path.parent.name: path.read_bytes()
            for path in self.directory.glob("*/run-*-0-3.safetensors")
            if "step" not in path.name
        }

    def losses(self) -> list[float]:
        return [event.loss for event in self.events if isinstance(event, StepCommitted)]

    def steps(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, StepCommitted)]

    def details(self) -> list[str]:
        return [event.detail for event in self.events if isinstance(event, RunStatus)]


@pytest.fixture
def quiet_losses(quiet_events: QuietEvents) -> QuietLosses:
    async def train(job: Job) -> list[float]:
        events = await quiet_events(job, ["0-3", "3-6"])
        return [event.loss for event in events if isinstance(event, StepCommitted)]

    return train


@pytest.mark.parametrize("dp", ["none", "q4"])
async def test_steps_are_committed_while_a_newcomer_takes_over_and_then_it_has_the_same_bits(
    make_job: MakeJob, tmp_path: Path, quiet_losses: QuietLosses, dp: str
) -> None:
    job = make_job(num_samples=16, batch_size=4, num_steps=STEPS, dp_codec=dp)
    story = Story(job, tmp_path / "joined", ["0-3", "3-6"])
    weights = await story.play()
    assert story.status().phase is RunPhase.FINISHED
    assert story.steps() == list(range(STEPS))
    assert len(story.received) >= HELD_STEPS, "the others trained on"
    assert any(detail.startswith(CAUGHT_UP) for detail in story.details())
    assert weights.keys() == {"peer-0", NEWCOMER}
    assert not list(story.directory.glob("*/*step*")), "what was handed over does not lie about"
    assert weights["peer-0"] == weights[NEWCOMER]
    if dp == "none":
        assert story.losses() == pytest.approx(await quiet_losses(job), rel=1e-4)


@pytest.mark.parametrize(
    ("layers", "dies"),
    [
        (["0-3", "0-3", "3-6"], "peer-0"),  # a source
        (["0-3", "3-6", "3-6"], "peer-1"),  # somebody of another stage
    ],
)
async def test_a_newcomer_goes_on_taking_over_when_somebody_dies(
    make_job: MakeJob, tmp_path: Path, layers: list[str], dies: str
) -> None:
    job = make_job(num_samples=16, batch_size=4, num_steps=STEPS)
    story = Story(job, tmp_path / "joined", layers, PeerId(dies))
    weights = await story.play()
    assert story.status().phase is RunPhase.FINISHED
    assert story.steps() == list(range(STEPS))
    assert any(detail.startswith(CAUGHT_UP) for detail in story.details())
    assert NEWCOMER in weights
    assert len(weights) == 2
    assert len(set(weights.values())) == 1
    begun = {event.assignments for event in story.events if isinstance(event, RunStatus)}
    assert any(dies not in {stage.peer_id for stage in stages} for stages in begun)


async def test_a_newcomer_that_dies_while_it_takes_over_costs_no_step(
    make_job: MakeJob, tmp_path: Path, quiet_losses: QuietLosses
) -> None:
    job = make_job(num_samples=16, batch_size=4, num_steps=STEPS)
    story = Story(job, tmp_path / "joined", ["0-3", "3-6"], NEWCOMER)
    weights = await story.play()
    assert story.status().phase is RunPhase.FINISHED
    assert story.steps() == list(range(STEPS))
    assert weights.keys() == {"peer-0"}
    assert story.losses() == await quiet_losses(job)


@pytest.mark.thorough
async def test_where_tied_embeddings_are_synchronised_all_wait_until_a_newcomer_has_the_state(
    make_job: MakeJob, tmp_path: Path, quiet_losses: QuietLosses
) -> None:
    job = make_job(num_samples=16, batch_size=4, num_steps=STEPS, sync_tied_embeddings=True)
    story = Story(job, tmp_path / "joined", ["0-3", "3-6"])
    story.released.set()
    weights = await story.play()
    assert story.status().phase is RunPhase.FINISHED
    assert story.steps() == list(range(STEPS))
    assert not story.received, "nobody trained meanwhile"
    assert weights.keys() == {"peer-0", NEWCOMER}
    assert weights["peer-0"] == weights[NEWCOMER]
    assert story.losses() == pytest.approx(await quiet_losses(job), rel=1e-4)
