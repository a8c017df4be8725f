"""Gradients coded with a codebook: learning, rates, both ends, hostile bytes."""

import contextlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec import codebook as codebook_module
from swarm_ft.codec.base import Codec
from swarm_ft.codec.basis import MOST_ENTRY_BITS, Basis, learn_basis
from swarm_ft.codec.codebook import LEAST_ROWS, SIZE_BITS, CodebookCodec, learn_codebook
from swarm_ft.codec.kernels.base import packed_bytes
from swarm_ft.codec.side_info import NAME_BYTES, PLAIN
from swarm_ft.codec.spec import Direction
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame, NonFinite
from tests.codecs import assert_sender_has_the_value, parse
from tests.draws import draws

CPU = torch.device("cpu")
CHANNELS, TARGETS = 48, 16
FRAME_BYTES = 80
"""Of a frame beside its tensor."""
NAMES = ["q1+z+book", "q3t+z+book", "q2t+book", "qc0.5+d+book", "top20+book", "fp16+book"]
every_name = pytest.mark.parametrize("name", NAMES)
property_test = settings(derandomize=True, deadline=None, max_examples=draws(15))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def directions(channels: int = CHANNELS) -> Tensor:
    """Return one unit vector for each target, float32 [targets, channels]."""
    drawn = torch.randn(TARGETS, channels, generator=generator(7))
    return torch.nn.functional.normalize(drawn, dim=1)


def gradients(tokens: int, seed: int = 0, noise: float = 0.3, channels: int = CHANNELS) -> Tensor:
    """Return vectors along targets' directions with sizes over three octaves, plus noise."""
    drawn = generator(seed)
    targets = torch.randint(TARGETS, (tokens,), generator=drawn)
    sizes = torch.exp2(3 * torch.rand(tokens, generator=drawn))[:, None]
    beside = torch.randn(tokens, channels, generator=drawn) / math.sqrt(channels)
    return sizes * (directions(channels)[targets] + noise * beside)


def taught(rows: Tensor) -> Basis:
    basis = learn_codebook([rows])
    assert basis is not None
    return basis


def book(channels: int = CHANNELS, count: int = 512) -> Basis:
    return taught(gradients(count, seed=1, channels=channels))


def codec_of(name: str, basis: Basis | None = None) -> CodebookCodec:
    codec = parse(name, Direction.BACKWARD)
    assert isinstance(codec, CodebookCodec)
    return codec.with_side_info(basis)


def error(codec: Codec, x: Tensor) -> float:
    """Return the squared error relative to x's square."""
    return float((codec.decode(codec.encode(x)) - x).square().sum() / x.square().sum())


# ---- what is learned


def test_the_directions_of_known_targets_are_entries() -> None:
    entries = book().entries(CPU)
    assert torch.allclose(entries.norm(dim=1), torch.ones(len(entries)), atol=0.15)
    nearest = (torch.nn.functional.normalize(entries, dim=1) @ directions().T).max(0).values
    assert (nearest > 0.93).sum() >= TARGETS - 2, "two of them may share one"


def test_sizes_of_rows_change_no_direction() -> None:
    rows = gradients(512)
    assert taught(rows).data == taught(rows * 2.0**40).data == taught(rows * 2.0**-60).data


@pytest.mark.parametrize(("rows", "entries"), [(64, 16), (127, 16), (128, 32), (9000, 1024)])
def test_as_many_entries_as_there_are_rows_for(rows: int, entries: int) -> None:
    codebook = taught(torch.randn(rows, 8, generator=generator(2))).codebook
    assert codebook is not None
    assert len(codebook.codes) == entries == 1 << codebook.bits


def test_of_few_rows_nothing_is_learned_nor_of_silent_ones() -> None:
    assert learn_codebook([gradients(LEAST_ROWS - 1)]) is None
    rows = gradients(LEAST_ROWS)
    rows[5] = 0
    assert learn_codebook([rows]) is None
    assert learn_codebook([torch.zeros(500, CHANNELS)]) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_rows_that_are_not_finite_teach_nothing(value: float) -> None:
    rows = gradients(512)
    rows[3] = value
    assert learn_codebook([rows]) is None


def test_rows_of_one_direction_make_a_codebook_all_the_same() -> None:
    row = torch.randn(1, CHANNELS, generator=generator(3))
    basis = taught(row.repeat(200, 1))
    assert basis.directions == 1
    cosines = torch.cosine_similarity(basis.entries(CPU), row)
    assert cosines.min() > 0.97


