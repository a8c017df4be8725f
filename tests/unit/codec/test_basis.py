"""Learned bases: learning from known rows, rounding, encoding and decoding."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm_ft.codec import basis as basis_module
from swarm_ft.codec import side_info_needed
from swarm_ft.codec.basis import (
    Basis,
    learn_basis,
    max_directions,
)
from swarm_ft.codec.codebook import learn_codebook
from swarm_ft.codec.side_info import NAME_BYTES, PLAIN
from swarm_ft.codec.spec import CodecName, Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadFrame
from tests.draws import draws

CPU = torch.device("cpu")
CHANNELS = 24
property_test = settings(derandomize=True, deadline=None, max_examples=draws(60))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def directions_of(channels: int, count: int, seed: int = 0) -> Tensor:
    """Return an orthonormal float32 [channels, count]."""
    drawn = torch.randn(channels, count, generator=generator(seed), dtype=torch.float64)
    directions: Tensor = torch.linalg.qr(drawn)[0].float()
    return directions


def rows_along(directions: Tensor, spreads: list[float], count: int = 4096) -> Tensor:
    """Return nearly uncorrelated rows with given spreads along directions."""
    drawn = torch.randn(count, len(spreads), generator=generator(9), dtype=torch.float64)
    white = torch.linalg.qr(drawn)[0] * math.sqrt(count)
    rows: Tensor = ((white * torch.tensor(spreads)) @ directions.double().T).float()
    return rows


def found(rows: Tensor, step: float, *, has_mean: bool = False) -> Basis:
    basis = learn_basis([rows], step, has_mean=has_mean)
    assert basis is not None
    return basis


def example_basis(*, has_mean: bool = False) -> Basis:
    rows = rows_along(directions_of(CHANNELS, 5), [8.0, 4.0, 2.0, 1.0, 0.5])
    return found(rows + 3 * has_mean, 0.1, has_mean=has_mean)


# ---- what is learned


def test_the_directions_of_known_rows_are_found_in_the_order_of_their_spreads() -> None:
    directions = directions_of(CHANNELS, 4)
    basis = found(rows_along(directions, [8.0, 4.0, 2.0, 1.0]), 0.1)
    assert (basis.directions, basis.channels) == (4, CHANNELS)
    overlaps = (basis.synthesis(CPU) @ directions).abs()
    assert torch.allclose(overlaps, torch.eye(4), atol=0.08)
    assert basis.mean is None


@pytest.mark.parametrize("step", [1.0, 0.001, 1000.0])
def test_as_many_directions_as_vary_by_more_than_a_share_of_the_step(step: float) -> None:
    """The share is the error of a quantiser, 0.29 steps."""
    directions = directions_of(CHANNELS, 6)
    spreads = [size * step for size in (20.0, 3.0, 1.0, 0.4, 0.2, 0.01)]
    assert found(rows_along(directions, spreads), step).directions == 4
    assert found(rows_along(directions, spreads), 4 * step).directions == 2
    assert learn_basis([rows_along(directions, spreads)], 100 * step, has_mean=False) is None


def test_what_all_rows_share_is_the_mean_where_there_is_one_and_a_direction_where_not() -> None:
    rows = rows_along(directions_of(CHANNELS, 2), [2.0, 1.0])
    common = torch.full((CHANNELS,), 5.0)
    with_mean = found(rows + common, 0.1, has_mean=True)
    without = found(rows + common, 0.1)
    assert with_mean.mean is not None
    assert torch.equal(with_mean.mean, with_mean.mean.bfloat16().float())
    assert torch.allclose(with_mean.mean, (rows + common).mean(0), rtol=2**-8)
    assert (with_mean.directions, without.directions) == (2, 3)
    along = without.synthesis(CPU)[0] @ common / common.norm()
    assert along.abs() > 0.99


def test_wider_directions_have_classes_no_lower_and_all_are_in_their_range() -> None:
    spreads = [2.0**-octave for octave in range(12)]
    classes = found(rows_along(directions_of(CHANNELS, 12), spreads), 1e-4).classes
    assert classes.dtype == torch.uint8
    assert torch.equal(classes, classes.sort(descending=True).values)
    assert 0 == classes.min() < classes.max() <= 7


@pytest.mark.parametrize("has_mean", [False, True])
def test_silence_has_no_basis(has_mean: bool) -> None:
    assert learn_basis([torch.zeros(64, CHANNELS)], 0.1, has_mean=has_mean) is None
    assert learn_basis([torch.zeros(64, CHANNELS)], 0.0, has_mean=has_mean) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("has_mean", [False, True])
@pytest.mark.parametrize("channels", [CHANNELS, 520])
def test_rows_or_a_step_that_are_not_finite_have_none(
    value: float, has_mean: bool, channels: int
) -> None:
    rows = torch.randn(64, channels, generator=generator(0))
    assert learn_basis([rows], value, has_mean=has_mean) is None
    rows[3, 4] = value
    assert learn_basis([rows], 0.1, has_mean=has_mean) is None


@pytest.mark.parametrize("step", [0.0, -1.0])
def test_a_step_of_nothing_has_none(step: float) -> None:
    assert learn_basis([torch.randn(64, CHANNELS)], step, has_mean=False) is None


@pytest.mark.parametrize("channels", [1, CHANNELS, 520])
def test_one_row_is_a_direction_and_around_its_own_mean_nothing(channels: int) -> None:
    row = torch.randn(1, channels, generator=generator(1)) + 1
    basis = found(row, 0.01)
    assert basis.directions == 1
    assert (basis.synthesis(CPU)[0] @ row[0]).abs() == pytest.approx(float(row.norm()), rel=0.05)
    assert learn_basis([row], 1.0, has_mean=True) is None, "but for what the mean is rounded by"


@pytest.mark.parametrize("power", [-60, 40])
def test_powers_of_two_change_no_direction(power: int) -> None:
    rows = rows_along(directions_of(CHANNELS, 3), [4.0, 2.0, 1.0])
    one, other = found(rows, 0.5), found(rows * 2.0**power, 0.5 * 2.0**power)
    assert one.data == other.data


@pytest.mark.parametrize("channels", [CHANNELS, 520])
def test_equal_rows_have_equal_bases_and_no_global_numbers_are_drawn(channels: int) -> None:
    rows = rows_along(directions_of(channels, 6), [9.0, 7.0, 5.0, 3.0, 2.0, 1.0], count=512)
    before = torch.random.get_rng_state()
    names = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        names.add(found(rows, 0.5, has_mean=True).name)
        assert torch.equal(torch.random.get_rng_state(), torch.manual_seed(seed).get_state())
    torch.random.set_rng_state(before)
    assert len(names) == 1


def spectrum(channels: int) -> list[float]:
    """Return spreads that fall slowly, as activations' do: about 300 matter at a step of one."""
    return [200.0 / (1 + i) ** 1.1 for i in range(channels)]


