"""`swarm-ft top` draws a swarm's state, and its keys move through it."""

import math
from dataclasses import replace
from io import StringIO
from itertools import pairwise

import pytest
from rich.console import Console

from swarm_ft.cli.overview import short_names
from swarm_ft.cli.top_screen import TopScreen, View, sparkline
from swarm_ft.ids import BlockIndex, PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.capacity import LinkSpeed, Machine
from swarm_ft.protocol.messages.client import (
    BoundaryStatus,
    MemberActivity,
    MemberLink,
    MemberStatus,
    MemberWork,
    RunPhase,
    RunSummary,
    StepCommitted,
    SwarmStatus,
)
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.messages.events import EventKind, SwarmEvent
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.protocol.messages.reports import BufferCounts, ByteCounts, Traffic
from swarm_ft.protocol.spec.layers import LayerRange

ONE, TWO = RunId("run-1"), RunId("run-2")
LOW, HIGH = LayerRange(0, 3), LayerRange(3, 6)


def member(name: str, work: MemberWork | None = None) -> MemberStatus:
    return MemberStatus(
        peer_id=PeerId(name),
        layers=None,
        device="cpu",
        memory_bytes=4_000_000_000,
        version="0.1.0",
        machine=Machine(up_bytes_per_s=5e6, down_bytes_per_s=12.5e6, round_trip_s=0.024),
        works=(work,) if work else (),
        given=Contribution(samples=1234, steps=50),
    )


def work(layers: LayerRange, stage: int, replica: int = 0) -> MemberWork:
    return MemberWork(
        run_id=ONE,
        layers=layers,
        stage=stage,
        replica=replica,
        num_replicas=2,
        doing=MemberActivity.COMPUTING,
        share=4,
        parts_begun=5,
        num_parts=12,
        microbatch_s=0.05,
    )


@pytest.fixture
def picture() -> TopScreen:
    """A run of two stages, the first with two replicas; another's run; a peer without work."""
    waiting = replace(work(HIGH, 1), waits_for=(PeerId("amber"), PeerId("beryl")))
    amber, beryl = (
        replace(
            member(name, work(LOW, 0, replica)),
            links=(MemberLink(peer_id=PeerId("coral"), way=way, speed=speed),),
        )
        for replica, (name, way, speed) in enumerate(
            [
                ("amber", Way.DIRECT, LinkSpeed(bytes_per_s=11e6, least_round_trip_s=0.017)),
                ("beryl", None, LinkSpeed(bytes_per_s=9e6, least_round_trip_s=0.031)),
            ]
        )
    )
    boundary = BoundaryStatus(
        boundary=BlockIndex(3),
        buffered_samples=222,
        key_frames=25,
        delta_frames=75,
        kept=BufferCounts(boundary=BlockIndex(3)),
        forward_codec="aq3+z",
        backward_codec="q3+z",
        traffic=Traffic(boundary=BlockIndex(3), forward_bytes=100, forward_uncompressed_bytes=1000),
    )
    hosts = (("amber", LOW), ("beryl", LOW), ("coral", HIGH))
    own = RunSummary(
        run_id=ONE,
        phase=RunPhase.TRAINING,
        detail="",
        committed_steps=50,
        num_steps=200,
        spec_digest=bytes(16),
        assignments=tuple(StageAssignment(peer_id=PeerId(p), layers=at) for p, at in hosts),
        joining=(PeerId("beryl"),),
        boundaries=(boundary,),
        sent=ByteCounts(forward_bytes=1_000_000, forward_uncompressed_bytes=9_000_000),
        last_step=StepCommitted(
            step=StepNumber(49),
            loss=1.648,
            learning_rate=2e-5,
            grad_norm=1.0,
            num_samples=8,
            seconds=0.5,
        ),
        step_s=0.5,
        samples_per_s=16.0,
        tokens_per_s=2048.0,
        eta_s=75.0,
    )
    other = RunSummary(
        run_id=TWO,
        phase=RunPhase.QUEUED,
        detail="",
        committed_steps=0,
        num_steps=40,
        spec_digest=bytes(16),
        is_own=False,
        place=1,
        behind=ONE,
    )
    others = (("coral", waiting), ("dolomite", None))
    members = (amber, beryl, *(member(name, does) for name, does in others))
    why = (
        "went back from step 60 to step 50 because nobody has the weights of layers 3-6 any more: "
        "peer coral left; 10 steps are made again. What would have kept them: another peer for "
        "layers 3-6, or snapshots more often (--save-steps 25 now)"
    )
    kinds = ((EventKind.PEER_JOINED, "peer amber joined"), (EventKind.RUN_WENT_BACK, why))
    events = tuple(
        SwarmEvent(serial=number, unix_s=1.7e9 + number, kind=kind, run_id=ONE, words=words)
        for number, (kind, words) in enumerate(kinds)
    )
    return TopScreen(
        found=SwarmStatus(members=members, runs=(own, other), version="0.1.0", unix_s=1.7e9),
        losses={ONE: [6.0 - 0.1 * step for step in range(50)]},
        events=events,
    )


