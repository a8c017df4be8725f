"""The start of a coordinator: its journal, keys, DHT, service, port and relay."""

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

from swarm_ft.api.connections import announce, open_dht
from swarm_ft.api.coordinator_options import MEMORY_JOURNAL, CoordinatorOptions
from swarm_ft.api.documents import event_fields, row_fields, status_fields
from swarm_ft.api.listen_options import LISTEN_ANYWHERE, ListenOptions, own_address_towards
from swarm_ft.api.swarm_keys import open_keys
from swarm_ft.base.clock import SystemClock
from swarm_ft.base.log import get_logger
from swarm_ft.base.sealing import sealing_key_at
from swarm_ft.coordinator.enrolment import Enrolment
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.coordinator.journal.reserve import RESERVE_BYTES
from swarm_ft.coordinator.journal.tokens import RESERVE_BYTES as TOKEN_RESERVE_BYTES
from swarm_ft.coordinator.meetings import Introductions
from swarm_ft.coordinator.member_names import MemberNames
from swarm_ft.coordinator.missing_snapshots import forget_missing_snapshots
from swarm_ft.coordinator.recording.files import RecordingFiles, folder_of
from swarm_ft.coordinator.relays import ConnectedRelay
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import BadInput, BadOption, JournalError
from swarm_ft.identity.authority import Authority, WebCertificate
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.page.server import LOOPBACK, HttpAddresses, HttpOptions, http_places, serve_http
from swarm_ft.page.status_cache import Documents
from swarm_ft.protocol.messages.meeting import RelayPlace
from swarm_ft.protocol.spec.bounds import host_of, is_loopback
from swarm_ft.protocol.spec.sizes import format_size
from swarm_ft.reach.relay import Relay
from swarm_ft.reach.transport import FrontedTransport
from swarm_ft.snapshots.store import SnapshotStore
from swarm_ft.transport.base import Handler, Method, Server, until_one_ends
from swarm_ft.transport.grpc_options import GrpcOptions, addresses_of, check_address
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import MEASURE_LINK

if TYPE_CHECKING:
    from swarm_ft.discovery.dht import DhtDirectory
    from swarm_ft.discovery.fallback_directory import FallbackDirectory

DOCUMENTS = Documents(status=status_fields, event=event_fields, row=row_fields)
SOMEWHERE = {"0.0.0.0": "192.0.2.1:9", "::": "[2001:db8::1]:9"}
"""Documentation addresses (RFC 5737, RFC 3849), whose route reveals this machine's address."""
Owned = tuple[Authority, Registry]

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinator:
    """A coordinator that listens.

    Attributes:
        endpoint: Address at which others reach it.
        addresses: Addresses of its DHT node.
        public: Public invitation, or None if the swarm has none.
        http_addresses: Addresses of its web page and its metrics.
        service: Service that plans and commits.
        enrolment: Service that admits members; None in a swarm without keys.
        disk_words: Free and reserved bytes of its disk, for people.
    """

    endpoint: str
    addresses: tuple[str, ...]
    public: Invite | None
    http_addresses: HttpAddresses
    service: CoordinatorService
    enrolment: Enrolment | None
    disk_words: str = ""

    async def run(self) -> None:
        """Plan and commit, until cancelled.

        Raises:
            JournalError: The journal cannot be written.
        """
        enrolling = [self.enrolment.run()] if self.enrolment else []
        await until_one_ends(self.service.run(), *enrolling)


async def start_coordinator(options: CoordinatorOptions, stack: AsyncExitStack) -> Coordinator:
    """Start a coordinator that listens as long as `stack` is open; a new swarm gets keys.

    Args:
        options: Options, which `check_swarm` accepted.
        stack: Context of everything that the coordinator opens.

    Raises:
        BadOption: The journal or the swarm's keys cannot be read, or the page needs keys.
        PortInUse: A port is taken.
        DirectoryUnreachable: None of the initial peers answers.
    """
    http, listening, nodes = _http(options), options.listening, options.nodes
    http.check(has_keys=not options.insecure)
    store = SnapshotStore(options.snapshots) if options.snapshots else None
    for place in ((listening.address, listening.port), *http.required):
        await check_address(*place)  # A taken port must not leave a new journal behind.
    sealing_key = sealing_key_at(options.encrypt_at_rest) if options.encrypt_at_rest else None
    owned = stack.enter_context(_with_keys(options))
    certificate = _web_certificate(http, listening, owned)
    directory = await stack.enter_async_context(await _dht(options, nodes, owned))
    journal = stack.enter_context(closing(_open_journal(str(options.journal), sealing_key)))
    forget_missing_snapshots(journal, store)  # The service must not have started yet.
    addresses = _announced(directory.addresses, listening.announced_host)
    recording = _recording(options, sealing_key, stack)
    server = _CoordinatorServer(options, owned, journal, store, nodes or addresses, recording)
    found = announce(await server.serve(), listening, directory, Role.COORDINATOR, COORDINATOR_NAME)
    endpoint = await stack.enter_async_context(found)
    await server.dial_back(endpoint)
    await server.lend_relay(endpoint, stack)
    return Coordinator(
        endpoint=endpoint,
        addresses=addresses,
        public=await server.set_endpoint(endpoint),
        http_addresses=await stack.enter_async_context(
            serve_http(server.service, SystemClock(), DOCUMENTS, http, certificate)
        ),
        service=server.service,
        enrolment=server.enrolment,
        disk_words=_disk_words(journal),
    )


