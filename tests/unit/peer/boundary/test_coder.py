"""Both ends of a boundary, frame by frame: equal buffers always, or a refusal."""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.codec import buffer_bytes, from_spec, pack_buffer, side_info_needed, unpack_buffer
from swarm_ft.codec.basis import Basis
from swarm_ft.codec.side_info import SideInfo
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.digest import fingerprint_of
from swarm_ft.errors import BadFrame, NonFinite
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, RunId, SampleId, StepNumber
from swarm_ft.peer.boundary.coder import FrameCoder, Refusal
from swarm_ft.peer.boundary.side_info import SideInfoKey, SideInfoStore, TensorKind
from swarm_ft.protocol.messages.boundary import Frame, FrameKey, FrameKind
from swarm_ft.protocol.spec.run_spec import Codecs, EvalCompression, RunSpec
from swarm_ft.protocol.wire.frames import LINK_MESSAGE, wire_bytes
from tests.draws import draws
from tests.specs import model_spec, train_spec
from tests.unit.peer.conftest import MakeSpec

RUN, BLOCK = RunId("run"), BlockIndex(2)
TOKENS, CHANNELS = 6, 8
NUM_MICROBATCHES = 4
MakeCoders: TypeAlias = "Callable[..., Ends]"
Change: TypeAlias = Callable[[Frame], Frame]

every_size = pytest.mark.parametrize("bits", [16, 8, 4])


class WatchedStore(BufferStore):
    """A real store that shows what is staged."""

    def __init__(self) -> None:
        super().__init__()
        self.staged: dict[BufferKey, BufferRecord] = {}

    def stage(self, key: BufferKey, record: BufferRecord) -> None:
        super().stage(key, record)
        self.staged[key] = record

    def record_of(self, key: BufferKey) -> BufferRecord:
        """Return the committed record of this name; there must be one."""
        record = self.get(key)
        assert record is not None
        return record

    def commit(self, step: StepNumber | None = None) -> None:
        super().commit(step)
        self.staged.clear()

    def rollback(self, but: Container[SampleId] = ()) -> None:
        super().rollback(but)
        self.staged.clear()


@pytest.mark.parametrize("codec", ["none", "q8", "q4+z"])
@pytest.mark.parametrize("forward", ["none", "aq4"])
def test_constants_are_kept_as_they_came_at_the_receiver_alone(codec: str, forward: str) -> None:
    train = {"train_layers": "2-", "num_samples": 4, "batch_size": 2, "num_steps": 4}
    wanted = {"frozen_codec": codec, "forward_codec": forward, "num_eval_samples": 2, **train}
    spec = RunSpec(
        model=model_spec(hidden_size=CHANNELS),
        train=train_spec(seq_length=TOKENS, micro_batch_size=2, **wanted),
    )
    sender_store, receiver_store = WatchedStore(), WatchedStore()
    sender = FrameCoder(spec, run_id=RUN, boundary=BLOCK, store=sender_store)
    receiver = FrameCoder(spec, run_id=RUN, boundary=BLOCK, store=receiver_store, keeps_input=True)
    for sample in (1, 4):  # one to train on, one that is held out
        x = torch.randn(TOKENS - 1, CHANNELS)
        frame = sender.encode(key(sample), x)
        assert frame.kind is FrameKind.DIRECT
        value = receiver.decode(frame)
        assert isinstance(value, torch.Tensor)
        assert receiver.read_cached_input(SampleId(sample), TOKENS - 1) is None, "the step is open"
        receiver_store.commit()
        found = receiver.read_cached_input(SampleId(sample), TOKENS - 1)
        assert found is not None
        assert torch.equal(found, value)
        assert receiver_store.record_of(received(sample)).payload == frame.tensor.payload
        assert receiver.read_cached_input(SampleId(sample), TOKENS) is None, "it has other tokens"
    assert not sender_store.staged
    assert sender.read_cached_input(SampleId(1), TOKENS - 1) is None


def sent(sample: int) -> BufferKey:
    return BufferKey(RUN, BLOCK, End.SENT, SampleId(sample))


def received(sample: int) -> BufferKey:
    return BufferKey(RUN, BLOCK, End.RECEIVED, SampleId(sample))


def residual(sample: int) -> BufferKey:
    return BufferKey(RUN, BLOCK, End.RESIDUAL, SampleId(sample))


def key(
    sample: int, step: int = 0, direction: Direction = Direction.FORWARD, microbatch: int = 0
) -> FrameKey:
    return FrameKey(
        Attempt(1),
        StepNumber(step),
        MicrobatchIndex(microbatch),
        SampleId(sample),
        direction,
    )


def encoded(coder: FrameCoder, name: FrameKey, x: torch.Tensor, *, as_key: bool = False) -> Frame:
    """Encode a frame; `as_key` as after the request of a receiver without the base."""
    frame = coder.encode(name, x)
    return coder.encode_again(frame) if as_key and frame.kind is FrameKind.DELTA else frame


