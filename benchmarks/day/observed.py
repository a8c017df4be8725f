"""Reports about a swarm at work: events, status, the page, and metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.day.processes import Command, run_command
from benchmarks.day.swarm import OWNERS, Swarm
from swarm_ft.page.guard import HEADER

PERIOD_S = 1.0
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """Peers by their names, each with why it is idle, at a time of the wall clock."""

    unix_s: float
    idle: dict[str, str]


@dataclass(slots=True)
class Observed:
    """All of it, in the order in which it came.

    Attributes:
        events_by_serial: of `swarm-ft events --follow --json`; an owner gets texts about its own
            run only.
        page_events: that the page received.
        page: what it showed, once a second.
        status: of `swarm-ft status --watch --json`; `newest` is the last.
        counts: of each kind of event, as the metrics had them last.
    """

    events_by_serial: dict[int, Document] = field(default_factory=dict)
    page_events: list[Document] = field(default_factory=list)
    page: list[Sample] = field(default_factory=list)
    status: list[Sample] = field(default_factory=list)
    newest: Document = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def events(self) -> list[Document]:
        """The events in their order."""
        return [self.events_by_serial[serial] for serial in sorted(self.events_by_serial)]

    async def until(self, is_so: Callable[[Observed], bool]) -> None:
        """Wait for a condition, which is evaluated whenever something arrives."""
        async with self.changed:
            await self.changed.wait_for(lambda: is_so(self))

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def follow_events(self, command: Command) -> None:
        """Follow all events from the first one."""
        async for event in command.documents():
            known = self.events_by_serial.get(event["serial"])
            if known is None or event["words"]:
                self.events_by_serial[event["serial"]] = event
            await self._notify()

    async def follow_status(self, command: Command) -> None:
        """Once a second."""
        async for document in command.documents():
            self.newest = document
            self.status.append(sample_of(document))
            await self._notify()

    async def follow_page(self, session: aiohttp.ClientSession, address: str) -> None:
        """Follow the page as a browser does that opens the address."""
        origin, _, token = address.partition("/?token=")
        async with session.post(f"{origin}/session", data=json.dumps({"token": token})) as got:
            got.raise_for_status()
            headers = {HEADER: (await got.json())["session"]}
        async with session.get(f"{origin}/live", headers=headers) as response:
            response.raise_for_status()
            kind = ""
            async for line in response.content:
                name, _, text = line.decode().rstrip("\n").partition(": ")
                if name == "event":
                    kind = text
                elif name == "data" and kind == "happened":
                    self.page_events.append(json.loads(text))
                elif name == "data":
                    self.page.append(sample_of(json.loads(text)))
                    await self._notify()

    async def follow_metrics(self, session: aiohttp.ClientSession, address: str) -> None:
        """Poll the metrics as Prometheus does."""
        while True:
            async with session.get(address) as got:
                families = text_string_to_metric_families(await got.text())
            events = next(f for f in families if f.name == "swarm_ft_events")
            self.counts = {s.labels["kind"]: round(s.value) for s in events.samples}
            await self._notify()
            await asyncio.sleep(PERIOD_S)


def sample_of(document: Document) -> Sample:
    """Read a document of `status --json` or of the page: its peers and their idle reasons."""
    return Sample(time.time(), {peer["peer"]: peer["idle"] for peer in document["peers"]})


@asynccontextmanager
async def observed(swarm: Swarm) -> AsyncIterator[Observed]:
    """Observe status, events, page and metrics until the context ends.

    Raises:
        SystemExit: one of the reports ended.
    """
    found = Observed()
    for owner in OWNERS:  # two first commands at once would make two keys
        await run_command("hello", swarm.home(owner), "status", *swarm.way)
    watch, follow = ("status", "--watch"), ("events", "--follow", "--since", 1)
    status = await Command.start("status", swarm.home(OWNERS[0]), *watch, "--json", *swarm.way)
    events = [
        await Command.start("events", swarm.home(owner), *follow, "--json", *swarm.way)
        for owner in OWNERS
    ]
    limits = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=limits, read_bufsize=1 << 24) as session,
        asyncio.TaskGroup() as group,
    ):
        following = [
            *(group.create_task(found.follow_events(command)) for command in events),
            group.create_task(found.follow_status(status)),
            group.create_task(found.follow_page(session, swarm.page)),
            group.create_task(found.follow_metrics(session, swarm.metrics)),
        ]
        try:
            yield found
        finally:
            for task in following:
                task.cancel()
            for command in (*events, status):
                await command.kill()
