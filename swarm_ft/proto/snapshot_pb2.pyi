from swarm_ft.proto import run_pb2 as _run_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardName(_message.Message):
    __slots__ = ("run_id", "step", "layers", "is_result", "is_saved")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    IS_RESULT_FIELD_NUMBER: _ClassVar[int]
    IS_SAVED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    layers: _run_pb2.LayerRange
    is_result: bool
    is_saved: bool
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., is_result: _Optional[bool] = ..., is_saved: _Optional[bool] = ...) -> None: ...

class ShardFile(_message.Message):
    __slots__ = ("digest", "total_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    total_bytes: int
    def __init__(self, digest: _Optional[bytes] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class ChunkList(_message.Message):
    __slots__ = ("total_bytes", "digests")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, total_bytes: _Optional[int] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("name", "first_chunk", "num_chunks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    name: ShardName
    first_chunk: int
    num_chunks: int
    def __init__(self, name: _Optional[_Union[ShardName, _Mapping]] = ..., first_chunk: _Optional[int] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class ChunkPart(_message.Message):
    __slots__ = ("chunk", "data")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    data: bytes
    def __init__(self, chunk: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