class Ends:
    """A sender and a receiver, each with a store of its own; gradients go the other way."""

    def __init__(self, spec: RunSpec) -> None:
        self.train = spec.train
        self.shape = (spec.train.seq_length, spec.model.hidden_size)
        self.sender_store, self.receiver_store = WatchedStore(), WatchedStore()
        self.sender, self.receiver = (
            FrameCoder(spec, run_id=RUN, boundary=BLOCK, store=store)
            for store in (self.sender_store, self.receiver_store)
        )

    def visit(
        self, sample: int, x: torch.Tensor, *, as_key: bool = False
    ) -> tuple[Frame, torch.Tensor]:
        """One frame there, checked in full; the frame and the value decoded."""
        return self._pass(key(sample), x, self.sender, self.receiver, self.sender_store, as_key)

    def back(
        self, sample: int, gradient: torch.Tensor, *, as_key: bool = False
    ) -> tuple[Frame, torch.Tensor]:
        """Pass a gradient on its way back; see `visit`."""
        name = key(sample, direction=Direction.BACKWARD)
        return self._pass(name, gradient, self.receiver, self.sender, self.receiver_store, as_key)

    def _pass(
        self,
        name: FrameKey,
        x: torch.Tensor,
        sender: FrameCoder,
        receiver: FrameCoder,
        store: WatchedStore,
        as_key: bool,
    ) -> tuple[Frame, torch.Tensor]:
        base = store.get(sent(name.sample))
        frame = encoded(sender, name, x, as_key=as_key)
        assert LINK_MESSAGE.from_bytes(LINK_MESSAGE.to_bytes(frame)) == frame
        value = receiver.decode(frame)
        self.assert_staged_equal()
        assert isinstance(value, torch.Tensor)
        if frame.kind is not FrameKind.DIRECT:
            expected, stored = self.replayed(frame, base)
            assert store.staged[sent(name.sample)].payload == self.packed(stored)
            assert torch.equal(value, expected)
        return frame, value

    def replayed(
        self, frame: Frame, base: BufferRecord | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The value, and what is kept of it, as base and frame alone make them."""
        way, built_on = frame.key.direction, None
        if frame.kind is FrameKind.KEY:
            codec = from_spec(self.train.key_frame_codec(way))
        else:
            codec = from_spec(self.train.codec(way))
            assert base is not None
            shape = base.tokens, base.channels
            built_on = unpack_buffer(base.payload, *shape, self.train.buffer_bits)
        value = codec.decode(frame.tensor, built_on)
        return value, codec.next_base(frame.tensor, value, built_on)

    def packed(self, value: torch.Tensor) -> bytes:
        """A buffer as the run keeps it."""
        return pack_buffer(value, self.train.buffer_bits)

    def assert_staged_equal(self) -> None:
        for one, other in (
            (self.sender_store, self.receiver_store),
            (self.receiver_store, self.sender_store),
        ):
            for name in one.staged:
                if name.end is End.RESIDUAL:
                    assert name not in other.staged
                    continue
                opposite = sent if name.end is End.RECEIVED else received
                assert one.staged[name] == other.staged[opposite(name.sample)]

    def assert_equal(self) -> None:
        self.assert_staged_equal()
        for sample in range(8):
            assert self.sender_store.get(sent(sample)) == self.receiver_store.get(received(sample))
            assert self.receiver_store.get(sent(sample)) == self.sender_store.get(received(sample))

    def commit(self) -> None:
        for store in (self.sender_store, self.receiver_store):
            store.commit()

    def rollback(self) -> None:
        for store in (self.sender_store, self.receiver_store):
            store.rollback()


@pytest.fixture
def make_coders(make_spec: MakeSpec) -> MakeCoders:
    def make(**train: Any) -> Ends:
        return Ends(make_spec(**train))

    return make


def activations(visits: int, samples: int, *, seed: int = 0) -> Iterator[torch.Tensor]:
    """Yield for each visit and sample a drifting activation, with channels of 1e5 as in Llama."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 1e5, 1e-3, 1.0, 300.0, 1.0, 0.0, 1e-30])
    now = torch.randn(samples, TOKENS, CHANNELS, generator=generator) * scale
    for visit in range(visits):
        yield now
        drift = torch.randn(samples, TOKENS, CHANNELS, generator=generator)
        now = now + drift * scale * 0.3 / (1 + visit)


# fmt: off
BUFFERED = [
    *(f"aq{bits}" for bits in range(1, 9)), "aq3t+d", "aq4f", "aq2tc", "aq1.5+z", "aq2t+d+z",
    "aqc0.5", "aqc0.25tc+d", "aqtop10", "aqtop30+z", "aqk0.5",
]
# fmt: on


@every_size
@pytest.mark.parametrize("codec", BUFFERED)
@pytest.mark.sampled(5)
def test_both_ends_hold_equal_buffers_after_every_frame_of_many_visits(
    make_coders: MakeCoders, codec: str, bits: int
) -> None:
    ends = make_coders(forward_codec=codec, buffer_bits=bits)
    kinds = []
    for now in activations(visits=12, samples=3):
        for sample in range(3):
            kinds.append(ends.visit(sample, now[sample])[0].kind)
            ends.assert_equal()
        ends.commit()
        ends.assert_equal()
    assert kinds == [FrameKind.KEY] * 3 + [FrameKind.DELTA] * 33


def test_a_first_visit_sends_half_precision_and_later_ones_the_change(
    make_coders: MakeCoders,
) -> None:
    ends = make_coders()
    x = torch.randn(TOKENS, CHANNELS)
    first, value = ends.visit(0, x)
    assert (first.kind, str(first.tensor.codec), first.base_digest) == (FrameKind.KEY, "fp16", b"")
    assert torch.allclose(value, x, rtol=2**-11)
    ends.commit()
    second, _ = ends.visit(0, x + 0.1)
    assert second.kind is FrameKind.DELTA
    assert second.tensor.codec == parse_codec_spec("aq4", Direction.FORWARD)
    assert second.base_digest == ends.sender_store.record_of(sent(0)).digest
    buffer = ends.sender_store.staged[sent(0)]
    assert second.result_digest == fingerprint_of(buffer.digest, second.tensor.payload)


def test_an_unchanging_activation_is_approached_from_visit_to_visit(
    make_coders: MakeCoders,
) -> None:
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


@pytest.mark.parametrize("codec", ["aq4", "aq2"])
def test_what_is_used_is_finer_than_what_a_coarse_buffer_keeps(
    make_coders: MakeCoders, codec: str
) -> None:
    ends = make_coders(forward_codec=codec, buffer_bits=4, seq_length=64, channels=64)
    first, x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(1))
    ends.visit(0, first)
    ends.commit()
    for _ in range(8):
        _, value = ends.visit(0, x)
        ends.commit()
    buffer = unpack_buffer(ends.sender_store.record_of(sent(0)).payload, 64, 64, 4)
    errors = {
        name: ((y - x).norm() / x.norm()).item() for name, y in (("used", value), ("kept", buffer))
    }
    assert 0.05 < errors["kept"] < 0.11
    assert errors["used"] < errors["kept"] / (7 if codec == "aq4" else 2.5)


@every_size
def test_records_of_one_run_have_one_size_and_what_is_owed_has_16_bits(
    make_coders: MakeCoders, bits: int
) -> None:
    ends = make_coders(backward_codec="q4+ef", buffer_bits=bits)
    for now, gradient in zip(activations(visits=3, samples=1), gradients(visits=3), strict=True):
        ends.visit(0, now[0])
        ends.back(0, gradient)
        ends.commit()
        assert len(ends.sender_store.record_of(sent(0)).payload) == buffer_bytes(
            TOKENS, CHANNELS, bits
        )
        owed = ends.receiver_store.record_of(residual(0)).payload
        assert len(owed) == buffer_bytes(TOKENS, CHANNELS, 16)


@every_size
def test_a_lost_coarse_buffer_is_repaired_by_a_key_frame_of_the_value(
    make_coders: MakeCoders, bits: int
) -> None:
    ends = make_coders(buffer_bits=bits)
    first, x = torch.randn(2, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(1))
    ends.visit(0, first)
    ends.sender_store.commit()
    ends.receiver_store.rollback()
    delta = ends.sender.encode(key(0), x)
    base = unpack_buffer(ends.sender_store.record_of(sent(0)).payload, TOKENS, CHANNELS, bits)
    decoded = from_spec(delta.tensor.codec).decode(delta.tensor, base)
    assert isinstance(ends.receiver.decode(delta), Refusal)
    _, value = ends.visit(0, x, as_key=True)
    assert torch.allclose(value, decoded, rtol=2**-10)
    ends.commit()
    ends.assert_equal()
    assert ends.visit(0, x)[0].kind is FrameKind.DELTA


def test_a_step_that_does_not_commit_is_redone_from_the_same_bases(make_coders: MakeCoders) -> None:
    ends = make_coders()
    committed, aborted, redone = torch.randn(3, TOKENS, CHANNELS, generator=torch.manual_seed(2))
    ends.visit(0, committed)
    ends.commit()
    base = ends.sender_store.record_of(sent(0))
    lost, _ = ends.visit(0, aborted)
    ends.rollback()
    again, _ = ends.visit(0, aborted)
    assert again == lost
    ends.rollback()
    other, _ = ends.visit(0, redone)
    assert other.base_digest == base.digest
    ends.commit()
    assert ends.sender_store.record_of(sent(0)).digest != base.digest
    assert ends.visit(0, redone)[0].base_digest == ends.sender_store.record_of(sent(0)).digest


def test_a_sample_sent_twice_before_the_commit_counts_as_it_was_sent_last(
    make_coders: MakeCoders,
) -> None:
    ends = make_coders()
    ends.visit(0, torch.ones(TOKENS, CHANNELS))
    ends.commit()
    ends.visit(0, torch.full((TOKENS, CHANNELS), 2.0))
    as_key, _ = ends.visit(0, torch.full((TOKENS, CHANNELS), 2.0), as_key=True)
    ends.commit()
    ends.assert_equal()
    left = ends.sender_store.record_of(sent(0)).digest
    assert fingerprint_of(left, as_key.tensor.payload) == as_key.result_digest


def put(store: BufferStore, name: BufferKey, record: BufferRecord) -> None:
    """Put a record into the store as if it were committed under that name."""
    BufferStore.stage(store, name, record)
    BufferStore.commit(store)


def test_a_receiver_without_the_base_refuses_and_takes_a_key_frame(make_coders: MakeCoders) -> None:
    ends = make_coders()
    ends.visit(0, torch.ones(TOKENS, CHANNELS))
    ends.sender_store.commit()
    ends.receiver_store.rollback()
    delta = ends.sender.encode(key(0), torch.full((TOKENS, CHANNELS), 2.0))
    refusal = ends.receiver.decode(delta)
    assert isinstance(refusal, Refusal)
    assert "not here" in refusal.reason
    assert not ends.receiver_store.staged
    _, value = ends.visit(0, torch.full((TOKENS, CHANNELS), 2.0), as_key=True)
    # What the delta would have made of the base.
    assert torch.allclose(value, torch.full((TOKENS, CHANNELS), 2.0), atol=0.1)
    ends.commit()
    ends.assert_equal()
    assert ends.visit(0, torch.ones(TOKENS, CHANNELS))[0].kind is FrameKind.DELTA


def warm(ends: Ends) -> None:
    """Two samples that were visited once."""
    for sample in range(2):
        ends.visit(sample, torch.full((TOKENS, CHANNELS), 1.0 + sample))
    ends.commit()


def test_a_foreign_buffer_is_refused_by_its_digest(make_coders: MakeCoders) -> None:
    ends = make_coders()
    warm(ends)
    put(ends.receiver_store, received(0), ends.receiver_store.record_of(received(1)))
    refusal = ends.receiver.decode(ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS)))
    assert isinstance(refusal, Refusal)
    assert "other here" in refusal.reason
    assert not ends.receiver_store.staged


