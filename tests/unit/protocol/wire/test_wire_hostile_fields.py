"""One hostile field at a time: each is refused, and the error says what was expected."""

import struct

import pytest

from swarm_ft.errors import MalformedMessage
from swarm_ft.proto import boundary_pb2, coordinator_pb2
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    EncodedTensor,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
)
from swarm_ft.protocol.messages.client import RunPhase, RunStatus, StageResult, StepCommitted
from swarm_ft.protocol.messages.control import (
    Assign,
    ClockProbe,
    ClockReply,
    CommitStep,
    HeldStage,
    PeerHello,
    PlanStep,
    StageAssignment,
    StageExported,
    StageFailed,
    StageReady,
    StepReady,
)
from swarm_ft.protocol.messages.reports import BufferCounts, HeldBuffers, SampleSet, Traffic
from swarm_ft.protocol.messages.shard import ShardFile
from swarm_ft.protocol.messages.timeline import (
    MAX_SPANS,
    ClockEstimate,
    PeerTimeline,
    Spans,
    StepTimeline,
)
from swarm_ft.protocol.spec.codec_spec import Axis, CodecName, CodecSpec, Direction
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import MAX_HIDDEN_SIZE, MAX_SEQ_LENGTH
from swarm_ft.protocol.spec.training_plan import Microbatch
from swarm_ft.protocol.wire.client_wire import event_from_wire, event_to_wire
from swarm_ft.protocol.wire.coordinator_wire import (
    to_peer_from_wire,
    to_peer_to_wire,
    tokens_from_wire,
)
from swarm_ft.protocol.wire.frames import (
    MAX_RECEIVED_KEYS,
    link_from_wire,
    link_to_wire,
)
from swarm_ft.protocol.wire.peer_wire import from_peer_from_wire, from_peer_to_wire

NAN, INF = float("nan"), float("inf")
KEY = FrameKey(1, 2, 0, 5, Direction.FORWARD)
AQ4 = CodecSpec(CodecName.AQ, 400, Axis.CHANNEL)
TENSOR = EncodedTensor(AQ4, 128, 64, b"payload")
HEADER = TENSOR.to_bytes()[:12]
DELTA = Frame(KEY, FrameKind.DELTA, TENSOR, b"b" * 16, b"r" * 16)
KEY_FRAME = Frame(KEY, FrameKind.KEY, TENSOR, b"", b"r" * 16)
DIRECT = Frame(KEY, FrameKind.DIRECT, TENSOR)
HELLO = BoundaryHello(
    run_id="run",
    spec_digest=b"d" * 16,
    boundary=1,
    peer_id="peer",
    attempt=1,
    window_frames=8,
    received=frozenset({KEY}),
)


def tensor_of(name=CodecName.AQ, flags=2, hundredths=400, tokens=128, channels=64):
    """A tensor's bytes with whatever its header claims."""
    return struct.pack("<BBHII", name, flags, hundredths, tokens, channels) + TENSOR.payload


def test_the_header_that_is_spoilt_below_is_a_good_one():
    assert tensor_of() == TENSOR.to_bytes()


def put(path, value):
    """A change of one field, `path` as in `hello.run_id` or `stages[0].layers.stop`."""

    def change(message):
        *owners, last = path.replace("[0]", ".[0]").split(".")
        for name in owners:
            message = message[0] if name == "[0]" else getattr(message, name)
        if value is None:
            message.ClearField(last)
        elif isinstance(value, list):
            message.ClearField(last)
            getattr(message, last).extend(value)
        else:
            setattr(message, last, value)

    return change


def cases(*rows):
    return pytest.mark.parametrize(
        ("message", "change", "complaint"),
        [(message, put(path, value), complaint) for message, path, value, complaint in rows],
        ids=[f"{type(m).__name__}-{path}-{str(value)[:20]!a}" for m, path, value, _ in rows],
    )


