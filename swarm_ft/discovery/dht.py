"""A directory in a hivemind DHT; the only module that imports hivemind, which takes seconds.

A record is a value under key `PREFIX.ROLE` and subkey NAME: the endpoint, or an empty text once
it is withdrawn. Of two values the one that expires later counts, wherever and whenever they
arrive. The DHT node runs in this process, its libp2p daemon beside it (`p2pd`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from google.protobuf.message import DecodeError
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from swarm_ft.discovery.directory import (
    MAX_LIFETIME_S,
    RecordRules,
    Role,
    checked_record,
    readable_records,
)
from swarm_ft.discovery.p2pd import P2pd, P2pdOptions
from swarm_ft.errors import BadOption, DirectoryUnreachable, Unavailable
from swarm_ft.log import get_logger

OPEN_TIMEOUT_S = 15.0
REQUEST_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
"""Above the 3 s that hivemind waits for a node that does not answer."""
EXPIRY_STEP_S = 0.001
"""What makes a new value of a record expire after the one before, however fast they follow."""
STORE_TRIES = 3
"""A node that is asked while it is busy may not answer, which hivemind reports as a refusal."""

_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DhtOptions:
    """How to take part in a DHT; addresses are multiaddrs.

    Attributes:
        initial_peers: nodes to join through, `.../p2p/ID`; one must answer. None: a new DHT.
        host_maddrs: to listen on; `tcp/0` is any free port.
        announce_maddrs: to give to others, where they differ from those listened on.
        identity_path: file of the private key, made if absent, that keeps the node's address
            the same over restarts.
        client_mode: do not listen and store nothing for others, only ask.
        prefix: of keys; swarms with different ones do not see each other.
        lifetime_s: how long a record lasts without refresh, at most MAX_LIFETIME_S.
        refresh_s: how often this process refreshes its records.
    """

    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_maddrs: tuple[str, ...] = ()
    identity_path: Path | None = None
    client_mode: bool = False
    prefix: str = "swarm-ft"
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
    """See `Directory`. Use `open`."""

    def __init__(
        self, options: DhtOptions, daemon: P2pd, node: DHTNode, addresses: tuple[str, ...]
    ) -> None:
        self._options = options
        self._daemon = daemon
        self._node = node
        self._addresses = addresses
        self._announced: dict[tuple[Role, str], str] = {}
        self._expires_s: dict[tuple[Role, str], float] = {}
        self._refreshing = asyncio.create_task(self._refresh_for_ever())

    @classmethod
    async def open(cls, options: DhtOptions) -> DhtDirectory:
        """Join a DHT, or begin one if there are no initial peers.

        Raises:
            BadOption: an address or the identity file is not usable.
            PortInUse: a listen address is taken.
            DirectoryUnreachable: no initial peer answers within 20 s.
        """
        _relay_hivemind_log()
        if options.identity_path is not None:
            await asyncio.to_thread(_ensure_identity, options.identity_path)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                daemon = await P2pd.start(_daemon_options(options))
                return await cls._join(options, daemon)
        except TimeoutError:
            raise _unreachable(options, f"no answer within {OPEN_TIMEOUT_S:.0f} s") from None
        except DirectoryUnreachable as error:
            raise _unreachable(options, error.message) from None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs, `.../p2p/ID`, that others can give as initial peers; none for clients."""
        return self._addresses

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """See `Directory`."""
        checked_record(name, endpoint)
        await self._store(role, name, endpoint)
        self._announced[role, name] = endpoint

    async def withdraw(self, role: Role, name: str) -> None:
        """See `Directory`. A DHT that cannot be told now forgets the record after its lifetime."""
        if self._announced.pop((role, name), None) is None:
            return
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
        return readable_records(
            (name, record.value) for name, record in found.value.items() if record.value != ""
        )

    async def close(self) -> None:
        """See `Directory`."""
        self._refreshing.cancel()
        await asyncio.wait({self._refreshing})
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await asyncio.gather(*(self.withdraw(*record) for record in tuple(self._announced)))
                if self._daemon.is_alive:  # hivemind would ask a dead one, and wait
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
            # hivemind lists no errors; whatever it was, the next turn tries again.
            _logger.exception("refresh_failed role=%s name=%s", role, name)

    async def _store(self, role: Role, name: str, value: str) -> None:
        self._check_alive()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                for _ in range(STORE_TRIES):
                    if await self._stored(role, name, value):
                        return
        except TimeoutError:
            raise Unavailable(f"the DHT did not answer within {REQUEST_TIMEOUT_S:.0f} s") from None
        raise Unavailable(f"the DHT did not take the record of {role} {name}")

    async def _stored(self, role: Role, name: str, value: str) -> bool:
        expires_s = max(
            get_dht_time() + self._options.lifetime_s,
            self._expires_s.get((role, name), 0.0) + EXPIRY_STEP_S,
        )
        self._expires_s[role, name] = expires_s
        return bool(await self._node.store(self._key(role), value, expires_s, subkey=name))

    def _key(self, role: Role) -> str:
        return f"{self._options.prefix}.{role}"

    def _check_alive(self) -> None:
        if not self._daemon.is_alive:
            raise Unavailable("the DHT node's libp2p daemon has ended; start this process again")


class _Relay(logging.Handler):
    """Hands hivemind's log lines to ours, so that a command's output has one form."""

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
        # Who is there changes by the second: ask, do not remember.
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
    )


def _daemon_options(options: DhtOptions) -> P2pdOptions:
    return P2pdOptions(
        binary=Path(str(resources.files("hivemind.hivemind_cli") / "p2pd")),
        host_maddrs=() if options.client_mode else options.host_maddrs,
        announce_maddrs=options.announce_maddrs,
        bootstrap_maddrs=options.initial_peers,
        identity_path=options.identity_path,
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
