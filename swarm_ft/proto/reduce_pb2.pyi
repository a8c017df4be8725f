from swarm_ft.proto import run_pb2 as _run_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReducePhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCE_PHASE_UNSPECIFIED: _ClassVar[ReducePhase]
    REDUCE_PHASE_SHARE: _ClassVar[ReducePhase]
    REDUCE_PHASE_SUM: _ClassVar[ReducePhase]

class ReduceScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCE_SCOPE_UNSPECIFIED: _ClassVar[ReduceScope]
    REDUCE_SCOPE_REPLICAS: _ClassVar[ReduceScope]
    REDUCE_SCOPE_STAGES: _ClassVar[ReduceScope]
REDUCE_PHASE_UNSPECIFIED: ReducePhase
REDUCE_PHASE_SHARE: ReducePhase
REDUCE_PHASE_SUM: ReducePhase
REDUCE_SCOPE_UNSPECIFIED: ReduceScope
REDUCE_SCOPE_REPLICAS: ReduceScope
REDUCE_SCOPE_STAGES: ReduceScope

class PieceKey(_message.Message):
    __slots__ = ("attempt", "step", "phase", "piece", "scope")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    phase: ReducePhase
    piece: int
    scope: ReduceScope
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ..., phase: _Optional[_Union[ReducePhase, str]] = ..., piece: _Optional[int] = ..., scope: _Optional[_Union[ReduceScope, str]] = ...) -> None: ...

class GradientPiece(_message.Message):
    __slots__ = ("key", "tensor")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    key: PieceKey
    tensor: bytes
    def __init__(self, key: _Optional[_Union[PieceKey, _Mapping]] = ..., tensor: _Optional[bytes] = ...) -> None: ...

class ReduceHello(_message.Message):
    __slots__ = ("run_id", "spec_digest", "attempt", "peer_id", "layers", "num_values", "scope")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_VALUES_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    spec_digest: bytes
    attempt: int
    peer_id: str
    layers: _run_pb2.LayerRange
    num_values: int
    scope: ReduceScope
    def __init__(self, run_id: _Optional[str] = ..., spec_digest: _Optional[bytes] = ..., attempt: _Optional[int] = ..., peer_id: _Optional[str] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., num_values: _Optional[int] = ..., scope: _Optional[_Union[ReduceScope, str]] = ...) -> None: ...
