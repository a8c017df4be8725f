from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Way(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAY_UNSPECIFIED: _ClassVar[Way]
    WAY_DIRECT: _ClassVar[Way]
    WAY_REVERSE: _ClassVar[Way]
    WAY_PUNCHED: _ClassVar[Way]
    WAY_RELAYED: _ClassVar[Way]
WAY_UNSPECIFIED: Way
WAY_DIRECT: Way
WAY_REVERSE: Way
WAY_PUNCHED: Way
WAY_RELAYED: Way

class Reachable(_message.Message):
    __slots__ = ("endpoints", "mapping_varies", "protocol_version")
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    MAPPING_VARIES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    mapping_varies: bool
    protocol_version: int
    def __init__(self, endpoints: _Optional[_Iterable[str]] = ..., mapping_varies: _Optional[bool] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class MeetingRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Linked(_message.Message):
    __slots__ = ("meeting", "way", "took_s")
    MEETING_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    meeting: bytes
    way: Way
    took_s: float
    def __init__(self, meeting: _Optional[bytes] = ..., way: _Optional[_Union[Way, str]] = ..., took_s: _Optional[float] = ...) -> None: ...

class RelayDistances(_message.Message):
    __slots__ = ("distances",)
    DISTANCES_FIELD_NUMBER: _ClassVar[int]
    distances: _containers.RepeatedCompositeFieldContainer[RelayDistance]
    def __init__(self, distances: _Optional[_Iterable[_Union[RelayDistance, _Mapping]]] = ...) -> None: ...

class RelayDistance(_message.Message):
    __slots__ = ("endpoint", "round_trip_s")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    round_trip_s: float
    def __init__(self, endpoint: _Optional[str] = ..., round_trip_s: _Optional[float] = ...) -> None: ...

class FromMember(_message.Message):
    __slots__ = ("reachable", "want", "linked", "measured")
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    reachable: Reachable
    want: MeetingRequest
    linked: Linked
    measured: RelayDistances
    def __init__(self, reachable: _Optional[_Union[Reachable, _Mapping]] = ..., want: _Optional[_Union[MeetingRequest, _Mapping]] = ..., linked: _Optional[_Union[Linked, _Mapping]] = ..., measured: _Optional[_Union[RelayDistances, _Mapping]] = ...) -> None: ...

class Relays(_message.Message):
    __slots__ = ("places",)
    PLACES_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedCompositeFieldContainer[RelayPlace]
    def __init__(self, places: _Optional[_Iterable[_Union[RelayPlace, _Mapping]]] = ...) -> None: ...

class RelayPlace(_message.Message):
    __slots__ = ("endpoint", "probe_endpoint")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PROBE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    probe_endpoint: str
    def __init__(self, endpoint: _Optional[str] = ..., probe_endpoint: _Optional[str] = ...) -> None: ...

class Meet(_message.Message):
    __slots__ = ("meeting", "name", "is_caller", "endpoints", "may_punch", "relay", "ticket", "house_endpoints")
    MEETING_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_CALLER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    MAY_PUNCH_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    HOUSE_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    meeting: bytes
    name: str
    is_caller: bool
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    may_punch: bool
    relay: str
    ticket: bytes
    house_endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, meeting: _Optional[bytes] = ..., name: _Optional[str] = ..., is_caller: _Optional[bool] = ..., endpoints: _Optional[_Iterable[str]] = ..., may_punch: _Optional[bool] = ..., relay: _Optional[str] = ..., ticket: _Optional[bytes] = ..., house_endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class Punch(_message.Message):
    __slots__ = ("meeting", "address")
    MEETING_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    meeting: bytes
    address: str
    def __init__(self, meeting: _Optional[bytes] = ..., address: _Optional[str] = ...) -> None: ...

class NoMeeting(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ToMember(_message.Message):
    __slots__ = ("relays", "meet", "punch", "no_meeting")
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    MEET_FIELD_NUMBER: _ClassVar[int]
    PUNCH_FIELD_NUMBER: _ClassVar[int]
    NO_MEETING_FIELD_NUMBER: _ClassVar[int]
    relays: Relays
    meet: Meet
    punch: Punch
    no_meeting: NoMeeting
    def __init__(self, relays: _Optional[_Union[Relays, _Mapping]] = ..., meet: _Optional[_Union[Meet, _Mapping]] = ..., punch: _Optional[_Union[Punch, _Mapping]] = ..., no_meeting: _Optional[_Union[NoMeeting, _Mapping]] = ...) -> None: ...

class RelayHello(_message.Message):
    __slots__ = ("endpoint", "probe_endpoint", "protocol_version")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PROBE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    probe_endpoint: str
    protocol_version: int
    def __init__(self, endpoint: _Optional[str] = ..., probe_endpoint: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class RelayCarries(_message.Message):
    __slots__ = ("links", "is_full", "relayed_bytes")
    LINKS_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    links: int
    is_full: bool
    relayed_bytes: int
    def __init__(self, links: _Optional[int] = ..., is_full: _Optional[bool] = ..., relayed_bytes: _Optional[int] = ...) -> None: ...

class LegSeen(_message.Message):
    __slots__ = ("meeting", "is_caller", "address")
    MEETING_FIELD_NUMBER: _ClassVar[int]
    IS_CALLER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    meeting: bytes
    is_caller: bool
    address: str
    def __init__(self, meeting: _Optional[bytes] = ..., is_caller: _Optional[bool] = ..., address: _Optional[str] = ...) -> None: ...

class FromRelay(_message.Message):
    __slots__ = ("hello", "carries", "leg_seen")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CARRIES_FIELD_NUMBER: _ClassVar[int]
    LEG_SEEN_FIELD_NUMBER: _ClassVar[int]
    hello: RelayHello
    carries: RelayCarries
    leg_seen: LegSeen
    def __init__(self, hello: _Optional[_Union[RelayHello, _Mapping]] = ..., carries: _Optional[_Union[RelayCarries, _Mapping]] = ..., leg_seen: _Optional[_Union[LegSeen, _Mapping]] = ...) -> None: ...

class RelayWelcome(_message.Message):
    __slots__ = ("ticket_key", "endpoint", "unix_s")
    TICKET_KEY_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ticket_key: bytes
    endpoint: str
    unix_s: float
    def __init__(self, ticket_key: _Optional[bytes] = ..., endpoint: _Optional[str] = ..., unix_s: _Optional[float] = ...) -> None: ...