def captured(rows: Tensor, basis: Basis) -> float:
    """Return the share of the rows' energy within the directions' span."""
    left = (
        rows.double() - rows.double() @ basis.analysis(CPU).double() @ basis.synthesis(CPU).double()
    )
    return 1 - float(left.square().sum() / rows.double().square().sum())


def test_beyond_512_channels_it_is_as_good_as_all_eigenvectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = rows_along(directions_of(600, 600), spectrum(600), count=1500)
    quick = found(rows, 1.0)
    monkeypatch.setattr(basis_module, "_WHOLE_CHANNELS", 600)
    exact = found(rows, 1.0)
    assert exact.directions > 200
    assert abs(quick.directions - exact.directions) <= 0.03 * exact.directions
    assert 1 - captured(rows, quick) <= 1.05 * (1 - captured(rows, exact))


def test_beyond_512_channels_few_directions_are_found_exactly() -> None:
    directions = directions_of(700, 3)
    basis = found(rows_along(directions, [4.0, 2.0, 1.0], count=64), 0.5)
    assert basis.directions == 3
    assert torch.allclose((basis.synthesis(CPU) @ directions).abs(), torch.eye(3), atol=0.08)


def test_no_basis_has_more_directions_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_directions(10**6) == basis_module.MAX_DIRECTIONS
    monkeypatch.setattr(basis_module, "MAX_DIRECTIONS", 7)
    rows = torch.randn(256, CHANNELS, generator=generator(3))
    basis = found(rows, 0.01)
    assert basis.directions == max_directions(CHANNELS) == 7


