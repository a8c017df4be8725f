"""The connections that are compared."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_ft.transport.grpc_options import (
    WARM_IDLE_S,
    GrpcOptions,
    channel_arguments,
    server_arguments,
)
from swarm_ft.transport.methods import MAX_MESSAGE_BYTES
from swarm_ft.transport.open_files import MAX_CONNECTIONS

KEEP_WINDOW = "net.ipv4.tcp_slow_start_after_idle=0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to carry messages.

    Attributes:
        kind: `grpc` or `tcp`.
        channel: gRPC's arguments for the client.
        server: and for the server.
        sysctl: a setting of both hosts.
        congestion_control: of TCP on both.
    """

    name: str
    kind: str = "grpc"
    channel: tuple[tuple[str, int], ...] = ()
    server: tuple[tuple[str, int], ...] = ()
    sysctl: str = ""
    congestion_control: str = "cubic"


def variants() -> list[Variant]:
    """Bare TCP, gRPC as it comes and as this project sets it; the latter with more arguments."""
    return [
        Variant(name="tcp", kind="tcp"),
        Variant(name="tcp, window kept", kind="tcp", sysctl=KEEP_WINDOW),
        Variant(name="tcp, bbr", kind="tcp", congestion_control="bbr"),
        Variant(name="grpc"),
        _ours("swarm-ft"),
        _ours("swarm-ft, kept warm", options=GrpcOptions(warm_idle_s=WARM_IDLE_S)),
        _ours("lookahead 8 MiB", ("grpc.http2.lookahead_bytes", 8 << 20)),
        _ours("no bdp probe", ("grpc.http2.bdp_probe", 0)),
        _ours("frames of 1 MiB", ("grpc.http2.max_frame_size", 1 << 20)),
        _ours("write buffer 8 MiB", ("grpc.http2.write_buffer_size", 8 << 20)),
        _ours("reads of 1 MiB", ("grpc.experimental.tcp_min_read_chunk_size", 1 << 20)),
        _ours("zero copy", ("grpc.experimental.tcp_tx_zerocopy_enabled", 1)),
    ]


def _ours(name: str, *more: tuple[str, int], options: GrpcOptions | None = None) -> Variant:
    options = options or GrpcOptions()
    return Variant(
        name=name,
        channel=(*channel_arguments(options), *more),
        server=(*server_arguments(options, MAX_MESSAGE_BYTES, MAX_CONNECTIONS), *more),
    )
