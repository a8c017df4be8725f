"""The speed at which this machine trains a block is a plausible number."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swarm_ft.protocol.spec.flops import block_flops
from swarm_ft.stage import speed
from swarm_ft.stage.speed import host_digest, machine_key, training_flops_per_s


def test_a_block_takes_six_operations_a_weight_and_token_and_some_for_attention() -> None:
    assert block_flops(1000, 8, tokens=20, seq_length=10) == 20 * (6000 + 12 * 10 * 8)


def test_this_machine_trains_at_more_than_nothing_in_either_type() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert 1e7 < training_flops_per_s(torch.device("cpu"), dtype) < 1e16


def test_the_key_of_a_machine_does_not_follow_from_its_public_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(speed, "BOOT_ID", tmp_path / "boot_id")
    found = set()
    for boot in ("one", "other"):
        (tmp_path / "boot_id").write_text(f"{boot}\n", encoding="ascii")
        assert machine_key(cpu) == machine_key(torch.device("cpu:0"))
        found |= {host_digest(cpu), machine_key(cpu)}
        assert not machine_key(cpu).startswith(host_digest(cpu))
    assert len(found) == 4


def test_a_gpu_is_known_by_its_uuid_and_not_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check two processes that each see another GPU, as number 0."""
    keys = []
    for uuid in ("GPU-1", "GPU-2", "GPU-1"):
        known = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, known=known: known)
        keys.append((machine_key(torch.device("cuda:0")), host_digest(torch.device("cuda:0"))))
    assert keys[0] == keys[2]
    assert set(keys[0]).isdisjoint(keys[1])
