"""Commands reach the peer that runs through its home, and nobody else's do."""

import asyncio
import json
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from swarm_ft.api.availability_controller import MonthlyTraffic, read_monthly_use, shape_of
from swarm_ft.cli.peer import in_words
from swarm_ft.cli.peer_control import (
    SOCKET,
    PeerControl,
    PeerState,
    running_homes,
    send_request,
    verb_of,
)
from swarm_ft.errors import MalformedMessage, Unavailable
from swarm_ft.ids import PeerId
from swarm_ft.peer.presence import DrainState
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.control import FromPeer, LeaveProgress, PeerLeaving

CONTRIBUTION = Contribution(
    samples=24, steps=3, seconds=60.0, sent_bytes=5_000_000, all_bytes=7_000_000
)


class Node:
    """A double of a peer that hosts a stage, as the control sees it."""

    def __init__(self) -> None:
        self.sent: list[FromPeer] = []
        self.presence = DrainState(self.sent.append, lambda _: None)
        self.has_stages = True
        self.reported: Contribution | None = None

    @property
    def last_contribution(self) -> Contribution | None:
        return self.reported

    async def contribution(self) -> Contribution | None:
        self.reported = CONTRIBUTION
        return CONTRIBUTION

    def ask(self, verb: str) -> None:
        stays = PeerLeaving(stays=True, reason="asked")
        self.presence.request(None if verb == "resume" else stays)


async def states(home: Path, verb: str) -> list[PeerState]:
    return [state async for state in send_request(home, verb)]


async def test_a_peer_is_paused_watched_and_resumed(tmp_path: Path) -> None:
    node = Node()
    control = PeerControl(PeerId("a"), node, node.ask)  # type: ignore[arg-type]
    async with control.listening(tmp_path):
        assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o600
        (state,) = await states(tmp_path, "status")
        assert (state.state, state.gave) == ("working", str(CONTRIBUTION))
        assert state.given == asdict(CONTRIBUTION)
        words = "24 samples in 3 steps, 1 min, 5.0 MB sent for training, 7.0 MB in all"
        assert in_words(state) == f"peer a is working; it gave {words}"
        assert in_words(replace(state, gave="")) == "peer a is working"
        replies = send_request(tmp_path, "pause")
        assert (await anext(replies)).state == "pausing"
        node.presence.on_progress(LeaveProgress(may_go=False, words="b takes over", seconds=7.0))
        reply = await anext(replies)
        assert (reply.state, reply.words, reply.seconds) == ("pausing", "b takes over", 7.0)
        node.presence.on_progress(LeaveProgress(may_go=True, words=""))
        assert [state.state async for state in replies] == ["paused"]
        assert [state.state for state in await states(tmp_path, "resume")] == ["working"]
        assert tmp_path in running_homes(tmp_path.parent)
    assert not (tmp_path / SOCKET).exists()


async def test_a_home_with_a_long_path_is_reached(tmp_path: Path) -> None:
    home = tmp_path / ("long" * 25) / "home"
    home.mkdir(parents=True)
    assert len(str(home)) > 107
    node = Node()
    control = PeerControl(PeerId("a"), node, node.ask)  # type: ignore[arg-type]
    async with control.listening(home):
        assert stat.S_IMODE((home / SOCKET).stat().st_mode) == 0o600
        assert running_homes(home.parent) == [home]
        (state,) = await states(home, "status")
        assert state.state == "working"
    assert not (home / SOCKET).exists()
    with pytest.raises(Unavailable, match="no peer of this user is running in"):
        await states(home, "status")


async def test_whoever_watches_a_peer_that_goes_hears_its_end(tmp_path: Path) -> None:
    node = Node()
    control = PeerControl(PeerId("a"), node, node.ask)  # type: ignore[arg-type]
    async with control.listening(tmp_path):
        replies = send_request(tmp_path, "drain")
        await anext(replies)
    assert [state async for state in replies] == []


async def test_where_no_peer_runs_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no peer of this user is running in"):
        await states(tmp_path, "status")


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"do": "format"}', b'"pause"', b"\xff"])
async def test_nonsense_is_not_obeyed(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(MalformedMessage):
        verb_of(line)
    node = Node()
    async with PeerControl(PeerId("a"), node, node.ask).listening(tmp_path):  # type: ignore[arg-type]
        reader, writer = await asyncio.open_unix_connection(tmp_path / SOCKET)
        writer.write(line + b"\n")
        assert await reader.read() == b""
        writer.close()
    assert node.sent == []


def test_the_month_is_counted_across_restarts(tmp_path: Path) -> None:
    file = tmp_path / "month.json"
    for used_up in (False, False, True):
        shape = shape_of(None, None)
        count = MonthlyTraffic(file, 0.001, shape)
        shape.up.wait(200_000)
        shape.down.wait(200_000)
        assert bool(count.used_up()) == used_up
    assert json.loads(file.read_text())["num_bytes"] == 1_200_000
    file.write_text("{}")
    assert read_monthly_use(file).num_bytes == 0
