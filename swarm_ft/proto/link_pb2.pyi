from swarm_ft.proto import boundary_pb2 as _boundary_pb2
from swarm_ft.proto import reduce_pb2 as _reduce_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkHello(_message.Message):
    __slots__ = ("peer_id", "to", "run_id", "protocol_version")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    to: str
    run_id: str
    protocol_version: int
    def __init__(self, peer_id: _Optional[str] = ..., to: _Optional[str] = ..., run_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class LinkPing(_message.Message):
    __slots__ = ("serial",)
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    serial: int
    def __init__(self, serial: _Optional[int] = ...) -> None: ...

class LinkPong(_message.Message):
    __slots__ = ("serial", "came_us")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    CAME_US_FIELD_NUMBER: _ClassVar[int]
    serial: int
    came_us: int
    def __init__(self, serial: _Optional[int] = ..., came_us: _Optional[int] = ...) -> None: ...

class LinkMessage(_message.Message):
    __slots__ = ("hello", "boundary_hello", "frame", "frame_ack", "key_frame_request", "reduce_hello", "piece", "piece_ack", "ping", "pong", "basis")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_HELLO_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    FRAME_ACK_FIELD_NUMBER: _ClassVar[int]
    KEY_FRAME_REQUEST_FIELD_NUMBER: _ClassVar[int]
    REDUCE_HELLO_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    PIECE_ACK_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    boundary_hello: _boundary_pb2.BoundaryHello
    frame: _boundary_pb2.Frame
    frame_ack: _boundary_pb2.FrameKey
    key_frame_request: _boundary_pb2.KeyFrameRequest
    reduce_hello: _reduce_pb2.ReduceHello
    piece: _reduce_pb2.GradientPiece
    piece_ack: _reduce_pb2.PieceKey
    ping: LinkPing
    pong: LinkPong
    basis: _boundary_pb2.SharedBasis
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., boundary_hello: _Optional[_Union[_boundary_pb2.BoundaryHello, _Mapping]] = ..., frame: _Optional[_Union[_boundary_pb2.Frame, _Mapping]] = ..., frame_ack: _Optional[_Union[_boundary_pb2.FrameKey, _Mapping]] = ..., key_frame_request: _Optional[_Union[_boundary_pb2.KeyFrameRequest, _Mapping]] = ..., reduce_hello: _Optional[_Union[_reduce_pb2.ReduceHello, _Mapping]] = ..., piece: _Optional[_Union[_reduce_pb2.GradientPiece, _Mapping]] = ..., piece_ack: _Optional[_Union[_reduce_pb2.PieceKey, _Mapping]] = ..., ping: _Optional[_Union[LinkPing, _Mapping]] = ..., pong: _Optional[_Union[LinkPong, _Mapping]] = ..., basis: _Optional[_Union[_boundary_pb2.SharedBasis, _Mapping]] = ...) -> None: ...