@cases(
    (HELLO, "boundary_hello", None, "expected a body"),
    (HELLO, "boundary_hello.run_id", "", "run id: expected 1 to 64"),
    (HELLO, "boundary_hello.run_id", "r" * 65, "run id: expected 1 to 64"),
    (HELLO, "boundary_hello.run_id", "../run", "no slash"),
    (HELLO, "boundary_hello.peer_id", "a\nb", "peer id: .* printable"),
    (HELLO, "boundary_hello.spec_digest", b"", "RunSpec digest: expected 16 bytes, got 0"),
    (HELLO, "boundary_hello.spec_digest", b"d" * 17, "RunSpec digest: expected 16 bytes, got 17"),
    (HELLO, "boundary_hello.boundary", 0, "boundary: expected 1 to 4096, got 0"),
    (HELLO, "boundary_hello.boundary", 4097, "boundary: expected 1 to 4096, got 4097"),
    (HELLO, "boundary_hello.window_frames", 0, "window: expected 1 to"),
    (HELLO, "boundary_hello.window_frames", 2**32 - 1, "window: expected 1 to"),
    (HELLO, "boundary_hello.received[0].direction", 0, "direction: expected 1 to 2, got 0"),
    (
        HELLO,
        "boundary_hello.received",
        [boundary_pb2.FrameKey()] * (MAX_RECEIVED_KEYS + 1),
        "frames received: expected 0 to",
    ),
    (Ack(KEY), "frame_ack.direction", 3, "direction: expected 1 to 2, got 3"),
    (KeyFrameRequest(KEY, ""), "key_frame_request.key", None, "direction"),
    (DELTA, "frame.key", None, "direction"),
    (DELTA, "frame.kind", 0, "frame kind: expected 1 to 3, got 0"),
    (DELTA, "frame.kind", 9, "frame kind: expected 1 to 3, got 9"),
    (DELTA, "frame.tensor", b"", "tensor: expected a header of 12 bytes, got 0"),
    (DELTA, "frame.tensor", HEADER[:11], "tensor: expected a header of 12 bytes, got 11"),
    (DELTA, "frame.tensor", tensor_of(tokens=0), "tokens: expected 1 to"),
    (DELTA, "frame.tensor", tensor_of(tokens=MAX_SEQ_LENGTH + 1), "tokens: expected 1 to"),
    (DELTA, "frame.tensor", tensor_of(tokens=2**32 - 1), "tokens: expected 1 to"),
    (DELTA, "frame.tensor", tensor_of(channels=0), "channels: expected 1 to"),
    (DELTA, "frame.tensor", tensor_of(channels=MAX_HIDDEN_SIZE + 1), "channels: expected 1 to"),
    (DELTA, "frame.tensor", tensor_of(channels=2**32 - 1), "channels: expected 1 to"),
    (DELTA, "frame.tensor", tensor_of(name=0), "tensor: .* names none"),
    (DELTA, "frame.tensor", tensor_of(name=12), "tensor: .* names none"),
    (DELTA, "frame.tensor", tensor_of(flags=0), "tensor: .* q, aq, qc and aqc have them"),
    (DELTA, "frame.tensor", tensor_of(flags=5), "tensor: .* names none"),
    (DELTA, "frame.tensor", tensor_of(flags=4 << 5 | 2), "tensor: .* names none"),
    (DELTA, "frame.tensor", tensor_of(flags=2 << 5 | 2), "tensor: .* feeds its error back"),
    (DELTA, "frame.tensor", tensor_of(hundredths=900), "9 bits is outside 1 to 8"),
    (DELTA, "frame.tensor", tensor_of(CodecName.Q, hundredths=0), "0 bits is outside 1 to 8"),
    (DELTA, "frame.tensor", tensor_of(hundredths=150), "1.5 bits is no whole number"),
    (DELTA, "frame.tensor", tensor_of(CodecName.FP16, 0, 800), "8 bits is outside 16 to 16"),
    (DELTA, "frame.tensor", tensor_of(CodecName.QC, 2, 50), "needs an entropy stage"),
    (DELTA, "frame.tensor", b"\xff" * 20, "tensor: .* names none"),
    (DELTA, "frame.base_digest", b"", "base digest: expected 16 bytes, got 0"),
    (DELTA, "frame.base_digest", b"b" * 15, "base digest: expected 16 bytes, got 15"),
    (DELTA, "frame.result_digest", b"", "result digest: expected 16 bytes, got 0"),
    (KEY_FRAME, "frame.base_digest", b"b" * 16, "KEY frame: has a digest"),
    (KEY_FRAME, "frame.result_digest", b"", "result digest: expected 16 bytes, got 0"),
    (DIRECT, "frame.base_digest", b"b" * 16, "DIRECT frame: has a digest"),
    (DIRECT, "frame.result_digest", b"r" * 16, "DIRECT frame: has a digest"),
)
def test_refuses_hostile_fields_over_a_boundary(message, change, complaint):
    wire = link_to_wire(message)
    change(wire)
    with pytest.raises(MalformedMessage, match=complaint):
        link_from_wire(wire)


