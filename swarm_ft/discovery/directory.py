"""The `--initial-peers` values, as typed. It reads files and checks nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from swarm_ft.clock import Clock
from swarm_ft.errors import BadOption, Unavailable
from swarm_ft.ids import PeerId
from swarm_ft.log import get_logger
from swarm_ft.protocol.spec.bounds import is_endpoint

# ---- a directory of who is there, whoever keeps it


class Role(StrEnum):
    """What an announced process is."""

    COORDINATOR = "coordinator"
    PEER = "peer"


class Directory(Protocol):
    """Names and their endpoints, as records that expire unless they are refreshed."""

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """Let others find `name` at `endpoint` (`host:port`) until withdrawn or closed.

        Announcing a name again replaces its endpoint.

        Raises:
            BadOption: the name or the endpoint is not fit for a record.
            Unavailable: the directory cannot take the record now.
        """
        ...

    async def withdraw(self, role: Role, name: str) -> None:
        """Take back what this directory announced; nothing if it did not."""
        ...

    async def find(self, role: Role) -> dict[str, str]:
        """Names and endpoints of all who are there now, this process included.

        Records come from strangers: only well-formed ones are returned.

        Raises:
            Unavailable: the directory does not answer.
        """
        ...

    async def close(self) -> None:
        """Withdraw everything and leave. The directory is of no use afterwards."""
        ...


async def find_peer(directory: Directory, peer_id: PeerId) -> str:
    """The endpoint of a peer.

    Raises:
        Unavailable: the directory does not know it (yet).
    """
    endpoint = (await directory.find(Role.PEER)).get(peer_id)
    if endpoint is None:
        raise Unavailable(f"peer {peer_id} is not in the DHT")
    return endpoint


# ---- what a record may hold, for writers and for readers who trust nobody

MAX_NAME_CHARS = 128
MAX_RECORDS = 10_000
"""Of one role. A flood of made-up names costs a reader this much and no more."""

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@-]{{0,{MAX_NAME_CHARS - 1}}}")

_logger = get_logger(__name__)


def checked_record(name: object, endpoint: object) -> tuple[str, str]:
    """The record, if it is one.

    Raises:
        BadOption: the name or the endpoint is malformed.
    """
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise BadOption(
            f"name {_shown(name)}: expected 1 to {MAX_NAME_CHARS} letters, digits or ._:@-"
        )
    if not (isinstance(endpoint, str) and is_endpoint(endpoint)):
        raise BadOption(
            f"endpoint {_shown(endpoint)}: expected HOST:PORT, for example 192.0.2.7:7001"
        )
    return name, endpoint


def readable_records(found: Iterable[tuple[object, object]]) -> dict[str, str]:
    """The well-formed ones of `found`, at most MAX_RECORDS; the others leave a line in the log."""
    records: dict[str, str] = {}
    for name, endpoint in found:
        if len(records) == MAX_RECORDS:
            _logger.warning("records_cut kept=%d", MAX_RECORDS)
            break
        try:
            checked, records[checked] = checked_record(name, endpoint)
        except BadOption as error:
            _logger.warning("record_skipped reason=%s", error)
    return records


def _shown(value: object) -> str:
    return ascii(value)[:80]


# ---- which records a DHT node stores or reads

MAX_LIFETIME_S = 3600.0
"""A record that would outlive this by far is refused: it could not be replaced before."""


class Record(Protocol):
    """What hivemind asks about; key and value in its own MessagePack."""

    @property
    def subkey(self) -> bytes:
        """The name."""
        ...

    @property
    def value(self) -> bytes:
        """The endpoint."""
        ...

    @property
    def expiration_time(self) -> float:
        """Seconds since 1970."""
        ...


class RecordRules:
    """A `RecordValidatorBase` of hivemind's, asked about each record that arrives.

    What is no short text never gets near hivemind's decoder, which a crafted value can make
    fail inside a search, so that the search never ends.
    """

    def validate(self, record: Record) -> bool:
        """Whether it is a short text under a short text, and not there to stay for ever."""
        return (
            record.expiration_time <= time.time() + 2 * MAX_LIFETIME_S
            and _is_short_text(record.subkey)
            and _is_short_text(record.value)
        )

    def sign_value(self, record: Record) -> bytes:
        """The value as it is; records are not signed yet."""
        return record.value

    def strip_value(self, record: Record) -> bytes:
        """The value as it is."""
        return record.value


def _is_short_text(packed: bytes) -> bool:
    # MessagePack: a text of up to 31 bytes is 0xA0 + length, one of up to 255 is 0xD9, length.
    if b"\xa0" <= packed[:1] <= b"\xbf":
        length, text = packed[0] - 0xA0, packed[1:]
    elif packed[:1] == b"\xd9" and len(packed) > 1:
        length, text = packed[1], packed[2:]
    else:
        return False
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return len(text) == length


# ---- a directory in memory, on a clock that is passed in
#
# One `Board` is one swarm: directories that share it see each other.


@dataclass(frozen=True, kw_only=True, slots=True)
class Posted:
    """A record on a board.

    Attributes:
        refresh_s: how often its owner refreshes it.
        lifetime_s: how long it lasts after each refresh.
    """

    endpoint: str
    posted_s: float
    refresh_s: float
    lifetime_s: float

    def is_alive(self, now_s: float) -> bool:
        """Whether it has been refreshed in time, seen from `now_s`."""
        since_refresh_s = (now_s - self.posted_s) % self.refresh_s
        return since_refresh_s < self.lifetime_s


@dataclass(frozen=True, slots=True)
class Board:
    """What every directory of one swarm shares."""

    records: dict[tuple[Role, str], Posted] = field(default_factory=dict)


class StaticDirectory:
    """See `Directory`."""

    def __init__(
        self, board: Board, clock: Clock, *, lifetime_s: float = 60.0, refresh_s: float = 20.0
    ) -> None:
        self._board = board
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._refresh_s = refresh_s
        self._mine: set[tuple[Role, str]] = set()

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """See `Directory`."""
        checked_record(name, endpoint)
        self._mine.add((role, name))
        self._board.records[role, name] = Posted(
            endpoint=endpoint,
            posted_s=self._clock.now_s(),
            refresh_s=self._refresh_s,
            lifetime_s=self._lifetime_s,
        )

    async def withdraw(self, role: Role, name: str) -> None:
        """See `Directory`."""
        if (role, name) in self._mine:
            self._mine.discard((role, name))
            self._board.records.pop((role, name), None)

    async def find(self, role: Role) -> dict[str, str]:
        """See `Directory`."""
        now_s = self._clock.now_s()
        return readable_records(
            (name, posted.endpoint)
            for (of, name), posted in self._board.records.items()
            if of is role and posted.is_alive(now_s)
        )

    async def close(self) -> None:
        """See `Directory`."""
        for role, name in tuple(self._mine):
            await self.withdraw(role, name)


MAX_FILE_BYTES = 1 << 20


def expand_initial_peers(values: Iterable[str]) -> tuple[str, ...]:
    """The addresses that `values` name; `@FILE` stands for those in a file, between whitespace.

    Raises:
        BadOption: such a file is missing, unreadable, too large or empty.
    """
    expanded: list[str] = []
    for value in values:
        expanded += _addresses_in(Path(value[1:])) if value.startswith("@") else [value]
    return tuple(dict.fromkeys(expanded))


def _addresses_in(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadOption(f"--initial-peers @{path}: larger than {MAX_FILE_BYTES} bytes")
        addresses = path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadOption(f"--initial-peers @{path}: {reason}") from None
    if not addresses:
        raise BadOption(
            f"--initial-peers @{path}: the file is empty; expected addresses as "
            "`swarm-ft dht` prints them"
        )
    return addresses
