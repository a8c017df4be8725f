"""All codecs satisfy the contract of `Codec`.

`make test` takes a sample that has every pair of settings, `make test-codecs` all of them.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec import from_spec
from swarm_ft.codec.spec import CodecName, Direction, Feedback, parse_codec_spec
from swarm_ft.codec.tensor import TENSOR_HEADER_BYTES, EncodedTensor
from swarm_ft.errors import BadCodec, BadFrame, NonFinite
from tests.codecs import assert_sender_has_the_value, pairwise, parse, settings_of

# fmt: off
FORWARD = [
    "none", "fp16", "bf16", "none+z", "fp16+z", "bf16+z",
    "q1c", "q2", "q3t", "q4f", "q5c+d", "q6tc", "q7c", "q8t+d", "aq1c", "aq3t", "aq4", "aq4tc+d",
    "aq8f",
    "q1t+z", "q2c+d+z", "q4tc+z", "q8f+z", "aq1.5c+z", "aq3t+d+z", "aq6tc+z",
    "qc0.25", "qc2t+d", "qc1f", "aqc0.5", "aqc0.02tc", "aqc1+d", "qk0.25", "aqk1",
    "top0.5", "top30+z", "aqtop10", "aqtop50+z",
]
BACKWARD = [
    "q2+ef", "qc1+d+ef", "q4+ef21", "q2t+d+ef21+z",
    "q1+z+last", "q2t+last", "qc1+d+last", "top10+last",
    "q2+z+book", "q2t+book", "top10+book",
]
# fmt: on
NAMES = FORWARD + BACKWARD
CODECS = {
    **{name: parse(name) for name in FORWARD},
    **{name: parse(name, Direction.BACKWARD) for name in BACKWARD},
}
DELTAS = [name for name in NAMES if name.startswith("aq") or "ef21" in name or "last" in name]
CHANGES = [name for name in DELTAS if "last" not in name]
"""They send the whole change, whatever the base."""
DIRECT = [name for name in NAMES if name not in DELTAS]
CODED = [n for n in NAMES if "+z" in n or "book" in n or n.startswith(("qc", "aqc", "qk", "aqk"))]
"""Their payloads vary in size."""
MAX_FLOAT = torch.finfo(torch.float32).max
property_test = settings(derandomize=True, deadline=None, max_examples=6)
SAMPLE = pairwise({name: codec.spec for name, codec in CODECS.items()})


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Return the parameter `name`; `make test-codecs` alone has those beyond the sample."""
    marks = {True: [], False: [pytest.mark.codecs]}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks[name in SAMPLE]) for name in names]
    )


every_codec = each(NAMES)


def gaussian(tokens: int, channels: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed)) * scale


def base_for(name: str, x: Tensor) -> Tensor | None:
    """Return a base of x's shape and magnitude for a delta codec."""
    if name not in DELTAS:
        return None
    peak = x.abs().max() if x.numel() else 1.0
    tokens, channels = x.shape
    return gaussian(tokens, channels, seed=99) * peak


KINDS = ["gaussian", "zeros", "constant", "outlier", "octaves", "sparse", "heavy"]


@st.composite
def samples(draw: st.DrawFn) -> Tensor:
    """Odd sizes; magnitudes from denormal to 1e30; zeros, constants, outliers."""
    tokens, channels = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    magnitude = draw(st.sampled_from([1e-44, 1e-38, 1e-30, 1e-8, 1.0, 1e5, 1e30]))
    x = gaussian(tokens, channels, draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(KINDS))
    if kind == "zeros":
        x.zero_()
    elif kind == "constant":
        x.fill_(-1.0)
    elif kind == "outlier":
        x[0, 0] = 1000.0
    elif kind == "octaves":
        x *= 2.0 ** -torch.arange(channels)
    elif kind == "sparse":
        x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.9] = 0.0
    elif kind == "heavy":
        x = x**3
    return x * magnitude


# ---- what was encoded decodes