LAYERS = LayerRange(0, 2)
FILE = ShardFile(digest=b"d" * 16, total_bytes=5)
EXPORTED = StageExported(run_id="run", file=FILE)
HELD = HeldStage(
    run_id="run", spec_digest=b"d" * 16, layers=LAYERS, committed_steps=3, exported=FILE
)
PEER = PeerHello(
    peer_id="peer", endpoint="peer.example:7001", layers=LAYERS, memory_bytes=1, held=HELD
)
READY = StepReady(
    run_id="run",
    attempt=1,
    step=0,
    squared_grad_norm=1.0,
    loss_sum=2.0,
    traffic=(Traffic(boundary=1),),
    buffers=(BufferCounts(boundary=1),),
    lost=(HeldBuffers(boundary=1, samples=SampleSet.of([3])),),
)
LOADED = StageReady(
    run_id="run", attempt=1, buffers=(HeldBuffers(boundary=1, samples=SampleSet.of([3])),)
)
ONE_EACH = dict.fromkeys(Spans.__dataclass_fields__, (1,))
TOLD = StepTimeline(
    run_id="run",
    attempt=1,
    step=0,
    origin_us=5,
    clock=ClockEstimate(-7, 2),
    spans=Spans(**ONE_EACH),
)


@cases(
    (PEER, "hello", None, "expected a body"),
    (PEER, "hello.peer_id", "p" * 65, "peer id: expected 1 to 64"),
    (PEER, "hello.endpoint", "", "endpoint '': expected HOST:PORT"),
    (PEER, "hello.endpoint", "unix:/tmp/x", "expected HOST:PORT"),
    (PEER, "hello.endpoint", "h" * 300 + ":1", "expected HOST:PORT"),
    (PEER, "hello.layers.stop", 0, "layers' stop: expected 1 to 4096"),
    (PEER, "hello.layers.stop", 4097, "layers' stop: expected 1 to 4096"),
    (PEER, "hello.layers.start", 2, "layers' start: expected 0 to 1, got 2"),
    (PEER, "hello.held.run_id", "", "run id"),
    (PEER, "hello.held.spec_digest", b"d", "RunSpec digest: expected 16 bytes, got 1"),
    (PEER, "hello.held.layers", None, "layers' stop"),
    (PEER, "hello.held.exported.digest", b"", "digest of a shard: expected 16 bytes, got 0"),
    (EXPORTED, "exported.file", None, "digest of a shard: expected 16 bytes, got 0"),
    (EXPORTED, "exported.file.total_bytes", (1 << 40) + 1, "shard: expected 0 to 1099511627776"),
    (READY, "step_ready.squared_grad_norm", NAN, "squared gradient norm: expected a finite"),
    (READY, "step_ready.squared_grad_norm", INF, "squared gradient norm: expected a finite"),
    (READY, "step_ready.squared_grad_norm", -1.0, "squared gradient norm: expected a finite"),
    (READY, "step_ready.squared_grad_norm", 1.7e308, "squared gradient norm: .* to 1e"),
    (READY, "step_ready.loss_sum", NAN, "loss: expected a finite"),
    (READY, "step_ready.loss_sum", 1.7e308, "loss: expected a finite number from 0 to 1e"),
    (READY, "step_ready.traffic[0].boundary", 0, "boundary: expected 1 to 4096"),
    (READY, "step_ready.traffic", [coordinator_pb2.Traffic(boundary=1)] * 3, "boundaries of a"),
    (
        READY,
        "step_ready.traffic",
        [coordinator_pb2.Traffic(boundary=1, forward_bytes=1 << 60)],
        "forward_bytes: expected 0 to",
    ),
    (READY, "step_ready.buffers[0].boundary", 4097, "boundary: expected 1 to 4096"),
    (READY, "step_ready.buffers[0].evictions", 1 << 60, "evictions: expected 0 to"),
    (READY, "step_ready.buffers", [coordinator_pb2.BufferCounts(boundary=1)] * 3, "boundaries of"),
    (READY, "step_ready.lost[0].samples", b"\1\0", "set of samples: expected a bitmap"),
    (LOADED, "stage_ready.buffers[0].boundary", 0, "boundary: expected 1 to 4096"),
    (LOADED, "stage_ready.buffers[0].samples", b"\0", "without zeros at its end"),
    (LOADED, "stage_ready.buffers[0].samples", b"\0" * (1 << 21) + b"\1", "of samples below 16777"),
    (LOADED, "stage_ready.buffers", [coordinator_pb2.HeldBuffers(boundary=1)] * 3, "boundaries"),
    (TOLD, "timeline.run_id", "", "run id"),
    (TOLD, "timeline.origin_us", 1 << 52, "origin: expected 0 to"),
    (TOLD, "timeline.clock_offset_us", -(1 << 52), "offset: expected -"),
    (TOLD, "timeline.clock_error_us", 1 << 52, "error of a clock: expected 0 to"),
    (TOLD, "timeline.spans.kinds", [0], "kinds: expected 1 to 20, got 0"),
    (TOLD, "timeline.spans.kinds", [21], "kinds: expected 1 to 20, got 21"),
    (TOLD, "timeline.spans.kinds", [], "expected 0 begin_us, got 1"),
    (TOLD, "timeline.spans.kinds", [1] * (MAX_SPANS + 1), "spans: expected 0 to 20000, got 20001"),
    (TOLD, "timeline.spans.begin_us", [1 << 52], "begin_us: expected 0 to"),
    (TOLD, "timeline.spans.duration_us", [1 << 52], "duration_us: expected 0 to"),
    (TOLD, "timeline.spans.microbatches", [1 << 33], "microbatches: expected 0 to"),
    (TOLD, "timeline.spans.samples", [1, 1], "expected 1 samples, got 2"),
    (TOLD, "timeline.spans.boundaries", [4097], "boundaries: expected 0 to 4096"),
    (TOLD, "timeline.spans.directions", [3], "directions: expected 0 to 2"),
    (TOLD, "timeline.spans.num_bytes", [1 << 51], "num_bytes: expected 0 to"),
    (ClockProbe(5), "probe.sent_us", 1 << 52, "time of a probe: expected 0 to"),
)
def test_refuses_hostile_fields_from_a_peer(message, change, complaint):
    wire = from_peer_to_wire(message)
    change(wire)
    with pytest.raises(MalformedMessage, match=complaint):
        from_peer_from_wire(wire)