def _disk_words(journal: Journal) -> str:
    """Describe the free disk of the coordinator; empty if it is unknown."""
    free_bytes, reserve = journal.tokens.free_bytes(), format_size(TOKEN_RESERVE_BYTES)
    if free_bytes is None:
        return ""
    free = f"Its disk has {format_size(free_bytes)} free"
    if free_bytes < TOKEN_RESERVE_BYTES:
        return (
            f"{free}, but it reserves {reserve} for active runs. It accepts no jobs; free some "
            "space."
        )
    return f"{free}; it reserves {reserve} for active runs."


def _http(options: CoordinatorOptions) -> HttpOptions:
    """Return the HTTP addresses, with a file beside the journal for the page's newest address."""
    http = http_places(options.page, options.metrics, has_page=not options.no_page)
    has_file = options.journal != MEMORY_JOURNAL
    return replace(http, address_file=Path(f"{options.journal}.page") if has_file else None)


class _CoordinatorServer:
    """The handlers of a coordinator's port.

    Args:
        options: Options of the coordinator.
        owned: The swarm's authority and registry; None: plaintext, without enrolment.
        journal: Journal of the runs.
        store: Store of snapshots; None: keepers store them, or nobody.
        nodes: Addresses of DHT nodes for new members.
        recording: Recording of the coordinator's inputs, or None.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        owned: Owned | None,
        journal: Journal,
        store: SnapshotStore | None,
        nodes: tuple[str, ...],
        recording: RecordingFiles | None,
    ) -> None:
        self._options = options
        self._owned = owned
        self._ticket_key = new_key()  # Tickets last a minute, so a restart may change the key.
        self._introductions = Introductions(lambda: self._ticket_key, SystemClock())
        self._names = MemberNames()
        self.service = self._new_service(journal, store, recording)
        self.enrolment: Enrolment | None = None
        if owned:
            self.enrolment = Enrolment(
                *owned,
                nodes,
                options.dht_prefix,
                on_revoked=self.service.revoke,
                on_void=self.service.dismiss_all_peers,
                on_renewed=self.service.renewed,
                take_callers=self.service.take_callers,
                names=self._names,
            )
        credentials = self.enrolment.credentials if self.enrolment else None
        self._grpc = GrpcTransport(GrpcOptions(credentials=credentials))
        self._fronted = FrontedTransport(self._grpc) if owned else None

    def _new_service(
        self, journal: Journal, store: SnapshotStore | None, recording: RecordingFiles | None
    ) -> CoordinatorService:
        options = self._options
        return CoordinatorService(
            journal,
            SystemClock(),
            store,
            num_keepers=options.num_keepers,
            moves_layers=options.moves_layers,
            queue_s=3600 * options.queue_hours,
            result_s=3600 * options.result_hours,
            quotas=options.quotas,
            grants=self._owned[1].grant_of if self._owned else None,
            claims=self._owned[1].claim_of if self._owned else None,
            ways=self._introductions.meetings.known,
            relays=self._introductions.relays,
            recording=recording,
            names=self._names,
        )

    async def serve(self) -> Server:
        """Listen on the configured port, or else on that of earlier invitations if it is free."""
        host, port = self._options.listening.address, self._options.listening.port
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
        """Answer members that request a connection test of their port.

        Args:
            endpoint: Announced address of the coordinator, whose network decides which addresses
                it may dial.
        """
        if self._fronted is None:
            return
        hosts = [host_of(address) for address in await addresses_of(endpoint)]
        # Many systems resolve their own name to 127.0.1.1, which does not reveal their network.
        is_known = hosts and (host_of(endpoint) in hosts or not is_loopback(hosts[0]))
        self._fronted.front.dial_back_from(hosts[0] if is_known else "")

    async def lend_relay(self, endpoint: str, stack: AsyncExitStack) -> None:
        """Run a relay at this port, if it is configured."""
        if self._fronted is None or not self._options.has_relay:
            return
        relay = Relay(self._fronted.front, self._ticket_key.public_key)
        probed = await self._fronted.front.listen(self._options.listening.address, 0)
        host, port = endpoint.rpartition(":")[0], probed.rpartition(":")[2]
        place = RelayPlace(endpoint=endpoint, probe_endpoint=f"{host}:{port}")
        self._introductions.relays.set_own_relay(
            lambda: ConnectedRelay(place=place, carries=relay.carries)
        )
        relay.on_leg(self._introductions.relays.own_leg)
        stack.callback(asyncio.create_task(relay.log_traffic()).cancel)

    async def set_endpoint(self, endpoint: str) -> Invite | None:
        """Set the address of future invitations; return the public invitation, if there is one."""
        if self.enrolment is None:
            return None
        return await self.enrolment.set_admission(endpoint, to_all=self._options.is_public)


# ---- files, addresses and the DHT


def _with_keys(options: CoordinatorOptions) -> AbstractContextManager[Owned | None]:
    """Open the swarm's authority and registry, created if absent; None with `--insecure`."""
    if options.insecure:
        return nullcontext()
    if not options.keys.exists():
        Authority.make(options.keys)
        logger.info(
            "created the keys of a new swarm in %s; only you can read them, keep a copy",
            options.keys,
        )
    return open_keys(str(options.journal))


