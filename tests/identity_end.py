"""Members at one machine of a lab, of whom some show a certificate that is not their own.

    python -m tests.identity_end FOLDER HUB ADDRESS NAME:SHOWN...

The coordinator knows each as NAME; to others it shows what SHOWN has. Once all can be introduced it
prints `ready`. Then it answers each line `CALLER CALLEE` with a call's outcome, which way it
went, and `?` with who called whom. Keys are in FOLDER, and in `revoked` whom nobody takes calls of.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from random import Random

from swarm_ft.base.clock import SystemClock
from swarm_ft.errors import SwarmError
from swarm_ft.protocol.messages.client import StatusRequest, SwarmStatus
from swarm_ft.reach.transport import HomeTransport
from swarm_ft.transport.base import MessageStream, call
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import STATUS
from tests.meeting_end import credentials_in, print_line

TIMEOUT_S = 20.0


class Ways(logging.Handler):
    """A handler that records this process's last ways to others from its own log."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        logger = logging.getLogger("swarm_ft.reach.meet")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        if record.msg.startswith("reaches") and isinstance(record.args, tuple):
            name, way, _ = record.args
            self.found[str(name)] = str(way)


class End:
    """All of them."""

    def __init__(self, folder: Path, hub: str, address: str) -> None:
        self._folder = folder
        self._hub = hub
        self._address = address
        self._ways = Ways()
        self._members: dict[str, HomeTransport] = {}
        self.calls: list[tuple[str, str]] = []

    async def add(self, name: str, shown: str) -> None:
        """Have one be there."""
        credentials = credentials_in(self._folder, shown)
        credentials.revoke((self._folder / "revoked").read_text(encoding="utf-8").split())
        control = GrpcTransport(GrpcOptions(credentials=credentials_in(self._folder, name)))
        grpc = GrpcTransport(GrpcOptions(credentials=credentials))
        transport = HomeTransport(grpc, self._find, SystemClock(), Random(name), control)

        async def status(stream: MessageStream[SwarmStatus, StatusRequest]) -> None:
            await stream.receive()
            assert stream.caller is not None
            self.calls.append((stream.caller.name, name))
            await stream.send(SwarmStatus(members=(), runs=()))

        server = await transport.serve("0.0.0.0", 0, {STATUS: status})
        transport.start((f"{self._address}:{server.endpoint.rpartition(':')[2]}",))
        await transport.reach.knows_mapping.wait()
        self._members[name] = transport

    async def ask(self, caller: str, callee: str) -> dict[str, str]:
        """Return the outcome of a call."""
        self._ways.found.clear()
        answer = {"code": "", "says": ""}
        channel = self._members[caller].connect("", callee)
        try:
            await call(channel, STATUS, StatusRequest(), TIMEOUT_S)
        except SwarmError as error:
            answer = {"code": error.code, "says": error.message}
        finally:
            await channel.close()
        return {**answer, "way": self._ways.found.get(callee, "")}

    async def _find(self) -> str:
        return self._hub


async def main() -> None:
    """Run with the arguments of the command line, until killed."""
    folder, hub, address, *members = sys.argv[1:]
    end = End(Path(folder), hub, address)
    for one in members:
        await end.add(*one.split(":"))
    print_line("ready")
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        print_line(json.dumps(end.calls if line == ["?"] else await end.ask(*line)))


if __name__ == "__main__":
    asyncio.run(main())
