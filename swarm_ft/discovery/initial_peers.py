"""The `--initial-peers` values, as typed. It reads files and checks nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from swarm_ft.errors import BadOption

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
