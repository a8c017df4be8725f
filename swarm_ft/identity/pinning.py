"""Lookup of an authority's certificate by its fingerprint, at any server that shows it.

The certificate alone proves nothing. The calls that follow check that the coordinator has a key
certified by that authority; this module reads the chain that a TLS server shows to everybody.
"""

from __future__ import annotations

import socket

from OpenSSL import SSL

from swarm_ft.errors import BadInvite, Unavailable
from swarm_ft.identity.certificates import Certificate, is_of

TIMEOUT_S = 10.0


def authority_at(host: str, port: int, fingerprint: bytes) -> Certificate:
    """Return the authority's certificate with this fingerprint, as the coordinator shows it.

    Raises:
        Unavailable: No server answers, or not in TLS.
        BadInvite: The server belongs to another swarm, or is no coordinator.
    """
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            chain = _shown(connection)
    except TimeoutError:
        raise Unavailable(f"{where} does not answer within {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise Unavailable(f"{where}: {error.strerror or error}") from None
    except SSL.Error:
        raise Unavailable(f"{where}: expected a swarm's coordinator, which speaks TLS") from None
    for certificate in chain:
        if is_of(certificate, fingerprint):
            return certificate
    raise BadInvite(
        f"{where} is not the coordinator of this invitation, or the authority of its swarm was "
        "replaced; ask for a new invitation"
    )


def _shown(connection: socket.socket) -> list[Certificate]:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_alpn_protos([b"h2"])
    # The kernel limits the blocking calls: pyOpenSSL has no timeout of its own.
    connection.settimeout(None)
    seconds = int(TIMEOUT_S).to_bytes(8, "little") + bytes(8)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, seconds)
    tls = SSL.Connection(context, connection)
    tls.set_connect_state()
    tls.do_handshake()
    return list(tls.get_peer_cert_chain(as_cryptography=True) or ())
