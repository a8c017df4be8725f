from swarm_ft.proto import run_pb2 as _run_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Spans(_message.Message):
    __slots__ = ("kinds", "begin_us", "duration_us", "steps", "microbatches", "samples", "boundaries", "directions", "num_bytes")
    KINDS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_US_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    DIRECTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[int]
    begin_us: _containers.RepeatedScalarFieldContainer[int]
    duration_us: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    microbatches: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedScalarFieldContainer[int]
    boundaries: _containers.RepeatedScalarFieldContainer[int]
    directions: _containers.RepeatedScalarFieldContainer[int]
    num_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kinds: _Optional[_Iterable[int]] = ..., begin_us: _Optional[_Iterable[int]] = ..., duration_us: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., microbatches: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[int]] = ..., boundaries: _Optional[_Iterable[int]] = ..., directions: _Optional[_Iterable[int]] = ..., num_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class StepTimeline(_message.Message):
    __slots__ = ("run_id", "attempt", "step", "origin_us", "clock", "num_dropped", "spans")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_US_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    step: int
    origin_us: int
    clock: ClockEstimate
    num_dropped: int
    spans: Spans
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., origin_us: _Optional[int] = ..., clock: _Optional[_Union[ClockEstimate, _Mapping]] = ..., num_dropped: _Optional[int] = ..., spans: _Optional[_Union[Spans, _Mapping]] = ...) -> None: ...

class ClockEstimate(_message.Message):
    __slots__ = ("offset_us", "error_us")
    OFFSET_US_FIELD_NUMBER: _ClassVar[int]
    ERROR_US_FIELD_NUMBER: _ClassVar[int]
    offset_us: int
    error_us: int
    def __init__(self, offset_us: _Optional[int] = ..., error_us: _Optional[int] = ...) -> None: ...

class PeerTimeline(_message.Message):
    __slots__ = ("peer_id", "layers", "timeline")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    layers: _run_pb2.LayerRange
    timeline: StepTimeline
    def __init__(self, peer_id: _Optional[str] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., timeline: _Optional[_Union[StepTimeline, _Mapping]] = ...) -> None: ...

class ClockProbe(_message.Message):
    __slots__ = ("sent_us",)
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    sent_us: int
    def __init__(self, sent_us: _Optional[int] = ...) -> None: ...

class ClockReply(_message.Message):
    __slots__ = ("sent_us", "coordinator_us")
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_US_FIELD_NUMBER: _ClassVar[int]
    sent_us: int
    coordinator_us: int
    def __init__(self, sent_us: _Optional[int] = ..., coordinator_us: _Optional[int] = ...) -> None: ...