# ---- what is foretold


def samples_of(bases: list[Tensor], noise: float = 0.0) -> list[Tensor]:
    """Return changes that are a linear map of their bases along five directions, plus noise."""
    over, along = directions_of(CHANNELS, 5, seed=21), directions_of(CHANNELS, 5, seed=22)
    beside = torch.linalg.qr(along)[0].T
    return [
        (base @ over) @ beside + noise * torch.randn(len(base), 5, generator=generator(k)) @ beside
        for k, base in enumerate(bases)
    ]


def bases_of(count: int = 6, tokens: int = 80) -> list[Tensor]:
    return [torch.randn(tokens, CHANNELS, generator=generator(100 + k)) for k in range(count)]


def foretelling(noise: float = 0.3) -> Basis:
    bases = bases_of()
    basis = learn_basis(samples_of(bases, noise), 0.01, old_values=bases)
    assert basis is not None
    assert basis.predictor is not None
    return basis


def test_a_map_of_the_bases_is_found_to_rounding_and_noise() -> None:
    basis = foretelling()
    assert basis.predictor is not None
    (base,) = bases_of(1)
    (change,) = samples_of([base])
    scales = 2.0 ** -basis.predictor.exponents.float()
    foretold = base @ (basis.predictor.coefficients.float() * scales) @ basis.synthesis(CPU)
    assert float((foretold - change).norm() / change.norm()) < 0.25
    assert basis.directions == 5, "the span is that of the changes"


def test_what_bases_do_not_tell_is_not_foretold() -> None:
    changes = samples_of(bases_of(), 0.0)
    unrelated = [torch.randn(80, CHANNELS, generator=generator(300 + k)) for k in range(6)]
    basis = learn_basis(changes, 0.01, old_values=unrelated)
    assert basis is not None
    assert basis.predictor is None


def test_of_one_sample_nothing_is_foretold() -> None:
    bases = bases_of(1)
    basis = learn_basis(samples_of(bases), 0.01, old_values=bases)
    assert basis is not None
    assert basis.predictor is None


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e15, 1e25, 3e38, math.inf, math.nan])
def test_bases_of_any_size_end_no_step(value: float) -> None:
    bases = [base.sign() * value for base in bases_of()]
    basis = learn_basis(samples_of(bases_of()), 0.01, old_values=bases)
    assert basis is not None
    if basis.predictor is not None:
        again = Basis.from_bytes(basis.data, CHANNELS)
        assert again.data == basis.data


@pytest.mark.parametrize("value", [1e15, 1e19, 1e25, 1e37])
@pytest.mark.parametrize("channels", [CHANNELS, 520])
def test_rows_of_any_size_end_no_step(value: float, channels: int) -> None:
    rows = torch.randn(64, channels, generator=generator(4)) * value
    basis = learn_basis([rows], value / 2)
    assert (basis is None) == (value >= 1e19), "beyond what float32 can square"


def test_a_sample_of_one_token_foretells_nothing_and_harms_nothing() -> None:
    """The mean over a sample's tokens is not predicted."""
    bases = [base[:1] for base in bases_of()]
    basis = learn_basis(samples_of(bases, 0.1), 0.01, old_values=bases)
    assert basis is None or basis.predictor is None


# ---- rounding


@pytest.mark.parametrize("channels", [8, 100, 768, 3000])
def test_rounding_bends_directions_little(channels: int) -> None:
    count = min(channels, 6)
    directions = directions_of(channels, count)
    spreads = [2.0**-i for i in range(count)]
    basis = found(rows_along(directions, spreads, count=256), 0.1)
    synthesis = basis.synthesis(CPU)
    errors = (synthesis - (synthesis @ directions) @ directions.T).norm(dim=1)
    assert errors.max() < 0.1
    assert torch.allclose(synthesis.norm(dim=1), torch.ones(count), atol=0.05)
    assert basis.coefficients.dtype == torch.int8


def test_a_channel_alone_is_a_direction_without_error() -> None:
    rows = torch.zeros(64, CHANNELS)
    rows[:, 3] = torch.randn(64, generator=generator(2))
    synthesis = found(rows, 0.1).synthesis(CPU)
    assert synthesis.abs().tolist() == [[float(c == 3) for c in range(CHANNELS)]]


