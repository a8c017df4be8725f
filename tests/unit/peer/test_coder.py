"""Both ends of a boundary, frame by frame: equal buffers always, or a refusal."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_ft.buffers import BufferKey, BufferStore, End
from swarm_ft.codec import from_spec, pack_buffer, unpack_buffer
from swarm_ft.errors import BadFrame, NonFinite
from swarm_ft.ids import RunId
from swarm_ft.peer.coder import FrameCoder, Refusal
from swarm_ft.protocol.boundary_wire import frame_wire_bytes
from swarm_ft.protocol.codec_spec import CodecName, CodecSpec, Direction
from swarm_ft.protocol.digest import digest_of
from swarm_ft.protocol.frame import Frame, FrameKey, FrameKind

RUN, BLOCK = RunId("run"), 2
TOKENS, CHANNELS = 6, 8


class WatchedStore(BufferStore):
    """A real store that shows what is staged."""

    def __init__(self):
        super().__init__()
        self.staged = {}

    def stage(self, key, record):
        super().stage(key, record)
        self.staged[key] = record

    def commit(self):
        super().commit()
        self.staged.clear()

    def rollback(self):
        super().rollback()
        self.staged.clear()


def sent(sample):
    return BufferKey(RUN, BLOCK, End.SENT, sample)


def received(sample):
    return BufferKey(RUN, BLOCK, End.RECEIVED, sample)


def key(sample, step=0, direction=Direction.FORWARD):
    return FrameKey(1, step, 0, sample, direction)


class Ends:
    """A sender and a receiver, each with a store of its own."""

    def __init__(self, spec):
        self.shape = (spec.train.seq_length, spec.model.hidden_size)
        self.codec = from_spec(spec.train.codec(Direction.FORWARD))
        self.here, self.there = WatchedStore(), WatchedStore()
        self.sender, self.receiver = (
            FrameCoder(spec, run_id=RUN, boundary=BLOCK, store=store)
            for store in (self.here, self.there)
        )

    def visit(self, sample, x, *, as_key=False):
        """One frame there, checked in full; the frame and the value decoded."""
        base = self.here.get(sent(sample))
        frame = self.sender.encode(key(sample), x, as_key=as_key)
        value = self.receiver.decode(frame)
        self.assert_staged_equal()
        if not isinstance(value, Refusal) and frame.kind is not FrameKind.DIRECT:
            assert self.here.staged[sent(sample)].payload == pack_buffer(value)
            assert torch.equal(value, self.replayed(frame, base))
        return frame, value

    def replayed(self, frame, base):
        """The value as base and frame alone make it."""
        if frame.kind is FrameKind.KEY:
            return unpack_buffer(frame.tensor.payload, *self.shape)
        return self.codec.decode(frame.tensor, unpack_buffer(base.payload, *self.shape))

    def assert_staged_equal(self):
        for one, other in ((self.here, self.there), (self.there, self.here)):
            for name in one.staged:
                opposite = sent if name.end is End.RECEIVED else received
                assert one.staged[name] == other.staged[opposite(name.sample)]

    def assert_equal(self):
        self.assert_staged_equal()
        for sample in range(8):
            assert self.here.get(sent(sample)) == self.there.get(received(sample))

    def commit(self):
        for store in (self.here, self.there):
            store.commit()

    def rollback(self):
        for store in (self.here, self.there):
            store.rollback()


@pytest.fixture
def make_coders(make_spec):
    def make(**train):
        return Ends(make_spec(**train))

    return make


def activations(visits, samples, *, seed=0):
    """For each visit and sample an activation that drifts, with channels of 1e5 as Llama has."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 1e5, 1e-3, 1.0, 300.0, 1.0, 0.0, 1e-30])
    now = torch.randn(samples, TOKENS, CHANNELS, generator=generator) * scale
    for visit in range(visits):
        yield now
        drift = torch.randn(samples, TOKENS, CHANNELS, generator=generator)
        now = now + drift * scale * 0.3 / (1 + visit)


