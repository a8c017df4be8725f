"""Peers measure the links between them: from real links to `swarm-ft status --json`."""

import json
from typing import Any

import pytest

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import Shell, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.variant,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("swarm"),
]

CAP_MBPS = 4.0
LOOKS = 100


def links_of(shell: Shell, invite: str) -> list[dict[str, Any]]:
    """Return all reports of members about links to each other."""
    status = shell.spawn("status", "--json", "--invite", invite)
    assert status.ends() == 0, status.err
    return [link for peer in status.first_words()["peers"] for link in peer["links"]]


def test_a_link_that_is_full_is_known_by_its_speed(shell: Shell, sample: DemoInput) -> None:
    """Uncompressed frames need more than the volunteers' caps let pass."""
    port = free_port()
    assert shell.spawn("init").ends() == 0
    shell.up("coordinator", "--port", port, "--no-page")
    client = shell.invited("--role", "client", "--uses", 2)
    peer = shell.invited("--uses", 2)
    for number in range(2):
        folder = shell.cwd / f"buffers-{number}"
        shell.up("serve-stage", peer, "--upload-mbps", CAP_MBPS, "--buffer-dir", folder)
    shell.spawn(
        *("client", "train", "--invite", client, "--model", sample.model_dir),
        *("--dataset", sample.train_file, "--out", shell.cwd / "tuned", "--steps", 1000),
        *("--batch-size", 64, "--seq-length", 128, "--fw", "none", "--bw", "none"),
    )
    links: list[dict[str, Any]] = []
    for _ in range(LOOKS):
        links = links_of(shell, client)
        if any(link["bytes_per_s"] for link in links):
            break
    measured = [link for link in links if link["bytes_per_s"]]
    assert measured, json.dumps(links)
    for link in measured:
        assert 0.5 * CAP_MBPS < 8e-6 * link["bytes_per_s"] < 1.2 * CAP_MBPS, link
        assert link["bytes_per_s"] <= link["peak_bytes_per_s"] < 1.5 * CAP_MBPS / 8e-6
        assert 0.0 < link["least_round_trip_s"] <= link["round_trip_s"] < 5.0
