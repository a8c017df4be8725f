"""The socket in a peer's home, over which the same user's commands control the peer.

A request is one line of JSON (`{"do": "pause"}`). The reply is lines of JSON with the peer's state,
one for each change, until the requested state is reached.
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

from swarm_ft.base import systems
from swarm_ft.base.log import get_logger
from swarm_ft.errors import MalformedMessage, Unavailable

if TYPE_CHECKING:
    from swarm_ft.peer.node import PeerNode

logger = get_logger(__name__)

SOCKET = "control.sock"
MAX_LINE_BYTES = 4096
ASK_S = 5.0
"""Seconds in which a new connection must send its request."""
POLL_S = 0.5
"""Seconds between two looks at the peer's state."""
PAUSE, RESUME, DRAIN, STATUS = "pause", "resume", "drain", "status"
VERBS = (PAUSE, RESUME, DRAIN, STATUS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerState:
    """The state of a peer.

    Attributes:
        peer: Id of the peer.
        state: working, idle, pausing, paused or leaving.
        words: Reason of the state, or what the peer waits for; may be empty.
        seconds: Estimated seconds until the next state.
        gave: Contribution in the swarm's count, as text; empty before the coordinator sent it.
        given: The same contribution as numbers; None before the coordinator sent it.
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
        """Whether this is the state that a request leads to."""
        return {PAUSE: self.state == "paused", DRAIN: self.state == "gone"}.get(verb, True)


def state_of(peer_id: str, node: PeerNode, name: str = "") -> PeerState:
    """Return the peer's state, with the newest contribution that the coordinator sent."""
    contribution = node.last_contribution
    gave = str(contribution) if contribution is not None else ""
    given = asdict(contribution) if contribution is not None else None
    idle = PeerState(peer=peer_id, name=name, state="idle", gave=gave, given=given)
    presence = node.presence
    leaving, progress = presence.leaving, presence.progress
    if leaving is None:
        return replace(idle, state="working" if node.has_stages else "idle")
    state = "leaving"
    if leaving.stays:
        state = "paused" if presence.is_paused or not node.has_stages else "pausing"
    words = progress.words if progress is not None and progress.words else leaving.reason
    seconds = progress.seconds if progress is not None else 0.0
    return replace(idle, state=state, words=words, seconds=seconds)


class PeerControl:
    """The peer's end of the socket.

    Args:
        peer_id: Id of the peer.
        node: The peer.
        carry_out: Function that carries out a request to pause, resume or drain.
        name: The peer's name for people.
    """

    def __init__(
        self, peer_id: str, node: PeerNode, carry_out: Callable[[str], None], name: str = ""
    ) -> None:
        self._peer_id = peer_id
        self._name = name
        self._node = node
        self._ask = carry_out

    @asynccontextmanager
    async def listening(self, home: Path | None) -> AsyncIterator[None]:
        """Serve requests at the home's socket as long as the context lasts.

        Without a home nothing is served.
        """
        path = home / SOCKET if home is not None else None
        if path is None:
            yield
            return
        path.unlink(missing_ok=True)  # A killed peer left it; this process locked the home.
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
                await self._send_states(writer, verb)
        finally:
            writer.close()

    async def _send_states(self, writer: asyncio.StreamWriter, verb: str) -> None:
        """Send the state at each change, until it is the requested one."""
        from swarm_ft.protocol.messages.control import without_numbers

        sent: PeerState | None = None
        await self._node.contribution()
        while sent is None or not sent.is_what(verb):
            now = state_of(self._peer_id, self._node, self._name)
            if (
                sent is None
                or now.state != sent.state
                or without_numbers(now.words) != without_numbers(sent.words)
            ):
                writer.write(json.dumps(asdict(now)).encode() + b"\n")
                await writer.drain()
            sent = now
            if not sent.is_what(verb):
                await asyncio.sleep(POLL_S)


def verb_of(line: bytes) -> str:
    """Return the verb of a request.

    Raises:
        MalformedMessage: The line is no request, or its verb is unknown.
    """
    try:
        request = json.loads(line)
    except ValueError:
        request = None
    verb = request.get("do") if isinstance(request, dict) else None
    if verb not in VERBS:
        raise MalformedMessage(f"expected one of {', '.join(VERBS)}")
    return str(verb)


async def send_request(home: Path, verb: str) -> AsyncIterator[PeerState]:
    """Send a request to the peer at this home, and yield its states until the requested one.

    Raises:
        Unavailable: No peer of this user is running there.
    """
    try:
        with systems.short_socket_path(home / SOCKET) as short:
            reader, writer = await asyncio.open_unix_connection(short)
    except (OSError, AttributeError):
        raise Unavailable(f"no peer of this user is running in {home}") from None
    try:
        writer.write(json.dumps({"do": verb}).encode() + b"\n")
        await writer.drain()
        while line := await reader.readline():
            fields: dict[str, Any] = json.loads(line)
            yield PeerState(**fields)
    finally:
        writer.close()


def running_homes(homes: Path) -> list[Path]:
    """Return the homes below this folder that have a peer's socket."""
    if not homes.is_dir():
        return []
    return sorted(home for home in homes.iterdir() if (home / SOCKET).exists())
