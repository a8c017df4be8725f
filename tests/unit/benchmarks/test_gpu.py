"""`make gpu`: what is kept of parts however they end, and what they compute; without a GPU."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import conformance, needs, runner
from benchmarks.gpu.conformance import damaged
from benchmarks.gpu.kernel_cases import cases, near, neighbours, paths, same
from benchmarks.gpu.member import StaticDirectory
from benchmarks.gpu.needs import Need
from benchmarks.gpu.paced_link import Pace, Rate
from benchmarks.gpu.parts import Part, Scene
from benchmarks.gpu.pool import Task, done_in_processes
from benchmarks.gpu.processes import Processes
from benchmarks.gpu.quality import bits_needed, water_filled
from benchmarks.gpu.report import CUT_OFF, DONE, FAILED, PartReport, Report, Row, ratio, table_lines
from benchmarks.gpu.runner import run_all
from benchmarks.gpu.speed import meets_goal
from benchmarks.gpu.swarm import PUBLISHED, link_words, published_ratios
from swarm_ft.codec.kernels.reference import ReferenceKernels
from swarm_ft.codec.spec import Direction, parse_codec_spec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import BadOption
from swarm_ft.identity.roles import COORDINATOR_NAME, Role
from tests.unit.benchmarks.gpu_tasks import ends, fails

ROOT = Path(__file__).parents[3]

# --- the report


def test_a_table_is_aligned_and_lacks_no_column() -> None:
    rows: list[Row] = [{"what": "a", "n": 1.23456}, {"what": "long", "n": None, "more": "yes"}]
    assert list(table_lines(rows)) == ["what     n  more", "a     1.23  -", "long     -  yes"]


def test_what_is_long_is_cut_but_in_the_last_column() -> None:
    (_, line) = table_lines([{"first": "x" * 100, "last": "y" * 100}])
    assert "x" * 59 + "…  " in line
    assert line.endswith("y" * 100)


def test_a_report_is_written_whole_as_json_and_as_text(tmp_path: Path) -> None:
    report = Report({"gpu": "none"})
    report.parts.append(PartReport("codec", "speed", DONE, rows=[{"table": "t", "x": 2.0}]))
    report.write(tmp_path / "gpu.json")
    assert (
        json.loads((tmp_path / "gpu.json").read_text())["parts"][0]["rows"] == report.parts[0].rows
    )
    text = (tmp_path / "gpu.txt").read_text()
    assert "== codec: speed (done" in text
    assert "-- t" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.txt"]


def test_checks_that_went_wrong_are_told_in_the_heading() -> None:
    part = PartReport("conformance", "", DONE, rows=[{"wrong": 2}, {"wrong": 0}, {"x": 1}])
    assert part.wrong == 2
    assert ", 2 WRONG)" in Report({}, [part]).to_text()


def test_ratios_need_both_sides() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is None
    assert ratio(3.0, None) is None
    assert ratio(3.0, 0.0) is None


# --- parts and how they end


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CHILD", "tests.unit.benchmarks.gpu_part")


def parts(*names: str, limit_s: float = 60.0) -> list[Part]:
    return [Part(name, "", (), "none", limit_s=limit_s) for name in names]


def run(some: list[Part]) -> tuple[Report, list[int]]:
    report, seen = Report({}), list[int]()
    run_all(
        some,
        report,
        lambda: seen.append(sum(len(part.rows) for part in report.parts)),
        rehearse=True,
        limit_s=None,
    )
    return report, seen


@pytest.mark.usefixtures("stand_in")
def test_parts_end_each_in_its_own_way_and_the_next_one_runs() -> None:
    report, seen = run(parts("fails", "breaks", "ends"))
    assert [(part.how, part.why) for part in report.parts] == [
        (FAILED, "it says why"),
        (FAILED, "its process ended with 3"),
        (DONE, ""),
    ]
    assert seen == [1, 1, 2, 2, 3, 3], "told after every row and after every part"


@pytest.mark.usefixtures("stand_in")
def test_a_part_that_is_cut_off_leaves_what_it_said() -> None:
    report, _ = run(parts("lasts", limit_s=3.0))
    (part,) = report.parts
    assert part.how == CUT_OFF
    assert part.why == "it had 3 s"
    assert part.rows == [{"name": "lasts", "n": 1}]


def test_a_part_ends_with_whoever_runs_it() -> None:
    code = "from benchmarks.gpu.child import end_with_parent as end; print(flush=True); end()"
    part = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with part:
        assert part.stdin is not None
        assert part.stdout is not None
        assert part.stdout.readline() == b"\n"
        assert part.poll() is None
        part.stdin.close()
        assert part.wait(30.0) == -signal.SIGKILL


def test_tasks_in_processes_end_each_in_its_own_way() -> None:
    scene = Scene(rehearse=True, end_s=time.monotonic() + 100.0)
    found = list(done_in_processes([Task("a", ends), Task("b", fails)], scene))
    trouble = {"table": "trouble", "what": "b", "wrong": 1, "first": "ValueError: it says why"}
    assert sorted(found, key=len) == [{"n": 1}, trouble]


def test_tasks_that_are_not_done_in_time_are_told() -> None:
    scene = Scene(rehearse=True, end_s=time.monotonic())
    found = list(done_in_processes([Task("a", ends), Task("b", ends)], scene))
    assert found == [{"table": "not done in time", "what": "a, b"}]


def test_a_part_that_lacks_something_says_what_to_carry() -> None:
    lacking = Part("x", "", (Need("no_such_module", "no-such-package", "2.0"),), "none")
    report, _ = run([lacking])
    assert report.parts[0].why == "carry no-such-package>=2.0"


def test_an_old_package_is_told_with_its_version() -> None:
    assert Need("pytest", "pytest", "1.0").missing == ""
    assert Need("pytest", "pytest", "999.1").missing.startswith("pytest>=999.1 (here is ")
    assert needs.numbers_in("2.11.0+cu130") == (2, 11, 0)


def test_protobuf_is_to_be_as_new_as_what_made_our_code() -> None:
    (protobuf,) = (need for need in needs.CODECS if need.package == "protobuf")
    assert needs.numbers_in(protobuf.least) >= (7,)


@pytest.mark.timeout(120)
def test_a_rehearsal_ends_with_a_table(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", "codec", "--rehearse"]
    done = subprocess.run([*command, "--json", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (part,) = json.loads(path.read_text())["parts"]
    assert part["how"] == DONE
    assert {row["table"] for row in part["rows"]} == {
        "kernels, on the device",
        "codecs, to bytes on the host and back",
    }
    assert "== codec" in done.stdout


# --- machines that lack what a swarm in plaintext does not need

ABSENT = (
    "cryptography",
    "OpenSSL",
    "base58",
    "hivemind",
    "datasets",
    "aiohttp",
    "prometheus_client",
)


def test_parts_import_without_what_bare_machines_lack() -> None:
    modules = (
        "conformance",
        "speed",
        "parity",
        "swarm",
        "torch_pipe",
        "quality",
        "memory",
        "engine",
        "tune",
    )
    imports = "; ".join(f"import benchmarks.gpu.{name}" for name in modules)
    hidden = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))"
    code = f"{hidden}; {imports}; import swarm_ft.coordinator.service, swarm_ft.api.peer_process"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


async def test_a_static_directory_knows_the_coordinator_and_checks_what_is_announced() -> None:
    directory = StaticDirectory("127.0.0.1:7000")
    await directory.announce(Role.PEER, "peer-0", "127.0.0.1:7001")
    assert await directory.find(Role.COORDINATOR) == {COORDINATOR_NAME: "127.0.0.1:7000"}
    assert await directory.find(Role.PEER) == {}
    with pytest.raises(BadOption):
        await directory.announce(Role.PEER, "peer 0", "127.0.0.1:7001")


# --- links


def test_bytes_wait_for_those_before_them_and_not_longer() -> None:
    rate = Rate()
    pace = Pace(rate)
    assert pace.wait_s(1000, 0.0, was_idle=False) == 0.0
    rate.set_mbps(8.0)  # a megabyte a second
    assert pace.wait_s(500_000, 10.0, was_idle=True) == pytest.approx(0.5)
    assert pace.wait_s(500_000, 10.25, was_idle=False) == pytest.approx(0.75)
    assert pace.wait_s(500_000, 20.0, was_idle=True) == pytest.approx(0.5), "idle time is no credit"


def test_a_sleep_that_took_too_long_is_made_up_for() -> None:
    rate = Rate()
    rate.set_mbps(8.0)
    pace = Pace(rate)
    pace.wait_s(500_000, 10.0, was_idle=True)
    assert pace.wait_s(500_000, 10.6, was_idle=False) == pytest.approx(0.4)
    assert pace.wait_s(500_000, 99.0, was_idle=False) == pytest.approx(0.25), "but not all of it"


def test_slow_links_pass_few_bytes_at_a_time() -> None:
    rate = Rate()
    sizes = []
    for mbps in (0.0, 0.1, 10.0, 10_000.0):
        rate.set_mbps(mbps)
        sizes.append(rate.chunk_bytes)
    assert sizes == [65536, 1448, 6250, 65536]


def test_a_link_passes_both_ways() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Processes() as processes:
        processes.start(
            "link", "benchmarks.gpu.paced_link", [":".join(map(str, server.getsockname()))]
        )
        place = "127.0.0.1", processes.receive("link", 30.0)["port"]
        processes.send("link", {"mbps": 1000.0})
        with socket.create_connection(place) as client:
            accepted, _ = server.accept()
            with accepted:
                client.sendall(b"hello")
                assert accepted.recv(5) == b"hello"
                accepted.sendall(b"olleh")
                assert client.recv(5) == b"olleh"


def test_links_are_told_in_words() -> None:
    assert [link_words(mbps) for mbps in (0.0, 25.0, 10_000.0)] == [
        "not paced",
        "25 Mbps",
        "10 Gbps",
    ]


def test_published_rows_are_beside_their_own_links_alone() -> None:
    assert published_ratios(100.0, 2 * 4045.0)["x TAH-Quant"] == pytest.approx(2.0)
    assert published_ratios(1000.0, 2600.0)["x FP32"] == pytest.approx(1.0)
    assert published_ratios(25.0, 1000.0) == {f"x {name}": None for name in PUBLISHED}


# --- what is computed


def test_goals_are_a_share_of_a_copy_or_a_rate() -> None:
    assert meets_goal(0.1, 0.6, is_entropy=False)
    assert not meets_goal(100.0, 0.59, is_entropy=False)
    assert meets_goal(10.0, 0.01, is_entropy=True)
    assert not meets_goal(9.9, 1.0, is_entropy=True)


def test_white_noise_takes_as_many_bits_in_any_basis() -> None:
    assert water_filled(torch.ones(64).double(), 1 / 16) == pytest.approx(2.0, abs=1e-6)
    by_channel, in_klt = bits_needed(7.0 * torch.eye(64, dtype=torch.float64))
    assert by_channel == pytest.approx(in_klt)


def test_one_direction_takes_its_own_bits_shared_by_all_channels() -> None:
    direction = torch.ones(64, 1, dtype=torch.float64)
    by_channel, in_klt = bits_needed(direction @ direction.T)
    assert by_channel == pytest.approx(2.0, abs=1e-6)
    assert in_klt == pytest.approx(2.0 / 64, abs=1e-6)


def test_silence_takes_no_bits() -> None:
    assert bits_needed(torch.zeros(4, 4, dtype=torch.float64)) == (0.0, 0.0)


def test_cases_hold_of_the_reference_itself_and_differences_are_seen() -> None:
    kernels = ReferenceKernels()
    seen = set()
    for case in cases(few=True):
        found = getattr(kernels, case.kernel)(*case.args)
        assert case.difference(found, found) == ""
        seen.add(case.kernel)
    assert {"unpack", "dequantize", "decode_symbols", "quantize", "moments"} <= seen
    assert {"trellis_symbols", "shifts_of", "flip_signs"} <= seen
    zeros, others = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert same(zeros, others) == "1 of 2 differ"
    assert same((zeros, True), (zeros, False)) == "True, not False"
    assert near(zeros, zeros + 1e-7) == ""
    assert paths(zeros, zeros) == ""
    assert paths(zeros, zeros + 1.0) == "100% of 2 differ"
    assert near(zeros, zeros + 1.0)
    assert neighbours(torch.tensor([1, 5]), torch.tensor([1, 3])) == "a code is 2 away"


def test_interpreters_that_cannot_loop_are_left_out_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"triton": "3.9.0", "numpy": "2.5.5"}
    monkeypatch.setattr(conformance, "version_of", found.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert conformance.interpreter_trouble() == ""
    assert [place.name for place in conformance.places()] == ["numba", "triton, interpreted"]
    found["triton"] = "3.6.0"
    assert "numpy below 2.4 (here is 2.5.5)" in conformance.interpreter_trouble()
    assert [place.name for place in conformance.places()] == ["numba"]
    found["numpy"] = "2.3.5"
    assert conformance.interpreter_trouble() == ""


def test_damaged_forms_differ_from_what_they_were() -> None:
    spec = parse_codec_spec("q4", Direction.FORWARD)
    encoded = EncodedTensor(spec, 2, 3, bytes(range(1, 20)))
    forms = list(damaged(encoded, seed=1, flips=3))
    assert len(forms) == 6
    assert all(form.payload != encoded.payload for form in forms)
    assert math.isclose(len(forms[-2].payload), len(encoded.payload) - 1)
