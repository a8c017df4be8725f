"""Activations along learned bases: whatever happens to a run, its losses are the quiet one's."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from swarm_ft.codec.basis import Basis
from swarm_ft.codec.codebook import learn_codebook
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import LINK
from tests.doubles.faults import FaultyTransport
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]
NUM_STEPS = 12
"""Six epochs: first activations, then changes plain and along bases of several steps."""
CODECS: dict[str, dict[str, Any]] = {
    "changes": {"forward_codec": "aqk0.5", "key_codec": "qk0.5"},
    "filled": {"forward_codec": "aqk0.5", "fill_codec": "aqk1", "fill_microbatches": 1},
    "direct": {"forward_codec": "qk0.5"},
    "gradients": {"forward_codec": "q4", "backward_codec": "q2+z+book"},
    "last gradients": {"forward_codec": "q4", "backward_codec": "q2+z+last"},
}


def losses_by_step(events: Iterable[RunEvent]) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepCommitted)}


def last_status(events: Iterable[RunEvent]) -> RunStatus:
    return [event for event in events if isinstance(event, RunStatus)][-1]


def forward_bytes(events: Iterable[RunEvent]) -> int:
    return sum(
        traffic.forward_bytes
        for event in events
        if isinstance(event, StepCommitted)
        for traffic in event.traffic
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)


@pytest.fixture
def codebooks(monkeypatch: pytest.MonkeyPatch) -> list[Basis | None]:
    """Those that stages learn."""
    found: list[Basis | None] = []

    def watched(rows: Sequence[Tensor]) -> Basis | None:
        found.append(learn_codebook(rows))
        return found[-1]

    monkeypatch.setattr("swarm_ft.codec.codebook.learn_codebook", watched)
    return found


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    """Make a job with samples of different lengths, whose prompts are only read."""
    return job_of(make_job, "changes")


def job_of(make_job: MakeJob, kind: str) -> Job:
    shared: dict[str, Any] = {"backward_codec": "q3+z", "num_steps": NUM_STEPS, "save_steps": 3}
    return make_job(num_samples=8, **(shared | CODECS[kind])).ragged()


@pytest.fixture
async def quiet(job: Job, quiet_events: QuietEvents) -> dict[int, float]:
    return losses_by_step(await quiet_events(job, LAYERS))


def exported(folder: Path, layers: str) -> list[bytes]:
    """The bytes of a stage as each of its replicas wrote it down."""
    found = folder.glob(f"*/run-*-{layers}.safetensors")
    return [path.read_bytes() for path in found if "step" not in path.name]


async def watched(
    swarm: LocalSwarm, job: Job, after: int, then: Callable[[RunStatus], Awaitable[None]]
) -> list[RunEvent]:
    """`LocalSwarm.watch_and` of a run that finishes."""
    status = await swarm.client.submit(job.spec, job.samples)
    events = await swarm.watch_and(status.run_id, after, lambda: then(status))
    assert last_status(events).phase is RunPhase.FINISHED
    return events


CUTS = {
    "sends": {"cut_sends": {LINK: [3, 17, 40, 41, 64, 90, 120, 150]}},
    "receives": {"cut_receives": {LINK: [4, 20, 39, 62, 63, 95, 118, 149]}},
    "both": {"cut_sends": {LINK: [7, 55, 101]}, "cut_receives": {LINK: [30, 56, 130]}},
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
async def test_streams_that_break_change_nothing(
    job: Job, quiet: dict[int, float], tmp_path: Path, cuts: dict[str, Any]
) -> None:
    transport = FaultyTransport(GrpcTransport(), **cuts)
    async with LocalSwarm(tmp_path, LAYERS, transport=transport) as swarm:
        events = await swarm.train(job.spec, job.samples)
    assert transport.num_cuts == sum(
        len(places) for cut in cuts.values() for places in cut.values()
    )
    assert losses_by_step(events) == quiet


@pytest.mark.parametrize("kind", ["filled", "direct", "gradients", "last gradients"])
@pytest.mark.thorough
async def test_nor_where_they_fill_the_pipeline_or_build_on_nothing(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path, kind: str
) -> None:
    job = job_of(make_job, kind)
    expected = losses_by_step(await quiet_events(job, LAYERS))
    transport = FaultyTransport(
        GrpcTransport(),
        cut_sends={LINK: [9, 41, 77, 120]},
        cut_receives={LINK: [5, 60, 100]},
    )
    async with LocalSwarm(tmp_path, LAYERS, transport=transport) as swarm:
        events = await swarm.train(job.spec, job.samples)
    assert transport.num_cuts == 7
    assert losses_by_step(events) == expected


@pytest.mark.parametrize(("kind", "after"), [("changes", 2), ("changes", 4), ("gradients", 4)])
@pytest.mark.thorough
async def test_a_stage_whose_only_peer_died_goes_back_to_its_snapshot_and_its_bases(
    make_job: MakeJob,
    quiet_events: QuietEvents,
    tmp_path: Path,
    codebooks: list[Basis | None],
    kind: str,
    after: int,
) -> None:
    """Also to one of a step that had yet to make its basis, and to rows that were gathered."""
    job = job_of(make_job, kind)
    quiet = losses_by_step(await quiet_events(job, LAYERS))
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()

        async def lose_a_stage(status: RunStatus) -> None:
            await swarm.can_go_back(status.run_id, step=3)
            await swarm.kill_peer(PeerId("peer-1"))
            await swarm.add_peer(PeerId("newcomer"), "2-4")

        events = await watched(swarm, job, after, lose_a_stage)
    assert losses_by_step(events) == quiet
    steps = [event.step for event in events if isinstance(event, StepCommitted)]
    assert sum(step == 0 for step in steps) == 1, "it did not begin anew"
    assert any(codebooks) == (kind == "gradients")


@pytest.mark.parametrize("after", [1, 5])
@pytest.mark.thorough
async def test_a_coordinator_that_is_killed_changes_nothing(
    job: Job, quiet: dict[int, float], tmp_path: Path, after: int
) -> None:
    async with LocalSwarm(tmp_path, LAYERS) as swarm:

        async def restart(_status: RunStatus) -> None:
            await swarm.kill_coordinator()
            await swarm.start_coordinator()

        events = await watched(swarm, job, after, restart)
    assert losses_by_step(events) == quiet


@pytest.mark.thorough
async def test_a_run_whose_processes_all_died_goes_on_from_its_snapshot(
    job: Job, quiet: dict[int, float], tmp_path: Path
) -> None:
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        status = await swarm.client.submit(job.spec, job.samples)
        watching = swarm.client.watch(status.run_id, lambda _trouble: None)
        async for event in watching:
            if isinstance(event, StepCommitted) and event.step == 7:
                break
        await watching.aclose()
        await swarm.snapshot_of(status.run_id, job.spec, step=6)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        events = await swarm.watch(status.run_id)
    assert last_status(events).phase is RunPhase.FINISHED
    assert losses_by_step(events) == quiet


@pytest.mark.thorough
async def test_a_newcomer_takes_part_as_a_replica(
    make_job: MakeJob, quiet_events: QuietEvents, tmp_path: Path
) -> None:
    """Each replica has bases of its own; the weights are the same in all."""
    codecs = CODECS["changes"] | {"backward_codec": "q8"}
    job = make_job(num_samples=16, num_steps=24, **codecs)
    expected = losses_by_step(await quiet_events(job, LAYERS))
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()

        async def join(_status: RunStatus) -> None:
            await swarm.add_peer(PeerId("newcomer"), "0-2")

        events = await watched(swarm, job, 4, join)
    losses = losses_by_step(events)
    assert losses.keys() == expected.keys()
    assert losses[23] == pytest.approx(expected[23], rel=0.1)
    assert len(set(exported(tmp_path, "0-2"))) == 1


@pytest.mark.thorough
async def test_a_run_that_is_cut_otherwise_goes_on(job: Job, tmp_path: Path) -> None:
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()

        async def cut_otherwise(status: RunStatus) -> None:
            await swarm.can_go_back(status.run_id, step=3)
            await swarm.kill_peer(PeerId("peer-1"))
            await asyncio.gather(
                swarm.add_peer(PeerId("newcomer-0"), "2-3"),
                swarm.add_peer(PeerId("newcomer-1"), "3-4"),
            )

        events = await watched(swarm, job, 4, cut_otherwise)
    stages = [str(stage.layers) for stage in last_status(events).assignments]
    assert stages == ["0-2", "2-3", "3-4", "4-6"]
    assert losses_by_step(events).keys() == set(range(NUM_STEPS))


@pytest.mark.thorough
async def test_what_changes_costs_fewer_bytes_along_a_basis_than_along_channels(
    make_job: MakeJob, quiet_events: QuietEvents
) -> None:
    """The bytes of the bases counted."""
    shared: dict[str, Any] = {"backward_codec": "q3+z", "batch_size": 16, "num_steps": 12}
    jobs = [
        make_job(num_samples=16, **shared, forward_codec=forward, key_codec=key)
        for forward, key in (("aqk0.5", "qk0.5"), ("aqc0.5", "qc0.5"))
    ]
    along, plain = [forward_bytes(await quiet_events(job, LAYERS)) for job in jobs]
    assert along < plain
