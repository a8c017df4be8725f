"""How messages move. It knows protobuf messages and streams; it refuses to know what they mean."""

from swarm_ft.transport.base import (
    Channel,
    Handler,
    MessageStream,
    Method,
    Server,
    Transport,
    call,
)

__all__ = ["Channel", "Handler", "MessageStream", "Method", "Server", "Transport", "call"]