def _web_certificate(
    http: HttpOptions, listening: ListenOptions, owned: Owned | None
) -> WebCertificate | None:
    """Issue the page's certificate, if other machines can reach the page."""
    if owned is None or not http.is_far:
        return None
    return owned[0].web((*page_names(http.page or "", listening), *LOOPBACK))


def page_names(page: str, listening: ListenOptions) -> tuple[str, ...]:
    """Return the hosts by which other machines call the page, the best one first.

    Args:
        page: Host on which the page listens.
        listening: Addresses of the coordinator itself.

    Raises:
        BadOption: No such host is known.
    """
    hosts = (page, listening.announced_host or "", listening.address)
    names = [host for host in hosts if host not in LISTEN_ANYWHERE and not is_loopback(host)]
    if any(names):
        return tuple(dict.fromkeys(filter(None, names)))
    try:
        return (own_address_towards(SOMEWHERE[page]),)
    except BadOption as error:
        raise BadOption(
            f"--page {page}: expected --announce HOST with its name beside it; {error.message}"
        ) from error


async def _dht(
    options: CoordinatorOptions, nodes: tuple[str, ...], owned: Owned | None
) -> AbstractAsyncContextManager[DhtDirectory | FallbackDirectory]:
    own = () if nodes else (await _listening_maddr(options.listening.address),)
    signer = owned[0].signer if owned else None
    return open_dht(nodes, options.dht_prefix, host_maddrs=own, signer=signer)


async def _last_port(host: str, registry: Registry) -> int:
    """Return the port in earlier invitations if it is free, or else 0 for any port."""
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
        raise BadOption(f"--{error.message}") from error  # The message begins "journal PATH:".


def _recording(
    options: CoordinatorOptions, sealing_key: bytes | None, stack: AsyncExitStack
) -> RecordingFiles | None:
    if not options.recording_bytes or options.journal == MEMORY_JOURNAL:
        return None
    folder = folder_of(str(options.journal))
    return stack.enter_context(
        closing(RecordingFiles(folder, sealing_key, options.recording_bytes))
    )


async def _listening_maddr(host: str) -> str:
    """Resolve a checked host to a multiaddr, since libp2p cannot listen on names."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    address = ipaddress.ip_address(found[0][4][0])
    return f"/ip{address.version}/{address}/tcp/0"


def _announced(addresses: Sequence[str], host: str | None) -> tuple[str, ...]:
    """Replace the host of the DHT's addresses by the announced one, if there is one."""
    if host is None:
        return tuple(addresses)
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    rests = (address.split("/", 3)[3] for address in addresses)
    return tuple(dict.fromkeys(f"/{kind}/{host}/{rest}" for rest in rests))
