"""Option texts become devices and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swarm_ft.base import systems
from swarm_ft.errors import BadOption
from swarm_ft.stage.device import (
    free_memory_bytes,
    pick_device,
    preserve_rng,
    shares_memory,
    synchronise,
)

HaveGpus = Callable[[int], None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> HaveGpus:
    def have(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.mark.parametrize(
    ("text", "count", "device"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device_is_what_the_text_says_and_the_machine_has(
    gpus: HaveGpus, text: str, count: int, device: str
) -> None:
    gpus(count)
    assert pick_device(text) == torch.device(device)


@pytest.mark.parametrize(("text", "count"), [("cuda", 0), ("cuda:2", 2), ("tpu", 1), ("cuda:", 1)])
def test_device_that_is_not_there_is_refused(gpus: HaveGpus, text: str, count: int) -> None:
    gpus(count)
    with pytest.raises(BadOption, match="--device"):
        pick_device(text)


# ---- Apple's GPUs: none is here, so torch's answers about one are made up


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make a Mac's torch, and record the requests to its GPU."""
    requests: list[str] = []
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 << 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4 << 30)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: requests.append("synchronize"))
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.ones(1))
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda _: requests.append("set_rng_state"))
    return requests


@pytest.mark.usefixtures("apple")
def test_an_apple_gpu_is_taken_if_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    assert pick_device("mps", torch.bfloat16) == torch.device("mps")
    assert pick_device("auto").type != "mps", "nobody has run one yet"


@pytest.mark.usefixtures("apple")
def test_an_apple_gpu_that_cannot_compute_in_this_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("BFloat16 is not supported on MPS")

    monkeypatch.setattr(torch, "ones", refuse)
    with pytest.raises(BadOption, match=r"BFloat16 is not supported.*--dtype float32"):
        pick_device("mps", torch.bfloat16)


@pytest.mark.parametrize(
    ("is_built", "expected"), [(False, "build of torch"), (True, "no Apple GPU")]
)
def test_a_machine_without_an_apple_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: is_built)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(BadOption, match=expected):
        pick_device("mps")


@pytest.mark.usefixtures("apple")
@pytest.mark.parametrize(("free_gib", "lent_gib"), [(8, 6), (2, 2)])
def test_an_apple_gpu_has_a_part_of_the_machines_memory(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, lent_gib: int
) -> None:
    monkeypatch.setattr(systems, "free_memory_bytes", lambda: free_gib << 30)
    device = torch.device("mps")
    assert free_memory_bytes(device) == lent_gib << 30
    assert shares_memory(device)


def test_memory_that_nobody_tells_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "free_memory_bytes", lambda: None)
    with pytest.raises(BadOption, match="--memory"):
        free_memory_bytes(torch.device("cpu"))


def test_an_apple_gpus_generator_is_put_back_too(apple: list[str]) -> None:
    with preserve_rng(torch.device("mps")):
        torch.manual_seed(1)
        assert not apple
    synchronise(torch.device("mps"))
    assert apple == ["set_rng_state", "synchronize"]


def test_generators_are_put_back() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with preserve_rng(torch.device("cpu")):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
