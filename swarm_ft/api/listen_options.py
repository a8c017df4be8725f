"""The address on which a process listens, and the one that it announces."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass, replace
from typing import Annotated

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.options import Option, check

LISTEN_ANYWHERE = ("0.0.0.0", "::")
_ANNOUNCED = re.compile(r"(?P<host>\[[^\]]*\]|[^:\[\]]+)(:(?P<port>\d+))?")


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """The address on which a process listens, and the one that it announces.

    Raises:
        BadOption: The port is out of its bounds, `--announce` is no address, or `--host` means
            all interfaces and `--announce` is missing.
    """

    host: Annotated[
        str,
        Option(
            "Address to listen on; 0.0.0.0 for all interfaces, with --announce.",
            default="this machine's own; for a peer with an invitation, all",
        ),
    ] = ""
    port: Annotated[int, Range(0, 65535), Option("Port to listen on.", default="any free one")] = 0
    announce: Annotated[
        str | None,
        Option(
            "Address that other members use, if it differs. A HOST alone gets the port.",
            metavar="HOST:PORT",
        ),
    ] = None

    def __post_init__(self) -> None:
        from swarm_ft.discovery.directory import checked_record

        check(self)
        if self.host in LISTEN_ANYWHERE and not self.announce:
            raise BadOption(
                f"--host {self.host}: expected --announce HOST beside it, since others cannot use "
                "the address of all interfaces"
            )
        if self.announce:
            checked_record("announced", self.endpoint(self.port or 1))

    def check_local(self) -> None:
        """Refuse addresses that other machines could reach, for links without keys.

        Raises:
            BadOption: The host to listen on or the announced one is not a loopback address.
        """
        from swarm_ft.transport.grpc_options import check_plaintext, format_endpoint

        check_plaintext(format_endpoint(self.address, 1))
        check_plaintext(self.endpoint(1))

    def reachable_from(self, endpoint: str) -> ListenOptions:
        """Return this with a default host: listen on all interfaces.

        The announced address is then the one by which this machine reaches `endpoint`.
        """
        if self.host:
            return self
        own = own_address_towards(endpoint)
        anywhere = "::" if ":" in own else "0.0.0.0"
        bracketed = f"[{own}]" if ":" in own else own
        return replace(self, host=anywhere, announce=self.announce or bracketed)

    @property
    def address(self) -> str:
        """The host to listen on; 127.0.0.1 by default."""
        return self.host or "127.0.0.1"

    def endpoint(self, bound_port: int) -> str:
        """Return the address to announce, `host:port`: `--announce`, or else the own address."""
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
    """Return the address of this machine by which it would reach `host:port`. Sends nothing.

    Raises:
        BadOption: The host cannot be resolved, or no route leads there.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as sock:
            sock.connect(found[0][4])
            return str(sock.getsockname()[0])
    except OSError as error:
        raise BadOption(f"no route to {endpoint}: {error.strerror}") from None