@every_codec
@given(x=samples())
@property_test
def test_finite_in_is_finite_out_of_the_promised_size_and_shape(name: str, x: Tensor) -> None:
    codec, base = CODECS[name], base_for(name, x)
    encoded = codec.encode(x, base)
    assert (encoded.codec, encoded.tokens, encoded.channels) == (codec.spec, *x.shape)
    assert len(encoded.payload) <= codec.max_payload_bytes(*x.shape)
    assert name in CODED or len(encoded.payload) == codec.max_payload_bytes(*x.shape)
    y = codec.decode(encoded, base)
    assert y.shape == x.shape
    assert y.dtype == torch.float32
    assert y.isfinite().all()


@every_codec
@given(x=samples())
@property_test
def test_a_tensor_is_the_same_after_its_way_over_the_wire(name: str, x: Tensor) -> None:
    codec, base = CODECS[name], base_for(name, x)
    encoded = codec.encode(x, base)
    raw = encoded.to_bytes()
    assert len(raw) == TENSOR_HEADER_BYTES + len(encoded.payload)
    arrived = EncodedTensor.from_bytes(raw)
    assert arrived == encoded
    ours, theirs = codec.decode(encoded, base), from_spec(arrived.codec).decode(arrived, base)
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@every_codec
@given(x=samples())
@property_test
def test_the_sender_has_the_value_that_the_receiver_reads(name: str, x: Tensor) -> None:
    assert_sender_has_the_value(CODECS[name], x, base_for(name, x))


@every_codec
@given(x=samples(), other=samples())
@settings(property_test, max_examples=3)
def test_a_codec_remembers_nothing(name: str, x: Tensor, other: Tensor) -> None:
    codec, base = CODECS[name], base_for(name, x)
    before = codec.encode(x, base)
    codec.decode(codec.encode(other, base_for(name, other)), base_for(name, other))
    assert codec.encode(x, base) == before


@every_codec
def test_every_codec_brings_much_of_a_sample_over(name: str) -> None:
    # Something of low rank, and noise, so that all kinds of codecs find what they are made for.
    codec, x = (
        CODECS[name],
        gaussian(64, 2) @ gaussian(2, 48, seed=1) + gaussian(64, 48, seed=2) / 2,
    )
    change = gaussian(64, 2, seed=3) @ gaussian(2, 48, seed=4)
    base = x + change if name in DELTAS else None
    y = codec.decode(codec.encode(x, base), base)
    assert (y - x).norm() < 0.95 * (x if base is None else change).norm()


@every_codec
def test_strides_and_autograd_of_the_input_do_not_matter(name: str) -> None:
    codec, x = CODECS[name], gaussian(6, 4)
    base = base_for(name, x)
    strided = x.T.contiguous().T.requires_grad_()
    assert not strided.is_contiguous()
    strided_base = None if base is None else base.T.contiguous().T.requires_grad_()
    encoded = codec.encode(strided, strided_base)
    assert encoded == codec.encode(x, base)
    y = codec.decode(encoded, strided_base)
    assert not y.requires_grad
    assert torch.equal(y, codec.decode(encoded, base))


@every_codec
def test_neither_end_changes_what_it_was_given(name: str) -> None:
    codec, x = CODECS[name], gaussian(6, 4)
    base = base_for(name, x)
    kept_x, kept_base = x.clone(), None if base is None else base.clone()
    encoded = codec.encode(x, base)
    y = codec.decode(encoded, base)
    y.mul_(2)  # and what comes out is the caller's own
    codec.encode_and_decode(x, base)[1].mul_(2)
    assert torch.equal(codec.decode(encoded, base) * 2, y)
    assert torch.equal(x, kept_x)
    if base is not None and kept_base is not None:
        assert torch.equal(base, kept_base)


# ---- what nobody encoded


def assert_refused_or_finite(name: str, encoded: EncodedTensor, base: Tensor | None) -> bool:
    """Return whether a payload is decoded; only BadFrame may be raised."""
    try:
        y = CODECS[name].decode(encoded, base)
    except BadFrame:
        return False
    assert y.shape == (encoded.tokens, encoded.channels)
    assert y.isfinite().all()
    return True


