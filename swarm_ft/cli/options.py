"""Options of commands: those that dataclasses declare, those that several commands share."""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import click

from swarm_ft import log
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import Declared, Option, build, check, declared

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = TypeVar("Command", bound=Callable[..., Any])

DHT_PREFIX = "swarm-ft"
"""Of a swarm that is not named otherwise."""
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


# ---- declared options (`protocol.spec.options`) as those of a click command


def takes(
    parameter: str, of: type[DataclassInstance]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command the options of a dataclass, and the dataclass to its `parameter`.

    Values out of their bounds are refused by the dataclass, with `BadInput`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(**given: Any) -> Any:
            own = {one.field: given.pop(one.field) for one in declared(of)}
            return command(**{parameter: build(of, own)}, **given)

        return declared_options(of)(with_options)

    return decorate


def declared_options(
    of: type[DataclassInstance], instead: Mapping[str, str] | None = None
) -> Callable[[Command], Command]:
    """The options of a dataclass; the command gets their values by field.

    Args:
        of: what declares them.
        instead: by field, what this command does where a required option is left out.
    """
    others = instead or {}
    return stack(*(_option(one, others.get(one.field)) for one in declared(of)))


def _option(one: Declared, instead: str | None) -> Callable[[Command], Command]:
    parsers = (note for note in one.notes if isinstance(note, click.ParamType))
    shape: dict[str, Any] = {"type": next(parsers, one.kind)}
    if one.choices:
        shape = {"type": click.Choice(list(one.choices)), "callback": _value_of(one.choices)}
    elif one.is_switch:
        shape = {"is_flag": True}
    is_open = one.default is MISSING or one.option.default
    if not is_open:
        shape["default"] = one.default_word if one.choices else one.default
    return click.option(
        one.field,
        "/".join(filter(None, (one.flag, one.no_flag))),
        *([one.long_flag] if one.long_flag else []),
        required=one.default is MISSING and not instead,
        metavar=one.option.metavar or None,
        help=f"{one.option.help}{_told(one, instead)}",
        **shape,
    )


def _value_of(choices: Mapping[str, object]) -> Callable[..., object]:
    return lambda _context, _option, word: None if word is None else choices[word]


def _told(one: Declared, instead: str | None) -> str:
    """What help says behind the sentence, as `  [default: 8; x>=1]`."""
    default = instead or one.default_word
    told = [f"default: {default}"] if default else []
    told += [f"x>={bound.minimum:g}" for bound in one.bounds if isinstance(bound, Range)]
    return f"  [{'; '.join(told)}]" if told else ""


# ---- what several commands take


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


def _expanded(_context: object, _option: object, values: tuple[str, ...]) -> tuple[str, ...]:
    from swarm_ft.discovery import expand_initial_peers

    return expand_initial_peers(values)


initial_peers_option = click.option(
    "--initial-peers",
    multiple=True,
    metavar="MADDR",
    callback=_expanded,
    help="DHT address to start from, as `swarm-ft dht` prints it; @FILE reads them from a "
    "file. May be given several times.",
)
dht_prefix_option = click.option(
    "--dht-prefix", default=DHT_PREFIX, show_default=True, help="Name of the swarm in the DHT."
)
snapshots_option = click.option(
    "--snapshots",
    metavar="URL",
    help="Where snapshots of runs lie: a directory, or what fsspec takes, as s3://...; the same "
    "for the coordinator and all peers.  [default: none are kept]",
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
run_option = click.option(
    "--run", "run_name", metavar="ID", help="The run.  [default: your only one]"
)
json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


insecure_option = click.option(
    "--insecure",
    is_flag=True,
    help="Without keys, in plaintext, and so on this machine alone: 127.0.0.1 or ::1.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferOptions:
    """What a peer lends to samples' buffers, and where."""

    memory_bytes: Annotated[
        int,
        ByteSize(),
        Option(
            "Memory for samples' buffers (--fw aq...); those needed last go first.",
            name="buffer-memory",
            default="2GiB",
        ),
    ] = 2 << 30
    disk_bytes: Annotated[
        int,
        ByteSize(),
        Option(
            "Disk for them; 0 keeps none there, and a restart loses them.",
            name="buffer-disk",
            default="50GiB",
        ),
    ] = 50 << 30
    directory: Annotated[
        Path | None,
        click.Path(file_okay=False, path_type=Path),
        Option(
            "Where on disk, a directory of its own for each peer.",
            name="buffer-dir",
            metavar="DIR",
            default="under ~/.cache/swarm-ft",
        ),
    ] = None
    keep_days: Annotated[
        int,
        Range(1),
        Option(
            "Days without a write after which a run's buffers are deleted, if the coordinator "
            "did not say before that the run is over.",
            name="buffer-days",
        ),
    ] = 7

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a process listens, and where others find it.

    Raises:
        BadOption: a port that there is not, listening everywhere without `--announce`, or
            `--announce` is no address.
    """

    host: Annotated[
        str,
        Option(
            "Address to listen on; 0.0.0.0 for all, with --announce.",
            default="this machine's own; for a peer with an invitation, all",
        ),
    ] = ""
    port: Annotated[int, Range(0, 65535), Option("Port to listen on.", default="any free one")] = 0
    announce: Annotated[
        str | None,
        Option(
            "Address that others should use, where it differs. A bare HOST gets the port.",
            metavar="HOST:PORT",
        ),
    ] = None

    def __post_init__(self) -> None:
        from swarm_ft.discovery.directory import checked_record

        check(self)
        if self.host in LISTEN_ANYWHERE and not self.announce:
            raise BadOption(
                f"--host {self.host} listens everywhere; --announce HOST must say where others "
                "find it"
            )
        if self.announce:
            checked_record("announced", self.endpoint(self.port or 1))

    def check_only_here(self) -> None:
        """Refuse what others could reach, or be sent to; for links without keys.

        Raises:
            BadOption: the host listened on, or the announced one, is not this machine's own.
        """
        from swarm_ft.transport.grpc_options import check_plaintext, format_endpoint

        check_plaintext(format_endpoint(self.address, 1))
        check_plaintext(self.endpoint(1))

    def towards(self, endpoint: str) -> Listening:
        """The same; for who was not told where to listen, all addresses of this machine.

        Others are told the one by which this machine reaches `endpoint`.
        """
        if self.host:
            return self
        own = own_address_towards(endpoint)
        anywhere = "::" if ":" in own else "0.0.0.0"
        bracketed = f"[{own}]" if ":" in own else own
        return replace(self, host=anywhere, announce=self.announce or bracketed)

    @property
    def address(self) -> str:
        """What to listen on."""
        return self.host or "127.0.0.1"

    def endpoint(self, bound_port: int) -> str:
        """The address to announce, `host:port`: `--announce`, else what is listened on."""
        from swarm_ft.transport.grpc_options import format_endpoint

        if self.announce is None:
            return format_endpoint(self.address, bound_port)
        match = _ANNOUNCED.fullmatch(self.announce)
        return f"{match['host']}:{match['port'] or bound_port}" if match else self.announce

    @property
    def announced_host(self) -> str | None:
        """The host of `--announce`, an IPv6 address without its brackets; None without it."""
        match = _ANNOUNCED.fullmatch(self.announce or "")
        return match["host"].strip("[]") if match else None


def own_address_towards(endpoint: str) -> str:
    """The address of this machine by which it would reach `host:port`; nothing is sent.

    Raises:
        BadOption: there is no way there.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as sock:
            sock.connect(found[0][4])
            return str(sock.getsockname()[0])
    except OSError as error:
        raise BadOption(f"no way to {endpoint}: {error.strerror}") from None