PLAN = PlanStep(run_id="run", attempt=1, step=0, microbatches=(Microbatch(0, (1, 2)),))
COMMIT = CommitStep(run_id="run", attempt=1, step=0, clip_factor=1.0, learning_rate=1e-3)


def microbatches(*batches):
    return [coordinator_pb2.Microbatch(index=i, samples=samples) for i, samples in batches]


@cases(
    (PLAN, "plan", None, "expected a body"),
    (PLAN, "plan.microbatches", [], "samples of a step: expected 1 to"),
    (PLAN, "plan.microbatches", microbatches((0, [])), "samples of a step: expected 1 to"),
    (PLAN, "plan.microbatches", microbatches((0, [1]), (1, [])), "samples of a microbatch"),
    (PLAN, "plan.microbatches", microbatches((1, [1]), (0, [2])), "numbered from 0"),
    (PLAN, "plan.microbatches", microbatches((0, [1]), (1, [1])), "samples that come twice"),
    (PLAN, "plan.microbatches", microbatches((0, range(2**16 + 1))), "samples of a step"),
    (PLAN, "plan.tokens", [coordinator_pb2.SampleTokens(sample=1)], "bytes of a sample"),
    (COMMIT, "commit.clip_factor", NAN, "clip factor: expected a finite number"),
    (COMMIT, "commit.learning_rate", -1.0, "learning rate: expected a finite number"),
    (COMMIT, "commit.run_id", "\x1b[2J", "run id: expected 1 to 64 printable"),
    (ClockReply(5, 6), "clock.sent_us", 1 << 52, "time of a probe: expected 0 to"),
    (ClockReply(5, 6), "clock.coordinator_us", 1 << 52, "coordinator's time: expected 0 to"),
)
def test_refuses_hostile_fields_from_a_coordinator(message, change, complaint):
    wire = to_peer_to_wire(message)
    change(wire)
    with pytest.raises(MalformedMessage, match=complaint):
        to_peer_from_wire(wire)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("stages", [], "peers of a run: expected 1 to"),
        ("stages[0].layers", None, "layers' stop"),
        ("spec", None, "RunSpec: expected version 7, got 0"),
        ("spec.version", 6, "RunSpec: expected version 7, got 6"),
        ("spec.version", 8, "RunSpec: expected version 7, got 8"),
        ("spec.model", None, "number of blocks: expected 1 to"),
        ("spec.model.num_blocks", 2**32 - 1, "number of blocks: expected 1 to"),
        ("spec.model.num_blocks", 2, "block digests: expected 2 to 2, got 3"),
        ("spec.model.block_digests", [b"d"] * 3, "block digest: expected 16 bytes, got 1"),
        ("spec.model.embed_digest", b"", "embeddings' digest: expected 16 bytes"),
        ("spec.model.hidden_size", 0, "hidden size: expected 1 to"),
        ("spec.model.vocab_size", 2**24 + 1, "vocabulary: expected 1 to"),
        ("spec.model.reference", "\x1b[2J", "RunSpec: model .* printable"),
        ("spec.model.architecture", "x" * 1001, "RunSpec: model .* at most 1000"),
        ("spec.train", None, "learning rate schedule: expected 1 to 3, got 0"),
        ("spec.train.lr_schedule", 4, "learning rate schedule: expected 1 to 3, got 4"),
        ("spec.train.batch_size", 0, "RunSpec: --batch-size"),
        ("spec.train.micro_batch_size", 3, "RunSpec: .* not divisible"),
        ("spec.train.learning_rate", NAN, "RunSpec: --lr: expected a finite number"),
        ("spec.train.weight_decay", INF, "RunSpec: --weight-decay: expected a finite"),
        ("spec.train.clip_grad_norm", -1.0, "RunSpec: --clip-grad-norm: expected a finite"),
        ("spec.train.forward_codec", "aq9", "RunSpec: --fw: codec 'aq9'"),
        (
            "spec.train.forward_codec",
            "\x1b" * 9000,
            "RunSpec: --fw: expected at most 40 characters, got 1000",
        ),
        ("spec.train.backward_codec", "aq4", "RunSpec: --bw: codec 'aq4': .* forward only"),
        ("spec.train.backward_codec", "\x1b[2J+ef", r"RunSpec: --bw: codec ' \[2J\+ef'"),
        ("spec.train.key_codec", "", "RunSpec: --key: codec ''"),
        (
            "spec.train.key_codec",
            "\x1b" * 9000,
            "RunSpec: --key: expected at most 40 characters, got 1000",
        ),
        (
            "spec.train.key_codec",
            "aq4",
            "RunSpec: --key: codec 'aq4': a key frame builds on nothing",
        ),
        (
            "spec.train.fill_codec",
            "\x1b" * 9000,
            "RunSpec: --fill: expected at most 40 characters, got 1000",
        ),
        ("spec.train.fill_codec", "q2", "RunSpec: --fill: expected a codec of changes"),
        ("spec.train.fill_microbatches", 0, "RunSpec: --fill-microbatches: expected 1 to"),
        ("spec.train.dp_codec", "", "RunSpec: --dp: codec '': replicas' gradients take none, fp16"),
        (
            "spec.train.dp_codec",
            "\x1b" * 9000,
            "RunSpec: --dp: expected at most 40 characters, got 1000",
        ),
        ("spec.train.dp_codec", "aq4", "RunSpec: --dp: codec 'aq4': replicas' gradients"),
        ("spec.train.buffer_bits", 0, "RunSpec: --buffer-bits: expected 16, 8 or 4, got 0"),
        ("spec.train.buffer_bits", 2**32 - 1, "RunSpec: --buffer-bits: .* got 4294967295"),
    ],
)
def test_refuses_hostile_fields_of_an_assignment(run_spec, path, value, complaint):
    stages = (StageAssignment(peer_id="peer", layers=LayerRange(0, 3)),)
    assign = Assign(
        run_id="run",
        spec=run_spec,
        attempt=1,
        stages=stages,
        committed_steps=0,
        fresh=True,
        spec_digest=run_spec.digest(),
    )
    wire = to_peer_to_wire(assign)
    put(f"assign.{path}", value)(wire)
    with pytest.raises(MalformedMessage, match=complaint):
        to_peer_from_wire(wire)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("status", None, "expected a body"),
        ("status.run_id", "", "run id"),
        ("status.phase", 0, "phase: expected 1 to 9, got 0"),
        ("status.phase", 10, "phase: expected 1 to 9, got 10"),
        ("status.spec", None, "RunSpec"),
        ("status.results[0].peer_id", "../peer", "peer id: .* no slash"),
        ("status.results[0].file", None, "digest of a shard: expected 16 bytes"),
    ],
)
def test_refuses_hostile_fields_of_a_run_status(run_spec, path, value, complaint):
    wire = event_to_wire(
        RunStatus(
            run_id="run",
            phase=RunPhase.QUEUED,
            detail="",
            committed_steps=0,
            spec=run_spec,
            results=(StageResult(peer_id="peer", file=FILE),),
        )
    )
    put(path, value)(wire)
    with pytest.raises(MalformedMessage, match=complaint):
        event_from_wire(wire)


