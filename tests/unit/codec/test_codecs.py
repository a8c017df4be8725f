"""What holds for every codec: sizes, errors, hostile payloads."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.codec import KEY_CODEC, from_spec, parse
from swarm_ft.errors import BadCodec, BadFrame, NonFinite
from swarm_ft.protocol.codec_spec import CodecName, CodecSpec, Direction
from swarm_ft.protocol.frame import EncodedTensor

NAMES = ["none", "fp16", *(f"q{b}" for b in range(2, 9)), *(f"aq{b}" for b in range(2, 9))]
DIRECT = [name for name in NAMES if not name.startswith("aq")]
property_test = settings(derandomize=True, deadline=None, max_examples=40)


def gaussian(tokens, channels, seed=0, scale=1.0):
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed)) * scale


def base_for(name, x):
    return gaussian(*x.shape, seed=99) if name.startswith("aq") else None


@st.composite
def samples(draw):
    """Odd sizes, any magnitude from denormal to 1e30; zeros, constants, outliers."""
    tokens, channels = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    magnitude = draw(st.sampled_from([1e-44, 1e-38, 1e-30, 1e-8, 1.0, 1e5, 1e30]))
    x = gaussian(tokens, channels, draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["gaussian", "zeros", "constant", "outlier", "mixed"]))
    if kind == "zeros":
        x.zero_()
    elif kind == "constant":
        x.fill_(-1.0)
    elif kind == "outlier":
        x[0, 0] = 1000.0
    elif kind == "mixed":
        x *= 10.0 ** -torch.arange(channels)
    return x * magnitude


@pytest.mark.parametrize("name", NAMES)
@given(x=samples())
@property_test
def test_finite_in_is_finite_out_of_the_promised_size_and_shape(name, x):
    codec, base = parse(name), base_for(name, x)
    encoded = codec.encode(x, base)
    assert (encoded.codec, encoded.tokens, encoded.channels) == (codec.spec, *x.shape)
    assert len(encoded.payload) == codec.payload_bytes(*x.shape)
    y = codec.decode(encoded, base)
    assert y.shape == x.shape
    assert y.dtype == torch.float32
    assert y.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1 << 30), tokens=st.integers(1, 5))
@property_test
def test_random_bytes_are_refused_or_decode_to_finite_values(name, seed, tokens):
    codec = parse(name)
    x = gaussian(tokens, 3)
    honest = codec.encode(x, base_for(name, x)).payload
    noise = Random(seed).randbytes(len(honest))
    for kept in (0, 2, 6):
        payload = honest[:kept] + noise[kept:]
        try:
            y = codec.decode(EncodedTensor(codec.spec, tokens, 3, payload), base_for(name, x))
        except BadFrame:
            continue
        assert y.isfinite().all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_finite_are_not_encoded(name, bad):
    x = gaussian(7, 3)
    x[4, 1] = bad
    with pytest.raises(NonFinite, match="finite"):
        parse(name).encode(x, base_for(name, x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3),
        torch.zeros(2, 3, 4),
        torch.zeros(0, 4),
        torch.zeros(4, 0),
        torch.zeros(2, 2, dtype=torch.float64),
    ],
)
def test_anything_but_one_float32_sample_is_not_encoded(name, x):
    with pytest.raises(BadFrame, match="one at a time"):
        parse(name).encode(x)


@pytest.mark.parametrize("name", NAMES)
def test_headers_that_lie_are_refused(name):
    codec, x = parse(name), gaussian(5, 3)
    base = base_for(name, x)
    good = codec.encode(x, base)
    other = CodecSpec(CodecName.Q, 5) if name != "q5" else CodecSpec(CodecName.Q, 6)
    for lie in (
        replace(good, codec=other),
        replace(good, tokens=6),
        replace(good, tokens=-5, channels=-3),
        replace(good, tokens=0),
        replace(good, payload=good.payload + b"\0"),
        replace(good, payload=good.payload[:-1]),
        replace(good, payload=b""),
    ):
        with pytest.raises(BadFrame, match=r"expected|takes"):
            codec.decode(lie, base)


@pytest.mark.parametrize("name", DIRECT)
def test_codecs_that_build_on_nothing_refuse_a_base(name):
    codec, x = parse(name), gaussian(2, 2)
    with pytest.raises(BadFrame, match="no base"):
        codec.encode(x, x)
    with pytest.raises(BadFrame, match="no base"):
        codec.decode(codec.encode(x), x)


@pytest.mark.parametrize("name", NAMES)
def test_strides_and_autograd_of_the_input_do_not_matter(name):
    codec, x = parse(name), gaussian(6, 4)
    base = base_for(name, x)
    strided = x.T.contiguous().T.requires_grad_()
    encoded = codec.encode(strided, base)
    assert encoded == codec.encode(x, base)
    assert not codec.decode(encoded, base).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_neither_end_changes_what_it_was_given(name):
    codec, x = parse(name), gaussian(6, 4)
    base = base_for(name, x)
    kept_x, kept_base = x.clone(), None if base is None else base.clone()
    encoded = codec.encode(x, base)
    assert torch.equal(codec.decode(encoded, base), codec.decode(encoded, base))
    assert torch.equal(x, kept_x)
    assert base is None or torch.equal(base, kept_base)


@pytest.mark.parametrize("name", NAMES)
@given(x=samples(), power=st.integers(-40, 40))
@settings(property_test, max_examples=20)
def test_one_samples_outlier_leaves_anothers_bytes_alone(name, x, power):
    codec, base = parse(name), base_for(name, x)
    before = codec.encode(x, base)
    codec.encode(x.clamp(-1, 1) * 2.0**power, base)
    assert codec.encode(x, base) == before


@given(x=samples())
@property_test
def test_none_keeps_every_bit(x):
    y = parse("none").decode(parse("none").encode(x))
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))


def test_names_lead_to_codecs_and_back():
    for name in NAMES:
        codec = parse(name)
        assert str(codec.spec) == name
        assert from_spec(codec.spec) == codec
    assert parse("fp16") == KEY_CODEC


def test_unknown_names_and_buffered_gradients_are_bad_codecs():
    for text in ("q1", "q9", "aq", "int8", ""):
        with pytest.raises(BadCodec):
            parse(text)
    with pytest.raises(BadCodec, match="forward only"):
        parse("aq4", Direction.BACKWARD)


def test_sizes_on_the_wire_are_a_seventh_and_under_a_quarter():
    assert parse("aq4").payload_bytes(128, 64) == 4096 + 128 <= 4300
    assert parse("q8").payload_bytes(128, 64) == 8192 + 128 <= 8500
    assert parse("fp16").payload_bytes(128, 64) == 16384 + 2
