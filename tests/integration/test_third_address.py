"""A hostile member tries hundreds of ways to have a third machine dialled, and none leads there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

ATTACK = (sys.executable, "-m", "tests.third_address")
EVERY_ADDRESS = (
    *("unshare", "--user", "--map-root-user", "--net", "sh", "-ec"),
    "ip link set lo up; ip -4 route add local default dev lo;"
    ' ip -6 route add local default dev lo; exec "$@"',
    "sh",
)
"""Runs a command where each address is one of this machine, so that whoever dials it is seen."""


def outcome(*command: str) -> dict[str, Any]:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return dict(json.loads(ended.stdout))


def has_namespaces() -> bool:
    try:
        command = (*EVERY_ADDRESS, "true")
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def check(found: dict[str, Any]) -> None:
    assert found["third"] == {}
    assert found["ways"] >= 300
    assert found["dialled"]["last"] == 2, "the honest member dials whom it may, to the end"
    # Each attempt is refused, or its meeting goes on at the hostile member's own address.
    met = sum(found["dialled"].values()) - found["dialled"]["last"]
    refused = {
        way: number
        for way, number in found["refused"].items()
        if way in {"announce", "announce_later", "be_called"}
    }
    assert met + sum(refused.values()) == found["ways"]


@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_no_way_leads_to_a_third_address_of_this_machine() -> None:
    check(outcome(*ATTACK, "127.0.0"))


@pytest.mark.timeout(300)
@pytest.mark.skipif(not has_namespaces(), reason="no right to make a network namespace")
@pytest.mark.thorough
def test_no_way_leads_to_any_address_of_the_internet_or_a_house() -> None:
    check(outcome(*EVERY_ADDRESS, *ATTACK, "203.0.113"))
