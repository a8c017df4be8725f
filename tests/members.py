"""A swarm's authority, and those whom it certified, for tests of links between them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from swarm_ft.identity.certificates import (
    AUTHORITY_LIFETIME_S,
    Certificate,
    authority_certificate,
    issue,
    key_name,
)
from swarm_ft.identity.keys import PrivateKey, name_of, new_key
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcChannel, GrpcTransport
from swarm_ft.transport.metering import Meter

NOW = datetime.now(UTC)


@dataclass
class Swarm:
    """An authority, and who it certified."""

    key: PrivateKey
    authority: Certificate

    def member(
        self, role: Role = Role.PEER, name: str | None = None, now: datetime = NOW
    ) -> Credentials:
        key = new_key()
        public = key.public_key()
        holder = Caller(role=role, name=name or name_of(public), key=public)
        return Credentials(key, issue(self.authority, self.key, holder, now), self.authority)

    def coordinator(self, invitations: tuple[Certificate, ...] = ()) -> Credentials:
        key = new_key()
        holder = Caller(role=Role.COORDINATOR, name=COORDINATOR_NAME, key=key.public_key())
        certificate = issue(self.authority, self.key, holder, NOW)
        return Credentials(key, certificate, self.authority, lambda: invitations)


def make_swarm() -> Swarm:
    key = new_key()
    return Swarm(key, authority_certificate(key, "swarm", AUTHORITY_LIFETIME_S, NOW))


class OneMember(GrpcTransport):
    """Encrypted links from one member to itself, for those who do not care who they are."""

    def __init__(self, meter: Meter | None = None) -> None:
        credentials = make_swarm().member()
        self.validity = credentials.validity
        self.name = key_name(credentials.certificate)
        super().__init__(GrpcOptions(credentials=credentials), meter)

    def connect(self, endpoint: str, name: str = "") -> GrpcChannel:
        return super().connect(endpoint, name or self.name)
