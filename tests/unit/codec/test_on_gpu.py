"""GPU use of encoders: few operations, and few synchronisations.

Each costs a GPU about as much as a pass over a whole tensor, so the host plans. The tests have no
GPU: `tests.doubles.gpu` counts.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm_ft.codec import from_spec
from swarm_ft.codec.base import to_device, to_host
from swarm_ft.codec.basis import learn_basis
from swarm_ft.codec.directional import DirectionalCodec
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.errors import NonFinite
from tests.doubles.gpu import CountedGpu

TOKENS, CHANNELS = 256, 384


def gaussian(seed: int) -> Tensor:
    return torch.randn(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(seed))


def some() -> tuple[Tensor, Tensor]:
    """Return a tensor whose channels have several spreads, and a base near it."""
    widths = torch.exp2(gaussian(0)[:1] / 2)
    return gaussian(1) * widths, (gaussian(1) + 0.1 * gaussian(2)) * widths


def counted(
    codec: Any, x: Tensor, base: Tensor | None, *, decodes: bool = False
) -> tuple[CountedGpu, bytes]:
    """Return the GPU double after an encode, with or without the value, and the payload."""
    gpu = CountedGpu()
    there = replace(codec, kernels=gpu.kernels())
    with gpu.present():
        on_gpu = gpu.tensor(x), None if base is None else gpu.tensor(base)
        gpu.operations.clear()
        sent = there.encode_and_decode(*on_gpu)[0] if decodes else there.encode(*on_gpu)
    return gpu, sent.payload


FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
LIMITS = {
    "aq4": (FORWARD, 49, 3),
    "q8": (BACKWARD, 20, 2),
    "q3c": (FORWARD, 26, 2),
    "aq3+z": (FORWARD, 55, 4),
    "q4+z": (FORWARD, 50, 4),
    "q3+z": (BACKWARD, 51, 4),
    "q1+z": (BACKWARD, 51, 4),
    "aqc0.1": (FORWARD, 69, 4),
    "aqk0.1": (FORWARD, 72, 5),
}
"""Operations and waits. Of an entropy-coded frame: a look at the tensor, the counts of symbols, how
many words there are, and the words."""
_OF_A_TRY = 10
"""Operations: scales there, one pass, and the counts back; of each but the first, and one wait."""


@pytest.mark.parametrize("name", LIMITS)
def test_an_encoder_asks_little_of_a_gpu_and_makes_the_same_bytes(name: str) -> None:
    direction, most_operations, most_waits = LIMITS[name]
    codec = from_spec(parse_codec_spec(name, direction))
    x, near = some()
    base = near if codec.spec.is_delta else None
    gpu, payload = counted(codec, x, base)
    more = max(0, gpu.operations["histogram"] // 2 - 1)
    assert payload == codec.encode(x, base).payload
    assert sum(gpu.operations.values()) <= most_operations + _OF_A_TRY * more, gpu.operations
    assert gpu.waits <= most_waits + more


@pytest.mark.parametrize(("name", "most_more"), [("aq4", 2), ("aq3+z", 4), ("q3+z", 4)])
def test_a_sender_has_the_value_of_its_frame_at_once(name: str, most_more: int) -> None:
    codec = from_spec(parse_codec_spec(name, FORWARD))
    x, near = some()
    base = near if codec.spec.is_delta else None
    without, payload = counted(codec, x, base)
    gpu, same = counted(codec, x, base, decodes=True)
    assert same == payload
    assert gpu.waits == without.waits
    assert gpu.operations.total() <= without.operations.total() + most_more


def test_large_codes_cost_an_answer_more() -> None:
    codec = from_spec(parse_codec_spec("q3+z", FORWARD))
    x, _ = some()
    without, _ = counted(codec, x, None)
    x[3, 4] = 5000
    gpu, payload = counted(codec, x, None)
    assert gpu.operations["index"] == 1
    assert payload == codec.encode(x).payload
    assert gpu.waits >= without.waits + 1


def test_along_a_basis_an_encoder_asks_little_too() -> None:
    bases = [gaussian(seed) for seed in range(8)]
    samples = [base + 0.1 * (base[:, :4] @ gaussian(9)[:4]) for base in bases]
    x, base = samples.pop() + 0.01 * gaussian(10), bases.pop()
    codec = from_spec(parse_codec_spec("aqk0.1", FORWARD))
    assert isinstance(codec, DirectionalCodec)
    basis = learn_basis(
        [sample - base for sample, base in zip(samples, bases, strict=True)],
        codec.step_of(x),
        old_values=bases,
    )
    assert basis is not None
    assert basis.predictor is not None
    along = codec.with_side_info(basis)
    counted(along, x, base)  # the first frame brings the basis there
    gpu, payload = counted(along, x, base)
    assert payload == along.encode(x, base).payload
    assert sum(gpu.operations.values()) <= 116, gpu.operations
    assert gpu.waits <= 6


@pytest.mark.parametrize("name", ["aq4", "aq3+z", "q8t"])
def test_what_is_not_finite_is_refused_before_anything_is_coded(name: str) -> None:
    codec = from_spec(parse_codec_spec(name, FORWARD))
    x, near = some()
    x[5, 6] = torch.inf
    with pytest.raises(NonFinite):
        counted(codec, x, near if codec.spec.is_delta else None)


# ---- the GPU that there is none of


def on_gpu() -> tuple[CountedGpu, Tensor]:
    gpu = CountedGpu()
    with gpu.present():
        x = gpu.tensor(torch.arange(6.0).view(2, 3))
    return gpu, x


def test_it_counts_operations_and_views() -> None:
    gpu, x = on_gpu()
    gpu.operations.clear()
    with gpu.present():
        (x[:, ::2] + 1).sum()
        torch.zeros(3, device=x.device)
        torch.zeros(3).sum()  # of the host's
    assert gpu.operations == {"slice": 1, "add": 1, "sum": 1, "zeros": 1}
    assert gpu.waits == 0


def test_whoever_looks_at_a_value_waits() -> None:
    looks = (
        lambda x: x.sum().item(),
        lambda x: bool((x > 1).any()),
        lambda x: int(x[0, 0]),
        lambda x: x.cpu(),
        lambda x: x[x > 1],
        lambda x: x.copy_(torch.zeros(2, 3)),
        lambda x: torch.zeros(3).to(x.device),
        lambda x: to_host(x, x + 1),
    )
    for look in looks:
        gpu, x = on_gpu()
        with gpu.present():
            look(x)
        assert gpu.waits == 1


def test_nobody_waits_for_a_copy_from_pinned_memory() -> None:
    gpu, x = on_gpu()
    with gpu.present():
        there = to_device(torch.ones(3), x.device)
        assert (x + there).is_cuda
    assert gpu.waits == 0
    assert gpu.operations["_to_copy"] == 1


def test_what_it_computes_is_right_and_is_not_mixed_with_the_hosts() -> None:
    gpu, x = on_gpu()
    with gpu.present():
        x += 1
        assert torch.equal((x * 2).cpu(), 2 * torch.arange(1.0, 7).view(2, 3))
        with pytest.raises(AssertionError, match="on the CPU"):
            x + torch.ones(3)
        with pytest.raises(AssertionError, match="on the CPU"):
            gpu.kernels().moments(x, torch.zeros(2, 3))
