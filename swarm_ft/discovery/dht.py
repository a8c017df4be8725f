"""A directory in a hivemind DHT.

A record is a value under key `PREFIX.ROLE` and subkey NAME: the endpoint, or an empty text after a
withdrawal. Of two values the one that expires later counts, in any order of arrival. The DHT node
runs in this process, its libp2p daemon beside it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from google.protobuf.message import DecodeError

from swarm_ft.base.log import get_logger
from swarm_ft.base.systems import socket_parent
from swarm_ft.discovery.directory import checked_record, readable_records
from swarm_ft.discovery.hivemind_parts import (
    P2P,
    DHTNode,
    DHTRecord,
    Multiaddr,
    P2PDaemonError,
    PeerID,
    RecordValidatorBase,
    ValidationError,
    get_dht_time,
    use_hivemind_log_handler,
)
from swarm_ft.errors import (
    BadOption,
    DirectoryUnreachable,
    InternalError,
    PortInUse,
    SwarmError,
    Unavailable,
)
from swarm_ft.identity.records import Signer, is_key_name, signed_endpoint
from swarm_ft.identity.roles import COORDINATOR_NAME, Role

OPEN_TIMEOUT_S = 15.0
REQUEST_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
"""Seconds until closing gives up, above hivemind's 3 s for a node that does not answer."""
EXPIRY_STEP_S = 0.001
"""Seconds by which a new value of a record expires after the previous one, at least."""
MAX_LIFETIME_S = 3600.0
"""Seconds that a record may live; the node refuses longer ones, which nobody could replace soon."""
MAX_SIGNED_LIFETIME_S = 120.0
"""Seconds that a signed record may live: three refreshes, and as much for clocks that differ."""
STORE_TRIES = 3
"""Tries to store a record: a busy node may not answer, which hivemind reports as a refusal."""

_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DhtOptions:
    """Settings of a DHT node; addresses are multiaddrs.

    Attributes:
        initial_peers: Nodes to join through, `.../p2p/ID`; one must answer. Empty: a new DHT.
        host_maddrs: Addresses to listen on; `tcp/0` is any free port.
        announce_maddrs: Addresses to announce, where they differ from those listened on.
        identity_path: File of the private key, created if absent, that keeps the node's address
            the same over restarts.
        client_mode: Whether the node only sends requests, without listening or storing.
        prefix: Prefix of keys; swarms with different ones do not see each other.
        signer: Signer of this process's records; None in a swarm without keys.
        authority: Name of the swarm's authority, under which its coordinator is found. With it,
            only records of members with keys count.
        lifetime_s: Seconds that a record lives without refresh, at most MAX_LIFETIME_S.
        refresh_s: Seconds between two refreshes of this process's records.
    """

    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_maddrs: tuple[str, ...] = ()
    identity_path: Path | None = None
    client_mode: bool = False
    prefix: str = "swarm-ft"
    signer: Signer | None = None
    authority: str | None = None
    lifetime_s: float = 60.0
    refresh_s: float = 20.0

    def __post_init__(self) -> None:
        _check_maddrs("initial peer", self.initial_peers, part="p2p")
        _check_maddrs("listen address", self.host_maddrs)
        _check_maddrs("announced address", self.announce_maddrs)
        if not self.refresh_s > 0:
            raise BadOption(f"DHT refresh of {self.refresh_s} s: expected more than 0")
        if not 0 < self.lifetime_s <= MAX_LIFETIME_S:
            raise BadOption(
                f"DHT lifetime of {self.lifetime_s} s: expected more than 0, "
                f"at most {MAX_LIFETIME_S:.0f}"
            )


