"""A run with a quality limit: the cost of compression is measured, and the codec follows it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from swarm_ft.errors import BadInput
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import (
    Evaluated,
    RunEvent,
    RunPhase,
    RunStatus,
    StepCommitted,
)
from swarm_ft.protocol.spec.quality import Prices, QualityControl, measures_at, num_measured
from swarm_ft.protocol.spec.run_spec import Adapter
from tests.integration.conftest import Job, MakeJob, QuietEvents
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]
NUM_STEPS, EVERY = 10, 2
QUALITY = 0.01


@pytest.fixture(autouse=True)
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_ft.protocol.spec.quality.MEASURE_EVERY_STEPS", EVERY)


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    """Make a job with samples of different lengths, some of which are held out."""
    return make_job(num_samples=8, num_steps=NUM_STEPS, quality=QUALITY).ragged()


def final_losses(events: Iterable[RunEvent]) -> list[float]:
    losses = {event.step: event.loss for event in events if isinstance(event, StepCommitted)}
    return [losses[step] for step in sorted(losses)]


def last_status(events: Iterable[RunEvent]) -> RunStatus:
    return [event for event in events if isinstance(event, RunStatus)][-1]


def evaluated(events: Iterable[RunEvent]) -> dict[int, float | None]:
    return {event.step: event.eval_loss for event in events if isinstance(event, Evaluated)}


def evaluation_bytes(events: Iterable[RunEvent]) -> dict[int, int]:
    return {e.step: e.sent.evaluation_bytes for e in events if isinstance(e, StepCommitted)}


async def quiet_run(job: Job, folder: Path, layers: Iterable[str] = LAYERS) -> list[RunEvent]:
    await asyncio.to_thread(folder.mkdir)
    async with LocalSwarm(folder, list(layers)) as swarm:
        await swarm.all_joined()
        return await swarm.watch((await swarm.client.submit(job.spec, job.samples)).run_id)


async def assert_ends_as(
    quiet: list[RunEvent],
    job: Job,
    folder: Path,
    after: int,
    then: Callable[[LocalSwarm, RunId], Awaitable[None]],
) -> None:
    """Something happens to a run after a step: losses, codecs and quality are the quiet run's."""
    async with LocalSwarm(folder, LAYERS) as swarm:
        await swarm.all_joined()
        run_id = (await swarm.client.submit(job.spec, job.samples)).run_id
        events = await swarm.watch_and(run_id, after, lambda: then(swarm, run_id))
    assert final_losses(events) == final_losses(quiet)
    assert last_status(events).codecs == last_status(quiet).codecs
    assert last_status(events).quality == last_status(quiet).quality


@pytest.mark.parametrize("changes", [{}, {"adapter": Adapter.LORA, "lora_r": 4}])
@pytest.mark.thorough
async def test_the_codec_follows_what_is_measured(
    make_job: MakeJob, quiet_events: QuietEvents, changes: dict[str, Any]
) -> None:
    job = make_job(num_samples=8, num_steps=NUM_STEPS, quality=QUALITY, **changes).ragged()
    adapts = bool(changes)
    events = await quiet_events(job, LAYERS)
    status = last_status(events)
    assert status.phase is RunPhase.FINISHED
    assert status.quality is not None
    assert status.quality.asked == QUALITY
    assert status.quality.num_measured == num_measured(NUM_STEPS) > 1
    assert status.codecs, "one measurement at least was not what was foretold"
    backward = Prices.of(adapts=adapts).backward_codec(QUALITY)
    assert {change.codecs.backward for change in status.codecs} == {backward}
    assert all(change.first_step % EVERY == 1 for change in status.codecs), "once it was measured"
    first = QualityControl.of(QUALITY, adapts=adapts).step_size
    assert status.codecs[0].codecs.forward != f"aqk{first:g}"
    sent = evaluation_bytes(events)
    assert all((sent[step] > 0) == measures_at(step) for step in range(NUM_STEPS))
    assert status.sent.evaluation_bytes == sum(sent.values())


@pytest.mark.parametrize("after", [1, 2, 5])
@pytest.mark.thorough
async def test_whoever_dies_what_is_measured_is_the_same(
    job: Job,
    quiet_events: QuietEvents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    quiet = await quiet_events(job, LAYERS)

    async def loses_one(swarm: LocalSwarm, run_id: RunId) -> None:
        await swarm.kill_peer(PeerId("peer-1"))
        await swarm.add_peer(PeerId("newcomer"), "2-4")
        with pytest.raises(BadInput, match="requests a quality"):
            swarm.service.change_codecs(run_id, forward="aq3")

    await assert_ends_as(quiet, job, tmp_path, after, loses_one)


@pytest.mark.thorough
async def test_shadows_change_nothing_but_what_is_sent(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ignores its shadows has the losses and evaluations of a run without any."""
    job = make_job(
        num_samples=8, num_eval_samples=3, num_steps=NUM_STEPS, eval_steps=3, quality=QUALITY
    )
    monkeypatch.setattr(QualityControl, "with_measurement", lambda self, _excess: self)
    measured = await quiet_run(job, tmp_path / "measured")
    monkeypatch.setattr("swarm_ft.coordinator.plan.steps.casts_shadows", lambda *_: False)
    plain = await quiet_run(job, tmp_path / "plain")
    assert final_losses(measured) == final_losses(plain)
    assert evaluated(measured) == evaluated(plain)
    assert evaluated(plain).keys() == {0, 3, 6, 9, NUM_STEPS}
    more = last_status(measured).sent.evaluation_bytes - last_status(plain).sent.evaluation_bytes
    assert more > 0


@pytest.mark.parametrize("after", [1, 2])
async def test_a_coordinator_that_is_killed_knows_what_was_measured(
    job: Job, quiet_events: QuietEvents, tmp_path: Path, after: int
) -> None:
    quiet = await quiet_events(job, LAYERS)

    async def restarts(swarm: LocalSwarm, _run_id: RunId) -> None:
        await swarm.kill_coordinator()
        await swarm.start_coordinator()

    await assert_ends_as(quiet, job, tmp_path, after, restarts)