def test_a_senders_own_foreign_buffer_is_refused_at_the_other_end(make_coders: MakeCoders) -> None:
    ends = make_coders()
    warm(ends)
    put(ends.sender_store, sent(0), ends.sender_store.record_of(sent(1)))
    delta = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    assert isinstance(ends.receiver.decode(delta), Refusal)


def test_a_torn_buffer_under_the_right_digest_is_refused_by_the_result(
    make_coders: MakeCoders,
) -> None:
    ends = make_coders()
    warm(ends)
    whole, other = (
        ends.receiver_store.record_of(received(0)),
        ends.receiver_store.record_of(received(1)),
    )
    put(ends.receiver_store, received(0), replace(whole, payload=other.payload))
    delta = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    refusal = ends.receiver.decode(delta)
    assert isinstance(refusal, Refusal)
    assert "does not match the frame's digest" in refusal.reason
    assert not ends.receiver_store.staged


def test_bytes_that_were_altered_are_noticed_though_they_make_the_same_buffer(
    make_coders: MakeCoders,
) -> None:
    ends = make_coders(key_codec="none")
    honest = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    altered = bytearray(honest.tensor.payload)
    altered[0] ^= 1  # the last bit of a float32: half precision does not see it
    with pytest.raises(BadFrame, match="does not match the frame's digest"):
        ends.receiver.decode(of(honest, payload=bytes(altered)))
    assert not isinstance(ends.receiver.decode(honest), Refusal)


def test_another_result_digest_refuses_a_delta_and_condemns_a_key_frame(
    make_coders: MakeCoders,
) -> None:
    ends = make_coders()
    warm(ends)
    delta = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    assert isinstance(ends.receiver.decode(replace(delta, result_digest=bytes(16))), Refusal)
    key_frame = encoded(ends.sender, key(0), torch.ones(TOKENS, CHANNELS), as_key=True)
    with pytest.raises(BadFrame, match="although it is a key frame"):
        ends.receiver.decode(replace(key_frame, result_digest=bytes(16)))
    assert not ends.receiver_store.staged


# ---- frames that do not fit the run


def of(frame: Frame, **tensor: Any) -> Frame:
    return replace(frame, tensor=replace(frame.tensor, **tensor))


def of_codec(frame: Frame, text: str) -> Frame:
    return of(frame, codec=parse_codec_spec(text, Direction.FORWARD))


BROKEN: dict[str, Change] = {
    "more tokens": lambda f: of(f, tokens=TOKENS + 1),
    "fewer channels": lambda f: of(f, channels=CHANNELS - 1),
    "swapped shape": lambda f: of(f, tokens=CHANNELS, channels=TOKENS),
    "other bits": lambda f: of_codec(f, "aq8tc"),
    "other codec": lambda f: of_codec(f, "q4tc"),
    "other axis": lambda f: of_codec(f, "aq4t"),
    "dithered": lambda f: of_codec(f, "aq4tc+d"),
    "entropy-coded": lambda f: of_codec(f, "aq4tc+z"),
    "long payload": lambda f: of(f, payload=f.tensor.payload + b"\0"),
    "a delta as a key": lambda f: replace(f, kind=FrameKind.KEY, base_digest=b""),
    "a delta as direct": lambda f: replace(f, kind=FrameKind.DIRECT),
}
BROKEN_INSIDE: dict[str, Change] = {
    "short payload": lambda f: of(f, payload=f.tensor.payload[:-1]),
    "no payload": lambda f: of(f, payload=b""),
}


def assert_broken(ends: Ends, frame: Frame, looks: Iterable[Callable[[Frame], object]]) -> None:
    for look in looks:
        with pytest.raises(BadFrame):
            look(frame)
    assert not ends.receiver_store.staged


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_frame_that_does_not_fit_the_run_is_broken(
    make_coders: MakeCoders, change: Change
) -> None:
    ends = make_coders(forward_codec="aq4tc")
    warm(ends)
    frame = change(ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS)))
    assert_broken(ends, frame, (ends.receiver.check, ends.receiver.decode))


@pytest.mark.parametrize("change", BROKEN_INSIDE.values(), ids=BROKEN_INSIDE)
def test_a_payload_that_does_not_fit_its_header_is_broken_once_it_is_read(
    make_coders: MakeCoders, change: Change
) -> None:
    ends = make_coders()
    warm(ends)
    frame = change(ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS)))
    ends.receiver.check(frame)
    assert_broken(ends, frame, (ends.receiver.decode,))


def test_a_direct_frame_is_broken_in_a_run_with_buffers(make_coders: MakeCoders) -> None:
    direct = make_coders(forward_codec="q4c").sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    assert direct.kind is FrameKind.DIRECT
    with pytest.raises(BadFrame, match="DIRECT of q4c in a step whose forward codec is aq4t"):
        make_coders(forward_codec="aq4t").receiver.decode(direct)


@pytest.mark.parametrize("codec", ["q4", "fp16", "none"])
def test_a_key_frame_is_broken_in_a_run_without_buffers(
    make_coders: MakeCoders, codec: str
) -> None:
    key_frame = make_coders().sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    ends = make_coders(forward_codec=codec)
    with pytest.raises(BadFrame, match=f"KEY of fp16 in a step whose forward codec is {codec}"):
        ends.receiver.decode(key_frame)
    assert not ends.receiver_store.staged


def test_a_gradient_in_the_forward_codec_is_broken(make_coders: MakeCoders) -> None:
    ends = make_coders()
    warm(ends)
    delta = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    backward = key(0, direction=Direction.BACKWARD)
    with pytest.raises(BadFrame, match="backward codec is q8"):
        ends.receiver.decode(replace(delta, key=backward))


def hostile_payloads(honest: bytes, largest: int) -> st.SearchStrategy[bytes]:
    """Noise of any size, the honest payload cut or lengthened, and one with bits flipped."""
    flips = st.lists(st.tuples(st.integers(0, len(honest) - 1), st.integers(1, 255)), min_size=1)
    return st.one_of(
        st.integers(0, largest).flatmap(lambda n: st.binary(min_size=n, max_size=n)),
        st.binary(min_size=len(honest), max_size=len(honest)),
        st.integers(0, len(honest) - 1).map(lambda n: honest[:n]),
        st.binary(min_size=1, max_size=3).map(lambda tail: honest + tail),
        flips.map(lambda where: flipped(honest, where)),
    )


def flipped(payload: bytes, where: list[tuple[int, int]]) -> bytes:
    changed = bytearray(payload)
    for place, mask in where:
        changed[place] ^= mask
    return bytes(changed)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    max_examples=draws(60),
    deadline=None,
)
@pytest.mark.parametrize(
    ("codec", "key_codec"),
    [("aq4", "fp16"), ("aq2t+d", "q4"), ("aq2+z", "q4+z"), ("aqc0.5", "qc0.25")],
)
@given(data=st.data(), is_key=st.booleans())
def test_whatever_bytes_come_nothing_infinite_or_foreign_is_kept(
    make_coders: MakeCoders, data: st.DataObject, codec: str, key_codec: str, is_key: bool
) -> None:
    ends = make_coders(forward_codec=codec, key_codec=key_codec)
    warm(ends)
    x = torch.randn(TOKENS, CHANNELS, generator=torch.manual_seed(8))
    honest = encoded(ends.sender, key(0), x, as_key=is_key)
    largest = from_spec(honest.tensor.codec).max_payload_bytes(TOKENS, CHANNELS)
    payload = data.draw(hostile_payloads(honest.tensor.payload, largest))
    claimed = data.draw(st.sampled_from([honest.result_digest, fingerprint_of(payload), bytes(16)]))
    frame = replace(of(honest, payload=payload), result_digest=claimed)
    try:
        value = ends.receiver.decode(frame)
    except BadFrame:
        assert not ends.receiver_store.staged
        return
    if isinstance(value, Refusal):
        assert not ends.receiver_store.staged
    else:
        assert torch.isfinite(value).all()
        digest = fingerprint_of(pack_buffer(value))
        assert ends.receiver_store.staged[received(0)].digest == digest
        assert fingerprint_of(digest, payload) == claimed


# ---- key frames in other codecs


KEY_CODECS = [
    "none",
    "bf16",
    "q8",
    "q4t+d",
    "q4+z",
    "qc0.25",
    "qk0.25",
    "top30",
]


