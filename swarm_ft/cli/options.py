"""Options that several commands share, and what they mean together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from swarm_ft import log
from swarm_ft.errors import BadOption

Command = TypeVar("Command", bound=Callable[..., Any])

LISTEN_ANYWHERE = ("0.0.0.0", "::")


def stack(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several option decorators as one, in the order in which help shows them."""

    def apply(command: Command) -> Command:
        return functools.reduce(lambda done, one: one(done), reversed(decorators), command)

    return apply


initial_peers_option = click.option(
    "--initial-peers",
    "initial_peers",
    multiple=True,
    metavar="MADDR",
    help="DHT address to start from, as `swarm-ft dht` prints it; @FILE reads them from a file. "
    "May be given several times.",
)
dht_prefix_option = click.option(
    "--dht-prefix", default="swarm-ft", show_default=True, help="Name of the swarm in the DHT."
)
listen_options = stack(
    click.option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        help="Address to listen on; links are not encrypted yet, so it is this machine only.",
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


def announced_endpoint(host: str, port: int, announce: str | None) -> str:
    """The address to announce: `--announce`, else what is listened on.

    Args:
        host: as given to `--host`.
        port: as really bound.
        announce: as given to `--announce`.

    Raises:
        BadOption: listening everywhere without saying how others get here.
    """
    if announce:
        bare = announce.strip()
        has_port = (bare.startswith("[") and "]:" in bare) or bare.count(":") == 1
        return bare if has_port else f"{bare}:{port}"
    check_announce(host, announce)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_announce(host: str, announce: str | None) -> None:
    """Refuse a listener that nobody could be told about.

    Raises:
        BadOption: listening everywhere without `--announce`.
    """
    if host in LISTEN_ANYWHERE and not announce:
        raise BadOption(
            f"--host {host} listens everywhere; --announce HOST must say where others find it"
        )
