"""A run whose owner changes its codecs on the way: whoever dies, all change in one step."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.coordinator.facts.events import RunRecord
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.errors import BadCodec, BadInput, NotFound, OutOfTurn
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import (
    CodecChange,
    RunEvent,
    RunPhase,
    RunStatus,
    StepCommitted,
)
from swarm_ft.protocol.spec.run_spec import Codecs
from tests.integration.conftest import Job, MakeJob
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]
NUM_STEPS, CHANGE_AT = 9, 4
LESS, PLAIN = Codecs("aq2", "q2+z+ef"), Codecs("q2+z", "q2")


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    """Make a job with samples of different lengths, whose prompts are only read."""
    return make_job(
        num_samples=8, num_steps=NUM_STEPS, forward_codec="aq4+z", backward_codec="q4+ef"
    ).ragged()


@pytest.fixture
def plain_job(make_job: MakeJob) -> Job:
    """One sample a step and nothing kept of it, so that replicas change no bit."""
    return make_job(
        num_samples=8,
        num_steps=NUM_STEPS,
        batch_size=1,
        micro_batch_size=1,
        forward_codec="q4",
        backward_codec="q4+z",
    ).ragged()


def final_losses(events: Iterable[RunEvent]) -> list[float]:
    losses = {event.step: event.loss for event in events if isinstance(event, StepCommitted)}
    return [losses[step] for step in sorted(losses)]


def last_status(events: Iterable[RunEvent]) -> RunStatus:
    return [event for event in events if isinstance(event, RunStatus)][-1]


def change(codecs: Codecs, step: int = CHANGE_AT) -> CodecChange:
    return CodecChange(StepNumber(step), codecs)


@asynccontextmanager
async def changing(
    job: Job, folder: Path, changed: CodecChange, layers: Sequence[str]
) -> AsyncIterator[tuple[LocalSwarm, RunId]]:
    """A swarm with a run whose journal has all changes of codecs from the beginning."""
    await asyncio.to_thread(folder.mkdir)
    async with LocalSwarm(folder, []) as swarm:
        run_id = (await swarm.client.submit(job.spec, job.samples)).run_id
        await swarm.kill_coordinator()
        journal = Journal(str(swarm.journal))
        (run,) = journal.load(0.0)
        steered = replace(run, steering=replace(run.steering, codecs=(changed,)))
        journal.write([RunRecord(steered)])
        journal.close()
        await swarm.start_coordinator()
        for index, offered in enumerate(layers):
            await swarm.add_peer(PeerId(f"peer-{index}"), offered)
        yield swarm, run_id


QuietLosses = Callable[[Job, CodecChange], Awaitable[list[float]]]


@pytest.fixture(scope="module")
def quiet_losses(tmp_path_factory: pytest.TempPathFactory) -> QuietLosses:
    """`await quiet_losses(job, changed)`: of a run that nothing else happens to; trained once."""
    found: dict[tuple[bytes, CodecChange], list[float]] = {}

    async def losses(job: Job, changed: CodecChange) -> list[float]:
        key, folder = (job.spec.digest(), changed), tmp_path_factory.mktemp("quiet") / "swarm"
        if key not in found:
            async with changing(job, folder, changed, LAYERS) as (swarm, run_id):
                found[key] = final_losses(await swarm.watch(run_id))
        return found[key]

    return losses


async def watched(
    swarm: LocalSwarm, run_id: RunId, after: int, then: Callable[[], Awaitable[None]]
) -> list[RunEvent]:
    """`LocalSwarm.watch_and` of a run that finishes."""
    events = await swarm.watch_and(run_id, after, then)
    assert last_status(events).phase is RunPhase.FINISHED
    return events


@pytest.mark.thorough
async def test_the_owner_changes_codecs_while_it_trains(
    job: Job, quiet_losses: QuietLosses, tmp_path: Path
) -> None:
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        run_id = (await swarm.client.submit(job.spec, job.samples)).run_id

        async def steer() -> None:
            with pytest.raises(BadCodec, match="--fw: codec 'q4': expected a delta codec"):
                swarm.service.change_codecs(run_id, forward="q4")
            swarm.service.change_codecs(run_id, LESS.forward, LESS.backward)

        events = await watched(swarm, run_id, 2, steer)
        with pytest.raises(OutOfTurn, match="is over"):
            swarm.service.change_codecs(run_id, forward="aq3")
        with pytest.raises(NotFound, match="not known"):
            swarm.service.change_codecs(RunId("run-none"))
    (changed,) = last_status(events).codecs
    assert changed.codecs == LESS
    assert 2 < changed.first_step < NUM_STEPS
    # Of samples that come again, so that none has a key frame.
    bits = {
        event.step: 32
        * sum(t.forward_bytes + t.backward_bytes for t in event.traffic)
        // sum(t.forward_uncompressed_bytes + t.backward_uncompressed_bytes for t in event.traffic)
        for event in events
        if isinstance(event, StepCommitted)
    }
    assert bits[changed.first_step] < bits[StepNumber(changed.first_step - 1)]
    assert (
        sum(t.key_frames for e in events if isinstance(e, StepCommitted) for t in e.traffic) == 16
    )
    assert final_losses(events) == await quiet_losses(job, changed)


async def test_a_run_that_went_back_changes_codecs_in_the_same_step(
    job: Job, quiet_losses: QuietLosses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    quiet = await quiet_losses(job, change(LESS))
    async with changing(job, tmp_path / "swarm", change(LESS), LAYERS) as (swarm, run_id):

        async def lose_a_stage() -> None:
            await swarm.kill_peer(PeerId("peer-1"))
            await swarm.add_peer(PeerId("newcomer"), "2-4")

        events = await watched(swarm, run_id, CHANGE_AT, lose_a_stage)
    steps = [event.step for event in events if isinstance(event, StepCommitted)]
    assert len(steps) > NUM_STEPS, "some were made again"
    assert final_losses(events) == quiet


@pytest.mark.parametrize("after", [CHANGE_AT - 1, CHANGE_AT])
async def test_a_coordinator_that_is_killed_knows_the_codecs_of_the_step_under_way(
    job: Job, quiet_losses: QuietLosses, tmp_path: Path, after: int
) -> None:
    quiet = await quiet_losses(job, change(LESS))
    async with changing(job, tmp_path / "swarm", change(LESS), LAYERS) as (swarm, run_id):

        async def restart() -> None:
            await swarm.kill_coordinator()
            await swarm.start_coordinator()

        events = await watched(swarm, run_id, after, restart)
    assert final_losses(events) == quiet


@pytest.mark.parametrize("after", [CHANGE_AT - 1, CHANGE_AT])
@pytest.mark.thorough
async def test_a_replica_that_dies_in_a_step_changes_no_bit_of_it(
    plain_job: Job, quiet_losses: QuietLosses, tmp_path: Path, after: int
) -> None:
    """The finished parts of the step stay finished, and go to the successor as they were."""
    quiet = await quiet_losses(plain_job, change(PLAIN))
    layers = ["0-2", "2-4", "2-4", "4-6", "4-6"]
    async with changing(plain_job, tmp_path / "swarm", change(PLAIN), layers) as (swarm, run_id):

        async def lose_replicas() -> None:
            await swarm.kill_peer(PeerId("peer-1"))
            await swarm.kill_peer(PeerId("peer-3"))

        events = await watched(swarm, run_id, after, lose_replicas)
    steps = [event.step for event in events if isinstance(event, StepCommitted)]
    assert steps == list(range(NUM_STEPS))
    assert final_losses(events) == quiet


async def test_codecs_are_changed_so_often_and_no_more(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.service.MAX_CODEC_CHANGES", 1)
    async with changing(job, tmp_path / "swarm", change(LESS), []) as (swarm, run_id):
        with pytest.raises(BadInput, match="had 1 pairs of codecs already"):
            swarm.service.change_codecs(run_id, forward="aq3")