def test_analysis_undoes_synthesis() -> None:
    basis = example_basis()
    product = basis.synthesis(CPU) @ basis.analysis(CPU)
    assert torch.allclose(product, torch.eye(basis.directions), atol=1e-5)
    assert basis.analysis(CPU) is basis.analysis(CPU), "computed once"


def test_synthesis_is_exact() -> None:
    basis = example_basis()
    exact = basis.coefficients.double() * 2.0 ** -basis.exponents.double()[:, None]
    assert torch.equal(basis.synthesis(CPU).double(), exact)


def test_directions_that_rounding_made_one_share_what_is_sent_along_them() -> None:
    basis = example_basis()
    twice = replace(basis, coefficients=basis.coefficients[[0, 1, 1, 3, 4]])
    along = basis.synthesis(CPU)[1] @ twice.analysis(CPU)
    assert torch.allclose(along @ twice.synthesis(CPU), basis.synthesis(CPU)[1], atol=1e-3)
    silent = replace(basis, coefficients=torch.zeros_like(basis.coefficients))
    assert silent.analysis(CPU).isfinite().all()


# ---- bytes and names


def with_entries() -> Basis:
    rows = rows_along(directions_of(CHANNELS, 5), [8.0, 4.0, 2.0, 1.0, 0.5], count=256)
    basis = learn_codebook([rows])
    assert basis is not None
    return basis


def various(kind: str) -> Basis:
    if kind == "codebook":
        return with_entries()
    return foretelling() if kind == "forecast" else example_basis(has_mean=kind == "mean")


KINDS = ["plain", "mean", "forecast", "codebook"]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_back(kind: str) -> None:
    basis = various(kind)
    data = basis.data
    again = Basis.from_bytes(data, CHANNELS)
    assert again.data == data
    assert again.name == basis.name
    assert torch.equal(again.synthesis(CPU), basis.synthesis(CPU))
    assert torch.equal(again.classes, basis.classes)
    assert (again.mean is None) == (kind != "mean")
    assert (again.predictor is None) == (kind != "forecast")
    assert (again.codebook is None) == (kind != "codebook")
    if again.codebook is not None and basis.codebook is not None:
        assert torch.equal(again.codebook.codes, basis.codebook.codes)
        assert torch.equal(again.entries(CPU), basis.entries(CPU))
    if again.predictor is not None and basis.predictor is not None:
        assert torch.equal(again.predictor.coefficients, basis.predictor.coefficients)
        assert torch.equal(again.predictor.exponents, basis.predictor.exponents)
    if again.mean is not None and basis.mean is not None:
        assert torch.equal(again.mean, basis.mean)


def test_a_name_is_of_all_that_decoding_depends_on() -> None:
    basis = example_basis(has_mean=True)
    assert basis.mean is not None
    changed = [
        replace(basis, mean=basis.mean * 2),
        replace(basis, mean=None),
        replace(basis, classes=basis.classes.flip(0)),
        replace(basis, exponents=basis.exponents + 1),
        replace(basis, predictor=foretelling().predictor),
        replace(basis, coefficients=-basis.coefficients),
    ]
    names = {one.name for one in (basis, *changed)}
    book = with_entries()
    assert book.codebook is not None
    changed += [
        replace(book, codebook=replace(book.codebook, codes=-book.codebook.codes)),
        replace(book, codebook=replace(book.codebook, scale=book.codebook.scale / 2)),
        replace(book, codebook=None),
        book,
    ]
    names |= {one.name for one in changed}
    assert len(names) == 1 + len(changed)
    assert all(len(name) == NAME_BYTES and name != PLAIN for name in names)


def test_no_name_is_the_one_of_no_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basis_module, "fingerprint_of", lambda *_parts: bytes(16))
    assert example_basis().name != PLAIN


def test_a_payload_names_its_basis_first() -> None:
    spec = parse_codec_spec("qk1", Direction.FORWARD)
    payloads = b"abcdefgh", PLAIN + b"efgh", b""
    needed = [side_info_needed(EncodedTensor(spec, 1, 8, payload)) for payload in payloads]
    assert needed == [b"abcd", b"", b""]
    assert side_info_needed(EncodedTensor(replace(spec, name=CodecName.QC), 1, 8, b"abcd")) == b""


