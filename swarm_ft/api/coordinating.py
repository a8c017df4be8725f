"""A coordinator put together: its journal, keys, DHT, service, port and relay."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    closing,
    nullcontext,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_ft.api.documents import event_fields, row_fields, status_fields
from swarm_ft.api.joining import announced, in_dht
from swarm_ft.api.listening import LISTEN_ANYWHERE, Listening, own_address_towards
from swarm_ft.api.swarm_keys import keys_folder, opened
from swarm_ft.clock import SystemClock
from swarm_ft.coordinator.enrolment import Enrolment
from swarm_ft.coordinator.facts.quotas import Quotas
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.coordinator.journal.reserve import RESERVE_BYTES
from swarm_ft.coordinator.journal.tokens import RESERVE_BYTES as TOKEN_RESERVE_BYTES
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.coordinator.member_names import MemberNames
from swarm_ft.coordinator.recording.files import RecordingFiles, folder_of
from swarm_ft.coordinator.relays import Relaying
from swarm_ft.coordinator.restored import forget_missing_snapshots
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import BadInput, BadOption, JournalError
from swarm_ft.identity.authority import Authority, WebCertificate
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.page.facts import Documents
from swarm_ft.page.server import LOOPBACK, HttpPlaces, Watched, watched
from swarm_ft.protocol.messages.meeting import RelayPlace
from swarm_ft.protocol.spec.bounds import host_of, is_loopback
from swarm_ft.reach.relay import Relay
from swarm_ft.reach.transport import FrontedTransport
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.transport.base import Handler, Method, Server, until_one_ends
from swarm_ft.transport.grpc_options import GrpcOptions, addresses_of, check_address
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import MEASURE_LINK

if TYPE_CHECKING:
    from swarm_ft.discovery.dht import DhtDirectory
    from swarm_ft.discovery.remembering import RememberingDirectory

DOCUMENTS = Documents(status=status_fields, event=event_fields, row=row_fields)
SOMEWHERE = {"0.0.0.0": "192.0.2.1:9", "::": "[2001:db8::1]:9"}
"""Addresses that nobody has (RFC 5737, RFC 3849): by which of ours we would reach them."""
KEEPERS = 2
"""As many machines beside a stage's own may die at once."""
Owned = tuple[Authority, Registry]


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """What a coordinator was told at its start.

    Attributes:
        journal: its file; the swarm's keys are beside it, if it has some.
        initial_peers: of the DHT; without any it starts one.
        queue_s: how long a run that nobody can host waits for somebody.
        result_s: how long a finished run waits for its client.
        snapshots: where peers save stages; None: with each other, or nowhere.
        num_keepers: how many peers keep each stage of a snapshot; 0: none do.
        moves_layers: whether runs are cut anew while they train, where that is faster.
        sealing_key: of what lies on its disk; None: that is not encrypted.
        is_public: anybody is let in, as a replica on probation.
        has_relay: it joins, at its port, whom no other way brings together.
        recording_bytes: of what went into its decisions; 0: nothing is kept.
        http: where its page and its metrics are.
    """

    journal: str
    initial_peers: tuple[str, ...]
    dht_prefix: str
    listening: Listening
    queue_s: float
    result_s: float
    quotas: Quotas
    snapshots: SnapshotStore | None
    num_keepers: int
    moves_layers: bool
    sealing_key: bytes | None
    is_public: bool
    has_relay: bool
    recording_bytes: int
    http: HttpPlaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinator:
    """One that listens.

    Attributes:
        endpoint: where others reach it.
        addresses: of its DHT node.
        public: the invitation for all, if all are to be let in.
        watched: where its page and its metrics are.
        disk_words: how much of the disk is free, and how much is reserved, for people.
    """

    endpoint: str
    addresses: tuple[str, ...]
    public: Invite | None
    watched: Watched
    service: CoordinatorService
    enrolment: Enrolment | None
    disk_words: str = ""

    async def run(self) -> None:
        """Plan and commit, until cancelled.

        Raises:
            JournalError: what has to be kept cannot be.
        """
        enrolling = [self.enrolment.run()] if self.enrolment else []
        await until_one_ends(self.service.run(), *enrolling)


def keepers_of(asked: int | None, snapshots: str | None) -> int:
    """How many peers are to keep each stage of a snapshot.

    Args:
        asked: how many; None: as many as is usual.
        snapshots: where all of them lie instead; None: nowhere.

    Raises:
        BadOption: both are asked for.
    """
    if asked and snapshots:
        raise BadOption(
            "--keepers, --snapshots: snapshots lie with peers or in one place, not both"
        )
    usual = 0 if snapshots else KEEPERS
    return usual if asked is None else asked


