"""How a volunteer's commands reach the peer that runs: a socket in its home, the user's alone.

One line of JSON asks (`{"do": "pause"}`), lines of JSON answer: what the peer is at, each time that
changes, until it is what was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_ft import systems
from swarm_ft.errors import MalformedMessage, Unavailable
from swarm_ft.log import get_logger

if TYPE_CHECKING:
    from swarm_ft.peer.node import PeerNode

logger = get_logger(__name__)

SOCKET = "control.sock"
MAX_LINE_BYTES = 4096
ASK_S = 5.0
"""How long whoever connects may take to say what it wants."""
POLL_S = 0.5
"""How often a peer looks whether it is what it was asked to be."""
PAUSE, RESUME, DRAIN, STATUS = "pause", "resume", "drain", "status"
VERBS = (PAUSE, RESUME, DRAIN, STATUS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerState:
    """What a peer is at.

    Attributes:
        peer: its id.
        state: working, idle, pausing, paused, leaving.
        words: why, or what it waits for; empty if there is nothing to say.
        seconds: that this takes yet, about.
        gave: the swarm's count of what it gave, in words; empty if the coordinator told nothing.
        given: the same as numbers; None if it told nothing.
        name: The peer's name for people.
    """

    peer: str
    state: str
    words: str = ""
    seconds: float = 0.0
    gave: str = ""
    given: dict[str, float] | None = None
    name: str = ""

    def is_what(self, verb: str) -> bool:
        """Whether nothing is to be waited for after this was asked."""
        return {PAUSE: self.state == "paused", DRAIN: self.state == "gone"}.get(verb, True)


def state_of(peer_id: str, node: PeerNode, name: str = "") -> PeerState:
    """What a peer is at now, with its contribution as it came last."""
    contribution = node.last_contribution
    gave = str(contribution) if contribution is not None else ""
    given = asdict(contribution) if contribution is not None else None
    told = PeerState(peer=peer_id, name=name, state="idle", gave=gave, given=given)
    presence = node.presence
    leaving, progress = presence.leaving, presence.progress
    if leaving is None:
        return replace(told, state="working" if node.hosts else "idle")
    state = "leaving"
    if leaving.stays:
        state = "paused" if presence.is_paused or not node.hosts else "pausing"
    words = progress.words if progress is not None and progress.words else leaving.reason
    seconds = progress.seconds if progress is not None else 0.0
    return replace(told, state=state, words=words, seconds=seconds)


class PeerControl:
    """The peer's side.

    Args:
        peer_id: The peer's id.
        node: the peer.
        ask: what to do with a verb that changes something.
        name: The peer's name for people.
    """

    def __init__(
        self, peer_id: str, node: PeerNode, ask: Callable[[str], None], name: str = ""
    ) -> None:
        self._peer_id = peer_id
        self._name = name
        self._node = node
        self._ask = ask

    @asynccontextmanager
    async def listening(self, home: Path | None) -> AsyncIterator[None]:
        """Answer at this home's socket; without a home, or where there are no such sockets, not."""
        path = home / SOCKET if home is not None else None
        if path is None or not systems.HAS_SOCKET_PATHS:
            yield
            return
        path.unlink(missing_ok=True)  # of a start that was killed; the home is locked
        answering: set[asyncio.Task[None]] = set()

        def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._answer(reader, writer))
            answering.add(task)
            task.add_done_callback(answering.discard)

        try:
            with systems.short_socket_path(path) as short:
                server = await asyncio.start_unix_server(answer, short, limit=MAX_LINE_BYTES)
        except OSError as error:
            logger.warning("%s: 'swarm-ft peer' cannot reach this peer: %s", path, error)
            yield
            return
        path.chmod(0o600)
        try:
            yield
        finally:
            server.close()
            for task in tuple(answering):
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
            path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, ValueError, TimeoutError, MalformedMessage):
                async with asyncio.timeout(ASK_S):
                    verb = verb_of(await reader.readline())
                if verb != STATUS:
                    self._ask(verb)
                await self._tell(writer, verb)
        finally:
            writer.close()

    async def _tell(self, writer: asyncio.StreamWriter, verb: str) -> None:
        from swarm_ft.protocol.messages.control import gist_of

        told: PeerState | None = None
        await self._node.contribution()
        while told is None or not told.is_what(verb):
            now = state_of(self._peer_id, self._node, self._name)
            if told is None or now.state != told.state or gist_of(now.words) != gist_of(told.words):
                writer.write(json.dumps(asdict(now)).encode() + b"\n")
                await writer.drain()
            told = now
            if not told.is_what(verb):
                await asyncio.sleep(POLL_S)


def verb_of(line: bytes) -> str:
    """What a line asks for.

    Raises:
        MalformedMessage: nothing that is known.
    """
    try:
        asked = json.loads(line)
    except ValueError:
        asked = None
    verb = asked.get("do") if isinstance(asked, dict) else None
    if verb not in VERBS:
        raise MalformedMessage(f"expected one of {', '.join(VERBS)}")
    return str(verb)


async def ask_peer(home: Path, verb: str) -> AsyncIterator[PeerState]:
    """Ask the peer at this home, and tell what it answers until it is what was asked for.

    Raises:
        Unavailable: no peer runs there.
    """
    try:
        with systems.short_socket_path(home / SOCKET) as short:
            reader, writer = await asyncio.open_unix_connection(short)
    except (OSError, AttributeError):
        raise Unavailable(f"no peer runs in {home}, or it is another user's") from None
    try:
        writer.write(json.dumps({"do": verb}).encode() + b"\n")
        await writer.drain()
        while line := await reader.readline():
            said: dict[str, Any] = json.loads(line)
            yield PeerState(**said)
    finally:
        writer.close()


def running_homes(homes: Path) -> list[Path]:
    """Homes below this folder that have a peer's socket."""
    if not homes.is_dir():
        return []
    return sorted(home for home in homes.iterdir() if (home / SOCKET).exists())