@pytest.mark.parametrize("key_codec", KEY_CODECS)
def test_any_codec_that_builds_on_nothing_begins_a_buffer(
    make_coders: MakeCoders, key_codec: str
) -> None:
    ends = make_coders(key_codec=key_codec)
    direct = from_spec(parse_codec_spec(key_codec, Direction.FORWARD))
    for visit, now in enumerate(activations(visits=4, samples=2)):
        for sample in range(2):
            frame, value = ends.visit(sample, now[sample])
            if visit == 0:
                assert frame.kind is FrameKind.KEY
                assert frame.tensor == direct.encode(now[sample])
                assert torch.equal(value, direct.decode(frame.tensor))
            else:
                assert frame.kind is FrameKind.DELTA
        ends.commit()
        ends.assert_equal()


def test_what_a_coarse_key_frame_lost_the_next_visits_bring(make_coders: MakeCoders) -> None:
    ends = make_coders(key_codec="q2", forward_codec="aq4")
    x = torch.randn(TOKENS, CHANNELS, generator=torch.manual_seed(4))
    errors = []
    for _ in range(4):
        errors.append((ends.visit(0, x)[1] - x).norm().item())
        ends.commit()
    assert errors[0] > 0.2 * x.norm()
    assert all(after < before / 4 for before, after in pairwise(errors))


@pytest.mark.parametrize(("ours", "theirs"), [("q8", "fp16"), ("fp16", "q8"), ("q4+z", "q4")])
def test_a_key_frame_in_another_codec_than_the_runs_is_broken(
    make_coders: MakeCoders, ours: str, theirs: str
) -> None:
    frame = make_coders(key_codec=theirs).sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
    ends = make_coders(key_codec=ours)
    assert_broken(ends, frame, (ends.receiver.check, ends.receiver.decode))


@pytest.mark.parametrize("key_codec", ["q8", "q4+z", "qc0.25"])
def test_a_key_frame_that_was_asked_for_is_in_the_key_codec_too(
    make_coders: MakeCoders, key_codec: str
) -> None:
    ends = make_coders(key_codec=key_codec)
    warm(ends)
    put(ends.receiver_store, received(0), ends.receiver_store.record_of(received(1)))
    x = torch.randn(TOKENS, CHANNELS, generator=torch.manual_seed(5))
    assert isinstance(ends.receiver.decode(ends.sender.encode(key(0), x)), Refusal)
    frame, _ = ends.visit(0, x, as_key=True)
    assert frame.tensor.codec == parse_codec_spec(key_codec, Direction.FORWARD)
    ends.commit()
    ends.assert_equal()


# ---- what fills the pipeline


def test_the_first_microbatches_go_by_the_fill_codec(make_coders: MakeCoders) -> None:
    ends = make_coders(
        forward_codec="aq4", backward_codec="q8", fill_codec="aq2+z", fill_microbatches=2
    )
    warm(ends)
    x = torch.randn(TOKENS, CHANNELS, generator=torch.manual_seed(9))
    for microbatch, expected in enumerate(("aq2f+z", "aq2f+z", "aq4tc")):
        frame = ends.sender.encode(key(microbatch % 2, microbatch=microbatch), x)
        assert frame.kind is FrameKind.DELTA
        assert str(frame.tensor.codec) == expected
        assert not isinstance(ends.receiver.decode(frame), Refusal)
        ends.assert_staged_equal()
        back = ends.receiver.encode(frame.key._replace(direction=Direction.BACKWARD), x)
        assert str(back.tensor.codec) == "q8t"


def test_the_next_visit_builds_on_what_a_fill_frame_left(make_coders: MakeCoders) -> None:
    ends = make_coders(forward_codec="aq4", fill_codec="aq2")
    warm(ends)
    x = torch.randn(TOKENS, CHANNELS, generator=torch.manual_seed(9))
    errors = []
    for microbatch in (0, 1, 0, 5):
        frame = ends.sender.encode(key(0, microbatch=microbatch), x)
        value = ends.receiver.decode(frame)
        assert isinstance(value, torch.Tensor)
        errors.append((value - x).norm().item())
        ends.commit()
        ends.assert_equal()
    assert all(after < before / 2 for before, after in pairwise(errors))


def test_a_fill_frame_that_was_refused_comes_as_a_key_frame(make_coders: MakeCoders) -> None:
    ends = make_coders(forward_codec="aq4", fill_codec="aq2", key_codec="q8")
    warm(ends)
    put(ends.receiver_store, received(0), ends.receiver_store.record_of(received(1)))
    x = torch.randn(TOKENS, CHANNELS, generator=torch.manual_seed(9))
    assert isinstance(ends.receiver.decode(ends.sender.encode(key(0), x)), Refusal)
    frame, value = ends.visit(0, x, as_key=True)
    assert str(frame.tensor.codec) == "q8tc"
    assert torch.equal(value, from_spec(frame.tensor.codec).decode(frame.tensor))


@pytest.mark.parametrize(("microbatch", "as_microbatch"), [(0, 1), (1, 0)])
def test_a_frame_by_the_others_codec_is_broken(
    make_coders: MakeCoders, microbatch: int, as_microbatch: int
) -> None:
    ends = make_coders(forward_codec="aq4", fill_codec="aq2")
    warm(ends)
    x = torch.ones(TOKENS, CHANNELS)
    frame = ends.sender.encode(key(0, microbatch=microbatch), x)
    frame = replace(frame, key=key(0, microbatch=as_microbatch))
    assert_broken(ends, frame, (ends.receiver.check, ends.receiver.decode))


@pytest.mark.parametrize(
    ("backward", "drain", "directions"),
    [("q4", "q2+z", ("q4t", "q2t+d+z")), ("q4+last", "q1+z+last", ("q4t+last", "q1t+d+last+z"))],
)
def test_the_last_microbatches_gradients_go_by_the_drain_codec(
    make_coders: MakeCoders, backward: str, drain: str, directions: tuple[str, str]
) -> None:
    """They are sent upstream, so that it is the receiver's turn."""
    ends = make_coders(backward_codec=backward, drain_codec=drain, drain_microbatches=2)
    for num_microbatches in (2, 4):
        for coder in (ends.sender, ends.receiver):
            coder.begin(ends.train, num_microbatches)
        for microbatch in range(num_microbatches):
            name = key(microbatch, microbatch=microbatch, direction=Direction.BACKWARD)
            x = torch.randn(TOKENS, CHANNELS, generator=torch.manual_seed(microbatch))
            frame = ends.receiver.encode(name, x)
            ends.sender.check(frame)
            assert not isinstance(ends.sender.decode(frame), Refusal)
            if frame.kind is not FrameKind.KEY:
                assert str(frame.tensor.codec) == directions[microbatch >= num_microbatches - 2]
        ends.commit()


def test_a_drain_frame_that_is_none_is_broken(make_coders: MakeCoders) -> None:
    ends = make_coders(backward_codec="q4", drain_codec="q2+z")
    for coder, num_microbatches in ((ends.receiver, 2), (ends.sender, 3)):
        coder.begin(ends.train, num_microbatches)
    name = key(1, microbatch=1, direction=Direction.BACKWARD)
    frame = ends.receiver.encode(name, torch.ones(TOKENS, CHANNELS))
    with pytest.raises(BadFrame, match="backward codec"):
        ends.sender.check(frame)


# ---- frames of varying size


@pytest.mark.parametrize("codec", ["aq2+z", "aqc0.5", "aqc1t+d"])
def test_entropy_coded_frames_vary_in_size_below_their_bound(
    make_coders: MakeCoders, codec: str
) -> None:
    ends = make_coders(
        forward_codec=codec, backward_codec="q2+d+z", seq_length=64, channels=32, key_codec="q4+z"
    )
    generator = torch.manual_seed(6)
    base, sizes = torch.randn(64, 32, generator=generator), []
    for visit in range(5):
        change = torch.randn(64, 32, generator=generator).pow(1 + visit % 3)
        frame, _ = ends.visit(0, base + change * 0.5**visit)
        ends.receiver.check(frame)
        ends.back(0, change)
        sizes.append(len(frame.tensor.payload))
        ends.commit()
        ends.assert_equal()
    largest = from_spec(frame.tensor.codec).max_payload_bytes(64, 32)
    assert max(sizes) <= largest
    assert len(set(sizes)) > 2
    assert_broken(ends, of(frame, payload=bytes(largest + 1)), (ends.receiver.check,))


