"""What the parts of one peer share: its name, its threads, its ways to others. Values only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from swarm_ft.clock import Clock
from swarm_ft.discovery.base import Directory
from swarm_ft.ids import PeerId
from swarm_ft.protocol.peer_messages import FromPeer
from swarm_ft.transport.base import Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerContext:
    """See the module's docstring.

    Attributes:
        compute: one thread, in which the engine lives.
        codecs: threads that encode and decode.
        say: gives a message to the coordinator's stream.
    """

    peer_id: PeerId
    directory: Directory
    transport: Transport
    clock: Clock
    compute: Executor
    codecs: Executor
    say: Callable[[FromPeer], None]
