"""What a record may hold, for writers and for readers who trust nobody. It does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable

from swarm_ft.errors import BadOption
from swarm_ft.log import get_logger

MAX_NAME_CHARS = 128
MAX_ENDPOINT_CHARS = 255
MAX_RECORDS = 10_000
"""Of one role. A flood of made-up names costs a reader this much and no more."""

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@-]{{0,{MAX_NAME_CHARS - 1}}}")
_HOST = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]"
_ENDPOINT = re.compile(rf"({_HOST}):([0-9]{{1,5}})")

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
    if not (isinstance(endpoint, str) and _is_endpoint(endpoint)):
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


def _is_endpoint(text: str) -> bool:
    if len(text) > MAX_ENDPOINT_CHARS:
        return False
    match = _ENDPOINT.fullmatch(text)
    return match is not None and 1 <= int(match[3]) <= 65535


def _shown(value: object) -> str:
    return ascii(value)[:80]
