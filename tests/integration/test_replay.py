"""A recording, decided again: the same swarm, at any moment."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.client.trace import TraceFile
from swarm_ft.coordinator.facts.events import Effect, Event
from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.coordinator.recorded_history import RecordedHistory, ReplayView, timelines
from swarm_ft.coordinator.recording.files import files_of
from swarm_ft.coordinator.recording.recorder import Recorder
from swarm_ft.coordinator.replay import Moment, at_end, at_step, moments
from swarm_ft.errors import BadInput, BadOption, NotFound, OutOfTurn
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import StatusRequest, StepCommitted, SwarmStatus
from swarm_ft.protocol.messages.events import EventsRequest
from tests.integration.conftest import MakeJob
from tests.local_swarm import LocalSwarm
from tests.simulation.replaying import without_keys

LAYERS = ["0-2", "2-4", "4-6"]
KEY = b"k" * 32


def recorded(journal: Path, key: bytes | None = None) -> list[Moment]:
    return list(moments(batch for file in files_of(journal, key) for batch in file.batches()))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[SwarmState]:
    """Return the coordinator's state after the last event that it recorded."""
    last = [SwarmState()]
    decided = Recorder.record_decision

    def note(
        self: Recorder,
        before: SwarmState,
        event: Event,
        after: SwarmState,
        effects: Sequence[Effect],
    ) -> None:
        last[0] = after
        decided(self, before, event, after, effects)

    monkeypatch.setattr(Recorder, "record_decision", note)
    return last


@pytest.mark.parametrize("key", [None, KEY])
async def test_the_end_is_as_it_was_and_so_is_every_step(
    make_job: MakeJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: list[SwarmState],
    key: bytes | None,
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    job = make_job(num_samples=8, num_steps=9, save_steps=2)
    seen: dict[int, SwarmStatus] = {}
    async with LocalSwarm(tmp_path, LAYERS, journal_key=key) as swarm:
        await swarm.all_joined()
        run_id = (await swarm.client.submit(job.spec, job.samples)).run_id
        killed = False
        async for event in swarm.client.watch(run_id, lambda _trouble: None):
            if isinstance(event, StepCommitted):
                status = swarm.service.status()
                seen[status.runs[0].committed_steps] = status
                if event.step >= 4 and not killed:
                    killed = True
                    await swarm.snapshot_of(run_id, job.spec, step=2)
                    await swarm.kill_peer(PeerId("peer-1"))
                    await swarm.add_peer(PeerId("newcomer"), "2-4")
        await swarm.kill_coordinator()
        living = known[0]
        found = recorded(swarm.journal, key)

        assert found[-1].state == without_keys(living)
        assert living.runs[run_id].storage_key not in b"".join(
            path.read_bytes() for path in (tmp_path / "journal.db.recording").iterdir()
        )
        for step, status in seen.items():
            then = at_step(found, step, run_id).status(StatusRequest())
            assert facts_of(then, step) == facts_of(status, step)

        await swarm.start_coordinator()
        await swarm.all_joined()
        await swarm.kill_coordinator()
        again = recorded(swarm.journal, key)
        assert len(again) > len(found)
        assert again[-1].state == without_keys(known[0])
        assert at_end(again).next_event > found[-1].next_event


def facts_of(status: SwarmStatus, step: int) -> object:
    """Return a status's facts about a run's last step."""
    (run,) = status.runs
    assert run.committed_steps == step
    return run.last_step, run.sent, run.step_s, run.spec_digest


async def test_events_losses_and_steps_are_told_again(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    job = make_job(num_samples=8, num_steps=9, save_steps=2, eval_steps=3)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        run_id = (await swarm.client.submit(job.spec, job.samples)).run_id
        killed = False
        async for event in swarm.client.watch(run_id, lambda _trouble: None):
            if isinstance(event, StepCommitted) and event.step >= 4 and not killed:
                killed = True
                await swarm.snapshot_of(run_id, job.spec, step=2)
                await swarm.kill_peer(PeerId("peer-1"))
                await swarm.add_peer(PeerId("newcomer"), "2-4")
        events = [event async for event in swarm.service.events(EventsRequest())]
        rows = swarm.service.losses(run_id, 0, 100)
        next_event = swarm.service.status().next_event
        await swarm.kill_coordinator()
        found = [one for one in recorded(swarm.journal) if one.next_event <= next_event]

    history = RecordedHistory()
    for moment in found:
        history.take(moment)
    past = ReplayView(found[-1], history)
    again = [event async for event in past.events(EventsRequest(since=events[1].serial))]
    events = events[1:]  # that the coordinator started was no decision
    assert [replace(event, unix_s=0.0) for event in again[: len(events)]] == [
        replace(event, unix_s=0.0) for event in events
    ]
    assert all(abs(a.unix_s - t.unix_s) < 1.0 for a, t in zip(again, events, strict=False))
    assert [(row.step, row.loss) for row in past.losses(run_id, 0, 100)] == [
        (row.step, row.loss) for row in rows
    ]
    assert not past.is_ready
    with pytest.raises(OutOfTurn, match="a recording cannot be changed"):
        past.pause(run_id)
    with pytest.raises(NotFound):
        past.losses(RunId("run-0"), 0, 100)

    lines = list(timelines(found, run_id))
    last = {line.peer_id: line.timeline.step for line in lines}
    assert last[PeerId("peer-0")] == last[PeerId("newcomer")] == 8
    assert last[PeerId("peer-1")] < 8
    for line in lines:
        step, _, ready, waits, commit = line.timeline.spans
        assert 0 <= ready.begin_us == waits.begin_us <= commit.begin_us == step.duration_us
    with TraceFile(tmp_path / "trace.json", pytest.fail) as trace:
        for line in lines:
            trace.add(line)
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())}
    assert {"step", "plan", "ready", "wait for commit", "commit"} <= names


async def test_what_was_not_recorded_is_said_so(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(num_samples=8, num_steps=3)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.train(job.spec, job.samples)
        journal = swarm.journal
    found = recorded(journal)
    (name,) = found[-1].state.runs
    with pytest.raises(BadOption, match=f"the recording has steps 0 to 3 of {name}"):
        at_step(found, 4)
    with pytest.raises(BadOption, match=f"got run-0; known: {name}"):
        at_step(found, 1, RunId("run-0"))
    with pytest.raises(BadInput, match="not encrypted"):
        recorded(journal, KEY)