@pytest.mark.parametrize("field", ["loss", "learning_rate", "grad_norm", "seconds"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0])
def test_refuses_numbers_of_a_step_that_are_not_finite(field, value):
    committed = StepCommitted(
        step=0, loss=1.0, learning_rate=0.1, grad_norm=1.0, num_samples=1, seconds=1.0
    )
    wire = event_to_wire(committed)
    setattr(wire.step, field, value)
    with pytest.raises(MalformedMessage, match="expected a finite number from 0"):
        event_from_wire(wire)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("timeline.peer_id", "", "peer id"),
        ("timeline.layers", None, "layers' stop"),
        ("timeline.timeline.spans.kinds", [77], "kinds"),
    ],
)
def test_refuses_hostile_fields_of_a_timeline_that_is_passed_on(path, value, complaint):
    wire = event_to_wire(PeerTimeline(peer_id="peer", layers=LAYERS, timeline=TOLD))
    put(path, value)(wire)
    with pytest.raises(MalformedMessage, match=complaint):
        event_from_wire(wire)


@pytest.mark.parametrize("num_bytes", [0, 3, 6, 4 * MAX_SEQ_LENGTH + 4])
def test_refuses_samples_that_are_no_whole_number_of_tokens(num_bytes):
    with pytest.raises(MalformedMessage, match="bytes"):
        tokens_from_wire(coordinator_pb2.SampleTokens(sample=1, token_ids=bytes(num_bytes)))


def test_texts_are_cut_and_freed_of_control_characters():
    hostile = "\x1b[2J" + "x" * 2000
    failed = StageFailed(run_id="run", attempt=1, code="internal", message=hostile)
    read = from_peer_from_wire(from_peer_to_wire(failed)).message
    assert read == " [2J" + "x" * 996
    request = link_to_wire(KeyFrameRequest(KEY, hostile))
    assert link_from_wire(request).reason == read
