"""Messages between replicas: there and back, and what a hostile one is told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.errors import MalformedMessage
from swarm_ft.proto import link_pb2 as pb
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.messages.reduction import (
    GradientPiece,
    Phase,
    PieceAck,
    PieceKey,
    ReduceHello,
)
from swarm_ft.protocol.spec.codec_spec import parse_dp_spec
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.wire.frames import (
    MAX_GRADIENT_VALUES,
    link_from_wire,
    link_to_wire,
    piece_wire_bytes,
)

property_test = settings(derandomize=True, deadline=None, max_examples=100)
u32 = st.integers(0, 2**32 - 1)
names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=64)
keys = st.builds(PieceKey, attempt=u32, step=u32, phase=st.sampled_from(Phase), piece=u32)
tensors = st.builds(
    EncodedTensor,
    codec=st.sampled_from(["none", "fp16", "q4", "q2.5+z"]).map(parse_dp_spec),
    tokens=st.integers(1, 1024),
    channels=st.just(128),
    payload=st.binary(max_size=64),
)
hellos = st.builds(
    ReduceHello,
    run_id=names,
    spec_digest=st.binary(min_size=16, max_size=16),
    attempt=u32,
    peer_id=names,
    layers=st.integers(0, 4095).map(lambda start: LayerRange(start, 4096)),
    num_values=st.integers(0, MAX_GRADIENT_VALUES),
)
messages = st.one_of(
    hellos, st.builds(GradientPiece, key=keys, tensor=tensors), st.builds(PieceAck, keys)
)

KEY = PieceKey(1, 2, Phase.SUM, 3)
HELLO = ReduceHello(
    run_id="run", spec_digest=b"d" * 16, attempt=1, peer_id="a", layers=LayerRange(0, 2)
)
PIECE = GradientPiece(KEY, EncodedTensor(parse_dp_spec("q4"), 1, 128, b"payload"))


@property_test
@given(messages)
def test_every_message_comes_back_as_it_went(message):
    wire = link_to_wire(message)
    data = wire.SerializeToString()
    assert link_from_wire(pb.LinkMessage.FromString(data)) == message
    if isinstance(message, GradientPiece):
        assert piece_wire_bytes(message) == len(data) + 5


def test_a_piece_costs_a_few_bytes_beside_its_payload():
    overhead = piece_wire_bytes(PIECE) - len(PIECE.tensor.payload)
    assert overhead <= 40


def changed(message, path, value):
    wire = link_to_wire(message)
    *parents, name = path.split(".")
    holder = wire
    for parent in parents:
        holder = getattr(holder, parent)
    if value is None:
        holder.ClearField(name)
    else:
        setattr(holder, name, value)
    return wire


@pytest.mark.parametrize(
    ("message", "path", "value", "match"),
    [
        (HELLO, "reduce_hello", None, "expected a body"),
        (HELLO, "reduce_hello.run_id", "", "run id: expected 1 to 64"),
        (HELLO, "reduce_hello.run_id", "a/b", "run id: .* no slash"),
        (HELLO, "reduce_hello.peer_id", "x" * 65, "peer id: expected 1 to 64"),
        (HELLO, "reduce_hello.spec_digest", b"short", "RunSpec digest: expected 16 bytes, got 5"),
        (HELLO, "reduce_hello.layers", None, "layers' stop: expected 1 to 4096, got 0"),
        (
            HELLO,
            "reduce_hello.num_values",
            MAX_GRADIENT_VALUES + 1,
            "values of a gradient: expected 0",
        ),
        (HELLO, "reduce_hello.layers.start", 2, "layers' start: expected 0 to 1, got 2"),
        (PIECE, "piece.key", None, "phase of an all-reduce: expected 1 to 2, got 0"),
        (PIECE, "piece.key.phase", 3, "phase of an all-reduce: expected 1 to 2, got 3"),
        (PIECE, "piece.tensor", b"", "tensor: expected a header of 12 bytes, got 0"),
        (PIECE, "piece.tensor", b"\xff" * 12, "tensor: codec header .* names none"),
        (PieceAck(KEY), "piece_ack.phase", 0, "phase of an all-reduce: expected 1 to 2, got 0"),
    ],
)
def test_a_field_out_of_its_bounds_is_refused(message, path, value, match):
    with pytest.raises(MalformedMessage, match=match):
        link_from_wire(changed(message, path, value))
