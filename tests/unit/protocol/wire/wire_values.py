"""Values of every message, good and hostile ones, drawn from the types and bounds of its fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.ids import MicrobatchIndex, SampleId
from swarm_ft.protocol.messages.boundary import Ack, Frame, FrameKind, SideInfoPart
from swarm_ft.protocol.messages.control import PlanStep, WholeTokens
from swarm_ft.protocol.messages.reduction import PieceAck
from swarm_ft.protocol.messages.reports import (
    MAX_TRAFFIC_BYTES,
    MAX_TRAFFIC_FRAMES,
    Bitmap,
    OfOneStep,
    SampleSet,
)
from swarm_ft.protocol.messages.shard import CHUNK_BYTES, ChunkList
from swarm_ft.protocol.messages.timeline import Spans
from swarm_ft.protocol.spec.addresses import IpAndPort
from swarm_ft.protocol.spec.bounds import (
    MAX_ENDPOINT_CHARS,
    MAX_ID_BYTES,
    MAX_SCALAR,
    MAX_TEXT_BYTES,
    Bound,
    Cleaned,
    HostAndPort,
    Length,
    Line,
    Name,
    NameList,
    OneOf,
    Range,
    cut_text,
    field_hints,
    metadata,
)
from swarm_ft.protocol.spec.layers import MAX_BLOCKS, LayerRange
from swarm_ft.protocol.spec.member_name import ChosenName, ShownName
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import MIN_LENGTH, Dtype, ModelSpec, RunSpec, TrainSpec
from swarm_ft.protocol.spec.version import PROTOCOL_VERSION, VersionField
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.protocol.wire.convert import DEFAULTS, IDS, WireType
from swarm_ft.transport import methods
from swarm_ft.transport.base import Method
from tests.specs import train_spec

Strategy = st.SearchStrategy[Any]

# ---- all there are


def _wire_types() -> Iterator[WireType[Any]]:
    yield RUN_SPEC
    for method in vars(methods).values():
        if isinstance(method, Method):
            yield from (method.request, method.reply)


WIRES = {
    wire.name: wire
    for wire in _wire_types()
    if not (isinstance(wire.kind, type) and issubclass(wire.kind, Message))
}
"""Wire types by their message's name."""


def kinds_of(wire: WireType[Any]) -> Mapping[str, tuple[Any, Descriptor]]:
    """Return the classes and descriptors of a message by their path; "" is the message."""
    descriptor: Any = wire.message.DESCRIPTOR
    if not _is_union(wire.kind):
        return {"": (wire.kind, descriptor)}
    kinds = {kind.__name__: kind for kind in get_args(wire.kind)}
    by_hand = {"FrameKey": "Ack", "PieceKey": "PieceAck", "SharedBasis": "SideInfoPart"}
    found = {}
    for field in descriptor.oneofs[0].fields:
        inner = field.message_type
        found[field.name] = kinds[by_hand.get(inner.name, inner.name)], inner
    return found


# ---- good values


def values_of(kind: Any, descriptor: Descriptor) -> Strategy:
    """Any value of a dataclass or named tuple that our own side may send."""
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    hints = field_hints(kind)
    if kind in (Ack, PieceAck):  # which travel as their keys
        return values_of(hints["key"], descriptor).map(kind)
    return st.builds(
        kind, **{name: _of(hints[name], descriptor.fields_by_name.get(name)) for name in hints}
    )


def _of(hint: Any, field: FieldDescriptor | None) -> Strategy:
    if _is_union(hint):
        return st.none() | _of(present(hint), field)
    kind, notes = annotation_of(hint)
    if any(isinstance(note, VersionField) for note in notes):
        return st.just(PROTOCOL_VERSION)
    if get_origin(kind) is not None:
        return _collection(kind, notes, field)
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return st.sampled_from(kind)
    if kind in _SPECIAL:
        return _SPECIAL[kind]
    if isinstance(kind, type) and has_fields(kind):
        return _inner(kind, notes, field)
    return _scalar(kind, notes, field)


