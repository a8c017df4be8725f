"""Buffers that go from peer to peer survive the wire; hostile ones are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.errors import MalformedMessage
from swarm_ft.protocol.codec_spec import Direction
from swarm_ft.protocol.digest import fingerprint_of
from swarm_ft.protocol.handover_wire import (
    BuffersRequest,
    SentBuffer,
    buffer_from_wire,
    buffer_to_wire,
    request_from_wire,
    request_to_wire,
)

REQUEST = BuffersRequest(run_id="run", spec_digest=b"d" * 16, boundary=1, samples=(3, 1))
BUFFER = SentBuffer(
    sample=3, direction=Direction.FORWARD, digest=fingerprint_of(b"payload"), payload=b"payload"
)


@given(st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=5).map(tuple), st.integers(1, 4096))
def test_requests_survive_the_wire(samples, boundary):
    request = BuffersRequest(
        run_id="run", spec_digest=b"d" * 16, boundary=boundary, samples=samples
    )
    assert request_from_wire(request_to_wire(request)) == request


@given(st.binary(max_size=50), st.sampled_from(Direction), st.integers(0, 2**24 - 1))
def test_buffers_survive_the_wire(payload, direction, sample):
    digest = fingerprint_of(payload)
    buffer = SentBuffer(sample=sample, direction=direction, digest=digest, payload=payload)
    assert buffer_from_wire(buffer_to_wire(buffer)) == buffer


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("run_id", "a/b", "run id: expected"),
        ("spec_digest", b"d", "RunSpec digest: expected 16 bytes"),
        ("boundary", 0, "boundary: expected 1 to 4096"),
        ("boundary", 4097, "boundary: expected 1 to 4096"),
        ("samples", [], "buffers asked for: expected 1 to 65536, got 0"),
        ("samples", [7] * 65537, "buffers asked for: expected 1 to 65536"),
        ("samples", [1 << 24], "sample: expected 0 to"),
    ],
)
def test_hostile_requests_are_refused(field, value, complaint):
    wire = request_to_wire(REQUEST)
    if isinstance(value, list):
        wire.ClearField(field)
        getattr(wire, field).extend(value)
    else:
        setattr(wire, field, value)
    with pytest.raises(MalformedMessage, match=complaint):
        request_from_wire(wire)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("sample", 1 << 24, "sample: expected 0 to"),
        ("direction", 0, "direction of a buffer: expected 1 to 2"),
        ("direction", 3, "direction of a buffer: expected 1 to 2"),
        ("digest", b"", "digest of a buffer: expected 16 bytes"),
        ("payload", b"pay1oad", "buffer of sample 3: damaged"),
    ],
)
def test_hostile_buffers_are_refused(field, value, complaint):
    wire = buffer_to_wire(BUFFER)
    setattr(wire, field, value)
    with pytest.raises(MalformedMessage, match=complaint):
        buffer_from_wire(wire)
