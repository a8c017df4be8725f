"""`swarm-ft status` shows a swarm's state in lines for people and in JSON."""

from dataclasses import asdict, replace

import pytest

from swarm_ft.api.documents import status_fields
from swarm_ft.cli.overview import overview_lines
from swarm_ft.cli.status_text import verbose_lines
from swarm_ft.ids import BlockIndex, PeerId, RunId
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.client import (
    BoundaryStatus,
    MemberActivity,
    MemberLink,
    MemberStatus,
    MemberWork,
    RelayStatus,
    RunPhase,
    RunSummary,
    SwarmStatus,
)
from swarm_ft.protocol.messages.contribution import Contribution
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.messages.meeting import Way
from swarm_ft.protocol.messages.reports import BufferCounts, ByteCounts, Traffic
from swarm_ft.protocol.spec.grant import Grant
from swarm_ft.protocol.spec.layers import LayerRange


@pytest.fixture
def found() -> SwarmStatus:
    """A run of one stage, which a second peer takes over."""
    stages = (PeerId("old"), PeerId("new"))
    run = RunSummary(
        run_id=RunId("run-1"),
        phase=RunPhase.TRAINING,
        detail="",
        committed_steps=9,
        num_steps=40,
        spec_digest=bytes(16),
        assignments=tuple(StageAssignment(peer_id=p, layers=LayerRange(0, 3)) for p in stages),
        joining=(PeerId("new"),),
        boundaries=(
            BoundaryStatus(
                boundary=BlockIndex(1),
                buffered_samples=40,
                key_frames=48,
                delta_frames=144,
                kept=BufferCounts(
                    boundary=BlockIndex(1),
                    samples=80,
                    memory_bytes=2_000_000,
                    disk_bytes=6_000_000,
                    memory_hits=140,
                    disk_hits=4,
                    misses=48,
                    evictions=3,
                    repairs=1,
                ),
            ),
            BoundaryStatus(
                boundary=BlockIndex(2),
                buffered_samples=0,
                key_frames=0,
                delta_frames=0,
                kept=BufferCounts(boundary=BlockIndex(2)),
            ),
        ),
    )
    return SwarmStatus(members=(), runs=(run,))