def _inner(kind: type, notes: tuple[Any, ...], field: FieldDescriptor | None) -> Strategy:
    if any(isinstance(note, OfOneStep) for note in notes):
        return st.builds(kind, **{name: _one_step(name) for name in field_hints(kind)})
    if field is None or field.message_type is None:
        (inner,) = field_hints(kind).values()
        return st.builds(kind, _of(inner, field))
    return values_of(kind, field.message_type)


def _one_step(name: str) -> Strategy:
    high = MAX_TRAFFIC_BYTES if name.endswith("_bytes") else MAX_TRAFFIC_FRAMES
    return st.integers(1, MAX_BLOCKS) if name == "boundary" else st.integers(0, high)


def _collection(kind: Any, notes: tuple[Any, ...], field: FieldDescriptor | None) -> Strategy:
    few = next(note for note in (*notes, Length(4)) if isinstance(note, Length))
    least, most = few.minimum, min(few.maximum, few.minimum + 3)
    inner, origin = get_args(kind), get_origin(kind)
    if origin is dict:
        entry = field.message_type if field is not None else None
        key, value = entry.fields if entry is not None else (None, None)
        return st.dictionaries(
            _of(inner[0], key), _of(inner[1], value), min_size=least, max_size=most
        )
    return st.lists(_of(inner[0], field), min_size=least, max_size=most).map(origin)


_PRINTABLE = st.characters(categories=("L", "M", "N", "P", "S"), include_characters=" ")
_BY_BOUND: Mapping[type, Callable[[Any, FieldDescriptor | None], Strategy]] = {
    Name: lambda _, __: st.text(
        _PRINTABLE.filter(lambda c: c not in "/\\"), min_size=1, max_size=MAX_ID_BYTES
    ).map(lambda name: cut_text(name, MAX_ID_BYTES)),
    Line: lambda _, __: st.text(_PRINTABLE, max_size=40),
    HostAndPort: lambda _, __: st.sampled_from(
        ("peer.example:7001", "192.0.2.7:1", "[2001:db8::7]:65535")
    ),
    IpAndPort: lambda _, __: st.sampled_from(
        ("198.51.100.7:7001", "192.168.1.7:1", "127.0.0.1:9", "[2001:db8::7]:65535")
    ),
    ChosenName: lambda _, __: st.sampled_from(("", "a", "ada-3090", "Anna.B_2", "x" * 24)),
    ShownName: lambda _, __: st.sampled_from(("ada-3090", "calm-otter-41 (v2avztnz)")),
    Cleaned: lambda _, __: st.text(_PRINTABLE, max_size=40),
    OneOf: lambda bound, _: st.sampled_from(bound.values),
    Length: lambda bound, field: _lengths(bound, field),
    WholeTokens: lambda _, __: st.integers(1, 5).flatmap(
        lambda count: st.binary(min_size=4 * count, max_size=4 * count)
    ),
    Bitmap: lambda _, __: st.frozensets(st.integers(0, 99)).map(
        lambda s: SampleSet.of(map(SampleId, s)).bitmap
    ),
    Range: lambda bound, field: _numbers(bound, field),
}


def _scalar(kind: Any, notes: tuple[Any, ...], field: FieldDescriptor | None) -> Strategy:
    for note in notes:
        if type(note) in _BY_BOUND:
            return _BY_BOUND[type(note)](note, field)
    natural = {bool: st.booleans(), bytes: st.binary(max_size=20)}
    return natural[kind] if kind in natural else st.integers(*_limits(field))


def _is_text(field: FieldDescriptor | None) -> bool:
    return field is not None and field.type == FieldDescriptor.TYPE_STRING


def _lengths(bound: Length, field: FieldDescriptor | None) -> Strategy:
    if _is_text(field):
        return st.text(_PRINTABLE, min_size=bound.minimum, max_size=bound.maximum).map(
            lambda text: cut_text(text, bound.maximum)
        )
    return st.binary(min_size=bound.minimum, max_size=min(bound.maximum, bound.minimum + 20))


def _numbers(bound: Range, field: FieldDescriptor | None) -> Strategy:
    if not bound.is_integer:
        high = None if bound.maximum == math.inf else bound.maximum
        low = None if bound.minimum == -math.inf else bound.minimum
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    low_bits, high_bits = _limits(field)
    return st.integers(max(int(bound.minimum), low_bits), int(min(bound.maximum, high_bits)))


