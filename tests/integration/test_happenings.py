"""The events of a living swarm: members that left, rollbacks with their reason, contributions."""

from pathlib import Path

import pytest

from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunEvent, RunPhase, RunStatus, StepCommitted
from swarm_ft.protocol.messages.events import EventKind, Rollback, SwarmEvent
from tests.integration.conftest import MakeJob
from tests.local_swarm import LocalSwarm

LAYERS = ["0-2", "2-4", "4-6"]


async def events_of(swarm: LocalSwarm, run_id: RunId | None = None) -> list[SwarmEvent]:
    return [event async for event in swarm.client.events(0, run_id=run_id)]


async def test_a_run_that_goes_back_is_told_at_once_and_kept(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_ft.coordinator.plan.membership.GRACE_S", 0.0)
    job = make_job(num_samples=8, num_steps=9, save_steps=2)
    async with LocalSwarm(tmp_path, LAYERS) as swarm:
        await swarm.all_joined()
        run_id = (await swarm.client.submit(job.spec, job.samples)).run_id
        events, killed = list[RunEvent](), False
        async for event in swarm.client.watch(run_id, lambda _trouble: None):
            events.append(event)
            if isinstance(event, StepCommitted) and event.step >= 4 and not killed:
                killed = True
                await swarm.snapshot_of(run_id, job.spec, step=2)
                await swarm.kill_peer(PeerId("peer-1"))
            if isinstance(event, RunStatus) and event.detail == "waiting for layers 2-4":
                await swarm.add_peer(PeerId("newcomer"), "2-4")

        (back,) = [event for event in events if isinstance(event, Rollback)]
        place = events.index(back)
        last = next(e for e in reversed(events[:place]) if isinstance(e, StepCommitted))
        first = next(e for e in events[place:] if isinstance(e, StepCommitted))
        assert (back.from_step, back.to_step) == (last.step + 1, first.step)
        assert (
            back.why
            == "no peer has the weights of layers 2-4 any more: peer peer-1 lost its connection"
        )
        assert "--save-steps 2 now" in back.remedy

        status = await swarm.client.status()
        found = await events_of(swarm)
        assert [event.serial for event in found] == list(range(1, len(found) + 1))
        kinds = [event.kind for event in found]
        assert kinds[0] is EventKind.COORDINATOR_STARTED
        assert kinds.count(EventKind.PEER_JOINED) == 4
        assert kinds.index(EventKind.PEER_GONE) < kinds.index(EventKind.RUN_WENT_BACK)
        (rollback,) = [event for event in found if event.kind is EventKind.RUN_WENT_BACK]
        assert rollback.words == back.words
        assert (rollback.from_step, rollback.to_step) == (back.from_step, back.to_step)
        assert all(event.run_id == run_id for event in await events_of(swarm, run_id))

        (run,) = status.runs
        assert run.phase is RunPhase.FINISHED
        assert run.last_step is not None
        assert run.last_step.step == 8
        assert 1 < status.next_event <= found[-1].serial + 1, "the last snapshot may come later"
        contributions = {one.peer_id: one.given for one in status.contributors}
        assert contributions[PeerId("peer-0")].steps == 9 + back.from_step - back.to_step
        assert contributions[PeerId("newcomer")].steps == 9 - back.to_step
        assert contributions[PeerId("peer-0")].sent_bytes > 0

        await swarm.kill_coordinator()
        await swarm.start_coordinator()
        again = await events_of(swarm)
        assert again[: len(found)] == found
        assert EventKind.COORDINATOR_STARTED in [event.kind for event in again[len(found) :]]
        known = {one.peer_id: one.given for one in (await swarm.client.status()).contributors}
        assert known == contributions


async def test_idle_peers_that_leave_are_told_as_left(tmp_path: Path) -> None:
    """Each sends a goodbye and is gone at once, before or after it was read."""
    num_peers = 6
    async with LocalSwarm(tmp_path, ["auto"] * num_peers) as swarm:
        await swarm.all_joined()
        for peer in swarm.peers.values():
            peer.node.leave(reason="its volunteer asked for it")
            await peer.task
        kinds = [event.kind for event in await events_of(swarm)]
    ends = {EventKind.PEER_LEFT, EventKind.PEER_GONE}
    assert [kind for kind in kinds if kind in ends] == [EventKind.PEER_LEFT] * num_peers


async def test_who_follows_is_told_what_happens(tmp_path: Path) -> None:
    async with LocalSwarm(tmp_path, ["0-2"]) as swarm:
        await swarm.all_joined()
        following = swarm.client.events(0, follows=True)
        async for event in following:
            if event.kind is EventKind.PEER_JOINED and event.peer_id == "peer-0":
                await swarm.add_peer(PeerId("late"), "0-2")
            if event.peer_id == "late":
                break
        await following.aclose()
        assert event.words == "peer late joined: offers layers 0-2"


async def test_a_peer_its_swarm_and_its_farewell_have_one_count(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Also after the coordinator was started again; what was sent before counts once."""
    sent, job = 7_000_000, make_job(num_samples=8, num_steps=4)
    async with LocalSwarm(tmp_path, LAYERS[:2]) as swarm:
        peer = await swarm.add_peer(PeerId("counted"), LAYERS[2], sent_bytes=lambda: sent)
        await swarm.train(job.spec, job.samples)
        contribution = await peer.node.contribution()
        assert contribution is not None
        assert (contribution.steps, contribution.all_bytes) == (job.spec.train.num_steps, 7_000_000)
        assert contribution.sent_bytes > 0
        await swarm.kill_coordinator()
        await swarm.start_coordinator()
        await swarm.all_joined()
        sent = 8_000_000
        contribution = await peer.node.contribution()
        assert contribution is not None
        assert contribution.all_bytes == 8_000_000
        status = await swarm.client.status()
        (shown,) = (one.given for one in status.members if one.peer_id == "counted")
        assert shown == contribution
        peer.node.leave()
        await swarm.client.acknowledge_result(status.runs[0].run_id)
        await peer.task
        assert peer.node.last_contribution == contribution
        events = await events_of(swarm)
    (left,) = (event for event in events if event.kind is EventKind.PEER_LEFT)
    assert left.words == f"peer counted left; it gave {contribution}"
