"""Every message survives the wire, and no bytes make a reader raise anything but our errors."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.errors import MalformedMessage
from swarm_ft.proto import coordinator_pb2, link_pb2, run_pb2
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    EncodedTensor,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
)
from swarm_ft.protocol.messages.client import (
    BoundaryStatus,
    MemberStatus,
    RunPhase,
    RunStatus,
    StageResult,
    StepCommitted,
    SwarmStatus,
)
from swarm_ft.protocol.messages.control import (
    Assign,
    ClockProbe,
    ClockReply,
    CommitStep,
    ExportStage,
    HeldStage,
    PeerAlive,
    PeerGoodbye,
    PeerHello,
    PlanStep,
    ReleaseStage,
    StageAssignment,
    StageExported,
    StageFailed,
    StageOffered,
    StageReady,
    StageTaken,
    StepReady,
    Taker,
    TakeStage,
)
from swarm_ft.protocol.messages.link import LinkHello
from swarm_ft.protocol.messages.reports import (
    BufferCounts,
    GradientTraffic,
    HeldBuffers,
    SampleSet,
    Traffic,
)
from swarm_ft.protocol.messages.shard import ShardFile
from swarm_ft.protocol.messages.timeline import (
    ClockEstimate,
    PeerTimeline,
    SpanKind,
    Spans,
    StepTimeline,
)
from swarm_ft.protocol.spec.codec_spec import Direction, parse_codec_spec
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange
from swarm_ft.protocol.spec.run_spec import BUFFER_BITS, LrSchedule, ModelSpec, RunSpec, TrainSpec
from swarm_ft.protocol.spec.training_plan import Microbatch
from swarm_ft.protocol.wire import client_wire, coordinator_wire, frames, peer_wire, run_wire

# ---- strategies: any message that our own side may send

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
numbers = st.floats(0, 1e200)
printable = st.characters(categories=("L", "M", "N", "P", "S"), include_characters=" ")
names = st.text(printable.filter(lambda c: c not in "/\\"), min_size=1, max_size=64)
texts = st.text(printable, max_size=40)
digests = st.binary(min_size=16, max_size=16)
# fmt: off
FORWARD = [
    "none", "fp16", "bf16", "q1", "q8f", "q4tc+d", "aq2", "aq1.5t+z", "hq3", "top0.01", "aqtop30",
    "qc0.02", "aqc8+d", "lowrank256+z",
]
BACKWARD = ["none", "fp16+ef", "q8", "q2+d+z", "top10+efmix", "lowrank4+ef21+z", "qc0.5+ef"]
# fmt: on
forward_texts, backward_texts = st.sampled_from(FORWARD), st.sampled_from(BACKWARD)
key_texts = forward_texts.filter(lambda text: not text.startswith("aq"))
codecs = st.one_of(
    forward_texts.map(lambda text: parse_codec_spec(text, Direction.FORWARD)),
    backward_texts.map(lambda text: parse_codec_spec(text, Direction.BACKWARD)),
)
layers = st.tuples(st.integers(0, 4095), st.integers(1, 4096)).map(
    lambda ends: LayerRange(min(*ends, ends[1] - 1), max(ends))
)
keys = st.builds(FrameKey, u32, u32, u32, u32, st.sampled_from(Direction))
tensors = st.builds(
    EncodedTensor, codecs, st.integers(1, 2**17), st.integers(1, 2**16), st.binary(max_size=20)
)
sent_frames = st.one_of(
    st.builds(Frame, keys, st.just(FrameKind.DIRECT), tensors),
    st.builds(Frame, keys, st.just(FrameKind.KEY), tensors, result_digest=digests),
    st.builds(Frame, keys, st.just(FrameKind.DELTA), tensors, digests, digests),
)
boundary_hellos = st.builds(
    BoundaryHello,
    run_id=names,
    spec_digest=digests,
    boundary=st.integers(1, 4096),
    peer_id=names,
    attempt=u32,
    window_frames=st.integers(1, 2**16),
    received=st.frozensets(keys, max_size=4),
)
link_messages = st.one_of(
    st.builds(LinkHello, peer_id=names, to=names),
    boundary_hellos,
    sent_frames,
    keys.map(Ack),
    st.builds(KeyFrameRequest, keys, texts),
)


@st.composite
def model_specs(draw):
    block_digests = tuple(draw(st.lists(digests, min_size=1, max_size=4)))
    return ModelSpec(
        reference=draw(texts),
        architecture=draw(texts),
        num_blocks=len(block_digests),
        hidden_size=draw(st.integers(1, 2**16)),
        vocab_size=draw(st.integers(1, 2**24)),
        block_bytes=draw(u64),
        embed_digest=draw(digests),
        block_digests=block_digests,
        head_digest=draw(digests),
        tied_embeddings=draw(st.booleans()),
    )


@st.composite
def train_specs(draw):
    micro_batch_size = draw(st.integers(1, 64))
    forward = draw(forward_texts)
    fill = draw(st.sampled_from(["", "aq1.5+z" if "aq" in forward else "q2"]))
    return TrainSpec(
        num_samples=draw(st.integers(1, 2**24)),
        seq_length=draw(st.integers(2, 2**17)),
        batch_size=micro_batch_size * draw(st.integers(1, 64)),
        micro_batch_size=micro_batch_size,
        num_steps=draw(st.integers(1, 2**31)),
        learning_rate=draw(numbers),
        lr_schedule=draw(st.sampled_from(LrSchedule)),
        warmup_steps=draw(st.integers(0, 2**31)),
        weight_decay=draw(numbers),
        clip_grad_norm=draw(numbers),
        seed=draw(st.integers(0, 2**63 - 1)),
        shuffle=draw(st.booleans()),
        dropout=draw(st.booleans()),
        sync_tied_embeddings=False,
        forward_codec=forward,
        backward_codec=draw(backward_texts),
        key_codec=draw(key_texts),
        dp_codec=draw(st.sampled_from(["none", "fp16", "q4", "q2.5+z"])),
        buffer_bits=draw(st.sampled_from(BUFFER_BITS)),
        fill_codec=fill,
        fill_microbatches=draw(st.integers(1, 2**16)),
    )


specs = st.builds(RunSpec, model=model_specs(), train=train_specs())
endpoints = st.sampled_from(("peer.example:7001", "192.0.2.7:1", "[2001:db8::7]:65535"))
stages = st.builds(StageAssignment, peer_id=names, layers=layers, endpoint=endpoints | st.just(""))
some_stages = st.lists(stages, min_size=1, max_size=3).map(tuple)
byte_counts, frame_counts = st.integers(0, 1 << 50), st.integers(0, 1 << 26)
traffic = st.builds(
    Traffic,
    boundary=st.integers(1, 4096),
    forward_bytes=byte_counts,
    backward_bytes=byte_counts,
    forward_uncompressed_bytes=byte_counts,
    backward_uncompressed_bytes=byte_counts,
    key_frames=frame_counts,
    delta_frames=frame_counts,
)
shard_files = st.builds(ShardFile, digest=digests, total_bytes=st.integers(0, 1 << 40))
held_stages = st.builds(
    HeldStage,
    run_id=names,
    spec_digest=digests,
    layers=layers,
    committed_steps=u32,
    last_attempt=u32,
    exported=st.none() | shard_files,
)
digests = st.binary(min_size=16, max_size=16)
some_names = st.lists(names, min_size=1, max_size=2).map(tuple)
boundaries = st.integers(1, 4096)
samples = st.integers(0, 2**24 - 1)
held_buffers = st.lists(
    st.builds(
        HeldBuffers,
        boundary=boundaries,
        samples=st.frozensets(st.integers(0, 99)).map(SampleSet.of),
    ),
    max_size=2,
).map(tuple)
buffer_counts = st.builds(
    BufferCounts,
    boundary=boundaries,
    samples=byte_counts,
    memory_bytes=byte_counts,
    disk_bytes=byte_counts,
    memory_hits=byte_counts,
    disk_hits=byte_counts,
    misses=byte_counts,
    evictions=byte_counts,
    repairs=byte_counts,
)
moments = st.integers(0, 2**51)
counted = st.integers(0, 2**32)
rows = st.tuples(
    st.sampled_from(SpanKind).map(int),
    moments,
    moments,
    u32,
    counted,
    counted,
    st.integers(0, 4096),
    st.integers(0, 2),
    byte_counts,
)
spans = st.just(Spans()) | st.lists(rows, min_size=1, max_size=5).map(
    lambda rows: Spans(*zip(*rows, strict=True))
)
timelines = st.builds(
    StepTimeline,
    run_id=names,
    attempt=u32,
    step=u32,
    origin_us=moments,
    clock=st.builds(ClockEstimate, st.integers(-(2**51), 2**51), moments),
    spans=spans,
    num_dropped=u32,
)
from_peer_messages = st.one_of(
    st.builds(
        PeerHello,
        endpoint=endpoints,
        peer_id=names,
        layers=st.none() | layers,
        memory_bytes=u64,
        held=st.none() | held_stages,
    ),
    st.builds(StageReady, run_id=names, attempt=u32, buffers=held_buffers),
    st.builds(StageTaken, run_id=names, attempt=u32, state_bytes=byte_counts),
    st.builds(StageOffered, run_id=names, attempt=u32, step=u32, digest=digests, total_bytes=u64),
    st.builds(
        StepReady,
        run_id=names,
        attempt=u32,
        step=u32,
        squared_grad_norm=numbers,
        loss_sum=numbers,
        compute_s=numbers,
        gradients=st.builds(
            GradientTraffic, sent_bytes=byte_counts, uncompressed_bytes=byte_counts
        ),
        traffic=st.lists(traffic, max_size=2).map(tuple),
        buffers=st.lists(buffer_counts, max_size=2).map(tuple),
        lost=held_buffers,
    ),
    st.builds(StageExported, run_id=names, file=shard_files),
    st.builds(StageFailed, run_id=names, attempt=u32, code=names, message=texts),
    st.just(PeerGoodbye()),
    timelines,
    st.builds(ClockProbe, moments),
    st.builds(PeerAlive, attempt=u32, step=u32, parts_begun=u32, compute_s=numbers),
)


@st.composite
def plans(draw):
    samples = draw(st.lists(u32, min_size=1, max_size=8, unique=True))
    size = draw(st.integers(1, 3))
    pieces = [tuple(samples[i : i + size]) for i in range(0, len(samples), size)]
    token_ids = st.lists(st.binary(min_size=4, max_size=4), min_size=1, max_size=3).map(b"".join)
    return PlanStep(
        run_id=draw(names),
        attempt=draw(u32),
        step=draw(u32),
        listeners=draw(st.lists(names, max_size=2).map(tuple)),
        microbatches=tuple(
            Microbatch(i, piece, draw(st.lists(u32, max_size=3).map(tuple)))
            for i, piece in enumerate(pieces)
        ),
        tokens={s: draw(token_ids) for s in samples if draw(st.booleans())},
        traced=draw(st.booleans()),
    )


to_peer_messages = st.one_of(
    st.builds(
        Assign,
        run_id=names,
        spec=specs,
        attempt=u32,
        stages=some_stages,
        committed_steps=u32,
        fresh=st.booleans(),
        spec_digest=digests,
        takers=st.lists(
            st.builds(Taker, peer_id=names, step=u32, donors=some_names), max_size=2
        ).map(tuple),
    ),
    plans(),
    st.builds(TakeStage, run_id=names, attempt=u32, digest=digests, donors=some_names),
    st.builds(
        CommitStep, run_id=names, attempt=u32, step=u32, clip_factor=numbers, learning_rate=numbers
    ),
    st.builds(ExportStage, run_id=names),
    st.builds(ReleaseStage, run_id=names, reason=texts),
    st.builds(ClockReply, moments, moments),
)
sums = st.integers(0, 2**63)
boundary_statuses = st.integers(1, MAX_BLOCKS).flatmap(
    lambda boundary: st.builds(
        BoundaryStatus,
        boundary=st.just(boundary),
        buffered_samples=u32,
        key_frames=sums,
        delta_frames=sums,
        kept=st.builds(
            BufferCounts, boundary=st.just(boundary), samples=sums, disk_bytes=sums, repairs=sums
        ),
    )
)
run_statuses = st.builds(
    RunStatus,
    run_id=names,
    phase=st.sampled_from(RunPhase),
    detail=texts,
    committed_steps=u32,
    attempt=u32,
    spec=specs,
    stages=st.just(()) | some_stages,
    joining=st.lists(names, max_size=2).map(tuple),
    boundaries=st.lists(boundary_statuses, max_size=2).map(tuple),
    results=st.lists(st.builds(StageResult, peer_id=names, file=shard_files), max_size=2).map(
        tuple
    ),
)
run_events = st.one_of(
    run_statuses,
    st.builds(
        StepCommitted,
        step=u32,
        loss=numbers,
        learning_rate=numbers,
        grad_norm=numbers,
        num_samples=u32,
        seconds=numbers,
        traffic=st.lists(traffic, max_size=2).map(tuple),
    ),
    st.builds(PeerTimeline, peer_id=names, layers=layers, timeline=timelines),
)
swarm_statuses = st.builds(
    SwarmStatus,
    members=st.lists(
        st.builds(MemberStatus, peer_id=names, layers=st.none() | layers), max_size=2
    ).map(tuple),
    runs=st.lists(run_statuses, max_size=1).map(tuple),
)

WIRES = {
    "link": (
        link_messages,
        frames.link_to_wire,
        link_pb2.LinkMessage,
        frames.link_from_wire,
    ),
    "from-peer": (
        from_peer_messages,
        peer_wire.from_peer_to_wire,
        coordinator_pb2.FromPeer,
        peer_wire.from_peer_from_wire,
    ),
    "to-peer": (
        to_peer_messages,
        coordinator_wire.to_peer_to_wire,
        coordinator_pb2.ToPeer,
        coordinator_wire.to_peer_from_wire,
    ),
    "event": (
        run_events,
        client_wire.event_to_wire,
        coordinator_pb2.RunEvent,
        client_wire.event_from_wire,
    ),
    "swarm": (
        swarm_statuses,
        client_wire.swarm_to_wire,
        coordinator_pb2.SwarmStatus,
        client_wire.swarm_from_wire,
    ),
    "run-spec": (specs, run_wire.spec_to_wire, run_pb2.RunSpec, run_wire.spec_from_wire),
}

every_wire = pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES.keys())
few = settings(derandomize=True, deadline=None, max_examples=60)

# ---- the tests


@every_wire
@given(data=st.data())
@few
def test_every_message_round_trips(wire, data):
    messages, to_wire, kind, from_wire = wire
    message = data.draw(messages)
    arrived = from_wire(kind.FromString(to_wire(message).SerializeToString()))
    assert arrived == message


@given(spec=specs)
@few
def test_a_spec_keeps_its_digest_over_the_wire(spec):
    arrived = run_wire.spec_from_wire(run_wire.spec_to_wire(spec))
    assert arrived.digest() == spec.digest()


@given(codec=codecs, tokens=st.integers(1, 2**17), channels=st.integers(1, 2**16))
@few
def test_a_tensor_takes_twelve_bytes_beside_its_payload(codec, tokens, channels):
    tensor = EncodedTensor(codec, tokens, channels, b"payload")
    assert len(tensor.to_bytes()) == 12 + len(b"payload")
    assert EncodedTensor.from_bytes(tensor.to_bytes()) == tensor


def fields_of(message):
    """Every (message, field) that is set, at any depth."""
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is not None:
            for child in value if field.is_repeated else (value,):
                yield from fields_of(child)


hostile_numbers = st.sampled_from([0, 1, 2, 3, 7, 255, 2**16, 2**17 + 1, 2**31 - 1, 2**31, 2**32])
hostile_values = {
    "string": st.sampled_from(
        ["", "\x1b[2J", "\0", "x" * 2000, "../../etc", "aq99", "q4+ef", "q\u0664"]
    ),
    "bytes": st.binary(max_size=18),
    "double": st.sampled_from([float("nan"), float("inf"), -1.0, -0.0, 1.8e308, 5e-324]),
    "whole": hostile_numbers | st.just(2**64 - 1) | st.just(-1),
}
KIND_OF_TYPE = {9: "string", 12: "bytes", 1: "double"}


def spoil(data, message):
    """Set one field that the message has to something hostile, or clear it."""
    found = list(fields_of(message))
    if not found:
        return
    owner, field = data.draw(st.sampled_from(found))
    values = hostile_values[KIND_OF_TYPE.get(field.type, "whole")]
    if field.message_type is not None or data.draw(st.integers(0, 4)) == 0:
        owner.ClearField(field.name)
        return
    value = data.draw(values)
    try:
        if field.is_repeated:
            getattr(owner, field.name).append(value)
        else:
            setattr(owner, field.name, value)
    except (ValueError, OverflowError):
        owner.ClearField(field.name)  # the value does not fit the field's type


def refusal(from_wire, message):
    """Why the message is refused, or nothing. Any other error goes through and fails the test."""
    try:
        from_wire(message)
    except MalformedMessage as error:
        return error.message
    return ""


def is_fit_for_logs(text):
    return text.isprintable() and len(text) < 1500


@every_wire
@given(data=st.data())
@few
def test_a_spoilt_message_is_read_or_refused_as_malformed(wire, data):
    messages, to_wire, _, from_wire = wire
    message = to_wire(data.draw(messages))
    for _ in range(data.draw(st.integers(1, 3))):
        spoil(data, message)
    assert is_fit_for_logs(refusal(from_wire, message))


@every_wire
@given(raw=st.binary(max_size=60))
@few
def test_random_bytes_are_read_or_refused_as_malformed(wire, raw):
    _, _, kind, from_wire = wire
    try:
        message = kind.FromString(raw)
    except DecodeError:
        return  # the transport refuses these, see `transport.wire`
    assert is_fit_for_logs(refusal(from_wire, message))
