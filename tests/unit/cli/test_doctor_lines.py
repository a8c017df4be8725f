"""The doctor's findings, at a terminal and in JSON: in full, and in short beside a peer."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner

from swarm_ft.base.clock import SystemClock
from swarm_ft.cli.doctor import doctor, examine_link, print_reachability, written_mb_per_s
from swarm_ft.coordinator.capacity import Capacity
from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.identity.invites import Invite, invitation_certificate, invitation_key
from swarm_ft.identity.keys import fingerprint_of, key_at, name_of
from swarm_ft.reach import doctor as examinations
from swarm_ft.reach.doctor import Finding, Verdict
from swarm_ft.reach.meet import Reach
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import MEASURE_LINK
from tests.members import NOW, make_swarm

NOBODY = cast(Reach, None)


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> None:
    async def examine(*_: object) -> AsyncIterator[Finding]:
        yield Finding("clock", Verdict.NOTE, "70 s behind", "set it")
        yield Finding("others", Verdict.OK, "reach this machine directly")

    monkeypatch.setattr(examinations, "examine_member", examine)


@pytest.mark.usefixtures("findings")
async def test_a_peer_says_how_it_is_reached_and_warns_of_what_is_in_the_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await print_reachability(NOBODY, "", as_json=False)
    printed = capsys.readouterr()
    assert printed.out == "Others reach this machine directly\n"
    assert printed.err == "warning: clock: 70 s behind\n         set it\n"


@pytest.mark.usefixtures("findings")
async def test_programs_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    await print_reachability(NOBODY, "", as_json=True)
    printed = capsys.readouterr()
    assert not printed.err
    (line,) = printed.out.splitlines()
    clock, others = json.loads(line)["reach"]
    assert (clock["about"], clock["verdict"], clock["advice"]) == ("clock", "note", "set it")
    assert (others["text"], others["cause"]) == ("reach this machine directly", "")


def examined(tmp_path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(
        doctor, ["--json"], env={"XDG_CACHE_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    )
    return {one["about"]: one for one in json.loads(result.output)["findings"]}


def test_the_machine_itself_is_looked_at(tmp_path: Path) -> None:
    found = examined(tmp_path)
    assert list(found)[:3] == ["packages", "device", "disk"]
    assert f"torch {torch.__version__}" in found["packages"]["text"]
    assert f"GiB free in {tmp_path}, written at" in found["disk"]["text"]


def test_a_gpu_that_torch_cannot_use_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[0] == "nvidia-smi"
        return subprocess.CompletedProcess(command, 0, "NVIDIA RTX 4090, 555.42\n")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", run)
    device = examined(tmp_path)["device"]
    assert device["verdict"] == "note"
    assert "torch cannot use NVIDIA RTX 4090 (driver 555.42)" in device["text"]
    assert "CUDA" in device["advice"]


def test_a_disk_that_takes_nothing_is_told(tmp_path: Path) -> None:
    assert written_mb_per_s(tmp_path) > 0
    with pytest.raises(OSError, match="No such file"):
        written_mb_per_s(tmp_path / "missing")


def test_a_key_that_others_may_read_is_told(tmp_path: Path) -> None:
    key = tmp_path / "swarm-ft" / "peers" / "0" / "key.pem"
    assert "key" not in examined(tmp_path)
    name = name_of(key_at(key).public_key())
    found = examined(tmp_path)["key"]
    assert (found["verdict"], found["text"]) == ("ok", f"{name}, in {key}")
    key.chmod(0o644)
    found = examined(tmp_path)["key"]
    assert (found["verdict"], found["advice"]) == ("bad", f"chmod 600 {key}")
    key.chmod(0o600)
    key.write_bytes(b"")
    found = examined(tmp_path)["key"]
    assert found["verdict"] == "bad"
    assert found["advice"]


# ---- the link


@asynccontextmanager
async def invited() -> AsyncIterator[Invite]:
    """Run a coordinator that only measures links; yield an invitation to it."""
    swarm, secret = make_swarm(), bytes(10)
    invite = Invite(
        fingerprint=fingerprint_of(swarm.key.public_key()),
        number=bytes(4),
        secret=secret,
        addresses=("127.0.0.1:1",),
    )
    shown = invitation_certificate(invitation_key(secret), invite.name, NOW)
    transport = GrpcTransport(GrpcOptions(credentials=swarm.coordinator((shown,))))
    capacity = Capacity(SystemClock(), SwarmState)
    server = await transport.serve("127.0.0.1", 0, {MEASURE_LINK: capacity.measure})
    try:
        yield replace(invite, addresses=("127.0.0.1:1", server.endpoint))
    finally:
        await server.stop()


async def test_the_link_is_measured_with_an_invitation_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with invited() as invite:
        found = await examine_link(invite)
        assert (found.about, found.verdict) == ("link", Verdict.OK)
        assert re.fullmatch(r"[\d,.]+ Mbps to the coordinator, [\d,.]+ from there", found.text)
        monkeypatch.setattr("swarm_ft.cli.doctor.MIN_MBPS", 1e9)
        slow = await examine_link(invite)
    assert slow.verdict is Verdict.NOTE
    assert "Wi-Fi" in slow.advice


async def test_a_link_that_is_not_measured_keeps_nobody_out() -> None:
    async with invited() as invite:
        pass
    found = await examine_link(invite)
    assert found.verdict is Verdict.NOTE
    assert found.text.startswith("not measured: no coordinator")