def test_constant_quality_costs_less_from_visit_to_visit(make_coders: MakeCoders) -> None:
    ends = make_coders(forward_codec="aqc0.5", key_codec="qc0.25", seq_length=64, channels=32)
    generator = torch.manual_seed(7)
    base, change = torch.randn(2, 64, 32, generator=generator)
    sizes, errors = [], []
    for visit in range(4):
        x = base + change * 0.5**visit
        frame, value = ends.visit(0, x)
        sizes.append(len(frame.tensor.payload))
        errors.append(((value - x).norm() / x.norm()).item())
        ends.commit()
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3]
    assert max(errors[1:]) < 0.5 / 12**0.5 * 1.2


# ---- gradients with error feedback


def gradients(visits: int, *, seed: int = 0) -> Iterator[torch.Tensor]:
    """Gradients of one sample that have much in common from visit to visit."""
    generator = torch.manual_seed(seed)
    common = torch.randn(TOKENS, CHANNELS, generator=generator) * 1e-4
    for _ in range(visits):
        yield common + torch.randn(TOKENS, CHANNELS, generator=generator) * 2e-5


# fmt: off
RESIDUAL = ["q2+ef", "q1.5+d+z+ef", "qc1+ef", "top10+ef", "top30+ef+z", "fp16+ef"]
EF21 = ["q2+ef21", "q4t+d+ef21", "q3+ef21+z", "qc0.5+ef21", "top30+ef21",
        "fp16+ef21", "q1+z+last", "q2t+last", "top30+last"]
# fmt: on
every_residual = pytest.mark.parametrize("codec", RESIDUAL)
every_ef21 = pytest.mark.parametrize("codec", EF21)


@every_residual
def test_what_was_sent_and_what_is_still_owed_add_up_to_all_gradients(
    make_coders: MakeCoders, codec: str
) -> None:
    ends = make_coders(backward_codec=codec)
    owed = torch.zeros(TOKENS, CHANNELS)
    difference, rounding = torch.zeros(2, TOKENS, CHANNELS, dtype=torch.float64)
    for gradient in gradients(visits=8):
        frame, value = ends.back(0, gradient)
        assert frame.kind is FrameKind.DIRECT
        assert ends.receiver_store.staged[residual(0)].payload == pack_buffer(
            gradient + owed - value
        )
        ends.commit()
        owed = unpack_buffer(ends.receiver_store.record_of(residual(0)).payload, TOKENS, CHANNELS)
        difference += gradient.double() - value.double()
        rounding += owed.double().abs() * 2**-11 + 1e-10  # of residuals, which are kept as halves
        assert ((difference - owed.double()).abs() <= rounding).all()
    assert len(ends.receiver_store) == 1
    assert len(ends.sender_store) == 0, "a residual is the sender's alone"


@pytest.mark.parametrize("codec", ["q1+ef", "top10+ef"])
def test_over_many_visits_feedback_sends_what_plain_compression_loses(
    make_coders: MakeCoders, codec: str
) -> None:
    plain = codec.split("+")[0]
    sums = {}
    for name in (codec, plain):
        ends = make_coders(backward_codec=name)
        sums[name] = torch.zeros(TOKENS, CHANNELS)
        for gradient in gradients(visits=30):
            sums[name] += ends.back(0, gradient)[1]
            ends.commit()
    total = sum(gradients(visits=30), torch.zeros(TOKENS, CHANNELS))
    errors = {name: ((got - total).norm() / total.norm()).item() for name, got in sums.items()}
    assert errors[codec] < errors[plain] / 2


@every_residual
def test_a_residual_counts_only_once_its_step_commits(make_coders: MakeCoders, codec: str) -> None:
    ends = make_coders(backward_codec=codec)
    first, second, other = gradients(visits=3)
    ends.back(0, first)
    assert ends.receiver_store.get(residual(0)) is None
    ends.commit()
    stored = ends.receiver_store.get(residual(0))
    lost, _ = ends.back(0, second)
    staged = ends.receiver_store.staged[residual(0)]
    assert ends.receiver_store.get(residual(0)) == stored
    ends.rollback()
    again, _ = ends.back(0, second)
    assert again == lost, "a step that is redone sends the same bytes"
    assert ends.receiver_store.staged[residual(0)] == staged
    ends.rollback()
    ends.back(0, other)
    ends.commit()
    assert ends.receiver_store.get(residual(0)) not in (stored, staged)


@every_residual
def test_a_residual_is_its_samples_own(make_coders: MakeCoders, codec: str) -> None:
    alone, paired = make_coders(backward_codec=codec), make_coders(backward_codec=codec)
    for gradient in gradients(visits=3):
        frame, _ = alone.back(0, gradient)
        paired.back(1, gradient * 1000)
        assert paired.back(0, gradient)[0] == frame
        for ends in (alone, paired):
            ends.commit()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("codec", ["q8", "top10+ef", "q4+ef21", "q2+z+ef"])
def test_a_gradient_that_is_not_finite_is_not_sent_and_leaves_nothing(
    make_coders: MakeCoders, codec: str, bad: float
) -> None:
    ends = make_coders(backward_codec=codec)
    good = next(gradients(visits=1))
    ends.back(3, good)
    ends.commit()
    records = [ends.receiver_store.get(name(3)) for name in (sent, residual)]
    spoilt = good.clone()
    spoilt[1, 2] = bad
    for name in (key(3, 7, Direction.BACKWARD), key(4, 7, Direction.BACKWARD)):
        with pytest.raises(NonFinite, match=f"^sample {name.sample}, step 7, backward: "):
            ends.receiver.encode(name, spoilt)
    assert not ends.receiver_store.staged
    assert [ends.receiver_store.get(name(3)) for name in (sent, residual)] == records


@every_ef21
def test_ef21_begins_with_a_gradient_and_goes_on_with_changes(
    make_coders: MakeCoders, codec: str
) -> None:
    ends = make_coders(backward_codec=codec)
    kinds = []
    for visit, gradient in enumerate(gradients(visits=6)):
        frame, _ = ends.back(0, gradient)
        kinds.append(frame.kind)
        assert frame.tensor.codec.is_delta == (visit > 0)
        ends.commit()
        ends.assert_equal()
    assert kinds == [FrameKind.KEY] + [FrameKind.DELTA] * 5
    assert ends.receiver_store.get(residual(0)) is None


@pytest.mark.parametrize("codec", [codec for codec in EF21 if not codec.startswith("qc")])
def test_a_gradient_that_stays_is_approached_and_a_redone_step_repeats_itself(
    make_coders: MakeCoders, codec: str
) -> None:
    ends = make_coders(backward_codec=codec)
    start, gradient = gradients(visits=2)
    ends.back(0, start)
    ends.commit()
    errors = []
    for _ in range(12):
        lost, _ = ends.back(0, gradient)
        ends.rollback()
        again, value = ends.back(0, gradient)
        assert again == lost
        ends.commit()
        errors.append((value - gradient).norm().item())
    assert errors[-1] < max(errors[0] / 4, 1e-3 * gradient.norm().item())


def test_ef21_leaves_the_buffers_of_activations_alone(make_coders: MakeCoders) -> None:
    ends = make_coders(forward_codec="aq4", backward_codec="q4+ef21", key_codec="q8")
    for now, gradient in zip(activations(visits=4, samples=1), gradients(visits=4), strict=True):
        _, value = ends.visit(0, now[0])
        _, back = ends.back(0, gradient)
        ends.commit()
        ends.assert_equal()
        assert ends.sender_store.record_of(sent(0)).payload == pack_buffer(value)
        assert ends.sender_store.record_of(received(0)).payload == pack_buffer(back)


def test_a_lost_buffer_of_gradients_is_refused_and_repaired_by_a_key_frame(
    make_coders: MakeCoders,
) -> None:
    ends = make_coders(backward_codec="q4+ef21")
    first, second, third = gradients(visits=3)
    ends.back(0, first)
    ends.receiver_store.commit()
    ends.sender_store.rollback()
    delta = ends.receiver.encode(key(0, direction=Direction.BACKWARD), second)
    assert isinstance(ends.sender.decode(delta), Refusal)
    frame, _ = ends.back(0, second, as_key=True)
    assert str(frame.tensor.codec) == "q4t"
    ends.commit()
    ends.assert_equal()
    assert ends.back(0, third)[0].kind is FrameKind.DELTA


