"""Events for each reader, and the number that is kept."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from swarm_ft.coordinator.event_log import EventLog
from swarm_ft.coordinator.facts.events import EmitEvent, EventRecord
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.journal import journal as journal_module
from swarm_ft.coordinator.journal.columns import recorded
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.watching import event_message, overview
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.events import EventKind
from tests.reasons import reason
from tests.unit.coordinator.conftest import RUN, FakePeer, MakeSpec, Swarm

NOW_S = 1_700_000_000.0


def caller(name: str) -> Caller:
    return Caller(name=name, role=Role.CLIENT, key=new_key().public_key())


def write(journal: Journal, log: EventLog, *words: str) -> None:
    events = log.number(
        [EmitEvent(kind=EventKind.PEER_JOINED, reason=recorded(one)) for one in words]
    )
    journal.write(events)
    log.notify_written(events)


def log_of(journal: Journal) -> EventLog:
    return EventLog(journal, lambda: NOW_S)


async def told(log: EventLog, since: int = 0) -> list[str]:
    pages = log.pages(since, follows=False)
    return [text_of(event) async for page in pages for event in page]


def text_of(event: EventRecord) -> str:
    assert event.event.reason is not None
    return event.event.reason.text


async def test_events_are_numbered_on_after_a_restart() -> None:
    journal = Journal(":memory:", b"k" * 32)
    write(journal, log_of(journal), "one", "two")
    again = log_of(journal)
    assert again.next_serial == 3
    write(journal, again, "three")
    assert await told(again) == ["one", "two", "three"]
    assert await told(again, since=2) == ["two", "three"]
    assert [event.unix_s for event in journal.events(0, 9)] == [NOW_S] * 3


async def test_events_are_counted_by_their_kind_over_a_restart() -> None:
    journal = Journal(":memory:")
    log = log_of(journal)
    write(journal, log, "one", "two")
    again = log_of(journal)
    gone = again.number([EmitEvent(kind=EventKind.PEER_GONE, peer_id=PeerId("a"))])
    journal.write(gone)
    assert again.counts == log.counts == {EventKind.PEER_JOINED: 2}, "not before it is written"
    again.notify_written(gone)
    assert again.counts == {EventKind.PEER_JOINED: 2, EventKind.PEER_GONE: 1}


async def test_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_EVENTS", 3)
    journal = Journal(":memory:")
    log = log_of(journal)
    write(journal, log, *map(str, range(10)))
    assert await told(log) == ["7", "8", "9"]


async def test_a_follower_misses_nothing_however_slowly_it_reads() -> None:
    journal = Journal(":memory:")
    log = log_of(journal)
    write(journal, log, "one")
    async with asyncio.timeout(10), aclosing(log.pages(0, follows=True)) as following:
        assert list(map(text_of, await anext(following))) == ["one"]
        waiting = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)
        write(journal, log, "two")
        write(journal, log, "three")
        assert list(map(text_of, await waiting)) == ["two", "three"]


async def test_many_readers_cost_the_journal_no_more_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = Journal(":memory:")
    log = log_of(journal)
    everything = list(map(str, range(1_000)))
    write(journal, log, *everything)
    reads: list[int] = []
    events = journal.events

    def counted(since: int, limit: int) -> Sequence[EventRecord]:
        reads.append(since)
        return events(since, limit)

    monkeypatch.setattr(journal, "events", counted)
    assert await told(log) == everything
    assert len(reads) == 4
    for since in (0, 1, 300, 511):
        assert await told(log, since) == everything[max(0, since - 1) :]
    assert len(reads) == 4 + 4, "only the newest page, which still grows, is read again"
    assert await told(log, 5_000) == []


async def test_pages_that_were_forgotten_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_EVENTS", 300)
    journal = Journal(":memory:")
    log = log_of(journal)
    write(journal, log, *map(str, range(2_000)))
    assert await told(log) == list(map(str, range(1_700, 2_000)))
    again = log_of(journal)
    assert await told(again) == list(map(str, range(1_700, 2_000)))


def test_words_about_a_run_are_for_those_who_may_read_it(make_spec: MakeSpec) -> None:
    run = Run(run_id=RUN, spec=make_spec(), owner="me")
    state = SwarmState(runs={RUN: run})
    waits = EmitEvent(kind=EventKind.RUN_WAITING, run_id=RUN, reason=recorded("my words"))
    event = EventRecord(1, 0.0, waits)
    assert event_message(state, None, event).words == "my words"
    assert event_message(state, caller("me"), event).words == "my words"
    assert event_message(state, caller("other"), event).words == ""
    unknown = EventRecord(2, 0.0, replace(waits, run_id=RunId("gone")))
    assert event_message(state, caller("me"), unknown).words == "", (
        "whose it was is not known any more"
    )
    joined = EmitEvent(kind=EventKind.PEER_JOINED, reason=reason(Kind.PEER_JOINED, "a"))
    general = EventRecord(3, 0.0, joined)
    assert event_message(state, caller("other"), general) == event_message(state, None, general)
    assert event_message(state, caller("other"), general).words == "peer a joined: takes any layers"


def test_of_anothers_run_status_tells_no_loss_and_no_endpoint(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(num_steps=9))
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().committed_steps == 3)
    seen = overview(swarm.state, caller=caller("other"))
    (run,) = seen.runs
    assert run.last_step is None
    assert run.model == ""
    assert run.step_s > 0.0
    assert [member.endpoint for member in seen.members] == ["", ""]
    itself = overview(swarm.state, caller=caller("a"))
    assert [member.endpoint for member in itself.members] == ["a.example:7001", ""]
