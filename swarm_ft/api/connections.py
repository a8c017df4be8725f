"""Connections of a process to a swarm, by an invitation or through given DHT nodes."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from shlex import quote
from typing import TYPE_CHECKING, Any

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import is_loopback

if TYPE_CHECKING:
    from swarm_ft.api.listen_options import ListenOptions
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.discovery import Directory
    from swarm_ft.discovery.dht import DhtDirectory
    from swarm_ft.discovery.fallback_directory import FallbackDirectory
    from swarm_ft.identity.invites import Invite
    from swarm_ft.identity.keys import PrivateKey
    from swarm_ft.identity.records import Signer
    from swarm_ft.identity.roles import Role
    from swarm_ft.net.enrol import Membership
    from swarm_ft.reach.shaping import Shape
    from swarm_ft.reach.transport import HomeTransport
    from swarm_ft.transport.base import Server
    from swarm_ft.transport.credentials import Credentials
    from swarm_ft.transport.grpc_transport import GrpcTransport

DHT_PREFIX = "swarm-ft"
"""Default name of a swarm in the DHT."""
MAX_FILE_CHARS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmAddress:
    """The address of a swarm, as a command or a call gets it.

    Attributes:
        invite: Invitation, with which links are encrypted and authenticated; None leads to a
            swarm without keys, in plaintext on this machine.
        initial_peers: Addresses of DHT nodes; empty: the coordinator sends them.
        dht_prefix: Name of the swarm in the DHT, without an invitation.
        coordinator: Address of the coordinator; None: the DHT has it.
        invite_file: File of the invitation, for suggested commands. They never contain the
            invitation itself, since other users of a machine can read command lines.

    Raises:
        BadOption: Without an invitation, a node is not on this machine.
    """

    invite: Invite | None
    initial_peers: tuple[str, ...]
    dht_prefix: str
    coordinator: str | None = None
    invite_file: str = "FILE"

    def __post_init__(self) -> None:
        if self.invite is None:
            check_local_nodes(self.initial_peers)

    def __str__(self) -> str:
        """Write the options that lead to the same swarm, quoted for a shell."""
        peers = " ".join(f"--initial-peers {peer}" for peer in self.initial_peers)
        security = (
            "--insecure" if self.invite is None else f"--invite {quote(f'@{self.invite_file}')}"
        )
        return f"{security} {peers}".rstrip()


def check_local_nodes(maddrs: Iterable[str]) -> None:
    """Refuse DHT nodes on other machines, for links without keys.

    Raises:
        BadOption: A node is not at an address of this machine.
    """
    for maddr in maddrs:
        _, kind, host, *_ = f"{maddr}///".split("/")
        if not (kind in {"ip4", "ip6"} and is_loopback(host)):
            raise BadOption(
                f"--initial-peers {ascii(maddr)[:200]}: with --insecure expected a node on this "
                "machine, /ip4/127.0.0.1/... or /ip6/::1/...; swarms on other machines need an "
                "invitation"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SwarmConnection:
    """A process's membership in a swarm.

    Attributes:
        directory: Directory of the swarm's members.
        credentials: Key and certificate of the process; None if links are not encrypted.
        name: Member id of its key; None without a key.
        coordinator: Address of the coordinator at the time of joining; None without an
            invitation.
        shown_name: This member's name for people; None if it has no key.
    """

    directory: Directory
    credentials: Credentials | None = None
    name: str | None = None
    coordinator: str | None = None
    shown_name: str | None = None

    def transport(
        self, grpc: GrpcTransport, shape: Shape | None = None
    ) -> GrpcTransport | HomeTransport:
        """Return the transport to other members; with keys it tries all ways to reach them.

        Args:
            grpc: Transport over one connection.
            shape: Rate limiter of this machine's link. It has no effect without keys, since links
                then stay on this machine.
        """
        if self.credentials is None:
            return grpc
        from swarm_ft.base.clock import SystemClock
        from swarm_ft.discovery.directory import find_coordinator
        from swarm_ft.reach.transport import HomeTransport
        from swarm_ft.transport.grpc_options import CONTROL_ANSWER_S, GrpcOptions
        from swarm_ft.transport.grpc_transport import GrpcTransport

        find = functools.partial(find_coordinator, self.directory)
        options = GrpcOptions(answer_timeout_s=CONTROL_ANSWER_S, credentials=self.credentials)
        control = GrpcTransport(options)
        return HomeTransport(grpc, find, SystemClock(), Random(), control, shape=shape)


def read_invite(text: str) -> Invite:
    """Parse an invitation, or the file with one that the text names behind an `@`.

    Raises:
        BadInvite: The text is no invitation.
        BadOption: The file cannot be read.
    """
    from swarm_ft.identity.invites import parse_invite

    return parse_invite(_in_file(Path(text[1:])) if text.startswith("@") else text)


def parse_swarm_address(
    invite: str | None, initial_peers: tuple[str, ...] = (), dht_prefix: str = DHT_PREFIX
) -> SwarmAddress:
    """Parse the arguments of a call that lead to a swarm.

    Raises:
        BadInvite: `invite` is no invitation.
        BadOption: Both arguments are missing, or an address is not on this machine.
    """
    if invite is None and not initial_peers:
        raise BadOption(
            "expected invite=..., got none; 'swarm-ft invite' prints an invitation. A swarm "
            "without keys on this machine takes initial_peers instead"
        )
    from swarm_ft.discovery import expand_initial_peers

    parsed = read_invite(invite) if invite is not None else None
    nodes = expand_initial_peers(initial_peers)
    return SwarmAddress(invite=parsed, initial_peers=nodes, dht_prefix=dht_prefix)


def _in_file(path: Path) -> str:
    try:
        with path.open(encoding="ascii") as file:
            return file.read(MAX_FILE_CHARS)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "expected an invitation, as text"
        raise BadOption(f"invitation @{path}: {reason}") from None


@asynccontextmanager
async def open_dht(
    initial_peers: tuple[str, ...],
    prefix: str = DHT_PREFIX,
    *,
    host_maddrs: tuple[str, ...] = (),
    announce_maddrs: tuple[str, ...] = (),
    identity_path: Path | None = None,
    signer: Signer | None = None,
    authority: str | None = None,
) -> AsyncIterator[DhtDirectory | FallbackDirectory]:
    """Take part in a DHT as long as the context lasts, see `DhtOptions`.

    Without addresses to listen on the process is a mere client of the DHT, which joins again after
    a loss. Others could not reach a node behind a home router.

    Raises:
        BadOption: An address or the identity file is not usable.
        PortInUse: A listen address is taken.
        DirectoryUnreachable: None of the initial peers answers.
    """
    from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
    from swarm_ft.discovery.fallback_directory import FallbackDirectory

    options = DhtOptions(
        initial_peers=initial_peers,
        host_maddrs=host_maddrs,
        announce_maddrs=announce_maddrs,
        identity_path=identity_path,
        client_mode=not host_maddrs,
        prefix=prefix,
        signer=signer,
        authority=authority,
    )
    directory: DhtDirectory | FallbackDirectory
    directory = dht = await DhtDirectory.open(options)
    if options.client_mode:
        directory = FallbackDirectory(functools.partial(DhtDirectory.open, options), dht=dht)
        await directory.enter()
    try:
        yield directory
    finally:
        await directory.close()


@asynccontextmanager
async def announce(
    server: Server, listening: ListenOptions, directory: Directory, role: Role, name: str
) -> AsyncIterator[str]:
    """Announce the server's address in the directory as long as the context lasts."""
    endpoint = listening.endpoint(int(server.endpoint.rpartition(":")[2]))
    try:
        await directory.announce(role, name, endpoint)
        yield endpoint
    finally:
        await server.stop()
        await directory.withdraw(role, name)


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` in the background as long as the context lasts."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def join(
    way: SwarmAddress, key_file: Path | None = None, chosen_name: str = ""
) -> AsyncIterator[SwarmConnection]:
    """Join the swarm as long as the context lasts.

    Args:
        way: Address of the swarm.
        key_file: Path of the process's key, created if absent; None: a new key each time.
        chosen_name: The name for people that this member chose; empty: none.

    Raises:
        BadOption: The key's file cannot be read or written.
        BadInvite: The invitation is used up, expired, revoked, or of another swarm.
        NotAllowed: The key was revoked.
        Unavailable: The coordinator does not answer.
        DirectoryUnreachable: None of the given DHT nodes answers.
    """
    if way.invite is None:
        async with open_dht(way.initial_peers, way.dht_prefix) as dht:
            yield SwarmConnection(directory=dht)
        return
    from swarm_ft.discovery.directory import find_coordinator
    from swarm_ft.identity.keys import key_at, new_key
    from swarm_ft.net.enrol import enrol, keep_enrolled

    own = key_at(key_file) if key_file else new_key()
    member = await enrol(way.invite, own, chosen_name)
    directory = await _directory_of(member, own, way.initial_peers)
    find = functools.partial(find_coordinator, directory)
    renewing = asyncio.create_task(keep_enrolled(member.credentials, own, find))
    try:
        yield SwarmConnection(
            directory=directory,
            credentials=member.credentials,
            name=member.name,
            coordinator=member.coordinator,
            shown_name=member.shown_name,
        )
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await directory.close()


@asynccontextmanager
async def connect(way: SwarmAddress, key_file: Path | None = None) -> AsyncIterator[SwarmClient]:
    """Connect a client to the swarm, with this key or this user's own; raises as `joined` does."""
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.reach.transport import HomeTransport
    from swarm_ft.transport.grpc_options import GrpcOptions
    from swarm_ft.transport.grpc_transport import GrpcTransport

    async with join(way, key_file or client_key_file()) as swarm:
        transport = swarm.transport(GrpcTransport(GrpcOptions(credentials=swarm.credentials)))
        if not isinstance(transport, HomeTransport):
            yield SwarmClient(swarm.directory, transport, swarm.name or "")
            return
        transport.start()
        try:
            yield SwarmClient(swarm.directory, transport, swarm.name or "")
        finally:
            await transport.close()


async def _directory_of(
    member: Membership, own: PrivateKey, initial_peers: tuple[str, ...]
) -> FallbackDirectory:
    """Join the swarm's DHT through `initial_peers`, or else through the coordinator's nodes.

    Raises:
        DirectoryUnreachable: None of `initial_peers` answers. The coordinator's nodes may fail.
    """
    from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
    from swarm_ft.discovery.directory import find_coordinator
    from swarm_ft.discovery.fallback_directory import FallbackDirectory
    from swarm_ft.errors import DirectoryUnreachable
    from swarm_ft.identity.certificates import key_name
    from swarm_ft.identity.records import Signer
    from swarm_ft.net.enrol import renew_enrolment

    options = DhtOptions(
        initial_peers=initial_peers or member.initial_peers,
        client_mode=True,
        prefix=member.dht_prefix,
        signer=Signer(own),
        authority=key_name(member.credentials.authority),
    )

    async def open_dht() -> DhtDirectory:
        nonlocal options
        try:
            return await DhtDirectory.open(options)
        except DirectoryUnreachable:
            if initial_peers:
                raise
            coordinator = await find_coordinator(directory)
            renewed = await renew_enrolment(member.credentials, own, coordinator)
            if renewed.initial_peers == options.initial_peers:
                raise
        options = replace(options, initial_peers=renewed.initial_peers)
        return await DhtDirectory.open(options)

    first = await open_dht() if initial_peers else None
    directory = FallbackDirectory(open_dht, member.coordinator, first)
    await directory.enter()
    return directory


def client_key_file() -> Path:
    """Return the path of the key of this user's clients on this machine."""
    return state_folder() / "client.pem"


def state_folder() -> Path:
    """Return the folder of this user's keys on this machine."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "swarm-ft"
