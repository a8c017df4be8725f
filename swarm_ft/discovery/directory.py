"""Directory of members: its interface, the coordinator's place, and checks of its records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from swarm_ft.base.log import get_logger
from swarm_ft.errors import BadOption, Unavailable
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from swarm_ft.protocol.spec.bounds import is_endpoint


class Directory(Protocol):
    """Names and their endpoints, as records that expire unless they are refreshed."""

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """Announce `name` at `endpoint` (`host:port`) until it is withdrawn.

        A later call for the same name replaces its endpoint.

        Raises:
            BadOption: The name or the endpoint is not fit for a record.
            Unavailable: The directory cannot store the record now.
        """

    async def withdraw(self, role: Role, name: str) -> None:
        """Withdraw a record that this directory announced; do nothing if it did not."""

    async def find(self, role: Role) -> dict[str, str]:
        """Return the endpoints of all present members of a role by name, this process included.

        Records come from strangers: only well-formed ones are returned.

        Raises:
            Unavailable: The directory does not answer.
        """

    async def close(self) -> None:
        """Withdraw all records and leave; the directory cannot be used afterwards."""


class KnownCoordinator:
    """A directory with the coordinator's endpoint alone, which sends no request.

    Args:
        endpoint: Endpoint of the coordinator, `host:port`.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """Refuse a record: this directory stores none.

        Raises:
            Unavailable: Always.
        """
        raise Unavailable(f"{role} {name} at {endpoint}: there is no directory to announce it in")

    async def withdraw(self, role: Role, name: str) -> None:
        """Do nothing: this directory announces no records."""

    async def find(self, role: Role) -> dict[str, str]:
        """See `Directory`."""
        return {COORDINATOR_NAME: self._endpoint} if role is Role.COORDINATOR else {}

    async def close(self) -> None:
        """See `Directory`."""


async def find_coordinator(directory: Directory) -> str:
    """Return the endpoint of the coordinator.

    Raises:
        Unavailable: The directory does not know it yet.
    """
    for endpoint in (await directory.find(Role.COORDINATOR)).values():
        return endpoint
    raise Unavailable("no coordinator is in the DHT")


# ---- checks of a record, for writers and for readers of strangers' records

MAX_NAME_CHARS = 128
MAX_RECORDS = 10_000
"""Records of one role that a reader accepts, which bounds the cost of made-up names."""

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@-]{{0,{MAX_NAME_CHARS - 1}}}")

_logger = get_logger(__name__)


def checked_record(name: object, endpoint: object) -> tuple[str, str]:
    """Return the record, if its name and endpoint are well-formed.

    Raises:
        BadOption: The name or the endpoint is malformed.
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
    """Return the well-formed records, at most MAX_RECORDS; log the others."""
    records: dict[str, str] = {}
    for name, endpoint in found:
        if len(records) == MAX_RECORDS:
            _logger.warning("records_cut limit=%d", MAX_RECORDS)
            break
        try:
            checked, records[checked] = checked_record(name, endpoint)
        except BadOption as error:
            _logger.warning("record_skipped reason=%s", error)
    return records


def _shown(value: object) -> str:
    return ascii(value)[:80]


# ---- values of `--initial-peers`

MAX_FILE_BYTES = 1 << 20


def expand_initial_peers(values: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses in `values`; `@FILE` stands for the file's, separated by whitespace.

    Raises:
        BadOption: Such a file is missing, unreadable, too large or empty.
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