class DhtDirectory:
    """Directory in a DHT, see `Directory`; `open` creates one."""

    def __init__(
        self, options: DhtOptions, daemon: P2pd, node: DHTNode, addresses: tuple[str, ...]
    ) -> None:
        self._options = options
        self._daemon = daemon
        self._node = node
        self._addresses = addresses
        self._announced: dict[tuple[Role, str], str] = {}
        self._newest: dict[tuple[Role, str], str] = {}
        self._expires_s: dict[tuple[Role, str], float] = {}
        self._refreshing = asyncio.create_task(self._refresh_for_ever())

    @classmethod
    async def open(cls, options: DhtOptions) -> DhtDirectory:
        """Join a DHT, or start one if there are no initial peers.

        Raises:
            BadOption: An address or the identity file is not usable.
            PortInUse: A listen address is taken.
            DirectoryUnreachable: No initial peer answers in time.
        """
        _relay_hivemind_log()
        if options.identity_path is not None:
            await asyncio.to_thread(_ensure_identity, options.identity_path)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                daemon = await P2pd.start(options)
                return await cls._join(options, daemon)
        except TimeoutError:
            raise _unreachable(options, f"no answer within {OPEN_TIMEOUT_S:.0f} s") from None
        except DirectoryUnreachable as error:
            raise _unreachable(options, error.message) from None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs, `.../p2p/ID`, that others can use as initial peers; empty for a client."""
        return self._addresses

    @property
    def is_lost(self) -> bool:
        """Whether this client knows no node any more, or its daemon has ended.

        hivemind forgets a node that fails to answer once, and other nodes only look for nodes that
        listen.
        """
        known = self._node.protocol.routing_table.uid_to_peer_id
        return self._options.client_mode and not (known and self._daemon.is_alive)

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """See `Directory`."""
        checked_record(name, endpoint)
        self._newest[role, name] = endpoint
        await self._store(role, name, endpoint)
        self._announced[role, name] = endpoint

    async def withdraw(self, role: Role, name: str) -> None:
        """See `Directory`. A DHT that cannot be reached forgets the record after its lifetime."""
        if self._announced.pop((role, name), None) is None:
            return
        self._newest[role, name] = ""
        try:
            await self._store(role, name, "")
        except Unavailable as error:
            _logger.warning("withdraw_failed role=%s name=%s reason=%s", role, name, error)

    async def find(self, role: Role) -> dict[str, str]:
        """See `Directory`."""
        self._check_alive()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                found = await self._node.get(self._key(role), latest=True)
        except TimeoutError:
            raise Unavailable(f"the DHT did not answer within {REQUEST_TIMEOUT_S:.0f} s") from None
        if found is None or not isinstance(found.value, dict):
            return {}
        read = self._signed if self._options.authority else _unsigned
        pairs = (
            read(role, name, record.value, record.expiration_time)
            for name, record in found.value.items()
        )
        return readable_records(pair for pair in pairs if pair is not None)

    def _signed(
        self, role: Role, name: object, value: object, expires_s: float
    ) -> tuple[str, str] | None:
        """Return the record's name and endpoint; None if withdrawn or wrongly signed."""
        if not isinstance(name, str) or not isinstance(value, str):
            return None
        if role is Role.COORDINATOR and name != self._options.authority:
            return None
        endpoint = signed_endpoint(role, name, value, round(expires_s))
        is_coordinator = role is Role.COORDINATOR
        return (COORDINATOR_NAME if is_coordinator else name, endpoint) if endpoint else None

    async def close(self) -> None:
        """See `Directory`."""
        await self._stop_refreshing()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*(self.withdraw(*record) for record in tuple(self._announced)))
        except TimeoutError:
            _logger.warning("dht_left_in_haste timeout_s=%s", CLOSE_TIMEOUT_S)
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        """Close without withdrawing records; the DHT forgets them after their lifetime."""
        await self._stop_refreshing()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if self._daemon.is_alive:  # hivemind would call a dead one, and wait
                    await self._node.shutdown()
        except TimeoutError:
            _logger.warning("dht_left_in_haste timeout_s=%s", CLOSE_TIMEOUT_S)
        finally:
            await self._node.p2p.shutdown()
            await self._daemon.stop()

    @classmethod
    async def _join(cls, options: DhtOptions, daemon: P2pd) -> DhtDirectory:
        p2p = None
        try:
            p2p = await P2P.replicate(Multiaddr(daemon.control_maddr))
            node = await _create_node(options, p2p)
            addresses = () if options.client_mode else await p2p.get_visible_maddrs()
        except BaseException as error:
            if p2p is not None:
                await p2p.shutdown()
            await daemon.stop()
            if isinstance(error, (RuntimeError, ValidationError, P2PDaemonError, OSError)):
                raise DirectoryUnreachable(str(error)) from error
            raise
        return cls(options, daemon, node, tuple(str(address) for address in addresses))

    async def _stop_refreshing(self) -> None:
        self._refreshing.cancel()
        await asyncio.wait({self._refreshing})

    async def _refresh_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._options.refresh_s)
            for (role, name), endpoint in tuple(self._announced.items()):
                if self._announced.get((role, name)) == endpoint:  # not withdrawn meanwhile
                    await self._refresh(role, name, endpoint)

    async def _refresh(self, role: Role, name: str, endpoint: str) -> None:
        try:
            await self._store(role, name, endpoint)
        except Unavailable as error:
            _logger.warning("refresh_failed role=%s name=%s reason=%s", role, name, error)
        except Exception:
            # hivemind documents no errors; the next turn tries again after any of them.
            _logger.exception("refresh_failed role=%s name=%s", role, name)

    async def _store(self, role: Role, name: str, value: str) -> None:
        self._check_alive()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                for _ in range(STORE_TRIES):
                    is_taken = await self._stored(role, name, value)
                    # The DHT refused it as older than a value stored meanwhile; the next try is
                    # newer.
                    if is_taken or self._newest[role, name] != value:
                        return
        except TimeoutError:
            raise Unavailable(f"the DHT did not answer within {REQUEST_TIMEOUT_S:.0f} s") from None
        raise Unavailable(f"the DHT did not take the record of {role} {name}")

    async def _stored(self, role: Role, name: str, value: str) -> bool:
        before_s, signer = self._expires_s.get((role, name), 0.0), self._options.signer
        expires_s = max(get_dht_time() + self._options.lifetime_s, before_s + EXPIRY_STEP_S)
        subkey = name
        if signer is not None:  # signatures cover whole seconds
            subkey, expires_s = signer.name, float(max(round(expires_s), round(before_s) + 1))
            value = signer.signed(role, value, round(expires_s))
        self._expires_s[role, name] = expires_s
        return bool(await self._node.store(self._key(role), value, expires_s, subkey=subkey))

    def _key(self, role: Role) -> str:
        return f"{self._options.prefix}.{role}"

    def _check_alive(self) -> None:
        if not self._daemon.is_alive:
            raise Unavailable("the DHT node's libp2p daemon has ended; start this process again")


