"""Messages of enrolment, by which a process gets a certificate of a swarm, as frozen values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Length, Name, Text
from swarm_ft.protocol.spec.member_name import Chosen, ShownName, default_name
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField

MAX_CERTIFICATE_BYTES = 4096
MAX_INITIAL_PEERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EnrolRequest:
    """Newcomer or member to coordinator: a request to certify the key that this call shows.

    Attributes:
        name: The name that the member chose for people. Empty leaves an earlier choice as it is.
    """

    protocol_version: Annotated[int, VersionField("newcomer", "coordinator")] = PROTOCOL_VERSION
    name: Chosen = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enrolled:
    """Coordinator to newcomer or member: its certificate.

    Attributes:
        certificate: Certificate of its key, DER.
        initial_peers: Multiaddrs through which it may join the swarm's DHT.
        dht_prefix: Prefix of the swarm's keys in the DHT.
        name: The caller's name for people. Empty: it follows from the key.
    """

    certificate: Annotated[bytes, Length(MAX_CERTIFICATE_BYTES, 1)]
    initial_peers: Annotated[tuple[Text, ...], Length(MAX_INITIAL_PEERS)]
    dht_prefix: Text
    name: Annotated[str, ShownName(is_optional=True)] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedMember:
    """A member's name for people, where it does not follow from the member's id.

    Attributes:
        member_id: The id, which follows from the member's key.
        name: The name, with letters of the id where two members have one name.
    """

    member_id: Annotated[str, Name()]
    name: Annotated[str, ShownName()]


def name_lookup(names: Iterable[NamedMember]) -> Callable[[str], str]:
    """Return a function from a member's id to its name for people.

    Args:
        names: The names that came with a message.
    """
    return _Names((one.member_id, one.name) for one in names).__getitem__


class _Names(dict[str, str]):
    def __missing__(self, member_id: str) -> str:
        self[member_id] = default_name(member_id)
        return self[member_id]
