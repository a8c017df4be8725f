"""How this project tunes gRPC, with the reasons. It opens no socket."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from swarm_ft.transport.wire import MAX_MESSAGE_BYTES

Arguments = list[tuple[str, int]]

MAX_STREAMS_PER_CONNECTION = 64
"""A neighbour needs a handful; a hostile one may not open calls without end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcOptions:
    """Settings of both ends of gRPC links.

    Attributes:
        keepalive_idle_s: silence after which a link is probed.
        keepalive_timeout_s: an unanswered probe after which it counts as dead. Home uplinks
            with full queues delay answers by a second or two.
        connect_timeout_s: of one attempt to reach a server, its answer to HTTP/2 included.
        channel_credentials: of clients; None: plaintext.
        server_credentials: of servers; None: plaintext.
    """

    max_message_bytes: int = MAX_MESSAGE_BYTES
    keepalive_idle_s: float = 3.0
    keepalive_timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    channel_credentials: grpc.ChannelCredentials | None = None
    server_credentials: grpc.ServerCredentials | None = None


def _common_arguments(options: GrpcOptions) -> Arguments:
    return [
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.keepalive_time_ms", _ms(options.keepalive_idle_s)),
        ("grpc.keepalive_timeout_ms", _ms(options.keepalive_timeout_s)),
        ("grpc.http2.ping_timeout_ms", _ms(options.keepalive_timeout_s)),
        # Probe however quiet the calls are: a dead neighbour sends nothing either.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_arguments(options: GrpcOptions) -> Arguments:
    """Arguments for a client's channel, in gRPC's own names."""
    return [
        *_common_arguments(options),
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


def server_arguments(options: GrpcOptions) -> Arguments:
    """Arguments for a server, in gRPC's own names."""
    return [
        *_common_arguments(options),
        # By default gRPC lets two processes share a port, each getting some of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        # By default a server hangs up on clients that probe more often than every 5 minutes.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(options.keepalive_idle_s / 2)),
    ]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
