"""TLS for gRPC: this process's identity on its links, and the identities at their other ends.

Both ends of every link show a certificate of the swarm (`identity.certificates`) over TLS 1.3. The
client names the server that it expects, and gRPC refuses any other. The server learns the caller's
identity.
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
    """Return no invitations: every process but the coordinator accepts members only."""
    return ()


@lru_cache(maxsize=1024)
def _member_of(shown: bytes, authority: Certificate) -> tuple[Certificate, Caller | None]:
    """Parse a certificate and verify it once; callers show the same one at each call."""
    certificate = from_pem(shown)
    with suppress(NotAllowed):
        return certificate, caller_of(certificate, authority)
    return certificate, None


class Credentials:
    """Key and newest certificate of a process; both may change while links stand.

    Args:
        key: Private key of this process.
        certificate: Certificate of that key by the swarm's authority.
        authority: Certificate of the authority; the handshake refuses keys without its signature.
        invitations: Returns the open invitations at each handshake.
        look: Called before each handshake, in threads of gRPC's; may load new invitations.
        validity: Validity of others' keys and certificates; None: all are valid until `revoke`.
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
        """Use another key from the next handshake on; existing links stay."""
        self.key_pem, self.certificate = key_pem(key), certificate

    def void(self, reason: str) -> None:
        """Refuse all calls from now on, and end those under way with this reason."""
        self.validity.void(reason)

    def renew(self, certificate: Certificate) -> None:
        """Show this certificate from the next handshake on; existing links stay."""
        self.certificate = certificate

    def revoke(self, names: Collection[str]) -> None:
        """Refuse exactly these names, although their certificates are valid.

        Every server with these credentials ends their calls under way.
        """
        self.validity.revoke(names)

    def caller(self, auth_context: Mapping[str, Collection[bytes]]) -> Caller:
        """Return the caller at the other end of a call, from gRPC's facts about its connection.

        Raises:
            NotAllowed: The swarm does not know the caller, or has revoked it.
            Unavailable: The caller's certificate has expired since the connection began.
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

    # ---- credentials in gRPC's own types

    def for_channel(self) -> grpc.ChannelCredentials:
        """Return credentials of a client with the present certificate."""
        return grpc.ssl_channel_credentials(
            to_pem(self.authority), self.key_pem, to_pem(self.certificate)
        )

    def for_server(self) -> grpc.ServerCredentials:
        """Return credentials of a server, which look the certificate up at each handshake."""
        shown = self._shown()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            # None if nothing changed, and not the same certificate anew: gRPC frees the previous
            # one while other handshakes still use it, so that many at once would crash the process.
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
        # The authority's own certificate follows ours: a client that knows only its fingerprint
        # finds it so.
        chain = to_pem(certificate) + to_pem(authority)
        roots = b"".join(map(to_pem, (authority, *invitations)))
        return grpc.ssl_server_certificate_configuration([(self.key_pem, chain)], roots)


def name_argument(name: str) -> tuple[str, str]:
    """Return the channel argument with which gRPC refuses a server that lacks this name."""
    return ("grpc.ssl_target_name_override", host_of(name))