# ---- hostile bytes


def is_within_bounds(basis: Basis, channels: int) -> bool:
    synthesis = basis.synthesis(CPU)
    return (
        1 <= basis.directions <= max_directions(channels)
        and basis.channels == channels
        and bool(synthesis.isfinite().all())
        and float(synthesis.abs().max()) <= 8.0
        and int(basis.classes.max()) < 8
        and len(basis.classes) == len(basis.exponents) == basis.directions
        and (basis.mean is None or bool(basis.mean.isfinite().all()))
        and (basis.codebook is None or bool(basis.entries(CPU).isfinite().all()))
    )


def assert_refused_or_within_bounds(data: bytes, channels: int) -> None:
    try:
        basis = Basis.from_bytes(data, channels)
    except BadFrame:
        return
    assert is_within_bounds(basis, channels)
    assert Basis.from_bytes(basis.data, channels).name == basis.name


@given(st.binary(max_size=200), st.integers(1, 20))
@example(b"", 1)
@property_test
def test_any_bytes_are_refused_or_a_basis_within_its_bounds(data: bytes, channels: int) -> None:
    assert_refused_or_within_bounds(data, channels)


@given(st.data())
@property_test
def test_altered_bytes_are_refused_or_a_basis_within_its_bounds(data: st.DataObject) -> None:
    honest = various(data.draw(st.sampled_from(KINDS))).data
    at = data.draw(st.integers(0, len(honest) - 1))
    altered = honest[:at] + bytes([data.draw(st.integers(0, 255))]) + honest[at + 1 :]
    assert_refused_or_within_bounds(altered, CHANNELS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_is_refused_and_a_byte_more_too(kind: str) -> None:
    honest = various(kind).data
    for cut in (*(honest[:end] for end in range(len(honest))), honest + b"\0"):
        with pytest.raises(BadFrame):
            Basis.from_bytes(cut, CHANNELS)


@pytest.mark.parametrize("channels", [1, CHANNELS - 1, CHANNELS + 1, 1 << 20])
def test_a_basis_of_other_channels_is_refused(channels: int) -> None:
    with pytest.raises(BadFrame, match=f"over {channels} channels, got .* over {CHANNELS}$"):
        Basis.from_bytes(example_basis().data, channels)


def test_a_claim_of_directions_without_end_allocates_nothing() -> None:
    head = b"\xff\xff" + CHANNELS.to_bytes(4, "little") + b"\0"
    with pytest.raises(BadFrame, match="got 65535 over"):
        Basis.from_bytes(head, CHANNELS)


def test_a_mean_that_is_not_finite_is_refused() -> None:
    basis = example_basis(has_mean=True)
    assert basis.mean is not None
    broken = basis.mean.clone()
    broken[5] = math.inf
    with pytest.raises(BadFrame, match="mean"):
        Basis.from_bytes(replace(basis, mean=broken).data, CHANNELS)


@pytest.mark.parametrize("flags", [5, 6, 7, 8, 255])
def test_parts_that_are_not_said_together_are_refused(flags: int) -> None:
    honest = with_entries().data
    with pytest.raises(BadFrame, match=f"parts {flags}"):
        Basis.from_bytes(honest[:6] + bytes([flags]) + honest[7:], CHANNELS)


@pytest.mark.parametrize("bits", [0, 11, 255])
def test_a_codebook_without_end_is_refused_and_an_empty_one(bits: int) -> None:
    basis = with_entries()
    at = 7 + basis.directions
    with pytest.raises(BadFrame, match=rf"2\^{bits} entries"):
        Basis.from_bytes(basis.data[:at] + bytes([bits]) + basis.data[at + 1 :], CHANNELS)


@pytest.mark.parametrize("pattern", [0x0000, 0x7F80, 0x7FC0, 0x4000, 0xBC00, 0x3000])
def test_entries_in_steps_that_no_unit_vector_has_are_refused(pattern: int) -> None:
    basis = with_entries()
    at = 8 + basis.directions
    said = basis.data[:at] + pattern.to_bytes(2, "little") + basis.data[at + 2 :]
    with pytest.raises(BadFrame, match="in steps of"):
        Basis.from_bytes(said, CHANNELS)
