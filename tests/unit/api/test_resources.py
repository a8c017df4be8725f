"""A volunteer's resources: bounded by the machine's, and printed in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.api.connections import SwarmAddress
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.api.peer_process import prepare_peer
from swarm_ft.api.resources import PeerResources, check_cores, check_disk, check_memory
from swarm_ft.api.serve_options import ServeOptions
from swarm_ft.base import systems
from swarm_ft.errors import BadOption

GIB = 1 << 30
ADDRESS = SwarmAddress(invite=None, initial_peers=(), dht_prefix="swarm")
RESOURCES = PeerResources(
    memory_bytes=5 * GIB, buffer_memory_bytes=2 * GIB, cores=2, disk_bytes=50 * GIB
)


def test_one_line_tells_the_limits_and_the_options_that_change_them() -> None:
    assert RESOURCES.in_words() == (
        "This machine lends at most 5 GiB of memory for stages and 2 GiB for buffers, 2 cores, "
        "50 GiB of disk, no cap on the link (--memory, --buffer-memory, --threads, --buffer-disk, "
        "--keep-disk, --model-disk, --upload-mbps, --download-mbps)"
    )
    capped = replace(RESOURCES, cores=1, up_mbps=20.0, down_mbps=100.0)
    assert "1 core, 50 GiB of disk, 20 Mbps up and 100 Mbps down (" in capped.in_words()
    assert "disk, 20 Mbps up (" in replace(RESOURCES, up_mbps=20.0).in_words()


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "core_count", lambda: 4)
    check_cores(None)
    check_cores(4)
    with pytest.raises(BadOption, match="--threads: expected at most 4, this machine's cores"):
        check_cores(5)


def test_more_memory_than_there_is_is_refused() -> None:
    check_memory("--memory", 23 * GIB, 23 * GIB, "this machine")
    check_memory("--memory", 500 * GIB, None, "this machine")  # nobody knows
    words = "--memory: expected at most 23 GiB, the memory of cuda:0, got 500 GiB"
    with pytest.raises(BadOption) as refusal:
        check_memory("--memory", 500 * GIB, 23 * GIB, "cuda:0")
    assert refusal.value.message == words


def test_more_disk_than_there_is_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    has_bytes = systems.disk_bytes(tmp_path / "not" / "there" / "yet")
    assert has_bytes == systems.disk_bytes(tmp_path)
    check_disk("--keep-disk", None, tmp_path)
    check_disk("--keep-disk", has_bytes, tmp_path)
    with pytest.raises(BadOption, match=r"--keep-disk: expected at most .* the disk of"):
        check_disk("--keep-disk", has_bytes + 1, tmp_path)


def test_a_small_machine_lends_its_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Defaults are upper limits: a machine with less disk and memory than these is welcome."""
    monkeypatch.setattr(systems, "total_memory_bytes", lambda: GIB)
    monkeypatch.setattr(systems, "disk_bytes", lambda _folder: 3 * GIB)
    monkeypatch.setattr(systems, "free_memory_bytes", lambda: GIB // 2)
    options = ServeOptions(buffers=BufferOptions(directory=tmp_path / "home"), device="cpu")
    with prepare_peer(ADDRESS, options) as prepared:
        assert prepared.resources.disk_bytes == 3 * GIB
        assert prepared.resources.buffer_memory_bytes == GIB
        assert prepared.device_memory_bytes == GIB
        assert 0 < prepared.memory_bytes <= GIB // 2
    changed = replace(options, stage_memory_bytes=2 * GIB)
    with (
        pytest.raises(BadOption, match="--memory: expected at most 1 GiB"),
        prepare_peer(ADDRESS, changed),
    ):
        pass


def test_a_container_has_what_its_limit_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = systems.total_memory_bytes(tmp_path)
    assert whole is not None
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert systems.total_memory_bytes(tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{whole // 2}\n", encoding="ascii")
    assert systems.total_memory_bytes(tmp_path) == whole // 2
    assert systems.machine_memory_bytes() == whole, "the machine has more than the container"