def test_equal_rows_have_equal_codebooks_and_no_global_numbers_are_drawn() -> None:
    names = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        names.add(book().name)
        assert torch.equal(torch.random.get_rng_state(), torch.manual_seed(seed).get_state())
    assert len(names) == 1


def test_entries_are_exact() -> None:
    basis = book()
    assert basis.codebook is not None
    rows = basis.coefficients.double() * 2.0 ** -basis.exponents.double()[:, None]
    exact = basis.codebook.codes.double() @ rows
    assert torch.equal(exact.float().double(), exact), "below 2^24, so that no order rounds it"
    assert torch.equal(basis.entries(CPU), exact.float() * basis.codebook.scale)
    assert basis.entries(CPU) is basis.entries(CPU), "computed once"


def test_a_basis_without_one_has_no_entries() -> None:
    plain = learn_basis([torch.randn(64, CHANNELS)], 0.1)
    assert plain is not None
    with pytest.raises(BadFrame, match="no codebook"):
        plain.entries(CPU)


# ---- what it is worth


def test_what_entries_tell_is_kept_and_of_dither_what_is_sure() -> None:
    x, codec = gradients(256, seed=5), codec_of("q0.7+z+book", book())
    encoded, value = codec.encode_and_decode(x)
    kept = codec.next_base(encoded, value)
    assert (kept - x).square().sum() < 0.7 * (value - x).square().sum()
    assert (kept - x).square().sum() < (told(codec, x) - x).square().sum()
    plain = codec_of("q0.7+z+book")
    encoded, value = plain.encode_and_decode(x)
    assert torch.equal(plain.next_base(encoded, value), value), "of a frame that no entry told of"


@pytest.mark.parametrize("name", ["q1+z", "q2+z", "q2t", "qc0.5"])
def test_what_entries_tell_need_not_be_sent(name: str) -> None:
    x, basis = gradients(256, seed=5), book()
    plain, with_entries = parse(name, Direction.BACKWARD), codec_of(f"{name}+book", basis)
    if name == "qc0.5":
        sizes = [len(codec.encode(x).payload) for codec in (plain, with_entries)]
        assert sizes[1] < 1.1 * sizes[0]
    assert error(with_entries, x) < error(plain, x) / 2


@pytest.mark.parametrize("channels", [32, 128, 600])
def test_entries_and_sizes_are_part_of_the_rate(channels: int) -> None:
    x, basis = gradients(256, channels=channels), book(channels)
    encoded = codec_of("q2+z+book", basis).encode(x)
    assert 0.96 * 2 <= (len(encoded.to_bytes()) + FRAME_BYTES) * 8 / x.numel() <= 1.01 * 2


def told(codec: CodebookCodec, x: Tensor) -> Tensor:
    """Return the entries' part of x's frame."""
    assert codec.basis is not None
    assert codec.basis.codebook is not None
    payload = codec.encode(x).payload[NAME_BYTES:]
    share, _ = codebook_module._read_share(payload, len(x), codec.basis, CPU)  # noqa: SLF001
    return share


def test_sizes_are_the_nearest_of_half_octaves() -> None:
    basis = book()
    entry = basis.entries(CPU)[3]
    octaves = torch.tensor([0.0, 0.2, 0.5, 1.0, 3.3, 6.9, 7.4, 20.0])
    share = told(codec_of("fp16+book", basis), entry * torch.exp2(-octaves)[:, None])
    expected = torch.exp2(-(2 * octaves).round() / 2)
    expected[octaves > 7] = 0
    assert torch.allclose((share @ entry) / entry.square().sum(), expected, rtol=0.01)


def test_of_what_points_away_from_all_entries_they_tell_nothing() -> None:
    basis = taught(directions()[:1].repeat(100, 1) + 1e-3 * gradients(100))
    codec, x = codec_of("q8t+book", basis), -directions()[:1].repeat(8, 1)
    assert not told(codec, x).any()
    assert error(codec, x) < 1e-3


# ---- both ends


