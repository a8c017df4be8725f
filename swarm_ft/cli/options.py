"""Options that several commands share, and what they mean together."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import click

from swarm_ft import log
from swarm_ft.errors import BadOption

Command = TypeVar("Command", bound=Callable[..., Any])

LISTEN_ANYWHERE = ("0.0.0.0", "::")
_ANNOUNCED = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]+)(:(?P<port>\d+))?")


def stack(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several option decorators as one, in the order in which help shows them."""

    def apply(command: Command) -> Command:
        return functools.reduce(lambda done, one: one(done), reversed(decorators), command)

    return apply


def examples(*lines: str) -> str:
    """A command's epilog: these lines as they are; click would fill them to a paragraph."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))


class ByteSize(click.ParamType):  # type: ignore[type-arg] # not generic in click 8.1
    """`2GiB`, `500MB`, `4096`; 0 is none."""

    name = "SIZE"
    _pattern = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?)?B?", re.IGNORECASE)
    _powers: ClassVar = {"K": 1, "M": 2, "G": 3, "T": 4}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        if isinstance(value, int):
            return value
        match = self._pattern.fullmatch(value.strip())
        if match is None:
            self.fail(f"expected a size such as 2GiB, 500MB or 0, got {value!r}", param, ctx)
        unit = match["unit"] or ""
        base = 1024 if unit[1:] else 1000
        return int(float(match["number"]) * base ** self._powers.get(unit[:1].upper(), 0))


def _expanded(values: tuple[str, ...]) -> tuple[str, ...]:
    from swarm_ft.discovery import expand_initial_peers

    return expand_initial_peers(values)


def _expanded_and_there(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        raise BadOption("--initial-peers is missing: the address that 'swarm-ft dht' printed")
    return _expanded(values)


def _initial_peers(
    check: Callable[[tuple[str, ...]], tuple[str, ...]],
) -> Callable[[Command], Command]:
    return click.option(
        "--initial-peers",
        multiple=True,
        metavar="MADDR",
        callback=lambda _context, _option, values: check(values),
        help="DHT address to start from, as `swarm-ft dht` prints it; @FILE reads them from a "
        "file. May be given several times.",
    )


initial_peers_option = _initial_peers(_expanded)
"""For commands that begin a DHT of their own without it."""
needed_initial_peers_option = _initial_peers(_expanded_and_there)
dht_prefix_option = click.option(
    "--dht-prefix", default="swarm-ft", show_default=True, help="Name of the swarm in the DHT."
)
listen_options = stack(
    click.option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        help="Address to listen on; links are not encrypted yet, so by default this machine only.",
    ),
    click.option(
        "--port",
        default=0,
        show_default="any free one",
        type=click.IntRange(0, 65535),
        help="Port to listen on.",
    ),
    click.option(
        "--announce",
        metavar="HOST:PORT",
        help="Address that others should use, where it differs. A bare HOST gets the port.",
    ),
)
snapshots_option = click.option(
    "--snapshots",
    metavar="URL",
    help="Where snapshots of runs lie: a directory, or what fsspec takes, as s3://...; the same "
    "for the coordinator and all peers.  [default: none are kept]",
)
buffer_options = stack(
    click.option(
        "--buffer-memory",
        "buffer_memory_bytes",
        default="2GiB",
        show_default=True,
        type=ByteSize(),
        help="Memory for samples' buffers (--fw aq...); those needed last go first.",
    ),
    click.option(
        "--buffer-disk",
        "buffer_disk_bytes",
        default="50GiB",
        show_default=True,
        type=ByteSize(),
        help="Disk for them; 0 keeps none there, and a restart loses them.",
    ),
    click.option(
        "--buffer-dir",
        metavar="DIR",
        type=click.Path(file_okay=False),
        help="Where on disk, a directory of its own for each peer.  "
        "[default: under ~/.cache/swarm-ft]",
    ),
)
log_option = click.option(
    "--log-level",
    default="INFO",
    show_default=True,
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    expose_value=False,
    callback=lambda _context, _option, value: log.configure(value.upper()),
    help="How much to tell on standard error.",
)
json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@dataclass(frozen=True, slots=True)
class Listening:
    """What `listen_options` parsed.

    Raises:
        BadOption: listening everywhere without `--announce`, or `--announce` is no address.
    """

    host: str
    port: int
    announce: str | None

    def __post_init__(self) -> None:
        from swarm_ft.discovery.directory import checked_record

        if self.host in LISTEN_ANYWHERE and not self.announce:
            raise BadOption(
                f"--host {self.host} listens everywhere; --announce HOST must say where others "
                "find it"
            )
        if self.announce:
            checked_record("announced", self.endpoint(self.port or 1))

    def endpoint(self, bound_port: int) -> str:
        """The address to announce, `host:port`: `--announce`, else what is listened on."""
        from swarm_ft.transport.grpc_options import format_endpoint

        if self.announce is None:
            return format_endpoint(self.host, bound_port)
        match = _ANNOUNCED.fullmatch(self.announce)
        return f"{match['host']}:{match['port'] or bound_port}" if match else self.announce

    @property
    def announced_host(self) -> str | None:
        """The host of `--announce`, an IPv6 address without its brackets; None without it."""
        match = _ANNOUNCED.fullmatch(self.announce or "")
        return match["host"].strip("[]") if match else None