async def composed(told: Charge, stack: AsyncExitStack) -> Coordinator:
    """A coordinator that listens as long as `stack` is open.

    Raises:
        BadOption: the journal, or the swarm's keys, cannot be read, or a page is asked for that
            needs them.
        PortInUse: its port is taken.
        DirectoryUnreachable: none of the initial peers answers.
    """
    told.http.check(has_keys=keys_folder(told.journal).exists())
    for place in ((told.listening.address, told.listening.port), *told.http.asked):
        await check_address(*place)  # before a journal is made
    owned = stack.enter_context(_with_keys(told.journal))
    certificate = _web_certificate(told, owned)
    directory = await stack.enter_async_context(await _dht(told, owned))
    journal = stack.enter_context(closing(_open_journal(told.journal, told.sealing_key)))
    forget_missing_snapshots(journal, told.snapshots)  # nobody is served yet
    addresses = _announced(directory.addresses, told.listening.announced_host)
    recording = _recording(told, stack)
    parts = _Parts(told, owned, journal, told.initial_peers or addresses, recording)
    found = announced(
        await parts.serve(), told.listening, directory, Role.COORDINATOR, COORDINATOR_NAME
    )
    endpoint = await stack.enter_async_context(found)
    await parts.dial_back(endpoint)
    await parts.lend_relay(endpoint, stack)
    return Coordinator(
        endpoint=endpoint,
        addresses=addresses,
        public=await parts.opens(endpoint),
        watched=await stack.enter_async_context(
            watched(parts.service, SystemClock(), DOCUMENTS, _http(told), certificate)
        ),
        service=parts.service,
        enrolment=parts.enrolment,
        disk_words=_disk_words(journal),
    )


def _disk_words(journal: Journal) -> str:
    free_bytes, reserve = journal.tokens.free_bytes(), f"{TOKEN_RESERVE_BYTES / 1e6:,.0f} MB"
    if free_bytes is None:
        return ""
    free = f"its disk has {free_bytes / 1e6:,.0f} MB free"
    if free_bytes < TOKEN_RESERVE_BYTES:
        return f"{free}; it takes no job, for {reserve} are reserved for runs under way; make room"
    return f"{free}, of which {reserve} stay reserved for runs under way"


def _http(told: Charge) -> HttpPlaces:
    """Serve HTTP; a file beside the journal has the page's newest address."""
    has_file = told.journal != ":memory:"
    return replace(told.http, address_file=Path(f"{told.journal}.page") if has_file else None)


class _Parts:
    """What answers at a coordinator's port.

    Args:
        told: at its start.
        owned: the swarm's keys; without them there is plaintext, and nobody enrols or meets.
        journal: of its runs.
        nodes: of the DHT, for those who enrol.
        recording: where all goes that went into decisions, if it is kept.
    """

    def __init__(
        self,
        told: Charge,
        owned: Owned | None,
        journal: Journal,
        nodes: tuple[str, ...],
        recording: RecordingFiles | None,
    ) -> None:
        self._told = told
        self._owned = owned
        self._ticket_key = new_key()  # good for a minute's tickets, and for this process
        self._introductions = Introductions(lambda: self._ticket_key, SystemClock())
        self._names = MemberNames()
        self.service = self._new_service(journal, recording)
        self.enrolment: Enrolment | None = None
        if owned:
            self.enrolment = Enrolment(
                *owned,
                nodes,
                told.dht_prefix,
                on_revoked=self.service.revoke,
                on_void=self.service.send_all_away,
                on_renewed=self.service.renewed,
                take_heard=self.service.take_heard,
                names=self._names,
            )
        credentials = self.enrolment.credentials if self.enrolment else None
        self._grpc = GrpcTransport(GrpcOptions(credentials=credentials))
        self._fronted = FrontedTransport(self._grpc) if owned else None

    def _new_service(
        self, journal: Journal, recording: RecordingFiles | None
    ) -> CoordinatorService:
        return CoordinatorService(
            journal,
            SystemClock(),
            self._told.snapshots,
            num_keepers=self._told.num_keepers,
            moves_layers=self._told.moves_layers,
            queue_s=self._told.queue_s,
            result_s=self._told.result_s,
            quotas=self._told.quotas,
            grants=self._owned[1].grant_of if self._owned else None,
            claims=self._owned[1].claim_of if self._owned else None,
            ways=self._introductions.meetings.known,
            relays=self._introductions.relays,
            recording=recording,
            names=self._names,
        )

    async def serve(self) -> Server:
        """Listen, at the port that earlier invitations name if none was asked for."""
        host, port = self._told.listening.address, self._told.listening.port
        if not port and self._owned:
            port = await _last_port(host, self._owned[1])
        return await (self._fronted or self._grpc).serve(host, port, self._handlers())

    def _handlers(self) -> Mapping[Method[Any, Any], Handler]:
        if self.enrolment is None:
            return self.service.handlers()
        own = self.enrolment.handlers(), self._introductions.handlers()
        served = {**self.service.handlers(), **own[0], **own[1]}
        return served | {MEASURE_LINK: self.enrolment.for_invited(served[MEASURE_LINK])}

    async def dial_back(self, endpoint: str) -> None:
        """Answer members that ask whether a port of theirs can be dialled.

        Args:
            endpoint: where this coordinator is announced; its scope decides which addresses it
                dials.
        """
        if self._fronted is None:
            return
        hosts = [host_of(address) for address in await addresses_of(endpoint)]
        # Many systems resolve their own name to 127.0.1.1, which says nothing of its network.
        is_known = hosts and (host_of(endpoint) in hosts or not is_loopback(hosts[0]))
        self._fronted.front.dial_back_from(hosts[0] if is_known else "")

    async def lend_relay(self, endpoint: str, stack: AsyncExitStack) -> None:
        """Be a relay at this port, if there is to be one."""
        if self._fronted is None or not self._told.has_relay:
            return
        relay = Relay(self._fronted.front, self._ticket_key.public_key)
        probed = await self._fronted.front.listen(self._told.listening.address, 0)
        host, port = endpoint.rpartition(":")[0], probed.rpartition(":")[2]
        place = RelayPlace(endpoint=endpoint, probe_endpoint=f"{host}:{port}")
        self._introductions.relays.have_own(lambda: Relaying(place=place, carries=relay.carries))
        relay.on_leg(self._introductions.relays.own_leg)
        stack.callback(asyncio.create_task(relay.tell()).cancel)

    async def opens(self, endpoint: str) -> Invite | None:
        """Where invitations lead from now on; that for all, if all are to be let in."""
        if self.enrolment is None:
            return None
        return await self.enrolment.opens(endpoint, to_all=self._told.is_public)


