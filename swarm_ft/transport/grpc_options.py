"""How this project tunes gRPC, with the reasons. It opens no socket.

Windows, frame sizes and buffers are gRPC's own: its probe of a path's bandwidth and delay opens the
windows as far as bare TCP goes, at 100 Mbps and up to 100 ms; without it, 25 of 100 Mbps are left
at 100 ms. No argument that was tried makes a stream faster (`benchmarks/grpc_links`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.errors import BadOption, PortInUse, SwarmError
from swarm_ft.protocol.spec.bounds import host_of, is_endpoint, is_loopback
from swarm_ft.systems import hold_port
from swarm_ft.transport.methods import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from swarm_ft.transport.credentials import Credentials

# ---- whether an address can be listened on, in one clear line


IPV4_IN_IPV6 = "::ffff:"
"""How a socket for both shows an IPv4 address."""
RESOLVE_S = 2.0
"""How long the resolver may take for one name."""


def format_endpoint(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def addresses_of(endpoint: str) -> list[str]:
    """Resolve `host:port`: all its addresses, as `host:port` each; none if nobody knows the name.

    Args:
        endpoint: with a name, or an address.
    """
    host, _, port = endpoint.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, ValueError):  # UnicodeError is a ValueError
        return []
    hosts = (str(address[0]).removeprefix(IPV4_IN_IPV6) for *_, address in found)
    return [format_endpoint(host, int(port)) for host in hosts]


async def check_address(host: str, port: int) -> None:
    """Bind the address and let go of it again, since gRPC's own refusal gives no reason.

    Raises:
        PortInUse: the port is taken.
        BadOption: the host does not resolve to this machine, or the port is not allowed.
    """
    if not 0 <= port <= 65535:
        raise BadOption(f"port {port}: expected 0 to 65535, where 0 is any free port")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            hold_port(probe)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise refusal(host, port, error) from None


def refusal(host: str, port: int, error: Exception) -> SwarmError:
    """The error to raise when `host:port` cannot be bound."""
    where = f"cannot listen on {format_endpoint(host, port)}"
    if isinstance(error, OSError) and error.errno != errno.EADDRINUSE:
        return BadOption(f"{where}: {error.strerror or os.strerror(error.errno or 0)}")
    return PortInUse(f"{where}: the port is taken; choose another, or 0 for any free one")


def check_plaintext(endpoint: str) -> None:
    """Without keys nothing is said to other machines, nor heard from them.

    Raises:
        BadOption: it is not `host:port` with an address of this machine.
    """
    host = host_of(endpoint)
    if not is_endpoint(endpoint) or not is_loopback(host):
        raise BadOption(
            f"{ascii(host or endpoint)[:80]}: links without keys are plaintext and stay on this "
            "machine, at 127.0.0.1 or ::1; 'swarm-ft init' makes keys for links to others"
        )


# ---- whether this machine's TCP forgets, in a pause, what a path carries
#
# Reads one file of Linux.
#
# A stage sends little while it waits for others, and the kernel then halves its window for every
# timeout; the first frames after it take several round trips each. gRPC's probes (`WARM_IDLE_S`)
# help for some seconds, not for longer pauses, as they fill no window.

SETTING = "net.ipv4.tcp_slow_start_after_idle"
ADVICE = f"links with a delay are faster after: sudo sysctl -w {SETTING}=0"


def restarts_after_idle(root: Path = Path("/proc/sys")) -> bool:
    """Whether it does; False where that is not known, as on other systems than Linux."""
    try:
        return int((root / SETTING.replace(".", "/")).read_text(encoding="ascii")) != 0
    except (OSError, ValueError):
        return False


Arguments = list[tuple[str, int]]

MAX_STREAMS_PER_CONNECTION = 64
"""A neighbour needs a handful; a hostile one may not open calls without end."""

HANDSHAKE_S = 10.0
"""How long a connection may take until it speaks HTTP/2, TLS included."""
IDLE_S = 10.0
"""How long a connection may have no call. Clients connect anew when they have one."""
FIRST_MESSAGE_S = 10.0
"""How long a call may take to say its first message: all of this project's calls begin with one."""

