"""gRPC settings of this project, with their reasons. The module opens no socket.

Windows, frame sizes and buffers are gRPC's own. Its probe of a path's bandwidth and delay opens the
windows as far as bare TCP does, at 100 Mbps and up to 100 ms; without it, 25 of 100 Mbps are left
at 100 ms. No other argument made a stream faster (`benchmarks/grpc_links`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_ft.base.systems import hold_port
from swarm_ft.errors import BadOption, PortInUse, SwarmError
from swarm_ft.protocol.spec.bounds import host_of, is_endpoint, is_loopback
from swarm_ft.transport.methods import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from swarm_ft.transport.credentials import Credentials

# ---- check of an address to listen on, with a clear error


IPV4_IN_IPV6 = "::ffff:"
"""Prefix of an IPv4 address at a socket for both versions of IP."""
RESOLVE_S = 2.0
"""Seconds that the resolver may take for one name."""


def format_endpoint(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def addresses_of(endpoint: str) -> list[str]:
    """Return all addresses of an endpoint, `host:port` each; none if its name is unknown.

    Args:
        endpoint: `host:port` with a name or an address.
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
    """Bind the address and release it again, since gRPC's own refusal gives no reason.

    Raises:
        PortInUse: The port is taken.
        BadOption: The host does not resolve to this machine, or the port is not allowed.
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
    """Return the error for an address that cannot be bound."""
    where = f"cannot listen on {format_endpoint(host, port)}"
    if isinstance(error, OSError) and error.errno != errno.EADDRINUSE:
        return BadOption(f"{where}: {error.strerror or os.strerror(error.errno or 0)}")
    return PortInUse(f"{where}: the port is taken; choose another, or 0 for any free one")


def check_plaintext(endpoint: str) -> None:
    """Refuse an address of another machine: links without keys stay on this machine.

    Raises:
        BadOption: The endpoint is not `host:port` with a loopback address.
    """
    host = host_of(endpoint)
    if not is_endpoint(endpoint) or not is_loopback(host):
        raise BadOption(
            f"{ascii(host or endpoint)[:80]}: links without keys are plaintext and stay on this "
            "machine, at 127.0.0.1 or ::1; 'swarm-ft init' makes keys for links to others"
        )


# ---- whether this machine's TCP forgets a path's capacity in a pause
#
# The check reads one file of Linux.
#
# A stage sends little while it waits for others, and the kernel then halves its window for every
# timeout; the first frames after it take several round trips each. gRPC's probes (`WARM_IDLE_S`)
# help for some seconds, but not for longer pauses, as they fill no window.

SETTING = "net.ipv4.tcp_slow_start_after_idle"
ADVICE = f"for faster links with a delay: sudo sysctl -w {SETTING}=0"


def restarts_after_idle(root: Path = Path("/proc/sys")) -> bool:
    """Whether TCP restarts slowly after a pause; False if unknown, as on macOS."""
    try:
        return int((root / SETTING.replace(".", "/")).read_text(encoding="ascii")) != 0
    except (OSError, ValueError):
        return False


Arguments = list[tuple[str, int]]

MAX_STREAMS_PER_CONNECTION = 64
"""Calls of one connection: a neighbour needs a handful, and a hostile one gets no more."""

HANDSHAKE_S = 10.0
"""Seconds until a connection has to finish its HTTP/2 handshake, TLS included."""
IDLE_S = 10.0
"""Seconds that a connection may stay without a call; clients connect anew for the next one."""
FIRST_MESSAGE_S = 10.0
"""Seconds until a call's first message has to arrive; all of this project's calls begin with one.
"""

WARM_IDLE_S = 0.1
"""Value of `GrpcOptions.warm_idle_s` for links with large messages and pauses.

Linux halves TCP's window for every timeout (a round trip + 200 ms) of silence, and then has to
measure the path anew: after 2 s of silence, 0.8 MB over 100 Mbps and 50 ms take 0.63 s instead of
0.16 s. A probe and its answer in time keep the windows of both ends, for 2 kB/s and 0.3 % of a
processor. The next probe leaves this long after an answer arrived, so any value well below 200 ms
is in time at any distance.
"""


CONTROL_ANSWER_S = 5.0
"""Value of `GrpcOptions.answer_timeout_s` for links that carry little: to the coordinator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcOptions:
    """Settings of both ends of gRPC links.

    Attributes:
        keepalive_idle_s: Seconds of silence after which a link is probed.
        keepalive_timeout_s: Seconds without an acknowledgement of sent data after which the
            kernel declares the other machine gone (TCP_USER_TIMEOUT).
        answer_timeout_s: Seconds without an answer to a probe after which the other process is
            gone. Where both ends send a lot, probe and answer wait behind the kernels' buffers,
            4 MB each: 13 s at 5 Mbps. gRPC intends to count any arrival as an answer, and
            does not (github.com/grpc/grpc/pull/39239).
        warm_idle_s: Seconds of silence after which a server probes its clients, to keep TCP's
            window; for links on which large messages come with pauses. None: `keepalive_idle_s`.
            A dead link counts as dead as late as without. Clients cannot probe so often: gRPC
            limits them to one probe a second.
        connect_timeout_s: Seconds of one attempt to reach a server, with its HTTP/2 answer.
        idle_s: Seconds without a call after which a server drops a connection.
        first_message_s: Seconds without a message after which a server ends a call.
        credentials: Credentials of both ends; None: plaintext on this machine alone, without
            identities.
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
        # The methods' own bounds hold, see `methods`: the sender refuses a message above them.
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", _ms(idle_s)),
        ("grpc.keepalive_timeout_ms", _ms(timeout_s)),
        ("grpc.http2.ping_timeout_ms", _ms(options.answer_timeout_s)),
        # Probe however quiet the calls are: a dead neighbour sends nothing either.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_arguments(options: GrpcOptions) -> Arguments:
    """Return the arguments of a client's channel, in gRPC's own names."""
    return [
        *_common_arguments(options, options.keepalive_idle_s),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A failed attempt must not slow down the next one by gRPC's usual two minutes.
        ("grpc.min_reconnect_backoff_ms", _ms(options.connect_timeout_s)),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Each channel has its own connection, so that a new one tries at once.
        ("grpc.use_local_subchannel_pool", 1),
        # The protocols above decide what is sent again; and peers are reached by their addresses,
        # not through a proxy from the environment or settings from the DNS.
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]


def server_arguments(
    options: GrpcOptions, max_request_bytes: int, max_connections: int
) -> Arguments:
    """Return the arguments of a server, in gRPC's own names.

    Args:
        options: Settings of both ends.
        max_request_bytes: Bytes of the largest message of any method that it serves. gRPC
            buffers a whole message before the server can check it.
        max_connections: Connections that the server accepts in all.
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