# ---- what is beside it


def _with_keys(journal: str) -> AbstractContextManager[Owned | None]:
    """The swarm's authority and registry; None if it has no keys."""
    return opened(journal) if keys_folder(journal).exists() else nullcontext()


def _web_certificate(told: Charge, owned: Owned | None) -> WebCertificate | None:
    """Of the page, if it is for other machines too."""
    if owned is None or not told.http.is_far:
        return None
    return owned[0].web((*page_names(told.http.page or "", told.listening), *LOOPBACK))


def page_names(page: str, listening: Listening) -> tuple[str, ...]:
    """By which other machines call the page, the best one first.

    Args:
        page: on what it listens.
        listening: where the coordinator itself is.

    Raises:
        BadOption: none is known.
    """
    hosts = (page, listening.announced_host or "", listening.address)
    names = [host for host in hosts if host not in LISTEN_ANYWHERE and not is_loopback(host)]
    if any(names):
        return tuple(dict.fromkeys(filter(None, names)))
    try:
        return (own_address_towards(SOMEWHERE[page]),)
    except BadOption as error:
        raise BadOption(
            f"--page {page}: --announce HOST must say its name; {error.message}"
        ) from error


async def _dht(
    told: Charge, owned: Owned | None
) -> AbstractAsyncContextManager[DhtDirectory | RememberingDirectory]:
    own = () if told.initial_peers else (await _listening_maddr(told.listening.address),)
    signer = owned[0].signer if owned else None
    return in_dht(told.initial_peers, told.dht_prefix, host_maddrs=own, signer=signer)


async def _last_port(host: str, registry: Registry) -> int:
    """The port that earlier invitations name, if it is free; else 0, for any."""
    port = int((registry.address() or ":0").rpartition(":")[2])
    try:
        await check_address(host, port)
    except BadInput:
        return 0
    return port


def _open_journal(path: str, sealing_key: bytes | None) -> Journal:
    try:
        return Journal(path, sealing_key, reserve_bytes=RESERVE_BYTES)
    except JournalError as error:
        raise BadOption(f"--{error.message}") from error  # it begins with "journal PATH:"


def _recording(told: Charge, stack: AsyncExitStack) -> RecordingFiles | None:
    if not told.recording_bytes or told.journal == ":memory:":
        return None
    folder = folder_of(told.journal)
    return stack.enter_context(
        closing(RecordingFiles(folder, told.sealing_key, told.recording_bytes))
    )


async def _listening_maddr(host: str) -> str:
    """`host`, which `check_address` passed, as a multiaddr; libp2p listens on no names."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    address = ipaddress.ip_address(found[0][4][0])
    return f"/ip{address.version}/{address}/tcp/0"


def _announced(addresses: Sequence[str], host: str | None) -> tuple[str, ...]:
    """The DHT's addresses, by the host that others were told to use, if they were."""
    if host is None:
        return tuple(addresses)
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    rests = (address.split("/", 3)[3] for address in addresses)
    return tuple(dict.fromkeys(f"/{kind}/{host}/{rest}" for rest in rests))
