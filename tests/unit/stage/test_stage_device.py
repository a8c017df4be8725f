"""From option texts to devices and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from swarm_ft.errors import BadOption
from swarm_ft.stage.engine import pick_device

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
