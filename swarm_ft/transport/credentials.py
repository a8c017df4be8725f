"""TLS for gRPC: who this process is on all its links, and who is at their other ends.

Both ends of every link show a certificate of the swarm (`identity.certificates`), TLS 1.3. Whoever
dials names who has to answer, and gRPC refuses all others; whoever serves learns who calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import lru_cache

import grpc

from swarm_ft.errors import NotAllowed
from swarm_ft.identity.certificates import Certificate, caller_of, from_pem, host_of, to_pem
from swarm_ft.identity.keys import PrivateKey, key_pem
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.transport.validity import Validity

Invitations = Callable[[], Collection[Certificate]]


def nobody_else() -> Collection[Certificate]:
    """For all but the coordinator: only members are known."""
    return ()


@lru_cache(maxsize=1024)
def _member_of(shown: bytes, authority: Certificate) -> tuple[Certificate, Caller | None]:
    """Parse a certificate and verify it once; callers show the same one at each call."""
    certificate = from_pem(shown)
    with suppress(NotAllowed):
        return certificate, caller_of(certificate, authority)
    return certificate, None


class Credentials:
    """A process's key with its newest certificate, which changes while links stand.

    Args:
        key: this process's own.
        certificate: of that key, by the swarm's authority.
        authority: the swarm's; whom it did not certify is refused in the handshake.
        invitations: those by which newcomers are let in, as of each handshake.
        look: called before each handshake, in threads of gRPC's; there may be new invitations.
        validity: of others' keys and certificates; None: all are valid until `revoke`.
    """

    def __init__(
        self,
        key: PrivateKey,
        certificate: Certificate,
        authority: Certificate,
        invitations: Invitations = nobody_else,
        look: Callable[[], None] = lambda: None,
        validity: Validity | None = None,
    ) -> None:
        self.validity = validity or Validity()
        self.key_pem = key_pem(key)
        self.certificate = certificate
        self.authority = authority
        self._invitations = invitations
        self._look = look

    def rekey(self, key: PrivateKey, certificate: Certificate) -> None:
        """Have another key from the next handshake on; links that stand are as they were."""
        self.key_pem, self.certificate = key_pem(key), certificate

    def void(self, reason: str) -> None:
        """Refuse whoever calls from now on, end all calls under way, and say why."""
        self.validity.void(reason)

    def renew(self, certificate: Certificate) -> None:
        """Show this one from the next handshake on; links that stand are as they were."""
        self.certificate = certificate

    def revoke(self, names: Collection[str]) -> None:
        """Refuse these names, and no others, although their certificates are good.

        Every server with these credentials ends the calls of theirs that are under way.
        """
        self.validity.revoke(names)

    def caller(self, auth_context: Mapping[str, Collection[bytes]]) -> Caller:
        """Who is at the other end of a call, by what gRPC says of its connection.

        Raises:
            NotAllowed: nobody that this swarm knows, or whom it knows no more.
            Unavailable: its certificate has expired since the connection began.
        """
        shown = next(iter(auth_context.get("x509_pem_cert", ())), b"")
        if not shown:
            raise NotAllowed("this swarm's links are encrypted; join it with an invitation")
        certificate, member = _member_of(shown, self.authority)
        caller = member or caller_of(certificate, self.authority, self._invitations())
        if caller.role is not Role.NEWCOMER:
            self.validity.certified(caller.name, certificate.not_valid_after_utc.timestamp())
        self.validity.check(caller)
        return caller

    # ---- as gRPC takes them

    def for_channel(self) -> grpc.ChannelCredentials:
        """Of a client, as of now."""
        return grpc.ssl_channel_credentials(
            to_pem(self.authority), self.key_pem, to_pem(self.certificate)
        )

    def for_server(self) -> grpc.ServerCredentials:
        """Of a server: as of each handshake."""
        shown = self._shown()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            # None while nothing changed, and not the same anew: gRPC frees what it had before while
            # other handshakes still use it, so that many at once would crash the process.
            nonlocal shown
            self._look()
            now = self._shown()
            if now == shown:
                return None
            shown = now
            return self._configuration(*now)

        return grpc.dynamic_ssl_server_credentials(
            self._configuration(*shown), changed, require_client_authentication=True
        )

    def _shown(self) -> tuple[Certificate, Certificate, tuple[Certificate, ...]]:
        return self.certificate, self.authority, tuple(self._invitations())

    def _configuration(
        self,
        certificate: Certificate,
        authority: Certificate,
        invitations: tuple[Certificate, ...],
    ) -> grpc.ServerCertificateConfiguration:
        # The authority's own certificate goes with ours: who has but its fingerprint finds it so.
        chain = to_pem(certificate) + to_pem(authority)
        roots = b"".join(map(to_pem, (authority, *invitations)))
        return grpc.ssl_server_certificate_configuration([(self.key_pem, chain)], roots)


def name_argument(name: str) -> tuple[str, str]:
    """The channel argument by which gRPC refuses whoever has not this name."""
    return ("grpc.ssl_target_name_override", host_of(name))