WARM_IDLE_S = 0.1
"""As `GrpcOptions.warm_idle_s`. Linux halves TCP's window for every timeout (a round trip + 200 ms)
of silence, and has to find out anew what the path carries: after 2 s of it, 0.8 MB over 100 Mbps
and 50 ms take 0.63 s instead of 0.16 s. A probe and its answer in time keep the windows of both
ends, for 2 kB/s and 0.3 % of a processor. The next probe leaves this long after an answer came, so
anything well below 200 ms is in time at any distance."""


CONTROL_ANSWER_S = 5.0
"""As `GrpcOptions.answer_timeout_s`, on links that carry little: to the coordinator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcOptions:
    """Settings of both ends of gRPC links.

    Attributes:
        keepalive_idle_s: silence after which a link is probed.
        keepalive_timeout_s: the other machine is gone if it has not acknowledged what was sent
            for so long: the kernel sees that (TCP_USER_TIMEOUT).
        answer_timeout_s: the other process is gone if it has not answered a probe for so long.
            Where both ends send a lot, probe and answer wait behind what is in the kernels'
            buffers, 4 MB each: 13 s at 5 Mbps. gRPC means to count any arrival as an answer, and
            does not (github.com/grpc/grpc/pull/39239).
        warm_idle_s: silence after which a server probes its clients, to keep what TCP knows of the
            path; for links on which large messages come with pauses. None: `keepalive_idle_s`.
            A dead link counts as dead as late as without. Clients cannot: gRPC holds them to
            one probe a second.
        connect_timeout_s: of one attempt to reach a server, its answer to HTTP/2 included.
        idle_s: after which a server drops a connection that has no call.
        first_message_s: after which it ends a call that has said nothing.
        credentials: of both ends; None: plaintext, on this machine alone, and nobody knows who is
            who.
    """

    keepalive_idle_s: float = 3.0
    keepalive_timeout_s: float = 5.0
    answer_timeout_s: float = 20.0
    warm_idle_s: float | None = None
    connect_timeout_s: float = 5.0
    idle_s: float = IDLE_S
    first_message_s: float = FIRST_MESSAGE_S
    credentials: Credentials | None = None


def _common_arguments(options: GrpcOptions, idle_s: float) -> Arguments:
    timeout_s = options.keepalive_idle_s + options.keepalive_timeout_s - idle_s
    return [
        # The methods' own bounds hold, see `methods`: a message is refused before it is sent.
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", _ms(idle_s)),
        ("grpc.keepalive_timeout_ms", _ms(timeout_s)),
        ("grpc.http2.ping_timeout_ms", _ms(options.answer_timeout_s)),
        # Probe however quiet the calls are: a dead neighbour sends nothing either.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_arguments(options: GrpcOptions) -> Arguments:
    """Arguments for a client's channel, in gRPC's own names."""
    return [
        *_common_arguments(options, options.keepalive_idle_s),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A failed attempt must not slow down the next one by gRPC's usual two minutes.
        ("grpc.min_reconnect_backoff_ms", _ms(options.connect_timeout_s)),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Each channel has its own connection, so that a new one tries at once.
        ("grpc.use_local_subchannel_pool", 1),
        # The protocols above decide what is sent again; and peers are reached as named, not
        # through a proxy from the environment or settings from the DNS.
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]


def server_arguments(
    options: GrpcOptions, max_request_bytes: int, max_connections: int
) -> Arguments:
    """Arguments for a server, in gRPC's own names.

    Args:
        options: of both ends.
        max_request_bytes: of the largest message of any method that it serves. gRPC holds a
            message whole before anybody can look at it.
        max_connections: that it takes in all.
    """
    idle_s = options.keepalive_idle_s if options.warm_idle_s is None else options.warm_idle_s
    return [
        *_common_arguments(options, idle_s),
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _ms(HANDSHAKE_S)),
        ("grpc.max_connection_idle_ms", _ms(options.idle_s)),
        # By default gRPC lets two processes share a port, each getting some of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        # By default a server hangs up on clients that probe more often than every 5 minutes.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(options.keepalive_idle_s / 2)),
    ]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
