"""The study's rivals of changes along directions: threshold reuse, and lazy sampling."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality.boundary import Boundary, Cuts
from benchmarks.quality.configs import Config, parse_config
from benchmarks.quality.data import Dataset
from benchmarks.quality.models import CutModel, Regime, steps
from benchmarks.quality.reuse import Reuse, parse_reuse
from benchmarks.quality.small_changes import mean_cost
from swarm_ft.codec.basis import learn_basis
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.spec import Direction
from tests.codecs import parse

TOKENS, CHANNELS = 32, 16


def activations(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed))


def boundary_of(config: str) -> Boundary:
    return Cuts(parse_config(config), 1).boundaries[0]


def test_texts_of_reuse() -> None:
    assert parse_reuse("t0.25") == Reuse(by_token=True, threshold=0.25)
    assert parse_reuse("s1") == Reuse(by_token=False, threshold=1.0)
    with pytest.raises(ValueError, match="expected t or s and a threshold"):
        parse_reuse("0.25")
    config = parse_config("aq2+z~aq1+z%t0.3/q2+z@q4+z#8")
    assert config == Config("aq2+z", "q2+z", "q4+z", bits=8, fill="aq1+z", reuse="t0.3")
    assert str(config) == "aq2+z~aq1+z%t0.3/q2+z@q4+z#8"


def test_a_token_is_judged_by_itself_or_with_its_sample() -> None:
    base = torch.ones(4, 3)
    x = base * torch.tensor([1.0, 1.1, 2.0, 1.0])[:, None]
    assert parse_reuse("t0.2").moved(x, base).tolist() == [False, False, True, False]
    assert parse_reuse("t0.05").moved(x, base).tolist() == [False, True, True, False]
    assert parse_reuse("t0").moved(x, base).tolist() == [False, True, True, False]
    # together the change is .38 of the values
    assert parse_reuse("s0.37").moved(x, base).tolist() == [True] * 4
    assert parse_reuse("s0.39").moved(x, base).tolist() == [False] * 4


@pytest.mark.parametrize("codec", ["aq4+z", "qc0.1", "aqk0.3"])
def test_tokens_that_hardly_moved_are_what_they_were_and_cost_a_bit(codec: str) -> None:
    forward = boundary_of(f"{codec}%t0.2/none@q8").forward
    x = activations()
    forward.send(0, x)
    first = forward.base_of(0, x)
    moved = torch.zeros(TOKENS, dtype=torch.bool)
    moved[3:11] = True
    later = torch.where(moved[:, None], activations(1), x)
    alone = boundary_of(f"{codec}/none@q8").forward
    alone.send(0, x[moved])
    before, alone_before = forward.tally.bits, alone.tally.bits
    sent = forward.send(0, later)
    own = alone.send(0, later[moved])
    assert torch.equal(sent[~moved], first[~moved])
    assert (sent[moved] - later[moved]).norm() < 0.3 * later[moved].norm()
    frame_bits = alone.tally.bits - alone_before
    assert forward.tally.bits - before == pytest.approx(TOKENS + frame_bits, rel=0.1)
    assert own.shape == sent[moved].shape
    assert forward.tally.values == 2 * TOKENS * CHANNELS  # those that were not sent count
    assert forward.reused_values == (TOKENS - 8) * CHANNELS


def test_a_sample_that_hardly_moved_costs_a_byte() -> None:
    cuts = Cuts(parse_config("aq4+z%s0.2/none@q8"), 1)
    forward, x = cuts.boundaries[0].forward, activations()
    forward.send(0, x)
    first = forward.base_of(0, x)
    before = forward.tally.bits
    assert torch.equal(forward.send(0, 1.1 * x), first)
    assert forward.tally.bits == before + 8
    assert cuts.reused() == 0.5
    assert not torch.equal(forward.send(0, 1.3 * x), first)
    cuts.rates()
    assert cuts.reused() == 0


def test_what_is_not_sent_adds_up_until_it_is() -> None:
    forward, x = boundary_of("aq4+z%s0.25/none@q8").forward, activations()
    forward.send(0, x)
    first = forward.base_of(0, x)
    sent = [forward.send(0, x * (1 + 0.1 * visit)) for visit in (1, 2, 3, 4)]
    are_first = [torch.equal(each, first) for each in sent]
    assert are_first == [True, True, True, False]  # .4 of 1.4


class Visited(Cuts):
    """Notes which samples come, and what is remembered of samples then."""

    def __init__(self) -> None:
        super().__init__(parse_config("aq4+z/q4+z+ef21@q8@q8"), 1)
        self.samples: list[frozenset[int]] = []
        self.known: list[set[int]] = []

    def begin(self, mode: str, ids: Tensor, lengths: Tensor) -> None:
        super().begin(mode, ids, lengths)
        if mode == "train":
            self.samples.append(frozenset(self.ids))
            self.known.append(set(self.boundaries[0].forward.seen))


def visited(in_a_row: int, epochs: int) -> Visited:
    sizes: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 50, "tokens": 8}
    torch.manual_seed(0)
    model = CutModel(Regime(**sizes, cuts=(1,)))
    model.in_a_row, model.cuts = in_a_row, (cuts := Visited())
    texts = Dataset(torch.randint(50, (12, 8)), torch.full((12,), 8), torch.empty(0))
    assert len(list(steps(model, texts, 4, epochs, 1e-3, 0))) == 3 * epochs
    return cuts


def test_a_batch_is_visited_in_a_row_and_then_forgotten() -> None:
    cuts = visited(in_a_row=2, epochs=4)
    seen = cuts.samples
    assert all(one == other for one, other in zip(seen[::2], seen[1::2], strict=True))
    passes = [frozenset().union(*seen[begin : begin + 6 : 2]) for begin in (0, 6)]
    assert passes == [frozenset(range(12))] * 2
    assert cuts.known == [set(), set(seen[0])] + [
        known for _, later in pairwise(seen[::2]) for known in (set(), set(later))
    ]


def test_by_default_samples_are_remembered_from_pass_to_pass() -> None:
    cuts = visited(in_a_row=1, epochs=2)
    assert all(one.isdisjoint(other) for one, other in pairwise(cuts.samples[:3]))
    assert cuts.known[3:] == [set(range(12))] * 3


def test_a_pass_that_does_not_come_out_even_has_the_steps_of_the_others() -> None:
    assert len(visited(in_a_row=2, epochs=3).samples) == 9


def test_smaller_changes_cost_less_and_none_a_few_bytes() -> None:
    base = activations()
    x = base + 0.4 * activations(1)
    codec = parse("aqk0.3", Direction.FORWARD)
    assert isinstance(codec, DirectionalCodec)
    basis = learn_basis([x - base], codec.step_of(x), old_values=[base], has_mean=False)
    visit = codec.with_side_info(basis), x, base
    sizes = [mean_cost([visit], share).frame_bytes for share in (1.0, 0.1, 0.0)]
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[2] < 12 + 4 + 9 + 18 + 8
    assert mean_cost([visit], 0.0).change == 0
    half, whole = (mean_cost([visit], share).change for share in (0.01, 0.02))
    assert whole == pytest.approx(2 * half, rel=0.01)