@pytest.mark.parametrize("bits", range(2, 9))
def test_both_ends_hold_equal_buffers_after_every_frame_of_many_visits(make_coders, bits):
    ends = make_coders(forward_codec=f"aq{bits}")
    kinds = []
    for now in activations(visits=12, samples=3):
        for sample in range(3):
            kinds.append(ends.visit(sample, now[sample])[0].kind)
            ends.assert_equal()
        ends.commit()
        ends.assert_equal()
    assert kinds == [FrameKind.KEY] * 3 + [FrameKind.DELTA] * 33


def test_a_first_visit_sends_half_precision_and_later_ones_the_change(make_coders):
    ends = make_coders()
    x = torch.randn(TOKENS, CHANNELS)
    first, value = ends.visit(0, x)
    assert (first.kind, str(first.tensor.codec), first.base_digest) == (FrameKind.KEY, "fp16", b"")
    assert torch.allclose(value, x, rtol=2**-11)
    ends.commit()
    second, _ = ends.visit(0, x + 0.1)
    assert (second.kind, str(second.tensor.codec)) == (FrameKind.DELTA, "aq4")
    assert second.base_digest == first.result_digest
    assert second.result_digest == ends.here.staged[sent(0)].digest


def test_an_unchanging_activation_is_approached_from_visit_to_visit(make_coders):
    ends = make_coders(forward_codec="aq2")
    generator = torch.Generator().manual_seed(1)
    first, x = torch.randn(2, TOKENS, CHANNELS, generator=generator)
    ends.visit(0, first)
    ends.commit()
    errors = []
    for _ in range(6):
        _, value = ends.visit(0, x)
        errors.append((value - x).norm().item())
        ends.commit()
    assert errors[-1] < errors[0] / 10


def test_a_step_that_does_not_commit_is_redone_from_the_same_bases(make_coders):
    ends = make_coders()
    kept, aborted, redone = torch.randn(3, TOKENS, CHANNELS, generator=torch.manual_seed(2))
    ends.visit(0, kept)
    ends.commit()
    base = ends.here.get(sent(0))
    lost, _ = ends.visit(0, aborted)
    ends.rollback()
    again, _ = ends.visit(0, aborted)
    assert again == lost
    ends.rollback()
    other, _ = ends.visit(0, redone)
    assert other.base_digest == base.digest
    ends.commit()
    assert ends.visit(0, redone)[0].base_digest == other.result_digest


def test_a_sample_sent_twice_before_the_commit_counts_as_it_was_sent_last(make_coders):
    ends = make_coders()
    ends.visit(0, torch.ones(TOKENS, CHANNELS))
    ends.commit()
    ends.visit(0, torch.full((TOKENS, CHANNELS), 2.0))
    as_key, _ = ends.visit(0, torch.full((TOKENS, CHANNELS), 2.0), as_key=True)
    ends.commit()
    ends.assert_equal()
    assert ends.here.get(sent(0)).digest == as_key.result_digest


def put(store, name, record):
    """As if `record` had been committed under that name."""
    BufferStore.stage(store, name, record)
    BufferStore.commit(store)


def test_a_receiver_without_the_base_refuses_and_takes_a_key_frame(make_coders):
    ends = make_coders()
    ends.visit(0, torch.ones(TOKENS, CHANNELS))
    ends.here.commit()
    ends.there.rollback()
    delta = ends.sender.encode(key(0), torch.full((TOKENS, CHANNELS), 2.0))
    refusal = ends.receiver.decode(delta)
    assert isinstance(refusal, Refusal)
    assert "not here" in refusal.reason
    assert not ends.there.staged
    _, value = ends.visit(0, torch.full((TOKENS, CHANNELS), 2.0), as_key=True)
    assert torch.equal(value, torch.full((TOKENS, CHANNELS), 2.0))
    ends.commit()
    ends.assert_equal()
    assert ends.visit(0, torch.ones(TOKENS, CHANNELS))[0].kind is FrameKind.DELTA


def warm(ends):
    """Two samples that were visited once."""
    for sample in range(2):
        ends.visit(sample, torch.full((TOKENS, CHANNELS), 1.0 + sample))
    ends.commit()