def _limits(field: FieldDescriptor | None) -> tuple[int, int]:
    """Return the limits of the message's field."""
    cpp_type = field.cpp_type if field is not None else FieldDescriptor.CPPTYPE_UINT32
    return {
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
        FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    }[cpp_type]


# ---- those whose fields hang together

# fmt: off
FORWARD = [
    "none", "fp16", "bf16", "q1", "q8f", "q4tc+d", "aq2", "aq1.5t+z", "top0.01", "aqtop30",
    "qc0.02", "aqc8+d",
]
BACKWARD = ["none", "fp16+ef", "q8", "q2+d+z", "top10+ef", "qc0.5+ef21+z", "qc0.5+ef"]
# fmt: on
codecs = st.one_of(
    st.sampled_from(FORWARD).map(lambda text: parse_codec_spec(text, Direction.FORWARD)),
    st.sampled_from(BACKWARD).map(lambda text: parse_codec_spec(text, Direction.BACKWARD)),
)
digests = st.binary(min_size=16, max_size=16)
u32 = st.integers(0, 2**32 - 1)
tensors = st.builds(
    EncodedTensor, codecs, st.integers(1, 2**17), st.integers(1, 2**16), st.binary(max_size=20)
)


@st.composite
def _frames(draw: st.DrawFn) -> Frame:
    kind, digest = draw(st.sampled_from(FrameKind)), draw(digests)
    return Frame(
        key=draw(_of(field_hints(Frame)["key"], _BOUNDARY_FRAME.fields_by_name["key"])),
        kind=kind,
        tensor=draw(tensors),
        base_digest=digest if kind is FrameKind.DELTA else b"",
        result_digest=b"" if kind is FrameKind.DIRECT else digest[::-1],
    )


_LINK_MESSAGE: Any = methods.LINK.request.message.DESCRIPTOR
_BOUNDARY_FRAME: Descriptor = _LINK_MESSAGE.fields_by_name["frame"].message_type


@st.composite
def _train_specs(draw: st.DrawFn) -> TrainSpec:
    micro_batch_size = draw(st.integers(1, 64))
    forward, backward = draw(st.sampled_from(FORWARD)), draw(st.sampled_from(BACKWARD))
    return train_spec(
        num_samples=draw(st.integers(1, 2**24)),
        seq_length=draw(st.integers(2, 2**17)),
        batch_size=micro_batch_size * draw(st.integers(1, 64)),
        micro_batch_size=micro_batch_size,
        num_steps=draw(st.integers(1, 2**31)),
        learning_rate=draw(st.floats(0, MAX_SCALAR)),
        seed=draw(st.integers(0, 2**63 - 1)),
        shuffle=draw(st.booleans()),
        forward_codec=forward,
        backward_codec=backward,
        drain_codec=draw(st.sampled_from(["", backward])),
        drain_microbatches=draw(st.integers(1, 4)),
        fill_codec=draw(st.sampled_from(["", "aq1.5+z" if "aq" in forward else "q2"])),
        buffer_bits=draw(st.sampled_from([16, 8, 4])),
        share_with=draw(st.sampled_from(["", "one"])),
        private_ends=",".join(draw(st.lists(st.sampled_from(["one", "other"]), max_size=3))),
    )


@st.composite
def _model_specs(draw: st.DrawFn) -> ModelSpec:
    descriptor: Any = RUN_SPEC.message.DESCRIPTOR
    model = descriptor.fields_by_name["model"].message_type
    blocks = tuple(draw(st.lists(digests, min_size=1, max_size=4)))
    drawn = {
        name: draw(_of(hint, model.fields_by_name[name]))
        for name, hint in field_hints(ModelSpec).items()
    }
    stored = draw(st.sampled_from([one for one in Dtype if one is not Dtype.AUTO]))
    own = {"num_blocks": len(blocks), "block_digests": blocks, "dtype": stored}
    return ModelSpec(**drawn | own)


