"""Messages of enrolment, by which a process gets a certificate of a swarm, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Length, Text
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, Spoken

MAX_CERTIFICATE_BYTES = 4096
MAX_INITIAL_PEERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EnrolRequest:
    """Newcomer or member to coordinator: a request to certify the key that this call shows."""

    protocol_version: Annotated[int, Spoken("newcomer", "coordinator")] = PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Enrolled:
    """Coordinator to newcomer or member: its certificate.

    Attributes:
        certificate: Certificate of its key, DER.
        initial_peers: Multiaddrs through which it may join the swarm's DHT.
        dht_prefix: Prefix of the swarm's keys in the DHT.
    """

    certificate: Annotated[bytes, Length(MAX_CERTIFICATE_BYTES, 1)]
    initial_peers: Annotated[tuple[Text, ...], Length(MAX_INITIAL_PEERS)]
    dht_prefix: Text
