"""The command `swarm-ft relay`, which forwards links between members behind routers."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import click

from swarm_ft.api.connections import DHT_PREFIX, SwarmAddress, SwarmConnection, join, state_folder
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.base.log import get_logger
from swarm_ft.cli.options import examples, json_flag, log_format_option, log_option, takes
from swarm_ft.cli.running import run_until_stopped, show_start
from swarm_ft.cli.swarm_options import parse_invite_argument, prompt_invite
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import Option, check

if TYPE_CHECKING:
    from swarm_ft.identity.invites import Invite
    from swarm_ft.protocol.messages.meeting import RelayHello
    from swarm_ft.reach.front import Front
    from swarm_ft.reach.relay import RelayLimits

logger = get_logger(__name__)

BYTES_PER_MBIT = 125_000.0
Mbps = Annotated[float, Range(0.1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayOptions:
    """The limits of a relay."""

    max_links: Annotated[
        int, Range(1, 65536), Option("Maximum number of links at a time; each joins two members.")
    ] = 256
    max_mbps: Annotated[
        Mbps | None,
        Option(
            "Maximum rate of all links together in Mbit/s, each way.",
            metavar="MBPS",
            default="no limit",
        ),
    ] = None
    max_link_mbps: Annotated[
        Mbps | None,
        Option("Maximum rate of one link in Mbit/s, each way.", metavar="MBPS", default="no limit"),
    ] = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def limits(self) -> RelayLimits:
        """The same limits in bytes per second."""
        from swarm_ft.reach.relay import RelayLimits

        return RelayLimits(
            links=self.max_links,
            bytes_per_s=BYTES_PER_MBIT * (self.max_mbps or math.inf),
            link_bytes_per_s=BYTES_PER_MBIT * (self.max_link_mbps or math.inf),
        )


@click.command(
    short_help="Run a relay for members that cannot reach each other.",
    epilog=examples(
        "swarm-ft relay @invitation.txt",
        "swarm-ft relay @invitation.txt --port 7100 --announce relay.example.org",
        "swarm-ft relay @invitation.txt --port 7100 --max-mbps 200 --max-link-mbps 50",
    ),
)
@click.argument("invite", required=False, callback=parse_invite_argument, metavar="INVITE")
@takes("listening", ListenOptions, instead={"host": "all interfaces"})
@takes("lent", RelayOptions)
@json_flag
@log_option
@log_format_option
def relay(
    invite: Invite | None, listening: ListenOptions, lent: RelayOptions, as_json: bool
) -> None:
    """Run a relay for members that cannot reach each other, until Ctrl-C.

    The relay forwards encrypted links, which it cannot read. It needs two ports that everybody
    reaches: --port, and the next one, with which members test their routers.

    INVITE is @FILE, a file with an invitation (`swarm-ft invite --role relay`). Without it the
    command prompts for the invitation, or reads standard input.
    """
    invite = invite or prompt_invite(reads_pipe=True)
    if invite is None:
        raise BadOption(
            "expected an invitation, got none; give a file as @FILE ('swarm-ft invite --role "
            "relay' prints one)"
        )
    way = SwarmAddress(invite=invite, initial_peers=(), dht_prefix=DHT_PREFIX)
    show_start("starting the relay", as_json=as_json)

    async def work() -> None:
        async with join(way, _key_file()) as swarm:
            await _serve(swarm, listening, lent, as_json=as_json)

    run_until_stopped(work)


def _key_file() -> Path:
    """Return the path of the key of this user's relay."""
    return state_folder() / "relay.pem"


async def _serve(
    swarm: SwarmConnection, listening: ListenOptions, lent: RelayOptions, *, as_json: bool
) -> None:
    """Run the relay until cancelled; print its address once the coordinator knows it."""
    from swarm_ft.discovery.directory import find_coordinator
    from swarm_ft.reach.front import Front
    from swarm_ft.reach.relay import CoordinatorStream, Relay
    from swarm_ft.transport.base import until_one_ends
    from swarm_ft.transport.grpc_options import CONTROL_ANSWER_S, GrpcOptions
    from swarm_ft.transport.grpc_transport import GrpcTransport

    find = functools.partial(find_coordinator, swarm.directory)
    options = GrpcOptions(answer_timeout_s=CONTROL_ANSWER_S, credentials=swarm.credentials)
    attendance, front = CoordinatorStream(GrpcTransport(options), find, Random()), Front()
    own = Relay(front, attendance.key, lent.limits, attendance.unix_s)

    async def show(port: int) -> None:
        _show(swarm.name, await attendance.welcomed, lent, as_json=as_json)
        await _check_reached(await find(), port)
        await asyncio.Event().wait()

    try:
        hello, port = await _listen(front, listening.reachable_from(swarm.coordinator or ""))
        await until_one_ends(attendance.run(own, hello), own.log_traffic(), show(port))
    finally:
        await front.close()


async def _listen(front: Front, listening: ListenOptions) -> tuple[RelayHello, int]:
    """Listen on two ports; return the addresses to announce, and the first port.

    Raises:
        PortInUse: One of the ports is taken.
    """
    from swarm_ft.protocol.messages.meeting import RelayHello
    from swarm_ft.transport.grpc_options import check_address

    wanted = (listening.port, listening.port + 1 if 0 < listening.port < 65535 else 0)
    for port in wanted:
        await check_address(listening.address, port)
    one, other = [
        int((await front.listen(listening.address, port)).rpartition(":")[2]) for port in wanted
    ]
    endpoint = listening.endpoint(one)
    probe = f"{endpoint.rpartition(':')[0]}:{other}"
    return RelayHello(endpoint=endpoint, probe_endpoint=probe), one


async def _check_reached(coordinator: str, port: int) -> None:
    """Warn if the coordinator cannot connect to the relay's port."""
    from swarm_ft.reach.sockets import is_dialled_back

    with suppress(OSError, TimeoutError):
        if await is_dialled_back(coordinator, port) is False:
            logger.warning(
                "the coordinator cannot reach port %d of this machine, so no member uses this "
                "relay; open the port in the firewall, or forward it in the router",
                port,
            )


def _show(name: str | None, endpoint: str, lent: RelayOptions, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"relay": name, "endpoint": endpoint, "max_links": lent.max_links}))
        return
    click.echo(
        f"The relay {name} is running at {endpoint}, for {lent.max_links} links. Ctrl-C stops it."
    )
