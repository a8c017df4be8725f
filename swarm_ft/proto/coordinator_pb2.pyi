from swarm_ft.proto import meeting_pb2 as _meeting_pb2
from swarm_ft.proto import run_pb2 as _run_pb2
from swarm_ft.proto import snapshot_pb2 as _snapshot_pb2
from swarm_ft.proto import timeline_pb2 as _timeline_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_PHASE_UNSPECIFIED: _ClassVar[RunPhase]
    RUN_PHASE_QUEUED: _ClassVar[RunPhase]
    RUN_PHASE_WAITING: _ClassVar[RunPhase]
    RUN_PHASE_LOADING: _ClassVar[RunPhase]
    RUN_PHASE_TRAINING: _ClassVar[RunPhase]
    RUN_PHASE_EXPORTING: _ClassVar[RunPhase]
    RUN_PHASE_FINISHED: _ClassVar[RunPhase]
    RUN_PHASE_COLLECTED: _ClassVar[RunPhase]
    RUN_PHASE_CANCELLED: _ClassVar[RunPhase]
    RUN_PHASE_FAILED: _ClassVar[RunPhase]

class Actor(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTOR_UNSPECIFIED: _ClassVar[Actor]
    ACTOR_CLIENT: _ClassVar[Actor]
    ACTOR_OWNER: _ClassVar[Actor]
    ACTOR_OPERATOR: _ClassVar[Actor]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_IDLE: _ClassVar[MemberState]
    MEMBER_STATE_WORKING: _ClassVar[MemberState]
    MEMBER_STATE_PAUSING: _ClassVar[MemberState]
    MEMBER_STATE_PAUSED: _ClassVar[MemberState]
    MEMBER_STATE_LEAVING: _ClassVar[MemberState]

class MemberActivity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_DOING_UNSPECIFIED: _ClassVar[MemberActivity]
    MEMBER_DOING_LOADING: _ClassVar[MemberActivity]
    MEMBER_DOING_COMPUTING: _ClassVar[MemberActivity]
    MEMBER_DOING_WAITING: _ClassVar[MemberActivity]
    MEMBER_DOING_JOINING: _ClassVar[MemberActivity]
    MEMBER_DOING_READY: _ClassVar[MemberActivity]
    MEMBER_DOING_EXPORTING: _ClassVar[MemberActivity]
    MEMBER_DOING_KEEPING: _ClassVar[MemberActivity]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_COORDINATOR_STARTED: _ClassVar[EventKind]
    EVENT_KIND_PEER_JOINED: _ClassVar[EventKind]
    EVENT_KIND_PEER_LEFT: _ClassVar[EventKind]
    EVENT_KIND_PEER_GONE: _ClassVar[EventKind]
    EVENT_KIND_PEER_SILENT: _ClassVar[EventKind]
    EVENT_KIND_PEER_REFUSED: _ClassVar[EventKind]
    EVENT_KIND_PEER_SET_ASIDE: _ClassVar[EventKind]
    EVENT_KIND_PEER_RELIEVED: _ClassVar[EventKind]
    EVENT_KIND_PEER_LEAVING: _ClassVar[EventKind]
    EVENT_KIND_PEER_PAUSED: _ClassVar[EventKind]
    EVENT_KIND_PEER_RESUMED: _ClassVar[EventKind]
    EVENT_KIND_DISK_LOW: _ClassVar[EventKind]
    EVENT_KIND_DISK_FREE: _ClassVar[EventKind]
    EVENT_KIND_RUN_SUBMITTED: _ClassVar[EventKind]
    EVENT_KIND_RUN_QUEUED: _ClassVar[EventKind]
    EVENT_KIND_RUN_WAITING: _ClassVar[EventKind]
    EVENT_KIND_RUN_LOADING: _ClassVar[EventKind]
    EVENT_KIND_RUN_TRAINING: _ClassVar[EventKind]
    EVENT_KIND_RUN_WENT_BACK: _ClassVar[EventKind]
    EVENT_KIND_RUN_EVALUATED: _ClassVar[EventKind]
    EVENT_KIND_SNAPSHOT_WHOLE: _ClassVar[EventKind]
    EVENT_KIND_SNAPSHOT_LOST: _ClassVar[EventKind]
    EVENT_KIND_RUN_EXPORTING: _ClassVar[EventKind]
    EVENT_KIND_RUN_FINISHED: _ClassVar[EventKind]
    EVENT_KIND_RUN_COLLECTED: _ClassVar[EventKind]
    EVENT_KIND_RUN_CANCELLED: _ClassVar[EventKind]
    EVENT_KIND_RUN_FAILED: _ClassVar[EventKind]
    EVENT_KIND_RUN_PAUSED: _ClassVar[EventKind]
    EVENT_KIND_RUN_RESUMED: _ClassVar[EventKind]
    EVENT_KIND_RUN_STEERED: _ClassVar[EventKind]
    EVENT_KIND_RUN_MOVED: _ClassVar[EventKind]
RUN_PHASE_UNSPECIFIED: RunPhase
RUN_PHASE_QUEUED: RunPhase
RUN_PHASE_WAITING: RunPhase
RUN_PHASE_LOADING: RunPhase
RUN_PHASE_TRAINING: RunPhase
RUN_PHASE_EXPORTING: RunPhase
RUN_PHASE_FINISHED: RunPhase
RUN_PHASE_COLLECTED: RunPhase
RUN_PHASE_CANCELLED: RunPhase
RUN_PHASE_FAILED: RunPhase
ACTOR_UNSPECIFIED: Actor
ACTOR_CLIENT: Actor
ACTOR_OWNER: Actor
ACTOR_OPERATOR: Actor
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_IDLE: MemberState
MEMBER_STATE_WORKING: MemberState
MEMBER_STATE_PAUSING: MemberState
MEMBER_STATE_PAUSED: MemberState
MEMBER_STATE_LEAVING: MemberState
MEMBER_DOING_UNSPECIFIED: MemberActivity
MEMBER_DOING_LOADING: MemberActivity
MEMBER_DOING_COMPUTING: MemberActivity
MEMBER_DOING_WAITING: MemberActivity
MEMBER_DOING_JOINING: MemberActivity
MEMBER_DOING_READY: MemberActivity
MEMBER_DOING_EXPORTING: MemberActivity
MEMBER_DOING_KEEPING: MemberActivity
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_COORDINATOR_STARTED: EventKind
EVENT_KIND_PEER_JOINED: EventKind
EVENT_KIND_PEER_LEFT: EventKind
EVENT_KIND_PEER_GONE: EventKind
EVENT_KIND_PEER_SILENT: EventKind
EVENT_KIND_PEER_REFUSED: EventKind
EVENT_KIND_PEER_SET_ASIDE: EventKind
EVENT_KIND_PEER_RELIEVED: EventKind
EVENT_KIND_PEER_LEAVING: EventKind
EVENT_KIND_PEER_PAUSED: EventKind
EVENT_KIND_PEER_RESUMED: EventKind
EVENT_KIND_DISK_LOW: EventKind
EVENT_KIND_DISK_FREE: EventKind
EVENT_KIND_RUN_SUBMITTED: EventKind
EVENT_KIND_RUN_QUEUED: EventKind
EVENT_KIND_RUN_WAITING: EventKind
EVENT_KIND_RUN_LOADING: EventKind
EVENT_KIND_RUN_TRAINING: EventKind
EVENT_KIND_RUN_WENT_BACK: EventKind
EVENT_KIND_RUN_EVALUATED: EventKind
EVENT_KIND_SNAPSHOT_WHOLE: EventKind
EVENT_KIND_SNAPSHOT_LOST: EventKind
EVENT_KIND_RUN_EXPORTING: EventKind
EVENT_KIND_RUN_FINISHED: EventKind
EVENT_KIND_RUN_COLLECTED: EventKind
EVENT_KIND_RUN_CANCELLED: EventKind
EVENT_KIND_RUN_FAILED: EventKind
EVENT_KIND_RUN_PAUSED: EventKind
EVENT_KIND_RUN_RESUMED: EventKind
EVENT_KIND_RUN_STEERED: EventKind
EVENT_KIND_RUN_MOVED: EventKind

class NamedMember(_message.Message):
    __slots__ = ("member_id", "name")
    MEMBER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    member_id: str
    name: str
    def __init__(self, member_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("name", "protocol_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    protocol_version: int
    def __init__(self, name: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Enrolled(_message.Message):
    __slots__ = ("certificate", "initial_peers", "dht_prefix", "name")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_PEERS_FIELD_NUMBER: _ClassVar[int]
    DHT_PREFIX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    initial_peers: _containers.RepeatedScalarFieldContainer[str]
    dht_prefix: str
    name: str
    def __init__(self, certificate: _Optional[bytes] = ..., initial_peers: _Optional[_Iterable[str]] = ..., dht_prefix: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class HeldStage(_message.Message):
    __slots__ = ("run_id", "spec_digest", "layers", "committed_steps", "last_attempt", "exported")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    spec_digest: bytes
    layers: _run_pb2.LayerRange
    committed_steps: int
    last_attempt: int
    exported: _snapshot_pb2.ShardFile
    def __init__(self, run_id: _Optional[str] = ..., spec_digest: _Optional[bytes] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., committed_steps: _Optional[int] = ..., last_attempt: _Optional[int] = ..., exported: _Optional[_Union[_snapshot_pb2.ShardFile, _Mapping]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("peer_id", "layers", "memory_bytes", "held", "endpoint", "kept_runs", "device", "version", "leaving", "max_up_bytes_per_s", "max_down_bytes_per_s", "keep_bytes", "kept_shards", "protocol_version", "max_beside", "device_memory_bytes", "session", "machine_key", "machine_memory_bytes")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    KEPT_RUNS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    MAX_UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    KEEP_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_SHARDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_BESIDE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MACHINE_KEY_FIELD_NUMBER: _ClassVar[int]
    MACHINE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    layers: _run_pb2.LayerRange
    memory_bytes: int
    held: _containers.RepeatedCompositeFieldContainer[HeldStage]
    endpoint: str
    kept_runs: _containers.RepeatedScalarFieldContainer[str]
    device: str
    version: str
    leaving: PeerLeaving
    max_up_bytes_per_s: float
    max_down_bytes_per_s: float
    keep_bytes: int
    kept_shards: _containers.RepeatedCompositeFieldContainer[KeptShard]
    protocol_version: int
    max_beside: int
    device_memory_bytes: int
    session: int
    machine_key: str
    machine_memory_bytes: int
    def __init__(self, peer_id: _Optional[str] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldStage, _Mapping]]] = ..., endpoint: _Optional[str] = ..., kept_runs: _Optional[_Iterable[str]] = ..., device: _Optional[str] = ..., version: _Optional[str] = ..., leaving: _Optional[_Union[PeerLeaving, _Mapping]] = ..., max_up_bytes_per_s: _Optional[float] = ..., max_down_bytes_per_s: _Optional[float] = ..., keep_bytes: _Optional[int] = ..., kept_shards: _Optional[_Iterable[_Union[KeptShard, _Mapping]]] = ..., protocol_version: _Optional[int] = ..., max_beside: _Optional[int] = ..., device_memory_bytes: _Optional[int] = ..., session: _Optional[int] = ..., machine_key: _Optional[str] = ..., machine_memory_bytes: _Optional[int] = ...) -> None: ...

class KeptShard(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: _snapshot_pb2.ShardName
    digest: bytes
    def __init__(self, name: _Optional[_Union[_snapshot_pb2.ShardName, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ShardKept(_message.Message):
    __slots__ = ("shard",)
    SHARD_FIELD_NUMBER: _ClassVar[int]
    shard: KeptShard
    def __init__(self, shard: _Optional[_Union[KeptShard, _Mapping]] = ...) -> None: ...

class ShardLost(_message.Message):
    __slots__ = ("shard", "reason")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    shard: KeptShard
    reason: str
    def __init__(self, shard: _Optional[_Union[KeptShard, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("flops_per_s", "up_bytes_per_s", "down_bytes_per_s", "round_trip_s", "watts", "cores", "host", "demand", "uses", "busy", "waits")
    FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    WATTS_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEMAND_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    flops_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float
    watts: float
    cores: float
    host: str
    demand: float
    uses: float
    busy: float
    waits: float
    def __init__(self, flops_per_s: _Optional[float] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., watts: _Optional[float] = ..., cores: _Optional[float] = ..., host: _Optional[str] = ..., demand: _Optional[float] = ..., uses: _Optional[float] = ..., busy: _Optional[float] = ..., waits: _Optional[float] = ...) -> None: ...

class StageReady(_message.Message):
    __slots__ = ("run_id", "attempt", "done", "buffers")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    done: _containers.RepeatedScalarFieldContainer[int]
    buffers: _containers.RepeatedCompositeFieldContainer[HeldBuffers]
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., done: _Optional[_Iterable[int]] = ..., buffers: _Optional[_Iterable[_Union[HeldBuffers, _Mapping]]] = ...) -> None: ...

class HeldBuffers(_message.Message):
    __slots__ = ("boundary", "samples")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    samples: bytes
    def __init__(self, boundary: _Optional[int] = ..., samples: _Optional[bytes] = ...) -> None: ...

class BufferCounts(_message.Message):
    __slots__ = ("boundary", "samples", "memory_bytes", "disk_bytes", "memory_hits", "disk_hits", "misses", "evictions", "repairs")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_HITS_FIELD_NUMBER: _ClassVar[int]
    DISK_HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    samples: int
    memory_bytes: int
    disk_bytes: int
    memory_hits: int
    disk_hits: int
    misses: int
    evictions: int
    repairs: int
    def __init__(self, boundary: _Optional[int] = ..., samples: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., memory_hits: _Optional[int] = ..., disk_hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., repairs: _Optional[int] = ...) -> None: ...

class CaughtUp(_message.Message):
    __slots__ = ("run_id", "attempt", "state_bytes", "proof")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    state_bytes: int
    proof: bytes
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., state_bytes: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("boundary", "forward_bytes", "backward_bytes", "forward_uncompressed_bytes", "backward_uncompressed_bytes", "key_frames", "delta_frames", "relayed_bytes", "evaluation_bytes", "evaluation_uncompressed_bytes", "evaluation_relayed_bytes")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    FORWARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_UNCOMPRESSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_UNCOMPRESSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DELTA_FRAMES_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_UNCOMPRESSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    forward_bytes: int
    backward_bytes: int
    forward_uncompressed_bytes: int
    backward_uncompressed_bytes: int
    key_frames: int
    delta_frames: int
    relayed_bytes: int
    evaluation_bytes: int
    evaluation_uncompressed_bytes: int
    evaluation_relayed_bytes: int
    def __init__(self, boundary: _Optional[int] = ..., forward_bytes: _Optional[int] = ..., backward_bytes: _Optional[int] = ..., forward_uncompressed_bytes: _Optional[int] = ..., backward_uncompressed_bytes: _Optional[int] = ..., key_frames: _Optional[int] = ..., delta_frames: _Optional[int] = ..., relayed_bytes: _Optional[int] = ..., evaluation_bytes: _Optional[int] = ..., evaluation_uncompressed_bytes: _Optional[int] = ..., evaluation_relayed_bytes: _Optional[int] = ...) -> None: ...

class GradientTraffic(_message.Message):
    __slots__ = ("sent_bytes", "uncompressed_bytes", "relayed_bytes")
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNCOMPRESSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    sent_bytes: int
    uncompressed_bytes: int
    relayed_bytes: int
    def __init__(self, sent_bytes: _Optional[int] = ..., uncompressed_bytes: _Optional[int] = ..., relayed_bytes: _Optional[int] = ...) -> None: ...

class StepReady(_message.Message):
    __slots__ = ("run_id", "attempt", "step", "squared_grad_norm", "loss_sum", "num_targets", "evaluation", "shadowed", "shadows", "traffic", "gradients", "compute_s", "buffers", "lost")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SQUARED_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    SHADOWED_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    step: int
    squared_grad_norm: float
    loss_sum: float
    num_targets: int
    evaluation: _containers.RepeatedCompositeFieldContainer[EvalSum]
    shadowed: EvalSum
    shadows: EvalSum
    traffic: _containers.RepeatedCompositeFieldContainer[Traffic]
    gradients: GradientTraffic
    compute_s: float
    buffers: _containers.RepeatedCompositeFieldContainer[BufferCounts]
    lost: _containers.RepeatedCompositeFieldContainer[HeldBuffers]
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., squared_grad_norm: _Optional[float] = ..., loss_sum: _Optional[float] = ..., num_targets: _Optional[int] = ..., evaluation: _Optional[_Iterable[_Union[EvalSum, _Mapping]]] = ..., shadowed: _Optional[_Union[EvalSum, _Mapping]] = ..., shadows: _Optional[_Union[EvalSum, _Mapping]] = ..., traffic: _Optional[_Iterable[_Union[Traffic, _Mapping]]] = ..., gradients: _Optional[_Union[GradientTraffic, _Mapping]] = ..., compute_s: _Optional[float] = ..., buffers: _Optional[_Iterable[_Union[BufferCounts, _Mapping]]] = ..., lost: _Optional[_Iterable[_Union[HeldBuffers, _Mapping]]] = ...) -> None: ...

class EvalSum(_message.Message):
    __slots__ = ("loss_sum", "num_targets", "counts")
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    loss_sum: float
    num_targets: int
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, loss_sum: _Optional[float] = ..., num_targets: _Optional[int] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class PeerAlive(_message.Message):
    __slots__ = ("attempt", "step", "compute_s", "parts_begun", "waits_for", "links", "run_id", "sent_bytes")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    PARTS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    compute_s: float
    parts_begun: int
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    links: _containers.RepeatedCompositeFieldContainer[LinkTo]
    run_id: str
    sent_bytes: int
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ..., compute_s: _Optional[float] = ..., parts_begun: _Optional[int] = ..., waits_for: _Optional[_Iterable[str]] = ..., links: _Optional[_Iterable[_Union[LinkTo, _Mapping]]] = ..., run_id: _Optional[str] = ..., sent_bytes: _Optional[int] = ...) -> None: ...

class ContributionRequest(_message.Message):
    __slots__ = ("sent_bytes",)
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    sent_bytes: int
    def __init__(self, sent_bytes: _Optional[int] = ...) -> None: ...

class ContributionReport(_message.Message):
    __slots__ = ("given",)
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    given: Contribution
    def __init__(self, given: _Optional[_Union[Contribution, _Mapping]] = ...) -> None: ...

class LinkTo(_message.Message):
    __slots__ = ("peer_id", "speed")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    speed: LinkSpeed
    def __init__(self, peer_id: _Optional[str] = ..., speed: _Optional[_Union[LinkSpeed, _Mapping]] = ...) -> None: ...

class LinkSpeed(_message.Message):
    __slots__ = ("bytes_per_s", "peak_bytes_per_s", "round_trip_s", "least_round_trip_s")
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    LEAST_ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: float
    peak_bytes_per_s: float
    round_trip_s: float
    least_round_trip_s: float
    def __init__(self, bytes_per_s: _Optional[float] = ..., peak_bytes_per_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., least_round_trip_s: _Optional[float] = ...) -> None: ...

class StageExported(_message.Message):
    __slots__ = ("run_id", "file")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    file: _snapshot_pb2.ShardFile
    def __init__(self, run_id: _Optional[str] = ..., file: _Optional[_Union[_snapshot_pb2.ShardFile, _Mapping]] = ...) -> None: ...

class StageFailed(_message.Message):
    __slots__ = ("run_id", "attempt", "code", "message", "about")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    code: str
    message: str
    about: str
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., about: _Optional[str] = ...) -> None: ...

class PeerGoodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeerLeaving(_message.Message):
    __slots__ = ("stays", "reason", "up_bytes_per_s")
    STAYS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    stays: bool
    reason: str
    up_bytes_per_s: float
    def __init__(self, stays: _Optional[bool] = ..., reason: _Optional[str] = ..., up_bytes_per_s: _Optional[float] = ...) -> None: ...

class PeerResumed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StateProof(_message.Message):
    __slots__ = ("peer_id", "proof")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    proof: bytes
    def __init__(self, peer_id: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class StageOffered(_message.Message):
    __slots__ = ("run_id", "attempt", "digest", "total_bytes", "step", "proofs")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    digest: bytes
    total_bytes: int
    step: int
    proofs: _containers.RepeatedCompositeFieldContainer[StateProof]
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., digest: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., step: _Optional[int] = ..., proofs: _Optional[_Iterable[_Union[StateProof, _Mapping]]] = ...) -> None: ...

class StageSaved(_message.Message):
    __slots__ = ("name", "digest", "total_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: _snapshot_pb2.ShardName
    digest: bytes
    total_bytes: int
    def __init__(self, name: _Optional[_Union[_snapshot_pb2.ShardName, _Mapping]] = ..., digest: _Optional[bytes] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class StageUnsaved(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: _snapshot_pb2.ShardName
    reason: str
    def __init__(self, name: _Optional[_Union[_snapshot_pb2.ShardName, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class FromPeer(_message.Message):
    __slots__ = ("hello", "stage_ready", "step_ready", "exported", "failed", "goodbye", "alive", "offered", "saved", "caught_up", "timeline", "probe", "machine", "unsaved", "shard_kept", "shard_lost", "leaving", "works", "contribution_request")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STAGE_READY_FIELD_NUMBER: _ClassVar[int]
    STEP_READY_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_FIELD_NUMBER: _ClassVar[int]
    SHARD_KEPT_FIELD_NUMBER: _ClassVar[int]
    SHARD_LOST_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    WORKS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_REQUEST_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    stage_ready: StageReady
    step_ready: StepReady
    exported: StageExported
    failed: StageFailed
    goodbye: PeerGoodbye
    alive: PeerAlive
    offered: StageOffered
    saved: StageSaved
    caught_up: CaughtUp
    timeline: _timeline_pb2.StepTimeline
    probe: _timeline_pb2.ClockProbe
    machine: Machine
    unsaved: StageUnsaved
    shard_kept: ShardKept
    shard_lost: ShardLost
    leaving: PeerLeaving
    works: PeerResumed
    contribution_request: ContributionRequest
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., stage_ready: _Optional[_Union[StageReady, _Mapping]] = ..., step_ready: _Optional[_Union[StepReady, _Mapping]] = ..., exported: _Optional[_Union[StageExported, _Mapping]] = ..., failed: _Optional[_Union[StageFailed, _Mapping]] = ..., goodbye: _Optional[_Union[PeerGoodbye, _Mapping]] = ..., alive: _Optional[_Union[PeerAlive, _Mapping]] = ..., offered: _Optional[_Union[StageOffered, _Mapping]] = ..., saved: _Optional[_Union[StageSaved, _Mapping]] = ..., caught_up: _Optional[_Union[CaughtUp, _Mapping]] = ..., timeline: _Optional[_Union[_timeline_pb2.StepTimeline, _Mapping]] = ..., probe: _Optional[_Union[_timeline_pb2.ClockProbe, _Mapping]] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ..., unsaved: _Optional[_Union[StageUnsaved, _Mapping]] = ..., shard_kept: _Optional[_Union[ShardKept, _Mapping]] = ..., shard_lost: _Optional[_Union[ShardLost, _Mapping]] = ..., leaving: _Optional[_Union[PeerLeaving, _Mapping]] = ..., works: _Optional[_Union[PeerResumed, _Mapping]] = ..., contribution_request: _Optional[_Union[ContributionRequest, _Mapping]] = ...) -> None: ...

class StageAssignment(_message.Message):
    __slots__ = ("peer_id", "layers", "endpoint")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    layers: _run_pb2.LayerRange
    endpoint: str
    def __init__(self, peer_id: _Optional[str] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., endpoint: _Optional[str] = ...) -> None: ...

class SavedStage(_message.Message):
    __slots__ = ("layers", "digest", "total_bytes", "keepers")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEEPERS_FIELD_NUMBER: _ClassVar[int]
    layers: _run_pb2.LayerRange
    digest: bytes
    total_bytes: int
    keepers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., digest: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., keepers: _Optional[_Iterable[str]] = ...) -> None: ...

class Learner(_message.Message):
    __slots__ = ("peer_id", "step", "sources")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    step: int
    sources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[str] = ..., step: _Optional[int] = ..., sources: _Optional[_Iterable[str]] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("run_id", "spec", "attempt", "assignments", "committed_steps", "fresh", "spec_digest", "learners", "last_attempt", "saved", "owner", "storage_key", "stage_keys", "priority", "claim", "weight")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    LAST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    STORAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    STAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    spec: _run_pb2.RunSpec
    attempt: int
    assignments: _containers.RepeatedCompositeFieldContainer[StageAssignment]
    committed_steps: int
    fresh: bool
    spec_digest: bytes
    learners: _containers.RepeatedCompositeFieldContainer[Learner]
    last_attempt: int
    saved: _containers.RepeatedCompositeFieldContainer[SavedStage]
    owner: str
    storage_key: bytes
    stage_keys: _containers.RepeatedCompositeFieldContainer[StageKey]
    priority: int
    claim: str
    weight: int
    def __init__(self, run_id: _Optional[str] = ..., spec: _Optional[_Union[_run_pb2.RunSpec, _Mapping]] = ..., attempt: _Optional[int] = ..., assignments: _Optional[_Iterable[_Union[StageAssignment, _Mapping]]] = ..., committed_steps: _Optional[int] = ..., fresh: _Optional[bool] = ..., spec_digest: _Optional[bytes] = ..., learners: _Optional[_Iterable[_Union[Learner, _Mapping]]] = ..., last_attempt: _Optional[int] = ..., saved: _Optional[_Iterable[_Union[SavedStage, _Mapping]]] = ..., owner: _Optional[str] = ..., storage_key: _Optional[bytes] = ..., stage_keys: _Optional[_Iterable[_Union[StageKey, _Mapping]]] = ..., priority: _Optional[int] = ..., claim: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class StageKey(_message.Message):
    __slots__ = ("layers", "key")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    layers: _run_pb2.LayerRange
    key: bytes
    def __init__(self, layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., key: _Optional[bytes] = ...) -> None: ...

class SaveStage(_message.Message):
    __slots__ = ("run_id", "step", "by_peers")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BY_PEERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    by_peers: bool
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., by_peers: _Optional[bool] = ...) -> None: ...

class KeepShard(_message.Message):
    __slots__ = ("name", "file", "sources")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    name: _snapshot_pb2.ShardName
    file: _snapshot_pb2.ShardFile
    sources: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[_Union[_snapshot_pb2.ShardName, _Mapping]] = ..., file: _Optional[_Union[_snapshot_pb2.ShardFile, _Mapping]] = ..., sources: _Optional[_Iterable[str]] = ...) -> None: ...

class GiveShard(_message.Message):
    __slots__ = ("name", "takers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TAKERS_FIELD_NUMBER: _ClassVar[int]
    name: _snapshot_pb2.ShardName
    takers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[_Union[_snapshot_pb2.ShardName, _Mapping]] = ..., takers: _Optional[_Iterable[str]] = ...) -> None: ...

class DropShards(_message.Message):
    __slots__ = ("run_id", "but")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    but: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., but: _Optional[_Iterable[int]] = ...) -> None: ...

class CatchUp(_message.Message):
    __slots__ = ("run_id", "attempt", "digest", "sources", "total_bytes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    digest: bytes
    sources: _containers.RepeatedScalarFieldContainer[str]
    total_bytes: int
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., digest: _Optional[bytes] = ..., sources: _Optional[_Iterable[str]] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class Microbatch(_message.Message):
    __slots__ = ("index", "samples", "route", "done", "entry")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    index: int
    samples: _containers.RepeatedScalarFieldContainer[int]
    route: _containers.RepeatedScalarFieldContainer[int]
    done: _containers.RepeatedScalarFieldContainer[int]
    entry: int
    def __init__(self, index: _Optional[int] = ..., samples: _Optional[_Iterable[int]] = ..., route: _Optional[_Iterable[int]] = ..., done: _Optional[_Iterable[int]] = ..., entry: _Optional[int] = ...) -> None: ...

class SampleTokens(_message.Message):
    __slots__ = ("sample", "token_ids")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    token_ids: bytes
    def __init__(self, sample: _Optional[int] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class PlanStep(_message.Message):
    __slots__ = ("run_id", "attempt", "step", "microbatches", "tokens", "listeners", "traced", "evaluation", "num_targets", "lengths", "codecs", "documents")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LISTENERS_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGETS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt: int
    step: int
    microbatches: _containers.RepeatedCompositeFieldContainer[Microbatch]
    tokens: _containers.RepeatedCompositeFieldContainer[SampleTokens]
    listeners: _containers.RepeatedScalarFieldContainer[str]
    traced: bool
    evaluation: _containers.RepeatedCompositeFieldContainer[Microbatch]
    num_targets: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    codecs: Codecs
    documents: _containers.RepeatedCompositeFieldContainer[SampleDocuments]
    def __init__(self, run_id: _Optional[str] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., microbatches: _Optional[_Iterable[_Union[Microbatch, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[SampleTokens, _Mapping]]] = ..., listeners: _Optional[_Iterable[str]] = ..., traced: _Optional[bool] = ..., evaluation: _Optional[_Iterable[_Union[Microbatch, _Mapping]]] = ..., num_targets: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ..., codecs: _Optional[_Union[Codecs, _Mapping]] = ..., documents: _Optional[_Iterable[_Union[SampleDocuments, _Mapping]]] = ...) -> None: ...

class SampleDocuments(_message.Message):
    __slots__ = ("sample", "lengths")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    sample: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sample: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class Codecs(_message.Message):
    __slots__ = ("forward", "backward")
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FIELD_NUMBER: _ClassVar[int]
    forward: str
    backward: str
    def __init__(self, forward: _Optional[str] = ..., backward: _Optional[str] = ...) -> None: ...

class CodecChange(_message.Message):
    __slots__ = ("first_step", "codecs")
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    codecs: Codecs
    def __init__(self, first_step: _Optional[int] = ..., codecs: _Optional[_Union[Codecs, _Mapping]] = ...) -> None: ...

class CommitStep(_message.Message):
    __slots__ = ("run_id", "step", "clip_factor", "learning_rate", "attempt")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLIP_FACTOR_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    clip_factor: float
    learning_rate: float
    attempt: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., clip_factor: _Optional[float] = ..., learning_rate: _Optional[float] = ..., attempt: _Optional[int] = ...) -> None: ...

class ExportStage(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ReleaseStage(_message.Message):
    __slots__ = ("run_id", "reason", "is_over")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    is_over: bool
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ..., is_over: _Optional[bool] = ...) -> None: ...

class StayIdle(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("name", "until_unix_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    until_unix_s: float
    def __init__(self, name: _Optional[str] = ..., until_unix_s: _Optional[float] = ...) -> None: ...

class LeaveProgress(_message.Message):
    __slots__ = ("may_go", "words", "seconds")
    MAY_GO_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    may_go: bool
    words: str
    seconds: float
    def __init__(self, may_go: _Optional[bool] = ..., words: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class MemoryShare(_message.Message):
    __slots__ = ("memory_bytes", "num_peers")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PEERS_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    num_peers: int
    def __init__(self, memory_bytes: _Optional[int] = ..., num_peers: _Optional[int] = ...) -> None: ...

class ToPeer(_message.Message):
    __slots__ = ("assign", "plan", "commit", "export", "release", "catch_up", "save", "keep", "give", "drop", "clock", "idle", "revoked", "leave", "renewed", "memory_share", "contribution_report")
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    GIVE_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_SHARE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_REPORT_FIELD_NUMBER: _ClassVar[int]
    assign: Assign
    plan: PlanStep
    commit: CommitStep
    export: ExportStage
    release: ReleaseStage
    catch_up: CatchUp
    save: SaveStage
    keep: KeepShard
    give: GiveShard
    drop: DropShards
    clock: _timeline_pb2.ClockReply
    idle: StayIdle
    revoked: Revoked
    leave: LeaveProgress
    renewed: Renewed
    memory_share: MemoryShare
    contribution_report: ContributionReport
    def __init__(self, assign: _Optional[_Union[Assign, _Mapping]] = ..., plan: _Optional[_Union[PlanStep, _Mapping]] = ..., commit: _Optional[_Union[CommitStep, _Mapping]] = ..., export: _Optional[_Union[ExportStage, _Mapping]] = ..., release: _Optional[_Union[ReleaseStage, _Mapping]] = ..., catch_up: _Optional[_Union[CatchUp, _Mapping]] = ..., save: _Optional[_Union[SaveStage, _Mapping]] = ..., keep: _Optional[_Union[KeepShard, _Mapping]] = ..., give: _Optional[_Union[GiveShard, _Mapping]] = ..., drop: _Optional[_Union[DropShards, _Mapping]] = ..., clock: _Optional[_Union[_timeline_pb2.ClockReply, _Mapping]] = ..., idle: _Optional[_Union[StayIdle, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., leave: _Optional[_Union[LeaveProgress, _Mapping]] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ..., memory_share: _Optional[_Union[MemoryShare, _Mapping]] = ..., contribution_report: _Optional[_Union[ContributionReport, _Mapping]] = ...) -> None: ...

class SubmitHeader(_message.Message):
    __slots__ = ("spec", "spec_digest", "run_id", "priority", "protocol_version")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    spec: _run_pb2.RunSpec
    spec_digest: bytes
    run_id: str
    priority: int
    protocol_version: int
    def __init__(self, spec: _Optional[_Union[_run_pb2.RunSpec, _Mapping]] = ..., spec_digest: _Optional[bytes] = ..., run_id: _Optional[str] = ..., priority: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class SubmitPart(_message.Message):
    __slots__ = ("header", "tokens")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    header: SubmitHeader
    tokens: SampleTokens
    def __init__(self, header: _Optional[_Union[SubmitHeader, _Mapping]] = ..., tokens: _Optional[_Union[SampleTokens, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run_id", "traced", "protocol_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    traced: bool
    protocol_version: int
    def __init__(self, run_id: _Optional[str] = ..., traced: _Optional[bool] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("run_id", "protocol_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol_version: int
    def __init__(self, run_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class CollectedRequest(_message.Message):
    __slots__ = ("run_id", "protocol_version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol_version: int
    def __init__(self, run_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("first_member", "first_run", "protocol_version")
    FIRST_MEMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_RUN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    first_member: int
    first_run: int
    protocol_version: int
    def __init__(self, first_member: _Optional[int] = ..., first_run: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "phase", "detail", "committed_steps", "spec", "assignments", "sent", "attempt", "joining", "results", "result_step", "codecs", "quality", "steered", "names")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    RESULT_STEP_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    STEERED_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    phase: RunPhase
    detail: str
    committed_steps: int
    spec: _run_pb2.RunSpec
    assignments: _containers.RepeatedCompositeFieldContainer[StageAssignment]
    sent: ByteCounts
    attempt: int
    joining: _containers.RepeatedScalarFieldContainer[str]
    results: _containers.RepeatedCompositeFieldContainer[StageResult]
    result_step: int
    codecs: _containers.RepeatedCompositeFieldContainer[CodecChange]
    quality: CompressionCost
    steered: _containers.RepeatedCompositeFieldContainer[Steered]
    names: _containers.RepeatedCompositeFieldContainer[NamedMember]
    def __init__(self, run_id: _Optional[str] = ..., phase: _Optional[_Union[RunPhase, str]] = ..., detail: _Optional[str] = ..., committed_steps: _Optional[int] = ..., spec: _Optional[_Union[_run_pb2.RunSpec, _Mapping]] = ..., assignments: _Optional[_Iterable[_Union[StageAssignment, _Mapping]]] = ..., sent: _Optional[_Union[ByteCounts, _Mapping]] = ..., attempt: _Optional[int] = ..., joining: _Optional[_Iterable[str]] = ..., results: _Optional[_Iterable[_Union[StageResult, _Mapping]]] = ..., result_step: _Optional[int] = ..., codecs: _Optional[_Iterable[_Union[CodecChange, _Mapping]]] = ..., quality: _Optional[_Union[CompressionCost, _Mapping]] = ..., steered: _Optional[_Iterable[_Union[Steered, _Mapping]]] = ..., names: _Optional[_Iterable[_Union[NamedMember, _Mapping]]] = ...) -> None: ...

class Steered(_message.Message):
    __slots__ = ("number", "kind", "actor", "step", "words")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    kind: EventKind
    actor: Actor
    step: int
    words: str
    def __init__(self, number: _Optional[int] = ..., kind: _Optional[_Union[EventKind, str]] = ..., actor: _Optional[_Union[Actor, str]] = ..., step: _Optional[int] = ..., words: _Optional[str] = ...) -> None: ...

class StageResult(_message.Message):
    __slots__ = ("peer_id", "file")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    file: _snapshot_pb2.ShardFile
    def __init__(self, peer_id: _Optional[str] = ..., file: _Optional[_Union[_snapshot_pb2.ShardFile, _Mapping]] = ...) -> None: ...

class BoundaryStatus(_message.Message):
    __slots__ = ("boundary", "buffered_samples", "key_frames", "delta_frames", "kept", "forward_codec", "backward_codec", "traffic", "newest")
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    KEY_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DELTA_FRAMES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_CODEC_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_CODEC_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    boundary: int
    buffered_samples: int
    key_frames: int
    delta_frames: int
    kept: BufferCounts
    forward_codec: str
    backward_codec: str
    traffic: Traffic
    newest: Traffic
    def __init__(self, boundary: _Optional[int] = ..., buffered_samples: _Optional[int] = ..., key_frames: _Optional[int] = ..., delta_frames: _Optional[int] = ..., kept: _Optional[_Union[BufferCounts, _Mapping]] = ..., forward_codec: _Optional[str] = ..., backward_codec: _Optional[str] = ..., traffic: _Optional[_Union[Traffic, _Mapping]] = ..., newest: _Optional[_Union[Traffic, _Mapping]] = ...) -> None: ...

class ByteCounts(_message.Message):
    __slots__ = ("forward_bytes", "forward_uncompressed_bytes", "backward_bytes", "backward_uncompressed_bytes", "gradient_bytes", "gradient_uncompressed_bytes", "state_bytes", "relayed_bytes", "evaluation_bytes", "evaluation_uncompressed_bytes")
    FORWARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_UNCOMPRESSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_UNCOMPRESSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_UNCOMPRESSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_UNCOMPRESSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    forward_bytes: int
    forward_uncompressed_bytes: int
    backward_bytes: int
    backward_uncompressed_bytes: int
    gradient_bytes: int
    gradient_uncompressed_bytes: int
    state_bytes: int
    relayed_bytes: int
    evaluation_bytes: int
    evaluation_uncompressed_bytes: int
    def __init__(self, forward_bytes: _Optional[int] = ..., forward_uncompressed_bytes: _Optional[int] = ..., backward_bytes: _Optional[int] = ..., backward_uncompressed_bytes: _Optional[int] = ..., gradient_bytes: _Optional[int] = ..., gradient_uncompressed_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ..., relayed_bytes: _Optional[int] = ..., evaluation_bytes: _Optional[int] = ..., evaluation_uncompressed_bytes: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("replica_only", "sees_tokens", "layers", "weight")
    REPLICA_ONLY_FIELD_NUMBER: _ClassVar[int]
    SEES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    replica_only: bool
    sees_tokens: bool
    layers: _run_pb2.LayerRange
    weight: int
    def __init__(self, replica_only: _Optional[bool] = ..., sees_tokens: _Optional[bool] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., weight: _Optional[int] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("peer_id", "layers", "idle", "grant", "endpoint", "device", "memory_bytes", "version", "speaks", "joined_ago_s", "heard_ago_s", "machine", "works", "links", "given", "state", "offered_bytes")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEAKS_FIELD_NUMBER: _ClassVar[int]
    JOINED_AGO_S_FIELD_NUMBER: _ClassVar[int]
    HEARD_AGO_S_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    WORKS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OFFERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    layers: _run_pb2.LayerRange
    idle: str
    grant: Grant
    endpoint: str
    device: str
    memory_bytes: int
    version: str
    speaks: int
    joined_ago_s: float
    heard_ago_s: float
    machine: Machine
    works: _containers.RepeatedCompositeFieldContainer[MemberWork]
    links: _containers.RepeatedCompositeFieldContainer[MemberLink]
    given: Contribution
    state: MemberState
    offered_bytes: int
    def __init__(self, peer_id: _Optional[str] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., idle: _Optional[str] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., endpoint: _Optional[str] = ..., device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., version: _Optional[str] = ..., speaks: _Optional[int] = ..., joined_ago_s: _Optional[float] = ..., heard_ago_s: _Optional[float] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ..., works: _Optional[_Iterable[_Union[MemberWork, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[MemberLink, _Mapping]]] = ..., given: _Optional[_Union[Contribution, _Mapping]] = ..., state: _Optional[_Union[MemberState, str]] = ..., offered_bytes: _Optional[int] = ...) -> None: ...

class MemberWork(_message.Message):
    __slots__ = ("run_id", "layers", "stage", "replica", "num_replicas", "doing", "waits_for", "share", "parts_begun", "num_parts", "microbatch_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PARTS_BEGUN_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    layers: _run_pb2.LayerRange
    stage: int
    replica: int
    num_replicas: int
    doing: MemberActivity
    waits_for: _containers.RepeatedScalarFieldContainer[str]
    share: int
    parts_begun: int
    num_parts: int
    microbatch_s: float
    def __init__(self, run_id: _Optional[str] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., stage: _Optional[int] = ..., replica: _Optional[int] = ..., num_replicas: _Optional[int] = ..., doing: _Optional[_Union[MemberActivity, str]] = ..., waits_for: _Optional[_Iterable[str]] = ..., share: _Optional[int] = ..., parts_begun: _Optional[int] = ..., num_parts: _Optional[int] = ..., microbatch_s: _Optional[float] = ...) -> None: ...

class MemberLink(_message.Message):
    __slots__ = ("peer_id", "way", "speed")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    way: _meeting_pb2.Way
    speed: LinkSpeed
    def __init__(self, peer_id: _Optional[str] = ..., way: _Optional[_Union[_meeting_pb2.Way, str]] = ..., speed: _Optional[_Union[LinkSpeed, _Mapping]] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("samples", "steps", "seconds", "compute_s", "sent_bytes", "all_bytes")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALL_BYTES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    steps: int
    seconds: float
    compute_s: float
    sent_bytes: int
    all_bytes: int
    def __init__(self, samples: _Optional[int] = ..., steps: _Optional[int] = ..., seconds: _Optional[float] = ..., compute_s: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., all_bytes: _Optional[int] = ...) -> None: ...

class Contributor(_message.Message):
    __slots__ = ("peer_id", "given")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    given: Contribution
    def __init__(self, peer_id: _Optional[str] = ..., given: _Optional[_Union[Contribution, _Mapping]] = ...) -> None: ...

class RunSummary(_message.Message):
    __slots__ = ("run_id", "phase", "detail", "committed_steps", "num_steps", "spec_digest", "assignments", "sent", "joining", "boundaries", "attempt", "is_own", "model", "last_step", "last_evaluation", "step_s", "samples_per_s", "tokens_per_s", "eta_s", "place", "behind", "snapshots", "is_paused", "learning_rate", "codecs", "quality", "eta_low_s", "eta_high_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    IS_OWN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_EVALUATION_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    ETA_LOW_S_FIELD_NUMBER: _ClassVar[int]
    ETA_HIGH_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    phase: RunPhase
    detail: str
    committed_steps: int
    num_steps: int
    spec_digest: bytes
    assignments: _containers.RepeatedCompositeFieldContainer[StageAssignment]
    sent: ByteCounts
    joining: _containers.RepeatedScalarFieldContainer[str]
    boundaries: _containers.RepeatedCompositeFieldContainer[BoundaryStatus]
    attempt: int
    is_own: bool
    model: str
    last_step: StepCommitted
    last_evaluation: Evaluated
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    eta_s: float
    place: int
    behind: str
    snapshots: _containers.RepeatedScalarFieldContainer[int]
    is_paused: bool
    learning_rate: float
    codecs: Codecs
    quality: CompressionCost
    eta_low_s: float
    eta_high_s: float
    def __init__(self, run_id: _Optional[str] = ..., phase: _Optional[_Union[RunPhase, str]] = ..., detail: _Optional[str] = ..., committed_steps: _Optional[int] = ..., num_steps: _Optional[int] = ..., spec_digest: _Optional[bytes] = ..., assignments: _Optional[_Iterable[_Union[StageAssignment, _Mapping]]] = ..., sent: _Optional[_Union[ByteCounts, _Mapping]] = ..., joining: _Optional[_Iterable[str]] = ..., boundaries: _Optional[_Iterable[_Union[BoundaryStatus, _Mapping]]] = ..., attempt: _Optional[int] = ..., is_own: _Optional[bool] = ..., model: _Optional[str] = ..., last_step: _Optional[_Union[StepCommitted, _Mapping]] = ..., last_evaluation: _Optional[_Union[Evaluated, _Mapping]] = ..., step_s: _Optional[float] = ..., samples_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., eta_s: _Optional[float] = ..., place: _Optional[int] = ..., behind: _Optional[str] = ..., snapshots: _Optional[_Iterable[int]] = ..., is_paused: _Optional[bool] = ..., learning_rate: _Optional[float] = ..., codecs: _Optional[_Union[Codecs, _Mapping]] = ..., quality: _Optional[_Union[CompressionCost, _Mapping]] = ..., eta_low_s: _Optional[float] = ..., eta_high_s: _Optional[float] = ...) -> None: ...

class CompressionCost(_message.Message):
    __slots__ = ("asked", "cost", "num_measured")
    ASKED_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    NUM_MEASURED_FIELD_NUMBER: _ClassVar[int]
    asked: float
    cost: float
    num_measured: int
    def __init__(self, asked: _Optional[float] = ..., cost: _Optional[float] = ..., num_measured: _Optional[int] = ...) -> None: ...

class SwarmStatus(_message.Message):
    __slots__ = ("members", "runs", "num_members", "num_runs", "relays", "version", "unix_s", "next_event", "contributors", "warnings", "names")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NUM_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNS_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NEXT_EVENT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    runs: _containers.RepeatedCompositeFieldContainer[RunSummary]
    num_members: int
    num_runs: int
    relays: _containers.RepeatedCompositeFieldContainer[RelayStatus]
    version: str
    unix_s: float
    next_event: int
    contributors: _containers.RepeatedCompositeFieldContainer[Contributor]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    names: _containers.RepeatedCompositeFieldContainer[NamedMember]
    def __init__(self, members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[RunSummary, _Mapping]]] = ..., num_members: _Optional[int] = ..., num_runs: _Optional[int] = ..., relays: _Optional[_Iterable[_Union[RelayStatus, _Mapping]]] = ..., version: _Optional[str] = ..., unix_s: _Optional[float] = ..., next_event: _Optional[int] = ..., contributors: _Optional[_Iterable[_Union[Contributor, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., names: _Optional[_Iterable[_Union[NamedMember, _Mapping]]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("since", "run_id", "follows", "protocol_version")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    since: int
    run_id: str
    follows: bool
    protocol_version: int
    def __init__(self, since: _Optional[int] = ..., run_id: _Optional[str] = ..., follows: _Optional[bool] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class SwarmEvent(_message.Message):
    __slots__ = ("serial", "unix_s", "kind", "run_id", "peer_id", "from_step", "to_step", "words", "actor", "peer_name")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    TO_STEP_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    PEER_NAME_FIELD_NUMBER: _ClassVar[int]
    serial: int
    unix_s: float
    kind: EventKind
    run_id: str
    peer_id: str
    from_step: int
    to_step: int
    words: str
    actor: Actor
    peer_name: str
    def __init__(self, serial: _Optional[int] = ..., unix_s: _Optional[float] = ..., kind: _Optional[_Union[EventKind, str]] = ..., run_id: _Optional[str] = ..., peer_id: _Optional[str] = ..., from_step: _Optional[int] = ..., to_step: _Optional[int] = ..., words: _Optional[str] = ..., actor: _Optional[_Union[Actor, str]] = ..., peer_name: _Optional[str] = ...) -> None: ...

class SwarmEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[SwarmEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[SwarmEvent, _Mapping]]] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("from_step", "to_step", "why", "remedy")
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    TO_STEP_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    to_step: int
    why: str
    remedy: str
    def __init__(self, from_step: _Optional[int] = ..., to_step: _Optional[int] = ..., why: _Optional[str] = ..., remedy: _Optional[str] = ...) -> None: ...

class RelayStatus(_message.Message):
    __slots__ = ("name", "endpoint", "links", "relayed_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: str
    links: int
    relayed_bytes: int
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[str] = ..., links: _Optional[int] = ..., relayed_bytes: _Optional[int] = ...) -> None: ...

class StepCommitted(_message.Message):
    __slots__ = ("step", "loss", "learning_rate", "grad_norm", "num_samples", "seconds", "traffic", "gradients", "state_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    num_samples: int
    seconds: float
    traffic: _containers.RepeatedCompositeFieldContainer[Traffic]
    gradients: GradientTraffic
    state_bytes: int
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., learning_rate: _Optional[float] = ..., grad_norm: _Optional[float] = ..., num_samples: _Optional[int] = ..., seconds: _Optional[float] = ..., traffic: _Optional[_Iterable[_Union[Traffic, _Mapping]]] = ..., gradients: _Optional[_Union[GradientTraffic, _Mapping]] = ..., state_bytes: _Optional[int] = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("step", "num_samples", "eval_loss", "compressed_eval_loss", "counts", "traffic")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_EVAL_LOSS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_samples: int
    eval_loss: float
    compressed_eval_loss: float
    counts: _containers.RepeatedScalarFieldContainer[int]
    traffic: _containers.RepeatedCompositeFieldContainer[Traffic]
    def __init__(self, step: _Optional[int] = ..., num_samples: _Optional[int] = ..., eval_loss: _Optional[float] = ..., compressed_eval_loss: _Optional[float] = ..., counts: _Optional[_Iterable[int]] = ..., traffic: _Optional[_Iterable[_Union[Traffic, _Mapping]]] = ...) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("status", "step", "timeline", "evaluated", "went_back")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    WENT_BACK_FIELD_NUMBER: _ClassVar[int]
    status: RunStatus
    step: StepCommitted
    timeline: _timeline_pb2.PeerTimeline
    evaluated: Evaluated
    went_back: Rollback
    def __init__(self, status: _Optional[_Union[RunStatus, _Mapping]] = ..., step: _Optional[_Union[StepCommitted, _Mapping]] = ..., timeline: _Optional[_Union[_timeline_pb2.PeerTimeline, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ..., went_back: _Optional[_Union[Rollback, _Mapping]] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("spec", "run_id", "protocol_version")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    spec: _run_pb2.RunSpec
    run_id: str
    protocol_version: int
    def __init__(self, spec: _Optional[_Union[_run_pb2.RunSpec, _Mapping]] = ..., run_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class PlacedPeer(_message.Message):
    __slots__ = ("peer_id", "layers", "memory_bytes", "machine", "num_runs", "busy", "host_busy", "host_load", "shared_up_bytes_per_s", "shared_down_bytes_per_s")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    HOST_BUSY_FIELD_NUMBER: _ClassVar[int]
    HOST_LOAD_FIELD_NUMBER: _ClassVar[int]
    SHARED_UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SHARED_DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    layers: _run_pb2.LayerRange
    memory_bytes: int
    machine: Machine
    num_runs: int
    busy: float
    host_busy: float
    host_load: float
    shared_up_bytes_per_s: float
    shared_down_bytes_per_s: float
    def __init__(self, peer_id: _Optional[str] = ..., layers: _Optional[_Union[_run_pb2.LayerRange, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ..., num_runs: _Optional[int] = ..., busy: _Optional[float] = ..., host_busy: _Optional[float] = ..., host_load: _Optional[float] = ..., shared_up_bytes_per_s: _Optional[float] = ..., shared_down_bytes_per_s: _Optional[float] = ...) -> None: ...

class Costs(_message.Message):
    __slots__ = ("logs", "covariance", "num_runs", "surprise")
    LOGS_FIELD_NUMBER: _ClassVar[int]
    COVARIANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNS_FIELD_NUMBER: _ClassVar[int]
    SURPRISE_FIELD_NUMBER: _ClassVar[int]
    logs: _containers.RepeatedScalarFieldContainer[float]
    covariance: _containers.RepeatedScalarFieldContainer[float]
    num_runs: int
    surprise: float
    def __init__(self, logs: _Optional[_Iterable[float]] = ..., covariance: _Optional[_Iterable[float]] = ..., num_runs: _Optional[int] = ..., surprise: _Optional[float] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("peers", "reason", "relayed_percent", "costs", "num_waiting", "starts_after_s", "beside_s", "names")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RELAYED_PERCENT_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    STARTS_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    BESIDE_S_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[PlacedPeer]
    reason: str
    relayed_percent: int
    costs: Costs
    num_waiting: int
    starts_after_s: float
    beside_s: float
    names: _containers.RepeatedCompositeFieldContainer[NamedMember]
    def __init__(self, peers: _Optional[_Iterable[_Union[PlacedPeer, _Mapping]]] = ..., reason: _Optional[str] = ..., relayed_percent: _Optional[int] = ..., costs: _Optional[_Union[Costs, _Mapping]] = ..., num_waiting: _Optional[int] = ..., starts_after_s: _Optional[float] = ..., beside_s: _Optional[float] = ..., names: _Optional[_Iterable[_Union[NamedMember, _Mapping]]] = ...) -> None: ...

class LinkSample(_message.Message):
    __slots__ = ("data", "protocol_version")
    DATA_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    protocol_version: int
    def __init__(self, data: _Optional[bytes] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class LinkEcho(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
