"""A process of a swarm of meetings, for tests that start it on machines of a lab.

    python -m tests.meeting_end hub FOLDER HOST          the coordinator with its relay
    python -m tests.meeting_end bare FOLDER HOST         one without a relay
    python -m tests.meeting_end member FOLDER NAME HUB ADDRESS   somebody to meet
    python -m tests.meeting_end mapped FOLDER NAME HUB ADDRESS   ... with a port of the router

It prints a line once it is up. A member then answers each line `NAME` with the way to that member
and its seconds, and `?` with the ways by which others reached it. FOLDER has the keys of all.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from random import Random

from swarm_ft.base.clock import SystemClock
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.coordinator.relays import ConnectedRelay
from swarm_ft.errors import SwarmError
from swarm_ft.identity.certificates import from_pem
from swarm_ft.identity.keys import key_at, new_key
from swarm_ft.protocol.messages.meeting import RelayPlace
from swarm_ft.reach.doctor import examine_member
from swarm_ft.reach.front import Front
from swarm_ft.reach.meet import Reach
from swarm_ft.reach.portmap import map_port
from swarm_ft.reach.relay import Relay
from swarm_ft.reach.transport import FrontedTransport
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions, format_endpoint
from swarm_ft.transport.grpc_transport import GrpcTransport

PORT = 7000


def credentials_in(folder: Path, name: str) -> Credentials:
    """Read the credentials of the member whose files the test made."""
    certificate, authority = (
        from_pem((folder / f"{one}.pem").read_bytes()) for one in (name, "authority")
    )
    return Credentials(key_at(folder / f"{name}.key"), certificate, authority)


async def hub(folder: Path, host: str, *, has_relay: bool = True) -> None:
    """Be the coordinator until killed."""
    key = new_key()
    introductions = Introductions(lambda: key, SystemClock())
    options = GrpcOptions(credentials=credentials_in(folder, "coordinator"))
    transport = FrontedTransport(GrpcTransport(options))
    relay = Relay(transport.front, key.public_key)
    server = await transport.serve(host, PORT, introductions.handlers())
    probe = await transport.front.listen(host, PORT + 1)
    if has_relay:
        place = RelayPlace(endpoint=server.endpoint, probe_endpoint=probe)
        introductions.relays.set_own_relay(
            lambda: ConnectedRelay(place=place, carries=relay.carries)
        )
        relay.on_leg(introductions.relays.own_leg)
    transport.front.dial_back_from(host)
    print_line(server.endpoint)
    await asyncio.Event().wait()


async def member(
    folder: Path, name: str, coordinator: str, address: str, *, is_mapped: bool = False
) -> None:
    """Be met, and meet whom the test names, until killed."""

    async def find() -> str:
        return coordinator

    front = Front()
    listens_at = await front.listen("0.0.0.0", 0)
    grpc = GrpcTransport(GrpcOptions(credentials=credentials_in(folder, name)))
    reach = Reach(grpc, find, front, SystemClock(), Random(name))
    port = int(listens_at.rpartition(":")[2])
    running = asyncio.create_task(reach.run((format_endpoint(address, port),)))
    await reach.knows_mapping.wait()
    stack = AsyncExitStack()
    if is_mapped:
        endpoint = await stack.enter_async_context(map_port(port))
        if endpoint is not None:
            reach.add_endpoint(endpoint)
            with suppress(SwarmError):  # once this is refused, the messages before it have arrived
                await reach.link("nobody")
    print_line(name)
    while line := await asyncio.to_thread(sys.stdin.readline):
        began_s = time.monotonic()
        if line.strip() == "?":
            found = [asdict(finding) async for finding in examine_member(reach, coordinator)]
            print_line(json.dumps(found[-1]))
            continue
        try:
            link = await reach.link(line.strip())
            answer = {"way": str(link.way), "took_s": time.monotonic() - began_s}
            link.sock.close()
        except SwarmError as error:
            answer = {"way": error.message, "took_s": time.monotonic() - began_s}
        print_line(json.dumps(answer))
    running.cancel()
    await stack.aclose()


def print_line(text: str) -> None:
    """A line, now."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Run with the arguments of the command line."""
    role, folder, *arguments = sys.argv[1:]
    if role in {"hub", "bare"}:
        asyncio.run(hub(Path(folder), *arguments, has_relay=role == "hub"))
    else:
        asyncio.run(member(Path(folder), *arguments, is_mapped=role == "mapped"))


if __name__ == "__main__":
    main()
