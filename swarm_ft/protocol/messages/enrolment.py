"""How somebody gets a certificate of a swarm, as frozen values whose types say what may come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Length, Text
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

MAX_CERTIFICATE_BYTES = 4096
MAX_INITIAL_PEERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EnrolRequest:
    """Certify the key of the certificate that this call shows: a newcomer's, or one that ends."""

    protocol_version: Annotated[int, Spoken("newcomer", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Enrolled:
    """The caller is a member.

    Attributes:
        certificate: of its key, DER.
        initial_peers: multiaddrs through which it may join the swarm's DHT.
        dht_prefix: of the swarm's records there.
    """

    certificate: Annotated[bytes, Length(MAX_CERTIFICATE_BYTES, 1)]
    initial_peers: Annotated[tuple[Text, ...], Length(MAX_INITIAL_PEERS)]
    dht_prefix: Text
