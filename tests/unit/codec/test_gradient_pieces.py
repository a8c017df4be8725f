"""Pieces of gradients: any length, one step a row, and error feedback."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.codec.sizes import PIECE_ROWS, ROW_VALUES
from swarm_ft.codec.spec import Direction, parse_codec_spec, parse_dp_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame, NonFinite
from tests.draws import draws

LOSSY = ["fp16", "bf16", "q8", "q4", "q2", "q1", "q4+z", "q2.5+z"]
ALL = ["none", *LOSSY]
property_test = settings(derandomize=True, deadline=None, max_examples=draws(60))


def codec_of(text: str) -> PieceCodec:
    return PieceCodec(parse_dp_spec(text))


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def error(got: Tensor, expected: Tensor) -> float:
    """Return the relative error in float64, because float32 has no squares of 1e-30."""
    return float((got - expected).double().norm() / expected.double().norm())


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 1000])
def test_a_piece_of_any_length_comes_back_in_that_length(text: str, count: int) -> None:
    codec, values = codec_of(text), normal(count)
    piece = codec.encode(values)
    assert (piece.tensor.tokens, piece.tensor.channels) == (-(-count // ROW_VALUES), ROW_VALUES)
    decoded = codec.decode(EncodedTensor.from_bytes(piece.tensor.to_bytes()), count)
    assert decoded.shape == (count,)
    assert torch.equal(decoded, piece.values)


@pytest.mark.parametrize("count", [1, 300])
def test_none_keeps_every_bit_and_owes_nothing(count: int) -> None:
    values = normal(count)
    values[0] = -0.0
    codec = codec_of("none")
    piece = codec.encode(values)
    assert codec.is_exact
    assert piece.residual is None
    assert torch.equal(
        codec.decode(piece.tensor, count).view(torch.int32), values.view(torch.int32)
    )


def test_the_others_are_not_exact() -> None:
    assert not any(codec_of(text).is_exact for text in LOSSY)


@pytest.mark.parametrize("text", ["q4", "q2", "q1"])
def test_the_last_row_is_as_good_as_the_others(text: str) -> None:
    """Padding with zeros would change the row's scale."""
    for count in (1, 5, 64):
        piece = codec_of(text).encode(normal(ROW_VALUES + count, seed=count))
        last = slice(ROW_VALUES, None)
        assert error(piece.values[last], normal(ROW_VALUES + count, seed=count)[last]) < 0.75


@pytest.mark.parametrize("text", ["q8", "q4", "q2"])
def test_rows_of_other_magnitudes_do_not_touch_each_other(text: str) -> None:
    rows = normal(3 * ROW_VALUES).view(3, ROW_VALUES) * torch.tensor([[1.0], [1e-20], [1e20]])
    values = codec_of(text).encode(rows.reshape(-1)).values.view(3, ROW_VALUES)
    errors = [error(values[i], rows[i]) for i in range(3)]
    assert max(errors) < {"q8": 0.01, "q4": 0.15, "q2": 0.4}[text]


@property_test
@given(
    text=st.sampled_from(LOSSY),
    count=st.integers(2, 600),
    exponent=st.integers(-30, 25),
    seed=st.integers(0, 99),
)
def test_what_was_sent_and_what_is_owed_add_up_to_all_values(
    text: str, count: int, exponent: int, seed: int
) -> None:
    codec = codec_of(text)
    sent, given_in = torch.zeros(count, dtype=torch.float64), torch.zeros(count).double()
    residual: Tensor | None = None
    peak = 0.0
    for step in range(5):
        values = normal(count, seed + step) * 10.0**exponent
        piece = codec.encode(values, residual)
        assert bool(torch.isfinite(piece.values).all())
        sent += piece.values.double()
        given_in += values.double()
        residual = piece.residual
        assert residual is not None
        peak = max(peak, float(values.abs().max()), float(residual.abs().max()))
    assert residual is not None
    # Two roundings of float32 a step, each relative to what is added up.
    assert float((sent + residual.double() - given_in).abs().max()) <= 5 * 2 * 2.0**-23 * 2 * peak


@pytest.mark.parametrize("text", LOSSY)
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-30])
def test_the_sum_over_twenty_steps_errs_an_order_less_than_one_step(
    text: str, scale: float
) -> None:
    """Includes values that the published code, with float16, never sends."""
    codec, values = codec_of(text), normal(2000) * scale
    single = error(codec.encode(values).values, values)
    residual, sent = None, torch.zeros(2000)
    for _ in range(20):
        piece = codec.encode(values, residual)
        residual = piece.residual
        sent += piece.values
    assert 0 < error(sent, 20 * values) < single / (3 if text == "q1" else 8)
    without = 20 * codec.encode(values).values
    assert error(without, 20 * values) == pytest.approx(single, rel=1e-3)


def test_values_and_residual_are_not_written_to() -> None:
    values, residual = normal(300), normal(300, seed=1)
    kept = values.clone(), residual.clone()
    codec_of("q4").encode(values, residual)
    codec_of("none").encode(values)
    assert torch.equal(values, kept[0])
    assert torch.equal(residual, kept[1])


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_not_sent(text: str, bad: float) -> None:
    values = normal(300)
    values[299] = bad
    with pytest.raises(NonFinite):
        codec_of(text).encode(values)


# ---- hostile pieces


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"codec": parse_dp_spec("q5")}, "expected q4t, the run's --dp, got q5t"),
        ({"codec": parse_codec_spec("q4c", Direction.BACKWARD)}, "expected q4t"),
        ({"tokens": PIECE_ROWS + 1}, "at most 2048 x 128, got 2049 x 128"),
        ({"channels": 127}, "got 3 x 127"),
        ({"payload": bytes(199)}, "expected 198 bytes at most, got 199"),
    ],
    ids=str,
)
def test_a_tensor_that_can_be_no_piece_is_refused_before_it_is_read(
    change: dict[str, Any], match: str
) -> None:
    codec = codec_of("q4")
    tensor = codec.encode(normal(300)).tensor
    codec.check(tensor)
    fields = {name: getattr(tensor, name) for name in EncodedTensor.__dataclass_fields__}
    with pytest.raises(BadFrame, match=match):
        codec.check(EncodedTensor(**fields | change))


def test_a_piece_of_another_length_is_refused() -> None:
    codec = codec_of("q4")
    tensor = codec.encode(normal(300)).tensor
    for count in (256, 385):
        with pytest.raises(BadFrame, match="got 3 x 128"):
            codec.decode(tensor, count)


@property_test
@given(text=st.sampled_from(ALL), noise=st.binary(max_size=64), at=st.integers(0, 200))
def test_any_bytes_decode_to_finite_values_or_are_refused(text: str, noise: bytes, at: int) -> None:
    codec = codec_of(text)
    tensor = codec.encode(normal(300)).tensor
    payload = tensor.payload[:at] + noise + tensor.payload[at + len(noise) :]
    try:
        values = codec.decode(
            EncodedTensor(tensor.codec, tensor.tokens, tensor.channels, payload), 300
        )
    except BadFrame:
        return
    assert bool(torch.isfinite(values).all())