def _unsigned(
    _role: Role, name: object, value: object, _expires_s: float
) -> tuple[object, object] | None:
    return (name, value) if value != "" else None


class _Relay(logging.Handler):
    """Handler that passes hivemind's log lines to ours, so that a command's output has one form."""

    def emit(self, record: logging.LogRecord) -> None:
        _logger.handle(record)


def _relay_hivemind_log() -> None:
    use_hivemind_log_handler("nowhere")
    hivemind = logging.getLogger("hivemind")
    hivemind.setLevel(logging.WARNING)
    hivemind.propagate = False
    hivemind.handlers[:] = [_Relay()]


async def _create_node(options: DhtOptions, p2p: P2P) -> DHTNode:
    return await DHTNode.create(
        p2p,
        initial_peers=list(options.initial_peers) or None,
        client_mode=options.client_mode,
        record_validator=RecordRules(),
        # Members change by the second, so the node queries and does not cache.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
    )


def _ensure_identity(path: Path) -> None:
    try:
        if not path.exists():
            P2P.generate_identity(str(path))
        PeerID.from_identity(path.read_bytes())
    except OSError as error:
        raise BadOption(f"identity file {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, DecodeError):
        raise BadOption(
            f"identity file {path}: expected a libp2p private key; remove it for a new one"
        ) from None


def _check_maddrs(what: str, maddrs: Iterable[str], part: str = "") -> None:
    for maddr in maddrs:
        try:
            parsed = Multiaddr(maddr)
        except ValueError as error:
            raise BadOption(f"{what} {ascii(maddr)[:200]}: {error}") from None
        if part and part not in parsed:
            raise BadOption(f"{what} {maddr}: expected /{part}/... at its end")


def _unreachable(options: DhtOptions, reason: str) -> DirectoryUnreachable:
    peers = ", ".join(options.initial_peers) or "none given"
    return DirectoryUnreachable(f"cannot join the DHT through --initial-peers {peers}: {reason}")


class RecordRules(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Rules for records that the node stores or reads; hivemind applies them to each arrival.

    The rules keep everything but a short text from hivemind's decoder: a crafted value can make it
    fail inside a search, so that the search never ends. A record under a key's name needs that
    key's signature, so that nobody can replace it.
    """

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record is a short text under a short text, with a bounded lifetime."""
        return 0 <= record.expiration_time <= time.time() + 2 * MAX_LIFETIME_S and _is_record(
            record.subkey, record.value, record.expiration_time
        )


def _is_record(packed_name: bytes, packed_value: bytes, expires_s: float) -> bool:
    name, value = _short_text(packed_name), _short_text(packed_value)
    if name is None or value is None:
        return False
    if not is_key_name(name):
        return True
    expires = round(expires_s)
    is_fresh = expires <= time.time() + MAX_SIGNED_LIFETIME_S
    roles = (Role.PEER, Role.COORDINATOR)
    return is_fresh and any(signed_endpoint(r, name, value, expires) is not None for r in roles)


def _short_text(packed: bytes) -> str | None:
    """Return the text in MessagePack; None for another type, or a long text."""
    # A text of up to 31 bytes is 0xA0 + length, one of up to 255 is 0xD9, length.
    if b"\xa0" <= packed[:1] <= b"\xbf":
        length, text = packed[0] - 0xA0, packed[1:]
    elif packed[:1] == b"\xd9" and len(packed) > 1:
        length, text = packed[1], packed[2:]
    else:
        return None
    try:
        return text.decode("utf-8") if len(text) == length else None
    except UnicodeDecodeError:
        return None


# ---- the libp2p daemon under hivemind's node, as a process of ours; it knows no DHT
#
# hivemind would start it in our process group: Ctrl-C would kill it before the directory can
# withdraw anything, and hivemind's calls would then wait for ever. Here it has a session of its
# own, and we end it. If we are killed, it ends as soon as its control connection closes.

STOP_TIMEOUT_S = 2.0
READY_LINE = b"Peer ID:"

_REFUSALS: tuple[tuple[str, type[SwarmError]], ...] = (
    ("address already in use", PortInUse),
    ("failed to listen", BadOption),
    ("bootstrap", DirectoryUnreachable),
)
"""Fragments of the daemon's last line with our errors; the first fragment found counts."""


class P2pd:
    """A libp2p daemon process."""

    def __init__(self, process: asyncio.subprocess.Process, control: Path) -> None:
        self._process = process
        self._control = control
        self._draining: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, options: DhtOptions) -> P2pd:
        """Start the daemon and wait until it is ready, which takes as long as its bootstrap.

        Cancelling this call ends the process.

        Raises:
            PortInUse, BadOption: The daemon cannot listen where it should.
            DirectoryUnreachable: No bootstrap address answers.
            InternalError: The daemon does not start, for another reason.
        """
        # The daemon removes its socket when it ends by itself.
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
        """Multiaddr of the daemon's control socket."""
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


def _command(options: DhtOptions, control: Path) -> list[str]:
    # Without an address of its own the node can only send requests.
    host_maddrs = () if options.client_mode else options.host_maddrs
    command = [
        str(resources.files("hivemind.hivemind_cli") / "p2pd"),
        f"-listen=/unix{control}",
        "-idleTimeout=30s",
        "-dhtServer" if host_maddrs else "-dhtClient",
        # Records name gRPC endpoints that must be reachable anyway, so libp2p's own ways around
        # NATs have no use.
        *("-autonat=0", "-autoRelay=0", "-relay=0", "-natPortMap=0"),
    ]
    if host_maddrs:
        command.append(f"-hostAddrs={','.join(host_maddrs)}")
    else:
        command.append("-noListenAddrs")
    if options.announce_maddrs:
        command.append(f"-announceAddrs={','.join(options.announce_maddrs)}")
    if options.initial_peers:
        command += ["-b", f"-bootstrapPeers={','.join(options.initial_peers)}"]
    if options.identity_path is not None:
        command.append(f"-id={options.identity_path}")
    return command


def _refusal(last_line: str) -> SwarmError:
    # The daemon puts the date before its text.
    text = last_line[20:] if last_line[:2] == "20" else last_line
    for fragment, error in _REFUSALS:
        if fragment in text:
            return error(f"the DHT node cannot start: {text}")
    return InternalError(f"the DHT node's libp2p daemon did not start: {text or 'no output'}")


def _socket_path() -> Path:
    name = f"swarm-ft-p2pd-{secrets.token_hex(8)}.sock"
    return socket_parent(len(name)) / name
