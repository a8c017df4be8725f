from swarm_ft.proto import link_pb2 as _link_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
