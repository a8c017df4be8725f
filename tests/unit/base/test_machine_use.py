"""Other use of a machine, from the system's files and tools."""

import os
from pathlib import Path

import pytest

from swarm_ft.base.machine_use import (
    IDLE_AFTER_S,
    CannotTell,
    gpu_busy,
    is_used_by_others,
    on_battery,
    user_active,
)


def supply(folder: Path, name: str, **lines: str) -> None:
    (folder / name).mkdir()
    for file, line in lines.items():
        (folder / name / file).write_text(f"{line}\n")


def test_a_machine_is_on_its_battery_if_no_mains_feed_it(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert on_battery(tmp_path)
    supply(tmp_path, "AC", type="Mains", online="0")
    assert on_battery(tmp_path)
    (tmp_path / "AC" / "online").write_text("1\n")
    assert not on_battery(tmp_path)


def test_a_machine_without_a_battery_says_so(tmp_path: Path) -> None:
    supply(tmp_path, "AC", type="Mains", online="1")
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CannotTell, match="lists no battery"):
            on_battery(folder)


PMON = """\
# gpu         pid   type     sm    mem    enc    dec    command
# Idx           #    C/G      %      %      %      %    name
    0       1234     C     97     40      -      -    python
    0       2345     G      3      1      -      -    Xorg
    1          -     -      -      -      -      -    -
"""


def test_a_gpu_is_busy_with_others_and_not_with_this_process() -> None:
    assert not is_used_by_others(PMON, own_pid=1234), "a desktop that is drawn is no work"
    assert is_used_by_others(PMON, own_pid=1)
    assert not is_used_by_others(PMON.replace("97", " -"), own_pid=1)


def test_without_its_tool_nothing_is_known_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CannotTell, match="nvidia-smi is not installed"):
        gpu_busy()


def test_who_typed_lately_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # without logind
    (tmp_path / "0").touch()
    (tmp_path / "ptmx").touch()
    os.utime(tmp_path / "0", (1000.0, 1000.0))
    assert user_active(tmp_path, 1000.0 + IDLE_AFTER_S - 1)
    assert not user_active(tmp_path, 1000.0 + IDLE_AFTER_S)
    with pytest.raises(CannotTell):
        user_active(tmp_path / "nothing")
