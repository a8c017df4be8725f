from swarm_ft.proto import boundary_pb2 as _boundary_pb2
from swarm_ft.proto import reduce_pb2 as _reduce_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BuffersRequest(_message.Message):
    __slots__ = ("run_id", "spec_digest", "boundary", "samples")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    spec_digest: bytes
    boundary: int
    samples: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., spec_digest: _Optional[bytes] = ..., boundary: _Optional[int] = ..., samples: _Optional[_Iterable[int]] = ...) -> None: ...

class BufferRecord(_message.Message):
    __slots__ = ("sample", "direction", "digest", "payload")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    sample: int
    direction: int
    digest: bytes
    payload: bytes
    def __init__(self, sample: _Optional[int] = ..., direction: _Optional[int] = ..., digest: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WeightsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class BlobHeader(_message.Message):
    __slots__ = ("run_id", "attempt", "step", "total_bytes", "digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    step: int
    total_bytes: int
    digest: bytes
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., total_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class BlobPart(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: BlobHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[BlobHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...