@st.composite
def _plans(draw: st.DrawFn) -> PlanStep:
    descriptor: Any = methods.JOIN.reply.message.DESCRIPTOR
    plan = descriptor.fields_by_name["plan"].message_type
    samples = draw(st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=8, unique=True))
    drawn = {
        name: draw(_of(hint, plan.fields_by_name[name]))
        for name, hint in field_hints(PlanStep).items()
    }
    made: list[Any] = []
    for batch in (*drawn["microbatches"], *drawn["evaluation"]):
        mine, samples = tuple(samples[:3]), samples[3:]
        if mine:
            made.append(type(batch)(len(made), mine, batch.route, batch.done))
    if not made:
        made.append(Microbatch(MicrobatchIndex(0), (SampleId(samples[0]),)))
    num_samples = sum(len(batch.samples) for batch in made)
    lengths = tuple(range(MIN_LENGTH, MIN_LENGTH + num_samples)) if drawn["lengths"] else ()
    counted = zip((sample for batch in made for sample in batch.samples), lengths, strict=False)
    long = [(sample, length) for sample, length in counted if length >= 2]
    documents = {sample: (1, length - 1) for sample, length in long if drawn["documents"]}
    cut = draw(st.integers(0, len(made)))
    batches = {"microbatches": tuple(made[:cut]), "evaluation": tuple(made[cut:])}
    return PlanStep(**drawn | batches | {"lengths": lengths, "documents": documents})


@st.composite
def _spans(draw: st.DrawFn) -> Spans:
    hints = field_hints(Spans)
    entries = {name: _of(get_args(annotation_of(hint)[0])[0], None) for name, hint in hints.items()}
    rows = draw(st.lists(st.tuples(*entries.values()), max_size=5))
    return Spans(*zip(*rows, strict=True)) if rows else Spans()


_SPECIAL: dict[Any, Strategy] = {
    LayerRange: st.tuples(st.integers(0, 4095), st.integers(1, 4096)).map(
        lambda ends: LayerRange(min(*ends, ends[1] - 1), max(ends))
    ),
    ChunkList: st.lists(digests, max_size=4).map(
        lambda few: ChunkList(total_bytes=CHUNK_BYTES * len(few), digests=tuple(few))
    ),
    EncodedTensor: tensors,
    Frame: _frames(),
    TrainSpec: _train_specs(),
    ModelSpec: _model_specs(),
    PlanStep: _plans(),
    SideInfoPart: st.builds(SideInfoPart, st.binary(max_size=20), u32),
    Spans: _spans(),
}
_SPECIAL[RunSpec] = st.builds(RunSpec, model=_SPECIAL[ModelSpec], train=_SPECIAL[TrainSpec])

# ---- values out of bounds