def test_a_foreign_buffer_is_refused_by_its_digest(make_coders):
    ends = make_coders()
    warm(ends)
    put(ends.there, received(0), ends.there.get(received(1)))
    refusal = ends.receiver.decode(ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS)))
    assert isinstance(refusal, Refusal)
    assert "other here" in refusal.reason
    assert not ends.there.staged


def test_a_senders_own_foreign_buffer_is_refused_at_the_other_end(make_coders):
    ends = make_coders()
    warm(ends)
    put(ends.here, sent(0), ends.here.get(sent(1)))
    delta = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    assert isinstance(ends.receiver.decode(delta), Refusal)


def test_a_torn_buffer_under_the_right_digest_is_refused_by_the_result(make_coders):
    ends = make_coders()
    warm(ends)
    whole, other = ends.there.get(received(0)), ends.there.get(received(1))
    put(ends.there, received(0), replace(whole, payload=other.payload))
    delta = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    refusal = ends.receiver.decode(delta)
    assert isinstance(refusal, Refusal)
    assert "another buffer" in refusal.reason
    assert not ends.there.staged


def test_another_result_digest_refuses_a_delta_and_condemns_a_key_frame(make_coders):
    ends = make_coders()
    warm(ends)
    delta = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    assert isinstance(ends.receiver.decode(replace(delta, result_digest=bytes(16))), Refusal)
    key_frame = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS), as_key=True)
    with pytest.raises(BadFrame, match="it was a key frame"):
        ends.receiver.decode(replace(key_frame, result_digest=bytes(16)))
    assert not ends.there.staged


# ---- frames that do not fit the run


def of(frame, **tensor):
    return replace(frame, tensor=replace(frame.tensor, **tensor))


BROKEN = {
    "more tokens": lambda f: of(f, tokens=TOKENS + 1),
    "fewer channels": lambda f: of(f, channels=CHANNELS - 1),
    "swapped shape": lambda f: of(f, tokens=CHANNELS, channels=TOKENS),
    "other bits": lambda f: of(f, codec=CodecSpec(CodecName.AQ, 8)),
    "other codec": lambda f: of(f, codec=CodecSpec(CodecName.Q, 4)),
    "short payload": lambda f: of(f, payload=f.tensor.payload[:-1]),
    "long payload": lambda f: of(f, payload=f.tensor.payload + b"\0"),
    "no payload": lambda f: of(f, payload=b""),
    "a delta as a key": lambda f: replace(f, kind=FrameKind.KEY, base_digest=b""),
    "a delta as direct": lambda f: replace(f, kind=FrameKind.DIRECT),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_frame_that_does_not_fit_the_run_is_broken(make_coders, change):
    ends = make_coders()
    warm(ends)
    frame = change(ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS)))
    for look in (ends.receiver.check, ends.receiver.decode):
        with pytest.raises(BadFrame):
            look(frame)
    assert not ends.there.staged


def test_a_direct_frame_is_broken_in_a_run_with_buffers(make_coders):
    direct = make_coders(forward_codec="q4").sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    assert direct.kind is FrameKind.DIRECT
    with pytest.raises(BadFrame, match="DIRECT of q4 in a run whose forward codec is aq4"):
        make_coders().receiver.decode(direct)


@pytest.mark.parametrize("codec", ["q4", "fp16", "none"])
def test_a_key_frame_is_broken_in_a_run_without_buffers(make_coders, codec):
    key_frame = make_coders().sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    ends = make_coders(forward_codec=codec)
    with pytest.raises(BadFrame, match=f"KEY of fp16 in a run whose forward codec is {codec}"):
        ends.receiver.decode(key_frame)
    assert not ends.there.staged


def test_a_gradient_in_the_forward_codec_is_broken(make_coders):
    ends = make_coders()
    warm(ends)
    delta = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    backward = key(0, direction=Direction.BACKWARD)
    with pytest.raises(BadFrame, match="backward codec is q8"):
        ends.receiver.decode(replace(delta, key=backward))


