"""A bug that affects one run fails that run, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from swarm_ft.coordinator.decide import snapshot_keepers
from swarm_ft.coordinator.facts.events import Record, RunRecord, Transition
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.tokens import TokenFiles
from swarm_ft.errors import MalformedMessage, NotFound, SwarmError
from swarm_ft.ids import Attempt, RunId
from swarm_ft.protocol.messages.client import RunPhase, StatusRequest
from swarm_ft.protocol.messages.control import Assign, StageFailed, ToPeer
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.transport import methods
from tests.unit.coordinator.conftest import FakePeer, MakeSpec
from tests.unit.coordinator.test_coordinator_service import (
    JoinedPeer,
    Office,
    coordinator,
    phases_of,
    status_in,
    submit,
    train_all,
    watch,
)

BAD = RunId("bad-run")


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec()


@pytest.fixture
def peers(make_peer: type[FakePeer]) -> list[FakePeer]:
    return [make_peer("a", "0-2"), make_peer("b", "2-4")]


@pytest.fixture
def break_decisions(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[Transition], bool]], None]:
    """Make the decisions raise that a test selects."""

    def make(raises: Callable[[Transition], bool]) -> None:
        sound = snapshot_keepers.reconcile

        def look_after(turn: Transition) -> None:
            if raises(turn):
                raise ZeroDivisionError("a bug")
            sound(turn)

        monkeypatch.setattr(snapshot_keepers, "reconcile", look_after)

    return make


def has_bad_run(turn: Transition) -> bool:
    run = turn.state.runs.get(BAD)
    return run is not None and not run.phase.is_over


async def trains_another_run(office: Office, spec: RunSpec, peers: list[FakePeer]) -> None:
    async with asyncio.TaskGroup() as group:
        sound = (await submit(office.channel, spec)).run_id
        training = group.create_task(train_all(office.channel, peers))
        assert phases_of(await watch(office.channel, sound))[-1] is RunPhase.FINISHED
        training.cancel()


async def test_a_job_that_no_decision_can_be_made_with_fails_at_its_client(
    spec: RunSpec,
    peers: list[FakePeer],
    break_decisions: Callable[[Callable[[Transition], bool]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    break_decisions(has_bad_run)
    async with coordinator() as office:
        status = await submit(office.channel, spec, run_id=BAD)
        assert status.phase is RunPhase.FAILED
        assert "a bug" in status.detail
        await trains_another_run(office, spec, peers)
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == 1
    assert "ZeroDivisionError" in str(tracebacks[0].exc_info)


async def test_a_run_that_time_cannot_pass_for_fails_and_time_goes_on(
    spec: RunSpec,
    peers: list[FakePeer],
    break_decisions: Callable[[Callable[[Transition], bool]], None],
) -> None:
    async with coordinator() as office, asyncio.TaskGroup() as group:
        await submit(office.channel, spec, run_id=BAD)
        break_decisions(has_bad_run)
        running = group.create_task(office.service.run())
        last = status_in((await watch(office.channel, BAD))[-1])
        assert last.phase is RunPhase.FAILED
        await trains_another_run(office, spec, peers)
        assert not running.done()
        running.cancel()


async def test_a_bug_that_no_run_explains_ends_the_coordinator(
    spec: RunSpec, break_decisions: Callable[[Callable[[Transition], bool]], None]
) -> None:
    async with coordinator() as office:
        await submit(office.channel, spec, run_id=BAD)
        break_decisions(lambda _: True)
        with pytest.raises(ZeroDivisionError):
            await office.service.run()
        break_decisions(lambda _: False)
        assert office.service.status(StatusRequest()).runs[0].phase is not RunPhase.FAILED


async def everything_received(joined: JoinedPeer) -> None:
    while await joined.receive() is not None:
        pass


async def test_a_stranger_to_a_run_cannot_fail_it(
    spec: RunSpec, make_peer: type[FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Transition.set_run
    async with coordinator() as office:
        await submit(office.channel, spec, run_id=BAD)
        stranger = JoinedPeer(office.channel, make_peer("a", "0-2"))
        await stranger.hello()

        def keep(turn: Transition, run: Any) -> None:
            if run.misfits:
                raise ZeroDivisionError("a bug")
            sound(turn, run)

        monkeypatch.setattr(Transition, "set_run", keep)
        failed = StageFailed(run_id=BAD, attempt=Attempt(1), code="bad-model", message="")
        await stranger.send(failed)
        with pytest.raises(SwarmError):
            await everything_received(stranger)
        monkeypatch.undo()
        assert office.service.status(StatusRequest()).runs[0].phase is not RunPhase.FAILED


@pytest.mark.parametrize("error", [ValueError("a bug"), NotFound("gone"), MemoryError()])
async def test_a_run_whose_tokens_cannot_be_read_by_a_bug_fails_alone(
    spec: RunSpec, peers: list[FakePeer], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    sound = TokenFiles.read

    def read(files: TokenFiles, run_id: RunId, *rest: Any) -> Any:
        if run_id == BAD:
            raise error
        return sound(files, run_id, *rest)

    monkeypatch.setattr(TokenFiles, "read", read)
    async with coordinator() as office, asyncio.TaskGroup() as group:
        await submit(office.channel, spec, run_id=BAD)
        training = group.create_task(train_all(office.channel, peers))
        assert status_in((await watch(office.channel, BAD))[-1]).phase is RunPhase.FAILED
        sound_run = (await submit(office.channel, spec)).run_id
        assert phases_of(await watch(office.channel, sound_run))[-1] is RunPhase.FINISHED
        training.cancel()
    names = [peer.peer_id for peer in peers]
    assert len(names) == 2, "nobody had to join anew"


async def test_a_run_whose_message_has_no_form_on_the_wire_fails_alone(
    spec: RunSpec, peers: list[FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_bytes(kind: Any, message: ToPeer, max_bytes: int) -> bytes:
        if isinstance(message, Assign) and message.run_id == BAD:
            raise MalformedMessage("it is longer than a message may be")
        return methods.to_bytes(kind, message, max_bytes)

    monkeypatch.setattr("tests.doubles.memory_transport.to_bytes", to_bytes)
    async with coordinator() as office, asyncio.TaskGroup() as group:
        await submit(office.channel, spec, run_id=BAD)
        training = group.create_task(train_all(office.channel, peers))
        assert status_in((await watch(office.channel, BAD))[-1]).phase is RunPhase.FAILED
        sound_run = (await submit(office.channel, spec)).run_id
        assert phases_of(await watch(office.channel, sound_run))[-1] is RunPhase.FINISHED
        training.cancel()


async def test_a_run_whose_record_cannot_be_written_fails_alone(
    spec: RunSpec, peers: list[FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Journal.write

    def write(journal: Journal, records: Iterable[Record]) -> None:
        records = list(records)
        runs = [record.run for record in records if isinstance(record, RunRecord)]
        if any(run.run_id == BAD and run.phase is RunPhase.LOADING for run in runs):
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        sound(journal, records)

    monkeypatch.setattr(Journal, "write", write)
    async with coordinator() as office, asyncio.TaskGroup() as group:
        await submit(office.channel, spec, run_id=BAD)
        training = group.create_task(train_all(office.channel, peers))
        assert status_in((await watch(office.channel, BAD))[-1]).phase is RunPhase.FAILED
        sound_run = (await submit(office.channel, spec)).run_id
        assert phases_of(await watch(office.channel, sound_run))[-1] is RunPhase.FINISHED
        training.cancel()