def out_of_bounds(
    kind: Any, descriptor: Descriptor, tried: set[Any]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield values that no field of a message may hold, each with the path to its field.

    A list replaces all entries of a repeated field. Classes in `tried` are left out, and then added
    to it: each is tried at one of its places.
    """
    if kind in tried or kind is SideInfoPart:  # whose fields have other names on the wire
        return
    tried.add(kind)
    for name, hint in field_hints(kind).items():
        field = descriptor.fields_by_name[name]
        for way, value in _bad(hint, field, tried):
            yield (name, *way), value


def _bad(
    hint: Any, field: FieldDescriptor, tried: set[Any]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    kind, notes = annotation_of(present(hint))
    message = field.message_type
    if get_origin(kind) is not None:
        yield from _bad_collections(kind, notes, field, tried)
    elif not has_fields(kind):
        yield from (((), value) for note in notes for value in _beyond(note, field))
        yield from (((), value) for value in (0, 99) if issubclass(kind, IntEnum))
    elif message is None:  # a class around one value
        (inner,) = field_hints(kind).values()
        yield from _bad(inner, field, tried)
    elif any(isinstance(note, OfOneStep) for note in notes):
        for name in field_hints(kind):
            yield (
                (name,),
                MAX_TRAFFIC_BYTES + 1 if name.endswith("_bytes") else MAX_TRAFFIC_FRAMES + 1,
            )
    else:
        yield from out_of_bounds(kind, message, tried)


def _bad_collections(
    kind: Any, notes: tuple[Any, ...], field: FieldDescriptor, tried: set[Any]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    if get_origin(kind) is dict:
        return  # entries that travel by themselves are tried there, others in `test_wire`
    for note in notes:
        if isinstance(note, Length) and note.minimum:
            yield (), []
        if isinstance(note, Length) and note.maximum <= 1 << 16:
            yield (), [_filling(field)] * (note.maximum + 1)
    for way, value in _bad(get_args(kind)[0], field, tried):
        yield way, value if way else [value]


def _filling(field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return GetMessageClass(field.message_type)()
    return {FieldDescriptor.TYPE_STRING: "a", FieldDescriptor.TYPE_BYTES: bytes(16)}.get(
        field.type, 1
    )


def _beyond(note: Any, field: FieldDescriptor) -> tuple[Any, ...]:
    """Yield values that a bound has to refuse."""
    match note:
        case Range(minimum, maximum) if note.is_integer:
            low, high = _limits(field)
            return tuple(int(n) for n in (minimum - 1, maximum + 1) if low <= n <= high)
        case Range(minimum, maximum):
            finite = (n for n in (minimum - 1, 2 * maximum) if math.isfinite(n))
            return (math.nan, math.inf, -math.inf, *finite)
        case Length(maximum, minimum) if _is_text(field):
            return tuple("x" * n for n in (minimum - 1, maximum + 1) if 0 <= n < 1 << 20)
        case Length(maximum, minimum):
            return tuple(bytes(n) for n in (minimum - 1, maximum + 1) if 0 <= n < 1 << 20)
        case OneOf((int(value),)):
            return (value - 1, value + 1)
        case Bitmap(num_samples):
            return b"\0", b"\1\0", bytes(num_samples // 8) + b"\1"
    return _BEYOND.get(type(note), ())


_BEYOND: Mapping[type, tuple[Any, ...]] = {
    Name: ("", "a/b", "..\\x", "x" * (MAX_ID_BYTES + 1), "\x1b[2J", "a\nb"),
    NameList: ("a,", "a,b/c", " a", ",".join(["a"] * 65), "a\nb", "x" * (MAX_ID_BYTES + 1)),
    ChosenName: (
        "-a",
        "a-",
        "a b",
        "a/b",
        "x" * 25,
        "\x1b[2J",
        "a\nb",
        "\u0430da",
        "owner",
        "0wner",
    ),
    ShownName: ("-a", "a ()", "a (v2avztn)", "a (V2AVZTNZ)", "x" * 25, "\x1b[2J", "a\n"),
    Line: ("x" * (MAX_TEXT_BYTES + 1), "\x1b[2J"),
    HostAndPort: ("unix:/tmp/x", "h:0", "h:65536", "h" * MAX_ENDPOINT_CHARS + ":1", "a b:1"),
    IpAndPort: (
        "peer.example:7001",
        "127.1:9",
        "0.0.0.0:9",
        "169.254.169.254:80",
        "224.0.0.1:9",
        "[::ffff:127.0.0.1]:9",
        "[fe80::1]:9",
        "[2001:DB8::7]:9",
        "192.0.2.7:0",
    ),
    WholeTokens: (b"", bytes(3), bytes(6), bytes(4 * 2**17 + 4)),
}


# ---- facts from types


def annotation_of(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without its metadata, and its declared or implied bounds."""
    notes = metadata(hint)
    named = get_args(hint)[0] if notes else hint
    kind = named
    while hasattr(kind, "__supertype__"):
        kind = kind.__supertype__
    if not any(isinstance(note, Bound | Cleaned) for note in notes):
        implied = IDS.get(named) or DEFAULTS.get(named)
        notes = (*notes, implied) if implied is not None else notes
    return kind, notes


def present(hint: Any) -> Any:
    """Return `X` of `X | None`."""
    return next(one for one in get_args(hint) if one is not NoneType) if _is_union(hint) else hint


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


def has_fields(kind: type) -> bool:
    """Whether it is a dataclass or a named tuple, of some fields."""
    return (is_dataclass(kind) and bool(fields(kind))) or hasattr(kind, "_fields")
