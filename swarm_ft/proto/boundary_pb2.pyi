from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTION_UNSPECIFIED: _ClassVar[Direction]
    DIRECTION_FORWARD: _ClassVar[Direction]
    DIRECTION_BACKWARD: _ClassVar[Direction]

class FrameKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_KIND_UNSPECIFIED: _ClassVar[FrameKind]
    FRAME_KIND_DIRECT: _ClassVar[FrameKind]
    FRAME_KIND_KEY: _ClassVar[FrameKind]
    FRAME_KIND_DELTA: _ClassVar[FrameKind]
DIRECTION_UNSPECIFIED: Direction
DIRECTION_FORWARD: Direction
DIRECTION_BACKWARD: Direction
FRAME_KIND_UNSPECIFIED: FrameKind
FRAME_KIND_DIRECT: FrameKind
FRAME_KIND_KEY: FrameKind
FRAME_KIND_DELTA: FrameKind

class FrameKey(_message.Message):
    __slots__ = ("attempt", "step", "microbatch", "sample", "direction")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    microbatch: int
    sample: int
    direction: Direction
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ..., microbatch: _Optional[int] = ..., sample: _Optional[int] = ..., direction: _Optional[_Union[Direction, str]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("key", "kind", "base_digest", "result_digest", "tensor")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESULT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    key: FrameKey
    kind: FrameKind
    base_digest: bytes
    result_digest: bytes
    tensor: bytes
    def __init__(self, key: _Optional[_Union[FrameKey, _Mapping]] = ..., kind: _Optional[_Union[FrameKind, str]] = ..., base_digest: _Optional[bytes] = ..., result_digest: _Optional[bytes] = ..., tensor: _Optional[bytes] = ...) -> None: ...

class BoundaryHello(_message.Message):
    __slots__ = ("run_id", "spec_digest", "boundary", "peer_id", "attempt", "window_frames", "received")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FRAMES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    spec_digest: bytes
    boundary: int
    peer_id: str
    attempt: int
    window_frames: int
    received: _containers.RepeatedCompositeFieldContainer[FrameKey]
    def __init__(self, run_id: _Optional[str] = ..., spec_digest: _Optional[bytes] = ..., boundary: _Optional[int] = ..., peer_id: _Optional[str] = ..., attempt: _Optional[int] = ..., window_frames: _Optional[int] = ..., received: _Optional[_Iterable[_Union[FrameKey, _Mapping]]] = ...) -> None: ...

class SharedBasis(_message.Message):
    __slots__ = ("basis", "rest_bytes")
    BASIS_FIELD_NUMBER: _ClassVar[int]
    REST_BYTES_FIELD_NUMBER: _ClassVar[int]
    basis: bytes
    rest_bytes: int
    def __init__(self, basis: _Optional[bytes] = ..., rest_bytes: _Optional[int] = ...) -> None: ...

class KeyFrameRequest(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: FrameKey
    reason: str
    def __init__(self, key: _Optional[_Union[FrameKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...