# ---- values


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("codec", ["aq4", "q4", "fp16", "none", "aq2+z", "aqc0.5", "aqtop10"])
def test_an_activation_that_is_not_finite_is_not_sent(
    make_coders: MakeCoders, codec: str, bad: float
) -> None:
    ends = make_coders(forward_codec=codec)
    warm(ends)
    x = torch.ones(TOKENS, CHANNELS)
    x[3, 5] = bad
    with pytest.raises(NonFinite, match=r"^sample 0, step 0, forward: .*finite"):
        ends.sender.encode(key(0), x)
    assert not ends.sender_store.staged


@pytest.mark.parametrize("codec", ["aq4", "q4", "fp16", "aq2+z", "aqc0.5", "aqtop10", "q4t+d"])
def test_one_samples_outlier_never_touches_another(make_coders: MakeCoders, codec: str) -> None:
    quiet, wild = make_coders(forward_codec=codec), make_coders(forward_codec=codec)
    for now in activations(visits=3, samples=2):
        outlier = now[1].clone()
        outlier[2, 3] = 1e30
        alone = quiet.visit(0, now[0]), quiet.visit(1, now[1])
        expected = wild.visit(1, outlier), wild.visit(0, now[0])
        assert expected[1][0] == alone[0][0]
        assert torch.equal(expected[1][1], alone[0][1])
        quiet.commit()
        wild.commit()


def test_gradients_leave_no_buffer(make_coders: MakeCoders) -> None:
    ends = make_coders()
    gradient = torch.randn(TOKENS, CHANNELS)
    backward = key(0, direction=Direction.BACKWARD)
    frame = ends.receiver.encode(backward, gradient)
    assert frame == Frame(backward, FrameKind.DIRECT, frame.tensor)
    value = ends.sender.decode(frame)
    assert isinstance(value, torch.Tensor)
    assert torch.allclose(value, gradient, atol=gradient.abs().max().item() / 200)
    assert not ends.sender_store.staged
    assert not ends.receiver_store.staged