NUM_DELTA_BYTES = 2 * CHANNELS + TOKENS * CHANNELS // 2
NUM_KEY_BYTES = 2 + 2 * TOKENS * CHANNELS


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None
)
@given(data=st.data(), kind=st.sampled_from([FrameKind.KEY, FrameKind.DELTA]))
def test_whatever_bytes_come_nothing_infinite_or_foreign_is_kept(make_coders, data, kind):
    ends = make_coders()
    warm(ends)
    is_key = kind is FrameKind.KEY
    size = NUM_KEY_BYTES if is_key else NUM_DELTA_BYTES
    payload = data.draw(st.binary(min_size=size, max_size=size))
    claimed = data.draw(st.sampled_from([digest_of(payload), bytes(16)]))
    honest = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS), as_key=is_key)
    frame = replace(of(honest, payload=payload), result_digest=claimed)
    try:
        value = ends.receiver.decode(frame)
    except BadFrame:
        assert not ends.there.staged
        return
    if isinstance(value, Refusal):
        assert not ends.there.staged
    else:
        assert torch.isfinite(value).all()
        assert ends.there.staged[received(0)].digest == claimed


# ---- values


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("codec", ["aq4", "q4", "fp16", "none"])
def test_an_activation_that_is_not_finite_is_not_sent(make_coders, codec, bad):
    ends = make_coders(forward_codec=codec)
    warm(ends)
    x = torch.ones(TOKENS, CHANNELS)
    x[3, 5] = bad
    for as_key in (False, True):
        with pytest.raises(NonFinite):
            ends.sender.encode(key(0), x, as_key=as_key)
    assert not ends.here.staged


@pytest.mark.parametrize("codec", ["aq4", "q4", "fp16"])
def test_one_samples_outlier_never_touches_another(make_coders, codec):
    quiet, wild = make_coders(forward_codec=codec), make_coders(forward_codec=codec)
    for now in activations(visits=3, samples=2):
        outlier = now[1].clone()
        outlier[2, 3] = 1e30
        alone = quiet.visit(0, now[0]), quiet.visit(1, now[1])
        beside = wild.visit(1, outlier), wild.visit(0, now[0])
        assert beside[1][0] == alone[0][0]
        assert torch.equal(beside[1][1], alone[0][1])
        quiet.commit()
        wild.commit()


def test_gradients_leave_no_buffer(make_coders):
    ends = make_coders()
    gradient = torch.randn(TOKENS, CHANNELS)
    backward = key(0, direction=Direction.BACKWARD)
    frame = ends.receiver.encode(backward, gradient)
    assert frame == Frame(backward, FrameKind.DIRECT, frame.tensor)
    assert torch.allclose(ends.sender.decode(frame), gradient, atol=gradient.abs().max() / 200)
    assert not ends.here.staged
    assert not ends.there.staged


def test_one_store_keeps_both_boundaries_of_a_stage_apart(make_spec):
    spec, store = make_spec(), WatchedStore()
    front, behind = (
        FrameCoder(spec, run_id=RUN, boundary=block, store=store) for block in (BLOCK, 4)
    )
    neighbour = FrameCoder(spec, run_id=RUN, boundary=BLOCK, store=WatchedStore())
    front.decode(neighbour.encode(key(0), torch.ones(TOKENS, CHANNELS)))
    store.commit()
    frame = behind.encode(key(0), torch.full((TOKENS, CHANNELS), 2.0))
    assert frame.kind is FrameKind.KEY, "the buffer in front of the stage is not the one behind it"
    store.commit()
    assert len(store) == 2


# ---- size


@pytest.mark.parametrize(("tokens", "channels"), [(128, 64), (256, 64), (128, 768), (512, 128)])
def test_whole_frames_are_as_small_as_promised(make_spec, tokens, channels):
    ends = Ends(make_spec(seq_length=tokens, channels=channels))
    x, change, gradient = torch.randn(3, tokens, channels, generator=torch.manual_seed(3))
    number = (1 << 20) + 5  # a sample whose numbers take more than one byte
    plain = 4 * tokens * channels
    ends.sender.encode(key(number, step=100_000), x)
    ends.here.commit()
    delta = ends.sender.encode(key(number, step=100_000), x + change)
    assert delta.kind is FrameKind.DELTA
    assert frame_wire_bytes(delta) <= plain / 7
    backward = ends.receiver.encode(key(number, 100_000, Direction.BACKWARD), gradient)
    assert frame_wire_bytes(backward) <= plain / 3.8
