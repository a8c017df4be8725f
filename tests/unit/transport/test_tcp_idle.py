"""The kernel's setting on pauses, and the advice that follows from it."""

from pathlib import Path

import pytest

from swarm_ft.transport.grpc_options import restarts_after_idle


@pytest.mark.parametrize(("text", "restarts"), [("1\n", True), ("0\n", False), ("?", False)])
def test_the_kernels_setting_is_read(tmp_path: Path, text: str, restarts: bool) -> None:
    folder = tmp_path / "net" / "ipv4"
    folder.mkdir(parents=True)
    (folder / "tcp_slow_start_after_idle").write_text(text)
    assert restarts_after_idle(tmp_path) is restarts


def test_systems_without_it_do_not_restart(tmp_path: Path) -> None:
    assert not restarts_after_idle(tmp_path)