def draw(picture: TopScreen, width: int, encoding: str = "utf-8") -> list[str]:
    """The lines at a terminal of this width."""
    console = Console(file=StringIO(), width=width, color_system=None, force_terminal=True)
    lines = console.render_lines(picture, replace(console.options, encoding=encoding), pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


@pytest.mark.parametrize("width", [80, 120])
def test_all_facts_find_room(picture: TopScreen, width: int) -> None:
    lines = draw(picture, width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for words in (
        "4 peers, 2 runs",
        "> run-1 training step 50/200 25% █",
        "loss 1.648 lr 2e-05 0.5 s/step 16 samples/s 2,048 tokens/s ETA 1:15 saved 8.0 MB",
        "run-2 queued: place 1, after run-1 step 0/40 0% (another client's)",
        "0-3 amber cpu computing 5/12 40% 40/100 24",
        "takes over; computing",
        "dolomite cpu layers auto nothing",
        "made again. What would have kept them: another peer for layers 3-6",
    ):
        assert words in text
    at_boundary = next(i for i, line in enumerate(lines) if "10.0x, 75% hits" in line)
    assert "amber" in " ".join(lines[:at_boundary])
    assert "coral" in " ".join(lines[at_boundary:])
    assert lines[at_boundary].split()[-2:] == ["72/?", "31"], "of the slowest link between them"
    is_wide = width == 120
    assert ("aq3+z down, q3+z up: 10.0x" in text) == is_wide
    assert ("direct coral" in text, "3.7 GiB" in text) == (is_wide, is_wide)


def test_it_fits_its_terminal_and_the_newest_events_go_first(picture: TopScreen) -> None:
    tall, low = (draw(replace(picture, height=height), 80) for height in (40, 22))
    assert (len(tall), len(low)) == (40, 22)
    assert tall[-1] == low[-1] == "q: quit   p: freeze   tab or arrows: other run"
    assert any("peer amber joined" in line for line in tall)
    assert not any("peer amber joined" in line for line in low)


def test_a_terminal_without_blocks_or_colour_shows_it(picture: TopScreen) -> None:
    lines = draw(picture, 80, encoding="ascii")
    assert all(line.isascii() for line in lines)
    assert "#" in lines[1]


def test_words_of_others_cannot_steer_the_terminal(picture: TopScreen) -> None:
    rogue = replace(picture.found.members[0], device="\x1b[2Jcpu [red]\nx")
    found = replace(picture.found, members=(rogue, *picture.found.members[1:]))
    text = "\n".join(draw(replace(picture, found=found), 120))
    assert "\x1b" not in text
    assert "[red]" in text


@pytest.mark.parametrize(
    ("keys", "chosen"), [([], ONE), (["\t"], TWO), (["\t", "\x1b[B"], ONE), (["\x1b[A"], TWO)]
)
def test_keys_go_from_run_to_run(picture: TopScreen, keys: list[str], chosen: RunId) -> None:
    view = View()
    for key in keys:
        view = view.after(key, picture.found)
    run = view.run_of(picture.found)
    assert run is not None
    assert run.run_id == chosen


def test_keys_hold_and_quit(picture: TopScreen) -> None:
    found = picture.found
    assert View().after("p", found).is_frozen
    assert not View().after("p", found).after("p", found).is_frozen
    assert View().after("q", found).has_quit
    assert View().after("x", found) == View()
    empty = SwarmStatus(members=(), runs=())
    assert View().after("\t", empty) == View()


def test_an_empty_swarm_says_what_would_fill_it() -> None:
    text = "\n".join(draw(TopScreen(found=SwarmStatus(members=(), runs=())), 80))
    assert "swarm-ft client train" in text
    assert "swarm-ft serve-stage" in text


def test_a_curve_goes_from_its_lowest_to_its_highest() -> None:
    assert sparkline([1.0, 2.0, 3.0], 10) == "▁▅█" or sparkline([1.0, 2.0, 3.0], 10) == "▁▄█"
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([], 10) == sparkline([math.nan], 10) == sparkline([1.0], 0) == ""
    falling = sparkline([-float(x) for x in range(1000)], 16)
    assert len(falling) == 16
    assert all(a >= b for a, b in pairwise(falling))


def test_names_are_cut_so_that_they_still_differ() -> None:
    names = ("x" * 22 + "lmnopqrs", "x" * 22 + "lmmnopqr", "z")
    found = SwarmStatus(members=tuple(member(name) for name in names), runs=())
    short = short_names(found)
    assert [short[PeerId(name)] for name in names] == [names[0][:25], names[1][:25], "z"]
