"""Options that several commands share, declared once, and those that lead to a swarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.api.connections import DHT_PREFIX
from swarm_ft.protocol.spec.options import Option

InitialPeers = Annotated[
    tuple[str, ...],
    Option(
        "Address of a DHT node of the swarm, as `swarm-ft dht` prints it; @FILE reads addresses "
        "from a file. May be repeated.",
        metavar="MADDR",
    ),
]
DhtPrefix = Annotated[str, Option("Name of the swarm in the DHT.")]
Insecure = Annotated[
    bool,
    Option(
        "Use a swarm without keys, in plaintext; on this machine only (127.0.0.1 or ::1).",
        has_no=False,
    ),
]
Snapshots = Annotated[
    str | None,
    Option(
        "Directory or fsspec URL (s3://...) for snapshots of runs, the same for the coordinator "
        "and all peers.",
        metavar="URL",
        default="the peers' disks",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class AddressOptions:
    """Options that lead to a swarm, beside an invitation."""

    initial_peers: InitialPeers = ()
    dht_prefix: DhtPrefix = DHT_PREFIX
    insecure: Insecure = False