def test_one_store_keeps_both_boundaries_of_a_stage_apart(make_spec: MakeSpec) -> None:
    spec, store = make_spec(), WatchedStore()
    front, behind = (
        FrameCoder(spec, run_id=RUN, boundary=block, store=store)
        for block in (BLOCK, BlockIndex(4))
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
def test_whole_frames_are_as_small_as_promised(
    make_spec: MakeSpec, tokens: int, channels: int
) -> None:
    ends = Ends(make_spec(seq_length=tokens, channels=channels))
    x, change, gradient = torch.randn(3, tokens, channels, generator=torch.manual_seed(3))
    number = (1 << 20) + 5  # a sample whose numbers take more than one byte
    plain = 4 * tokens * channels
    ends.sender.encode(key(number, step=100_000), x)
    ends.sender_store.commit()
    delta = ends.sender.encode(key(number, step=100_000), x + change)
    assert delta.kind is FrameKind.DELTA
    assert wire_bytes(delta) <= plain / 7
    backward = ends.receiver.encode(key(number, 100_000, Direction.BACKWARD), gradient)
    assert wire_bytes(backward) <= plain / 3.8


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("codec", ["aq4", "aq2+z", "aqc0.5"])
def test_samples_of_different_lengths_have_buffers_of_their_own(
    make_coders: MakeCoders, codec: str, bits: int
) -> None:
    ends = make_coders(
        forward_codec=codec, backward_codec="q4+ef", buffer_bits=bits, seq_length=16, channels=32
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        for sample, tokens in enumerate((16, 2, 7)):
            x = torch.randn(tokens, 32, generator=generator)
            frame, value = ends.visit(sample, x)
            assert value.shape == (tokens, 32)
            assert frame.kind is (FrameKind.DELTA if step else FrameKind.KEY)
            frame, value = ends.back(sample, x)
            assert value.shape == (tokens, 32)
        ends.sender_store.commit()
        ends.receiver_store.commit()
    frame, _ = ends.visit(1, torch.randn(3, 32, generator=generator))
    assert frame.kind is FrameKind.KEY, "a buffer of another length is of no use"
    for tokens in (0, 17):
        with pytest.raises(BadFrame, match="expected 1 to 16 tokens of 32 channels"):
            ends.receiver.check(replace(frame, tensor=replace(frame.tensor, tokens=tokens)))


# ---- held-out samples


@pytest.mark.parametrize(
    ("compression", "codecs"),
    [
        (EvalCompression.OFF, ["none", "none"]),
        (EvalCompression.ON, ["q4tc", "q4tc"]),
        (EvalCompression.BOTH, ["none", "none", "q4tc", "q4tc"]),
    ],
)
def test_held_out_samples_go_direct_and_leave_nothing(
    compression: EvalCompression, codecs: list[str]
) -> None:
    train = train_spec(key_codec="q4", num_eval_samples=2, eval_compression=compression)
    ends = Ends(RunSpec(model=model_spec(), train=train))
    x = torch.randn(*ends.shape, generator=torch.Generator().manual_seed(1))
    for number, codec in enumerate(codecs):
        for _ in range(2):
            frame, value = ends.visit(train.num_samples + number, x)
            assert (frame.kind, str(frame.tensor.codec)) == (FrameKind.DIRECT, codec)
            assert torch.equal(value, x) == (codec == "none")
            assert not ends.sender_store.staged
            assert not ends.receiver_store.staged
            ends.sender_store.commit()


def test_a_held_out_sample_in_another_codec_is_refused() -> None:
    train = train_spec(key_codec="q4", num_eval_samples=2)
    ends = Ends(RunSpec(model=model_spec(), train=train))
    x = torch.zeros(*ends.shape)
    trained, _ = ends.visit(0, x)
    with pytest.raises(BadFrame, match="forward codec"):
        ends.receiver.decode(replace(trained, key=key(train.num_samples)))


# ---- codecs that change on the way


def begin(ends: Ends, codecs: Codecs) -> None:
    """The next step goes by other codecs, at both ends."""
    ends.train = ends.train.with_codecs(codecs)
    for coder in (ends.sender, ends.receiver):
        coder.begin(ends.train, NUM_MICROBATCHES)


@every_size
@pytest.mark.parametrize(
    "codecs",
    [("aq2", "aq8", "aq3"), ("aq3+z", "aq2+z", "aq4"), ("aqc0.5", "aq2t+d+z", "aqtop10", "aq1")],
)
def test_changes_in_other_bits_build_on_the_same_buffers(
    make_coders: MakeCoders, codecs: tuple[str, ...], bits: int
) -> None:
    ends = make_coders(forward_codec=codecs[0], buffer_bits=bits)
    visits = activations(visits=2 * len(codecs) + 1, samples=3)
    first = next(visits)
    for sample in range(3):
        ends.visit(sample, first[sample])
    ends.commit()
    for codec in codecs:
        begin(ends, Codecs(codec, "q8"))
        for now in (next(visits), next(visits)):
            for sample in range(3):
                frame, _ = ends.visit(sample, now[sample])
                assert frame.kind is FrameKind.DELTA
                assert frame.tensor.codec == parse_codec_spec(codec, Direction.FORWARD)
            ends.commit()
            ends.assert_equal()


def test_gradients_in_other_bits_build_on_the_same_buffers(make_coders: MakeCoders) -> None:
    ends = make_coders(backward_codec="q8+ef21")
    for codec in ("q8+ef21", "q2+ef21", "top10+ef21"):
        begin(ends, Codecs("aq4", codec))
        frame, _ = ends.back(0, torch.randn(TOKENS, CHANNELS))
        assert frame.kind is (FrameKind.KEY if codec == "q8+ef21" else FrameKind.DELTA)
        ends.commit()
        ends.assert_equal()


@pytest.mark.parametrize("codecs", [("q2+ef", "q4+ef"), ("top10+ef", "top50+ef")])
def test_a_residual_goes_to_the_next_codec(
    make_coders: MakeCoders, codecs: tuple[str, str]
) -> None:
    ends = make_coders(backward_codec=codecs[0])
    ends.back(0, torch.randn(TOKENS, CHANNELS))
    ends.commit()
    owed = ends.receiver_store.record_of(residual(0))
    begin(ends, Codecs("aq4", codecs[1]))
    frame, _ = ends.back(0, torch.zeros(TOKENS, CHANNELS))
    assert str(frame.tensor.codec).startswith(codecs[1].partition("+")[0])
    left = ends.receiver_store.staged[residual(0)]
    assert left.payload != owed.payload
    size = [unpack_buffer(one.payload, TOKENS, CHANNELS).norm() for one in (left, owed)]
    assert size[0] < size[1], "some of it was sent"


def test_a_delta_that_is_asked_for_again_comes_as_what_its_step_made(
    make_coders: MakeCoders,
) -> None:
    ends = make_coders()
    warm(ends)
    begin(ends, Codecs("aq1", "q8"))
    frame = ends.sender.encode(key(0), torch.zeros(TOKENS, CHANNELS))
    again = ends.sender.encode_again(frame)
    value = ends.receiver.decode(again)
    assert isinstance(value, torch.Tensor)
    assert again.kind is FrameKind.KEY
    ends.assert_staged_equal()


def test_a_frame_by_another_codec_than_its_steps_is_broken(make_coders: MakeCoders) -> None:
    """Whichever of the two it was made by: that of the step before, or of one to come."""
    for codec, other in (("aq4", "aq2"), ("aq2", "aq4")):
        ends = make_coders(forward_codec=codec)
        warm(ends)
        ends.receiver.begin(ends.train.with_codecs(Codecs(other, "q8")), NUM_MICROBATCHES)
        frame = ends.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
        assert_broken(ends, frame, (ends.receiver.check, ends.receiver.decode))


@pytest.mark.parametrize(
    ("forward", "kin", "strangers"),
    [
        ("aq4", ["aq2", "aq3+z", "aqtop10"], ["q4", "none"]),
        ("q4", ["none", "q2+z", "top10"], ["aq2"]),
    ],
)
def test_a_frame_before_its_step_may_be_by_any_codec_that_could_follow(
    make_coders: MakeCoders, forward: str, kin: list[str], strangers: list[str]
) -> None:
    ends = make_coders(forward_codec=forward)
    warm(ends)
    for codec in (*kin, *strangers):
        other = make_coders(forward_codec=codec)
        warm(other)
        frame = other.sender.encode(key(0), torch.ones(TOKENS, CHANNELS))
        if codec in strangers:
            with pytest.raises(BadFrame, match="in a step whose forward codec is"):
                ends.receiver.check(frame, is_early=True)
            continue
        ends.receiver.check(frame, is_early=True)
        most = from_spec(frame.tensor.codec).max_payload_bytes(TOKENS, CHANNELS)
        long = replace(frame, tensor=replace(frame.tensor, payload=bytes(most + 1)))
        with pytest.raises(BadFrame, match="expected at most"):
            ends.receiver.check(long, is_early=True)
        assert_broken(ends, frame, (ends.receiver.check, ends.receiver.decode))


# ---- along a basis that the sender learned


class AlongEnds(Ends):
    """Both ends, and what the sender's stage learns; the receiver gets each basis that is sent."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.bases = SideInfoStore()
        self.received_bases: dict[bytes, SideInfo] = {}
        self.sender = FrameCoder(
            spec, run_id=RUN, boundary=BLOCK, store=self.sender_store, side_info=self.bases
        )

    def carry(self, frame: Frame) -> torch.Tensor | Refusal:
        """Decode a frame at the receiver, with its basis if that is new there."""
        needed = side_info_needed(frame.tensor)
        if needed and needed not in self.received_bases:
            basis = self.sender.side_info_of(frame)
            assert basis is not None
            self.received_bases[needed] = self.receiver.read_side_info(basis.data)
            assert self.received_bases[needed].name == needed
        return self.receiver.decode(frame, self.received_bases.get(needed))

    def step(self, values: dict[int, torch.Tensor], step: int = 0) -> list[Frame]:
        """All samples there, and the commit at both ends."""
        frames = [self.sender.encode(key(sample, step), x) for sample, x in values.items()]
        for frame in frames:
            assert isinstance(self.carry(frame), torch.Tensor)
        self.assert_staged_equal()
        self.commit()
        return frames

    def commit(self) -> None:
        super().commit()
        self.bases.commit()

    def rollback(self) -> None:
        super().rollback()
        self.bases.rollback()


ALONG_TOKENS, ALONG_CHANNELS = 24, 32


def along_ends(make_spec: MakeSpec, **train: Any) -> AlongEnds:
    codecs = {"forward_codec": "aqk0.3", "key_codec": "qk0.3", "seq_length": ALONG_TOKENS}
    return AlongEnds(make_spec(channels=ALONG_CHANNELS, **(codecs | train)))


def moving(visits: int, samples: int = 3, first: int = 0) -> Iterator[dict[int, torch.Tensor]]:
    """Yield for each visit activations around a mean; they and their changes are low-rank."""
    generator = torch.Generator().manual_seed(17)
    common, directions = (torch.randn(rows, ALONG_CHANNELS, generator=generator) for rows in (1, 3))
    shape = samples, ALONG_TOKENS, 3
    now = torch.randn(shape, generator=generator) @ directions + 4 * common
    for _ in range(visits):
        yield {first + sample: now[sample] for sample in range(samples)}
        now = now + torch.randn(shape, generator=generator) @ directions


def test_the_first_step_is_plain_and_later_ones_go_along_a_basis(make_spec: MakeSpec) -> None:
    ends = along_ends(make_spec)
    needed = []
    for now in moving(visits=6):
        frames = ends.step(now)
        needed.append({side_info_needed(frame.tensor) for frame in frames})
        ends.assert_equal()
    # A sample's first activations, first changes, and then changes along what these were.
    assert needed[0] == needed[1] == {b""}
    assert all(len(names) == 1 and b"" not in names for names in needed[2:])
    fresh = next(moving(visits=1, first=5))
    (first, *_) = ends.step(fresh)
    assert first.kind is FrameKind.KEY
    assert side_info_needed(first.tensor) not in {b"", *needed[-1]}, (
        "first activations have their own"
    )
    basis = ends.received_bases[side_info_needed(first.tensor)]
    assert isinstance(basis, Basis)
    assert basis.mean is not None


def test_a_basis_makes_the_frames_of_the_next_steps_smaller(make_spec: MakeSpec) -> None:
    def sizes(**train: Any) -> list[int]:
        ends = along_ends(make_spec, **train)
        return [sum(len(f.tensor.payload) for f in ends.step(now)) for now in moving(visits=6)]

    along, plain = sizes(), sizes(forward_codec="aqc0.3", key_codec="qc0.3")
    assert sum(along[2:]) < 0.8 * sum(plain[2:])


def test_direct_frames_go_along_a_basis_of_first_activations(make_spec: MakeSpec) -> None:
    ends = along_ends(make_spec, forward_codec="qk0.3")
    for visit, now in enumerate(moving(visits=3)):
        for frame in ends.step(now):
            assert frame.kind is FrameKind.DIRECT
            assert bool(side_info_needed(frame.tensor)) == (visit > 0)
    assert not len(ends.sender_store)


def test_fill_frames_go_along_the_same_basis(make_spec: MakeSpec) -> None:
    ends = along_ends(make_spec, fill_codec="aqk1", fill_microbatches=1)
    visits = list(moving(visits=4))
    for now in visits[:3]:
        ends.step(now)
    frames = [
        ends.sender.encode(key(0, microbatch=microbatch), visits[3][0]) for microbatch in (0, 1)
    ]
    assert [str(frame.tensor.codec) for frame in frames] == ["aqk1", "aqk0.3"]
    assert side_info_needed(frames[0].tensor) == side_info_needed(frames[1].tensor) != b""
    assert len(frames[0].tensor.payload) < len(frames[1].tensor.payload)


def test_gradients_need_no_basis(make_spec: MakeSpec) -> None:
    ends = along_ends(make_spec)
    for now in moving(visits=3):
        ends.step(now)
    back = ends.receiver.encode(key(0, direction=Direction.BACKWARD), now[0])
    assert side_info_needed(back.tensor) == b""


@pytest.mark.parametrize("as_key", [False, True])
def test_a_frame_whose_basis_is_not_here_is_broken_and_leaves_all_as_it_was(
    make_spec: MakeSpec, as_key: bool
) -> None:
    ends = along_ends(make_spec)
    visits = list(moving(visits=5))
    for now in visits[:4]:
        ends.step(now)
    frame = encoded(ends.sender, key(0), visits[4][0], as_key=as_key)
    other = next(
        basis
        for name, basis in ends.received_bases.items()
        if name != side_info_needed(frame.tensor)
    )
    for wrong in (None, other):
        with pytest.raises(BadFrame, match="basis"):
            ends.receiver.decode(frame, wrong)
    assert not ends.receiver_store.staged
    assert isinstance(ends.carry(frame), torch.Tensor)


def test_a_lost_buffer_is_repaired_along_the_basis_of_first_activations(
    make_spec: MakeSpec,
) -> None:
    ends = along_ends(make_spec)
    visits = list(moving(visits=5))
    for now in visits[:3]:
        ends.step(now)
    put(ends.receiver_store, received(0), ends.receiver_store.record_of(received(1)))
    delta = ends.sender.encode(key(0), visits[3][0])
    assert isinstance(ends.carry(delta), Refusal)
    again = ends.sender.encode_again(delta)
    assert again.kind is FrameKind.KEY
    assert side_info_needed(again.tensor) not in (b"", side_info_needed(delta.tensor))
    value = ends.carry(again)
    assert isinstance(value, torch.Tensor)
    ends.commit()
    ends.assert_equal()
    assert (value - visits[3][0]).norm() < 0.2 * visits[3][0].norm()
    assert all(frame.kind is FrameKind.DELTA for frame in ends.step(visits[4]))


def test_a_frame_that_is_made_again_teaches_nothing(make_spec: MakeSpec) -> None:
    """Or what is learned would depend on what the receiver lost."""
    quiet, unlucky = along_ends(make_spec), along_ends(make_spec)
    visits = list(moving(visits=6))
    for now in visits:
        quiet.step(now)
        for sample, x in now.items():
            frame = unlucky.sender.encode(key(sample), x)
            if frame.kind is FrameKind.DELTA and sample == 0:
                unlucky.sender.encode_again(frame)
                frame = unlucky.sender.encode(key(sample), x)
            unlucky.carry(frame)
        unlucky.commit()
    for kind in (TensorKind.FIRST, TensorKind.CHANGE):
        one, other = (ends.bases.get(SideInfoKey(BLOCK, kind)) for ends in (quiet, unlucky))
        assert one is not None
        assert other is not None
        assert one.name == other.name


def test_held_out_samples_teach_nothing(make_spec: MakeSpec) -> None:
    train = {"num_eval_samples": 2, "eval_compression": EvalCompression.ON}
    quiet, evaluating = (along_ends(make_spec, **train) for _ in range(2))
    held_out = quiet.train.num_samples
    names = []
    for now in moving(visits=5):
        for ends in (quiet, evaluating):
            ends.step(now)
        x = 100 * torch.randn(ALONG_TOKENS, ALONG_CHANNELS, generator=torch.manual_seed(1))
        for sample in (held_out, held_out + 1):
            frame = evaluating.sender.encode(key(sample), x)
            assert frame.kind is FrameKind.DIRECT
            assert isinstance(evaluating.carry(frame), torch.Tensor)
            names.append(side_info_needed(frame.tensor))
    for kind in (TensorKind.FIRST, TensorKind.CHANGE):
        one, other = (e.bases.get(SideInfoKey(BLOCK, kind)) for e in (quiet, evaluating))
        assert one is not None
        assert other is not None
        assert one.name == other.name
    assert any(names), "but they are coded along what the others taught"


def test_a_step_that_is_redone_is_coded_along_the_same_basis(make_spec: MakeSpec) -> None:
    quiet, redone = along_ends(make_spec), along_ends(make_spec)
    for now in moving(visits=6):
        frames = quiet.step(now)
        for sample, x in now.items():
            redone.sender.encode(key(sample), x * (1 + sample))
        redone.rollback()
        assert redone.step(now) == frames


def test_a_tensor_that_is_not_finite_teaches_nothing(make_spec: MakeSpec) -> None:
    ends = along_ends(make_spec)
    for now in moving(visits=4):
        ends.step(now)
    before = ends.bases.get(SideInfoKey(BLOCK, TensorKind.CHANGE))
    with pytest.raises(NonFinite, match="sample 0"):
        ends.sender.encode(key(0), torch.full((ALONG_TOKENS, ALONG_CHANNELS), torch.nan))
    ends.commit()
    assert ends.bases.next_info(SideInfoKey(BLOCK, TensorKind.CHANGE)) is None
    assert ends.bases.get(SideInfoKey(BLOCK, TensorKind.CHANGE)) is before


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda _: b"x" * 99])
def test_what_is_no_basis_is_refused(make_spec: MakeSpec, change: Callable[[bytes], bytes]) -> None:
    ends = along_ends(make_spec)
    for now in moving(visits=3):
        frames = ends.step(now)
    basis = ends.sender.side_info_of(frames[0])
    assert basis is not None
    assert len(basis.data) <= ends.receiver.max_side_info_bytes
    with pytest.raises(BadFrame, match=r"basis|frame"):
        ends.receiver.read_side_info(change(basis.data))
    with pytest.raises(BadFrame, match=f"over {CHANNELS} channels, got .* over {ALONG_CHANNELS}"):
        Ends(make_spec()).receiver.read_side_info(basis.data)


# ---- gradients beside a codebook that their sender learned


def gradient_ends(make_spec: MakeSpec, **train: Any) -> AlongEnds:
    """The sender is the stage above the boundary."""
    codecs = {"forward_codec": "q4", "key_codec": "q4", "backward_codec": "q2+z+book"}
    return along_ends(make_spec, **(codecs | train))


def gradient_frames(ends: AlongEnds, values: dict[int, torch.Tensor]) -> list[Frame]:
    """Encode a step that is yet to be committed, and decode all of it at the other end."""
    names = {one: key(one, direction=Direction.BACKWARD) for one in values}
    frames = [ends.sender.encode(names[one], x) for one, x in values.items()]
    assert all(isinstance(ends.carry(frame), torch.Tensor) for frame in frames)
    return frames


def test_gradients_are_sent_beside_what_those_of_earlier_steps_taught(
    make_spec: MakeSpec,
) -> None:
    ends, names, announced = gradient_ends(make_spec), [], []
    assert ends.sender.has_side_info(Direction.BACKWARD)
    assert not ends.sender.has_side_info(Direction.FORWARD)
    for now in moving(visits=6):
        frames = gradient_frames(ends, now)
        assert all(frame.kind is FrameKind.DIRECT for frame in frames)
        assert len({side_info_needed(frame.tensor) for frame in frames}) == 1, (
            "one for all of a step"
        )
        names.append(side_info_needed(frames[0].tensor))
        new = [basis.name for basis in ends.sender.new_side_info(Direction.BACKWARD, [])]
        assert new == ([names[-1]] if names[-1] != names[-2:][0] else [])
        announced += [basis.name for basis in ends.sender.next_side_info(Direction.BACKWARD)]
        assert bool(announced) == (len(names) >= 5), "the fourth step makes the second one"
        ends.commit()
    assert not names[0]
    assert names[1] == names[2] == names[3] == names[4] != names[5]
    assert [names[5]] == announced
    assert ends.bases.get(SideInfoKey(BLOCK, TensorKind.FIRST)) is None
    assert len(ends.sender_store) == len(ends.receiver_store) == 0, "nothing is kept of samples"


def test_gradients_of_a_step_that_is_redone_are_the_same_bytes(make_spec: MakeSpec) -> None:
    quiet, redone = gradient_ends(make_spec), gradient_ends(make_spec)
    for now in moving(visits=6):
        expected = gradient_frames(quiet, now)
        gradient_frames(redone, {sample: -x for sample, x in now.items()})
        redone.rollback()
        assert [frame.tensor for frame in gradient_frames(redone, now)] == [
            frame.tensor for frame in expected
        ]
        for ends in (quiet, redone):
            ends.commit()


def test_first_gradients_go_beside_a_codebook_and_later_ones_beside_what_is_kept_of_the_last(
    make_spec: MakeSpec,
) -> None:
    ends = gradient_ends(make_spec, backward_codec="q2+z+last")
    assert ends.sender.has_side_info(Direction.BACKWARD)
    early, late = (next(moving(visits=1, first=first)) for first in (0, 3))
    for frame in gradient_frames(ends, early):
        assert frame.kind is FrameKind.KEY
        assert not side_info_needed(frame.tensor), "there is none yet"
    ends.assert_staged_equal()
    ends.commit()
    for frame in gradient_frames(ends, early | late):
        is_first = frame.key.sample in late
        assert frame.kind is (FrameKind.KEY if is_first else FrameKind.DELTA)
        assert bool(side_info_needed(frame.tensor)) == is_first
    ends.assert_staged_equal()
    ends.commit()


def test_a_codec_of_gradients_that_all_wait_for_may_take_a_codebook_alone(
    make_spec: MakeSpec,
) -> None:
    spec = make_spec(backward_codec="q2+z", drain_codec="q1+z+book", drain_microbatches=1)
    assert Ends(spec).receiver.has_side_info(Direction.BACKWARD)