@every_codec
@given(seed=st.integers(0, 1 << 30), tokens=st.integers(1, 9), channels=st.integers(1, 9))
@property_test
def test_random_bytes_are_refused_or_decode_to_finite_values(
    name: str, seed: int, tokens: int, channels: int
) -> None:
    codec, random = CODECS[name], Random(seed)
    x = gaussian(tokens, channels)
    base = base_for(name, x)
    honest = codec.encode(x, base)
    largest = codec.max_payload_bytes(tokens, channels)
    noise = random.randbytes(largest)
    starts = [0, 1, 2, 6, 10, 14, len(honest.payload) // 2]
    for payload in (
        noise,
        noise[: random.randint(0, largest)],
        *(honest.payload[:kept] + noise[kept : len(honest.payload)] for kept in starts),
    ):
        assert_refused_or_finite(name, replace(honest, payload=payload), base)


@every_codec
@given(x=samples(), seed=st.integers(0, 1 << 30))
@property_test
def test_payloads_with_bits_flipped_are_refused_or_decode_to_finite_values(
    name: str, x: Tensor, seed: int
) -> None:
    base, random = base_for(name, x), Random(seed)
    honest = CODECS[name].encode(x, base)
    for _ in range(4):
        payload = bytearray(honest.payload)
        for _ in range(random.choice([1, 1, 3])):
            # Headers and tables come first, so the first bytes are hit as often as all others.
            end = random.choice([min(24, len(payload)), len(payload)])
            payload[random.randrange(end)] ^= 1 << random.randrange(8)
        assert_refused_or_finite(name, replace(honest, payload=bytes(payload)), base)


@every_codec
@given(x=samples(), data=st.data())
@property_test
def test_payloads_that_are_cut_or_lengthened_are_refused(
    name: str, x: Tensor, data: st.DataObject
) -> None:
    base = base_for(name, x)
    honest = CODECS[name].encode(x, base)
    cut = data.draw(st.integers(0, len(honest.payload) - 1))
    tail = data.draw(st.binary(min_size=1, max_size=4))
    for payload in (honest.payload[:cut], honest.payload[:-1], honest.payload + tail):
        with pytest.raises(BadFrame):
            CODECS[name].decode(replace(honest, payload=payload), base)


@every_codec
def test_headers_that_lie_are_refused(name: str) -> None:
    codec, x = CODECS[name], gaussian(5, 3)
    base = base_for(name, x)
    good = codec.encode(x, base)
    for lie in (
        replace(good, codec=parse_codec_spec("q5tc", Direction.FORWARD)),
        replace(good, tokens=6),
        replace(good, channels=9),
        replace(good, tokens=1, channels=1),
        replace(good, tokens=-5, channels=-3),
        replace(good, tokens=0),
        replace(good, channels=0),
        replace(good, payload=b""),
    ):
        with pytest.raises(BadFrame, match=r"^(frame|base): "):
            codec.decode(lie, base)


@every_codec
def test_the_same_payload_under_another_flag_is_not_read(name: str) -> None:
    spec, x = CODECS[name].spec, gaussian(5, 3)
    base = base_for(name, x)
    good = CODECS[name].encode(x, base)
    for other in (
        replace(spec, entropy=not spec.entropy),
        replace(spec, dither=not spec.dither),
        replace(spec, feedback=Feedback.EF if not spec.feedback else Feedback.NONE),
        replace(spec, hundredths=spec.hundredths + 100),
    ):
        with pytest.raises(BadFrame, match="expected codec"):
            CODECS[name].decode(replace(good, codec=other), base)


# ---- what cannot be encoded


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@every_codec
def test_values_that_are_not_finite_are_not_encoded(name: str, bad: float) -> None:
    x = gaussian(7, 3)
    x[4, 1] = bad
    with pytest.raises(NonFinite, match="finite"):
        CODECS[name].encode(x, base_for(name, gaussian(7, 3)))


NO_SAMPLES = [
    torch.zeros(3),
    torch.zeros(2, 3, 4),
    torch.zeros(0, 4),
    torch.zeros(4, 0),
    torch.zeros(2, 2, dtype=torch.float64),
    torch.zeros(2, 2, dtype=torch.float16),
    torch.zeros(2, 2, dtype=torch.int32),
]


@every_codec
def test_anything_but_one_float32_sample_is_not_encoded(name: str) -> None:
    for x in NO_SAMPLES:
        with pytest.raises(BadFrame, match="one at a time"):
            CODECS[name].encode(x)


# ---- bases


@each(DIRECT)
def test_codecs_that_build_on_nothing_refuse_a_base(name: str) -> None:
    codec, x = CODECS[name], gaussian(2, 2)
    with pytest.raises(BadFrame, match="no base"):
        codec.encode(x, x)
    with pytest.raises(BadFrame, match="no base"):
        codec.decode(codec.encode(x), x)


@each(DELTAS)
def test_a_missing_base_is_refused_at_both_ends(name: str) -> None:
    codec, x = CODECS[name], gaussian(3, 2)
    with pytest.raises(BadFrame, match="key frame"):
        codec.encode(x)
    with pytest.raises(BadFrame, match="key frame"):
        codec.decode(codec.encode(x, x))


@each(DELTAS)
def test_a_base_of_another_shape_or_type_is_refused_at_both_ends(name: str) -> None:
    codec, x = CODECS[name], gaussian(3, 2)
    encoded = codec.encode(x, x)
    for base in (torch.zeros(2, 3), torch.zeros(6), torch.zeros(3, 2).double()):
        with pytest.raises(BadFrame, match="base: expected"):
            codec.encode(x, base)
        with pytest.raises(BadFrame, match="base: expected"):
            codec.decode(encoded, base)


@each(CHANGES)
def test_a_change_beyond_float32_is_not_encoded(name: str) -> None:
    x = torch.full((2, 2), MAX_FLOAT)
    with pytest.raises(NonFinite):
        CODECS[name].encode(x, -x)


@each(DELTAS)
def test_a_base_that_is_not_finite_is_not_built_on(name: str) -> None:
    x, base = gaussian(3, 2), torch.full((3, 2), torch.nan)
    with pytest.raises(NonFinite):
        CODECS[name].encode(x, base)


@each(CHANGES)
def test_a_change_that_takes_the_base_out_of_range_is_refused(name: str) -> None:
    codec, base = CODECS[name], torch.full((40, 40), MAX_FLOAT)
    upward = codec.encode(base / 2, torch.zeros(40, 40))
    with pytest.raises(BadFrame, match="finite"):
        codec.decode(upward, base)


# ---- names


def test_none_keeps_every_bit() -> None:
    codec = parse("none")
    patterns = torch.randint(-(2**31), 2**31 - 1, (50, 40), generator=torch.manual_seed(0))
    x = patterns.to(torch.int32).view(torch.float32)
    x = torch.where(x.isfinite(), x, 0.0)
    for name in ("none", "none+z"):
        y = CODECS[name].decode(CODECS[name].encode(x))
        assert torch.equal(y.view(torch.int32), x.view(torch.int32))
    assert codec.max_payload_bytes(50, 40) == 8000


@every_codec
def test_names_lead_to_codecs_and_back(name: str) -> None:
    codec = CODECS[name]
    direction = Direction.BACKWARD if name in BACKWARD else Direction.FORWARD
    assert parse(str(codec.spec), direction) == codec
    assert from_spec(codec.spec) == codec


def test_the_sample_has_every_pair_of_settings_and_is_smaller_than_all() -> None:
    pairs = {name: set(combinations(settings_of(codec.spec), 2)) for name, codec in CODECS.items()}
    in_sample = set().union(*(pairs[name] for name in SAMPLE))
    assert in_sample == set().union(*pairs.values())
    assert {CODECS[name].spec.name for name in SAMPLE} == set(CodecName)
    assert 3 * len(SAMPLE) <= 2 * len(NAMES)


def test_every_family_is_here() -> None:
    assert {codec.spec.name for codec in CODECS.values()} == set(CodecName)
    assert {codec.spec.feedback for codec in CODECS.values()} == set(Feedback)


@pytest.mark.parametrize("text", ["q0", "q9", "aq", "int8", "", "q4+ef"])
def test_what_is_no_codec_is_not_made(text: str) -> None:
    with pytest.raises(BadCodec):
        parse(text)


def test_sizes_on_the_wire_are_a_seventh_and_under_a_quarter() -> None:
    assert parse("aq4c").max_payload_bytes(128, 64) == 4096 + 128 <= 4300
    assert parse("q8c").max_payload_bytes(128, 64) == 8192 + 128 <= 8500
    assert parse("fp16").max_payload_bytes(128, 64) == 16384 + 2
