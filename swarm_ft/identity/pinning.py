"""Finding an authority's certificate by its fingerprint: at whoever shows it, which proves nothing.

That the coordinator has the key of a certificate by that authority is for the calls that follow
to find out; this only looks at what a TLS server shows to everybody.
"""

from __future__ import annotations

import socket

from OpenSSL import SSL

from swarm_ft.errors import BadInvite, Unavailable
from swarm_ft.identity.certificates import Certificate, is_of

TIMEOUT_S = 10.0


def authority_at(host: str, port: int, fingerprint: bytes) -> Certificate:
    """The certificate of the authority with this fingerprint, as the coordinator there shows it.

    Raises:
        Unavailable: nobody answers there, or not in TLS.
        BadInvite: it is another swarm's coordinator, or none.
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
        f"{where} is not the coordinator that this invitation is of, or its swarm's authority was "
        "replaced since; ask for a new invitation"
    )


def _shown(connection: socket.socket) -> list[Certificate]:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_alpn_protos([b"h2"])
    # Blocking, with the kernel's own limit: pyOpenSSL cannot wait by itself.
    connection.settimeout(None)
    seconds = int(TIMEOUT_S).to_bytes(8, "little") + bytes(8)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, seconds)
    tls = SSL.Connection(context, connection)
    tls.set_connect_state()
    tls.do_handshake()
    return list(tls.get_peer_cert_chain(as_cryptography=True) or ())