def club() -> SwarmStatus:
    """Twelve peers of one thread, and six runs of three owners: two train, four wait."""
    letters = "abcdefghijkl"
    members = tuple(
        MemberStatus(
            peer_id=PeerId(letter * 32),
            layers=None,
            device="cpu",
            memory_bytes=430_000_000,
            works=(
                MemberWork(
                    run_id=RunId(f"run-{number % 2}"),
                    layers=LayerRange(number // 2, number // 2 + 1),
                    stage=number // 2,
                    replica=0,
                    num_replicas=1,
                    doing=MemberActivity.COMPUTING,
                    share=8,
                ),
            ),
            links=tuple(MemberLink(peer_id=PeerId(other * 32)) for other in letters),
            given=Contribution(samples=10, steps=5, seconds=60.0, sent_bytes=1000),
        )
        for number, letter in enumerate(letters)
    )
    runs = tuple(
        RunSummary(
            run_id=RunId(f"run-{number}"),
            phase=RunPhase.TRAINING if number < 2 else RunPhase.QUEUED,
            detail="" if number < 2 else f"place {number - 1}, after run-0 and run-1",
            committed_steps=9 if number < 2 else 0,
            num_steps=40,
            spec_digest=bytes(16),
            is_own=number % 3 == 0,
            assignments=tuple(
                StageAssignment(peer_id=m.peer_id, layers=m.works[0].layers)
                for m in members[number::2]
            )
            if number < 2
            else (),
            samples_per_s=7.25 if number < 2 else 0.0,
            step_s=1.1 if number < 2 else 0.0,
        )
        for number in range(6)
    )
    return SwarmStatus(members=members, runs=runs, version="0.1.0")


def test_a_club_of_twelve_peers_and_six_runs_fits_one_screen() -> None:
    lines = list(overview_lines(club(), width=80))
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "swarm-ft 0.1.0: 12 peers, 6 runs"
    assert lines[2].split()[:2] == ["run-0", "9/40"]
    assert [line.split()[0] for line in lines[2:8]] == [f"run-{number}" for number in range(6)]
    assert "queued: place 1, after run-0 and run-1" in lines[4]
    assert len([line for line in lines if "computing" in line]) == 12
    assert "another client's" not in lines[2]


def test_lines_of_a_wide_terminal_and_of_a_file_have_all_words() -> None:
    lines = list(overview_lines(club()))
    assert "training, 1.1 s/step, 7.25 samples/s, on 6 peers, another client's" in lines[3]
    assert "run-1 layers 5-6 computing" in lines[-2]
    assert lines[-1].endswith("--verbose: links, stages, buffers, contributions")


def test_warnings_come_first_and_no_name_steers_the_terminal() -> None:
    cut = MemberStatus(
        peer_id=PeerId("cut"), layers=None, memory_bytes=1 << 30, offered_bytes=1 << 31
    )
    (_, about) = verbose_lines(SwarmStatus(members=(cut,), runs=()))
    assert about == "  1 GiB of 2 GiB lent (several peers share the machine's memory)"
    rogue = MemberStatus(peer_id=PeerId("a"), layers=None, device="\x1b[2Jcpu", heard_ago_s=30.0)
    found = SwarmStatus(members=(rogue,), runs=(), warnings=("the disk is nearly full",))
    lines = list(overview_lines(found))
    assert lines[1] == "warning: the disk is nearly full"
    assert "silent for 30 s; idle" in lines[3]
    assert "\x1b" not in "".join(lines)


def test_what_a_peer_may_host_is_shown() -> None:
    limited = Grant(replica_only=True, layers=LayerRange(2, 7))
    members = (
        MemberStatus(peer_id=PeerId("any"), layers=None),
        MemberStatus(peer_id=PeerId("few"), layers=LayerRange(2, 4), idle="why", grant=limited),
    )
    found = SwarmStatus(members=members, runs=())
    assert list(verbose_lines(found)) == [
        "peer any  layers auto",
        "peer few  layers 2-4  (replica only, layers 2-7 only)  idle: why",
    ]
    any_, few = status_fields(found)["peers"]
    assert (any_["replica_only"], any_["sees_tokens"], any_["only_layers"]) == (False, True, None)
    assert (few["replica_only"], few["sees_tokens"], few["only_layers"]) == (True, True, "2-7")


def test_relays_are_shown_with_what_they_carry() -> None:
    relays = (
        RelayStatus(endpoint="192.0.2.1:7000"),
        RelayStatus(name="abc", endpoint="192.0.2.2:7000", links=3, relayed_bytes=2_000_000),
    )
    found = SwarmStatus(members=(), runs=(), relays=relays)
    assert list(verbose_lines(found))[1:] == [
        "relay of the coordinator at 192.0.2.1:7000  0 links, 0 bytes so far",
        "relay abc at 192.0.2.2:7000  3 links, 2.0 MB so far",
    ]
    own, other = status_fields(found)["relays"]
    assert own["relay"] == ""
    assert (other["relay"], other["links"], other["bytes"]) == ("abc", 3, 2_000_000)


def test_a_replica_that_takes_over_is_shown_as_joining(found: SwarmStatus) -> None:
    assert "  layers 0-3  old, new (joining)" in list(verbose_lines(found))
    (run,) = status_fields(found)["runs"]
    assert [(stage["peer"], stage["joining"]) for stage in run["stages"]] == [
        ("old", False),
        ("new", True),
    ]


def test_of_anothers_run_its_numbers_are_shown() -> None:
    stages = (StageAssignment(peer_id=PeerId("one"), layers=LayerRange(0, 3)),)
    other = RunSummary(
        run_id=RunId("run-2"),
        phase=RunPhase.TRAINING,
        detail="",
        committed_steps=9,
        num_steps=40,
        spec_digest=bytes(16),
        assignments=stages,
        is_own=False,
    )
    found = SwarmStatus(members=(), runs=(other,))
    lines = list(verbose_lines(found))
    assert lines[:2] == [
        "run-2  step 9/40  training  (another client's)",
        "  layers 0-3  one",
    ]
    (run,) = status_fields(found)["runs"]
    assert (run["run"], run["own"], run["steps"], run["detail"]) == ("run-2", False, 9, "")


def test_what_is_kept_at_a_boundary_and_what_went_over_it_is_shown(found: SwarmStatus) -> None:
    lines = list(verbose_lines(found))
    assert lines[-3:-1] == [
        "  boundary 1           40 samples remembered, buffer hit rate 75.0% (48 key, "
        "144 delta frames)",
        "                       1.9 MiB in memory, 5.7 MiB on disk; 140 reads from memory, "
        "4 from disk, 48 misses; 3 evicted, 1 repaired",
    ]
    boundary, quiet = status_fields(found)["runs"][0]["boundaries"]
    assert boundary == {
        "boundary": 1,
        "samples": 40,
        "records": 80,
        "key_frames": 48,
        "delta_frames": 144,
        "hit_rate": 0.75,
        "memory_bytes": 2_000_000,
        "disk_bytes": 6_000_000,
        "memory_hits": 140,
        "disk_hits": 4,
        "misses": 48,
        "evictions": 3,
        "repairs": 1,
        "forward_codec": "",
        "backward_codec": "",
        "ratio": None,
        "step_bytes": 0,
    }
    assert quiet["hit_rate"] is None


def test_what_went_over_relays_is_shown(found: SwarmStatus) -> None:
    sent = ByteCounts(forward_bytes=75, forward_uncompressed_bytes=300, relayed_bytes=25)
    relayed = replace(found, runs=(replace(found.runs[0], sent=sent),))
    assert status_fields(relayed)["runs"][0]["relayed_bytes"] == 25
    lines = [line.split() for line in verbose_lines(relayed)]
    assert ["over", "relays", "25", "bytes", "(33.3%)"] in lines


def test_links_are_shown_with_what_was_measured_of_them() -> None:
    full = LinkSpeed(
        bytes_per_s=11.8e6, peak_bytes_per_s=12e6, round_trip_s=0.09, least_round_trip_s=0.0213
    )
    links = (
        MemberLink(peer_id=PeerId("two"), way=Way.PUNCHED, speed=full),
        MemberLink(peer_id=PeerId("three"), way=Way.RELAYED),
        MemberLink(peer_id=PeerId("four"), speed=LinkSpeed(least_round_trip_s=0.2)),
    )
    member = MemberStatus(peer_id=PeerId("one"), layers=None, links=links)
    found = SwarmStatus(members=(member,), runs=())
    assert (
        "  links: punched to two (94.4 Mbps, 21.3 ms), relayed to three, to four (200 ms)"
        in verbose_lines(found)
    )
    unknown = dict.fromkeys(("bytes_per_s", "peak_bytes_per_s", "round_trip_s"))
    assert status_fields(found)["peers"][0]["links"] == [
        {"peer": "two", "way": "punched", **asdict(full)},
        {"peer": "three", "way": "relayed", **unknown, "least_round_trip_s": None},
        {"peer": "four", "way": None, **unknown, "least_round_trip_s": 0.2},
    ]


def test_a_ratio_is_that_of_the_last_step_and_its_codecs(found: SwarmStatus) -> None:
    """Steps with other codecs would make the present ones look better or worse than they are."""

    def sent(forward_bytes: int) -> Traffic:
        return Traffic(
            boundary=BlockIndex(1),
            forward_bytes=forward_bytes,
            backward_bytes=100,
            forward_uncompressed_bytes=1600,
            backward_uncompressed_bytes=1600,
        )

    (run,) = found.runs
    boundary = replace(
        run.boundaries[0],
        forward_codec="aq2",
        backward_codec="q2+z",
        traffic=sent(300),
        newest=sent(100),
    )
    after = replace(found, runs=(replace(run, boundaries=(boundary,)),))
    line = "  boundary 1           aq2 down, q2+z up: 16.0 times fewer bytes"
    assert line in list(verbose_lines(after))
    (fields,) = status_fields(after)["runs"][0]["boundaries"]
    assert (fields["ratio"], fields["step_bytes"]) == (16.0, 200)
    assert replace(boundary, newest=Traffic(boundary=BlockIndex(1))).ratio == 8.0
