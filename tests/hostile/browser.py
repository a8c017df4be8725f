"""HTTP requests of strangers and of the owner's browser to the page and the metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp

from swarm_ft.errors import RunFailed
from tests.hostile.attacker import ANSWER_S


async def raw_request(place: str, text: bytes) -> bytes:
    """Send bytes to an HTTP server; the first line of its answer, or nothing."""
    host, _, port = place.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(text)
                return await reader.readline()
            finally:
                writer.close()
    except OSError:
        return b""


@dataclass
class Page:
    """The owner's page, open in a browser."""

    place: str
    headers: dict[str, str]

    async def first_bytes(self, path: str, within_s: float = ANSWER_S) -> bytes:
        """The first part of an answer's body."""
        url, own = f"http://{self.place}{path}", aiohttp.ClientTimeout(total=within_s)
        async with (
            aiohttp.ClientSession(timeout=own) as session,
            session.get(url, headers=self.headers) as answer,
        ):
            return await answer.content.readany()


async def open_page(address: str) -> Page:
    """Open the page at its one-time address, as its own script does.

    Raises:
        RunFailed: it does not open.
    """
    place, _, token = address.split("//")[1].partition("/?token=")
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{place}/session", json={"token": token}) as answer,
    ):
        if not answer.ok:
            raise RunFailed(f"the page's address is answered by {answer.status}")
        if answer.cookies:
            raise RunFailed("the page sets a cookie, which goes to every port of this host")
        document = await answer.json()
    return Page(place, {"X-Swarm-FT": str(document["session"])})
