"""The libp2p daemon that hivemind talks through, as a process of ours. It knows no DHT.

hivemind would start it itself, but inside our process group: Ctrl-C would kill it before the
directory can withdraw anything, and hivemind's calls would then wait for ever. Here it has a
session of its own and ends when we end it. If we are killed, it ends by itself as soon as its
control connection closes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarm_ft.errors import BadOption, DirectoryUnreachable, InternalError, PortInUse, SwarmError
from swarm_ft.log import get_logger

STOP_TIMEOUT_S = 2.0
MAX_SOCKET_PATH_BYTES = 103
"""What every system takes; Linux takes 107."""
READY_LINE = b"Peer ID:"

_REFUSALS: tuple[tuple[str, type[SwarmError]], ...] = (
    ("address already in use", PortInUse),
    ("failed to listen", BadOption),
    ("bootstrap", DirectoryUnreachable),
)
"""What the daemon says when it gives up, and what that is to us; the first that fits."""

_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class P2pdOptions:
    """How to start the daemon; addresses are multiaddrs.

    Attributes:
        binary: the executable.
        host_maddrs: to listen on; none: do not listen.
        announce_maddrs: to give to others; none: those listened on.
        bootstrap_maddrs: to connect to before all else; one of them must answer.
        identity_path: private key, which makes the peer id; None: a new one each time.
    """

    binary: Path
    host_maddrs: tuple[str, ...]
    announce_maddrs: tuple[str, ...]
    bootstrap_maddrs: tuple[str, ...]
    identity_path: Path | None


class P2pd:
    """A running daemon."""

    def __init__(self, process: asyncio.subprocess.Process, control: Path) -> None:
        self._process = process
        self._control = control
        self._draining: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, options: P2pdOptions) -> P2pd:
        """Start it and wait until it is ready, which takes as long as its bootstrap.

        Cancelling this ends the process.

        Raises:
            PortInUse, BadOption: it cannot listen where it should.
            DirectoryUnreachable: no bootstrap address answers.
            InternalError: it does not start, for another reason.
        """
        # The daemon removes its socket when it ends, even if nobody is left to tell it to.
        control = _socket_path()
        process = await asyncio.create_subprocess_exec(
            *_command(options, control),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        daemon = cls(process, control)
        try:
            await daemon._until_ready()
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    @property
    def control_maddr(self) -> str:
        """Multiaddr of the socket through which it is told what to do."""
        return f"/unix{self._control}"

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    async def stop(self) -> None:
        """End the process, by force if need be, and remove its socket."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        finally:
            if self._draining is not None:
                self._draining.cancel()
                await asyncio.wait({self._draining})
            self._control.unlink(missing_ok=True)

    async def _until_ready(self) -> None:
        output = self._output()
        last = b""
        async for line in output:
            if line.startswith(READY_LINE):
                self._draining = asyncio.create_task(self._drain(output))
                return
            last = line.strip() or last
        raise _refusal(last.decode("utf-8", "replace"))

    def _output(self) -> asyncio.StreamReader:
        if self._process.stdout is None:
            raise InternalError("the libp2p daemon was started without a pipe for its output")
        return self._process.stdout

    async def _drain(self, output: asyncio.StreamReader) -> None:
        # An unread pipe would fill up and stop the daemon.
        while chunk := await output.read(1 << 14):
            for line in chunk.decode("utf-8", "replace").splitlines():
                _logger.debug("p2pd line=%s", ascii(line))


def _command(options: P2pdOptions, control: Path) -> list[str]:
    command = [
        str(options.binary),
        f"-listen=/unix{control}",
        "-idleTimeout=30s",
        # Without an address of its own it can only ask others.
        "-dhtServer" if options.host_maddrs else "-dhtClient",
        # Records name gRPC endpoints that must be reachable anyway, so there is nothing for
        # libp2p's own ways around NATs to do.
        *("-autonat=0", "-autoRelay=0", "-relay=0", "-natPortMap=0"),
    ]
    if options.host_maddrs:
        command.append(f"-hostAddrs={','.join(options.host_maddrs)}")
    else:
        command.append("-noListenAddrs")
    if options.announce_maddrs:
        command.append(f"-announceAddrs={','.join(options.announce_maddrs)}")
    if options.bootstrap_maddrs:
        command += ["-b", f"-bootstrapPeers={','.join(options.bootstrap_maddrs)}"]
    if options.identity_path is not None:
        command.append(f"-id={options.identity_path}")
    return command


def _refusal(last_line: str) -> SwarmError:
    # The daemon puts the date before what it says.
    said = last_line[20:] if last_line[:2] == "20" else last_line
    for words, error in _REFUSALS:
        if words in said:
            return error(f"the DHT node cannot start: {said}")
    return InternalError(f"the DHT node's libp2p daemon did not start: {said or 'no output'}")


def _socket_path() -> Path:
    """A new name for a socket; in /tmp where that of temporary files is too long for one."""
    name = f"swarm-ft-p2pd-{secrets.token_hex(8)}.sock"
    path = Path(tempfile.gettempdir()) / name
    return path if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES else Path("/tmp") / name
