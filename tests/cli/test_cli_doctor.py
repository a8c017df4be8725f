"""`swarm-ft doctor` at homes of a lab, with a coordinator that has IPv4 and IPv6."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.lab.homes import Home, Internet, why_not
from benchmarks.lab.host import Host
from benchmarks.lab.hub import Link
from tests.cli.conftest import Shell

UP_MBPS, DOWN_MBPS = 20.0, 100.0
DELAYED = Link(UP_MBPS, DOWN_MBPS, delay_ms=10.0)
OPEN = Home("open", ipv6=True, link=Link(delay_ms=10.0))
BURST = 1.1
"""By how much a line may seem faster than its rate: its bucket is full at first."""
TIMEOUT_S = 120.0

Findings = dict[str, dict[str, str]]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.variant,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("swarm"),
    pytest.mark.skipif(bool(why_not(OPEN)), reason=why_not(OPEN)),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Findings]]:
    """Run the doctor at a home with IPv6, and at one without, whose router is symmetric."""
    homes = {"ipv6": Home(ipv6=True, link=DELAYED), "varies": Home("symmetric", link=DELAYED)}
    with Internet() as internet, ExitStack() as stack:

        def shell(name: str, home: Home) -> tuple[Shell, Host]:
            host = internet.household(home).machines[0]
            made = Shell(tmp_path_factory.mktemp(name), host)
            made.env["XDG_STATE_HOME"] = str(made.cwd)
            stack.callback(made.close)
            return made, host

        owner, public = shell("public", OPEN)
        assert owner.spawn("init").ends() == 0
        up = owner.up("coordinator", "--host", "::", "--announce", public.address)
        port = up.first_words()["endpoint"].rpartition(":")[2]
        addresses = f"{public.address}:{port}", f"[{public.ipv6}]:{port}"
        word = owner.invited(*(part for one in addresses for part in ("--address", one)))
        yield {name: examined(shell(name, home)[0], word) for name, home in homes.items()}


def examined(shell: Shell, word: str) -> Findings:
    doctor = shell.spawn("doctor", word, "--json")
    assert doctor.ends(TIMEOUT_S) == 0, doctor.err
    report = doctor.first_words()
    assert report["can_join"]
    return {one["about"]: one for one in report["findings"]}


def test_ipv6_is_used_where_both_have_it(found: dict[str, Findings]) -> None:
    assert found["ipv6"]["ipv6"]["verdict"] == "ok"
    assert found["ipv6"]["ipv6"]["text"].startswith("2a45:")
    without = found["varies"]["ipv6"]
    assert (without["verdict"], without["text"]) == ("note", "this machine has no IPv6 address")
    assert without["advice"]


def test_an_address_that_does_not_answer_keeps_nobody_out(found: dict[str, Findings]) -> None:
    """The last finding about the coordinator is where it answers."""
    assert found["varies"]["coordinator"]["verdict"] == "ok"


@pytest.mark.parametrize("home", ["ipv6", "varies"])
def test_the_link_is_measured_before_anybody_joins(found: dict[str, Findings], home: str) -> None:
    link_text = found[home]["link"]["text"]
    match = re.fullmatch(r"([\d,.]+) Mbps to the coordinator, ([\d,.]+) from there", link_text)
    assert match, link_text
    up_mbps, down_mbps = map(float, match.groups())
    assert 0 < up_mbps < BURST * UP_MBPS
    assert 0 < down_mbps < BURST * DOWN_MBPS


def test_how_others_reach_it_is_told(found: dict[str, Findings]) -> None:
    assert "punched" in found["ipv6"]["others"]["text"]
    assert "relayed" in found["varies"]["others"]["text"]
    assert found["varies"]["router"]["verdict"] == "note"
    assert {home["relay"]["verdict"] for home in found.values()} == {"ok"}