@every_name
@given(
    tokens=st.integers(1, 40),
    seed=st.integers(0, 1000),
    magnitude=st.sampled_from([0.0, 1e-44, 1e-30, 1e-4, 1.0, 1e5, 1e30]),
    is_known=st.booleans(),
)
@property_test
def test_both_ends_hold_the_same_values(
    name: str, tokens: int, seed: int, magnitude: float, is_known: bool
) -> None:
    basis = book() if is_known else None
    sender = codec_of(name, basis)
    receiver = codec_of(name, Basis.from_bytes(basis.data, CHANNELS) if basis else None)
    x = gradients(tokens, seed) * magnitude
    encoded = sender.encode(x)
    assert len(encoded.payload) <= sender.max_payload_bytes(tokens, CHANNELS)
    assert_sender_has_the_value(sender, x, None)
    theirs = receiver.decode(EncodedTensor.from_bytes(encoded.to_bytes()))
    assert torch.equal(sender.decode(encoded), theirs)


@every_name
def test_without_a_codebook_it_is_the_codec_alone(name: str) -> None:
    x = gradients(16)
    plain = parse(name.replace("+book", ""), Direction.BACKWARD).encode(x).payload
    first_activations = learn_basis([x], 0.1)
    for basis in (None, first_activations):
        assert codec_of(name, basis).encode(x).payload == PLAIN + plain


@pytest.mark.parametrize("bits", range(1, MOST_ENTRY_BITS + 1))
@pytest.mark.parametrize("tokens", [1, 8, 13, 100])
def test_numbers_and_levels_and_back(bits: int, tokens: int) -> None:
    drawn = np.random.default_rng(bits)
    numbers = drawn.integers(0, 1 << bits, tokens)
    levels = drawn.integers(0, 1 << SIZE_BITS, tokens).astype(np.uint8)
    packed = codebook_module._packed(numbers, levels, bits)  # noqa: SLF001
    assert len(packed) == packed_bytes(tokens, bits + SIZE_BITS)
    found = codebook_module._unpacked(packed, tokens, bits)  # noqa: SLF001
    assert found[0].tolist() == numbers.tolist()
    assert found[1].tolist() == levels.tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_known", [False, True])
def test_gradients_that_are_not_finite_are_not_encoded(value: float, is_known: bool) -> None:
    x = gradients(8)
    x[2, 3] = value
    with pytest.raises(NonFinite):
        codec_of("q2t+book", book() if is_known else None).encode(x)


# ---- hostile payloads


def honest(name: str = "q2t+book") -> tuple[CodebookCodec, EncodedTensor]:
    codec = codec_of(name, book())
    return codec, codec.encode(gradients(9))


def forged(encoded: EncodedTensor, payload: bytes) -> EncodedTensor:
    return EncodedTensor(encoded.codec, encoded.tokens, encoded.channels, payload)


@every_name
def test_every_cut_is_refused(name: str) -> None:
    codec, encoded = honest(name)
    for end in range(len(encoded.payload)):
        with pytest.raises(BadFrame):
            codec.decode(forged(encoded, encoded.payload[:end]))


@pytest.mark.parametrize("bits", [0x7F80, 0x7FC0, 0xFF80, 0xBF80, 0x0000, 0x0001, 0x7F7F])
def test_sizes_that_no_encoder_says_are_refused(bits: int) -> None:
    codec, encoded = honest()
    payload = encoded.payload[:NAME_BYTES] + bits.to_bytes(2, "little")
    with pytest.raises(BadFrame, match="sizes up to"):
        codec.decode(forged(encoded, payload + encoded.payload[NAME_BYTES + 2 :]))


def test_another_basis_than_the_frame_names_is_refused_and_one_without_a_codebook() -> None:
    codec, encoded = honest()
    plain = learn_basis([gradients(64)], 0.1)
    assert plain is not None
    for basis in (None, plain, taught(gradients(512, seed=8))):
        with pytest.raises(BadFrame, match="which this end does not have"):
            codec.with_side_info(basis).decode(encoded)
    payload = plain.name + encoded.payload[NAME_BYTES:]
    with pytest.raises(BadFrame, match="no codebook"):
        codec.with_side_info(plain).decode(forged(encoded, payload))


@given(st.data())
@property_test
def test_altered_bytes_are_refused_or_finite(data: st.DataObject) -> None:
    codec, encoded = honest(data.draw(st.sampled_from(NAMES)))
    at = data.draw(st.integers(0, len(encoded.payload) - 1))
    byte = bytes([data.draw(st.integers(0, 255))])
    payload = encoded.payload[:at] + byte + encoded.payload[at + 1 :]
    with contextlib.suppress(BadFrame):
        assert codec.decode(forged(encoded, payload)).isfinite().all()
