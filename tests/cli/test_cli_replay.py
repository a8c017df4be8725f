"""`swarm-ft replay`: of a living coordinator, of one that is gone; what it prints and refuses."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from swarm_ft.client.demo_input import DemoInput
from swarm_ft.coordinator.journal.journal import Journal
from tests.cli.conftest import RunHere, Shell

LOAD = ("demand", "busy", "uses", "waits")
PASSING = ("unix_s", "joined_ago_s", "heard_ago_s", "all_bytes", *LOAD)
"""What differs from one moment to the next."""


def still(document: Any) -> Any:
    """A document without what passes."""
    if isinstance(document, dict):
        return {key: still(one) for key, one in document.items() if key not in PASSING}
    return [still(one) for one in document] if isinstance(document, list) else document


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_processes_are_replayed_while_they_run_and_after(
    shell: Shell, sample: DemoInput, run_here: RunHere
) -> None:
    journal = shell.cwd / "journal.db"
    key = shell.cwd / "key"
    arguments = ("--journal", journal, "--encrypt-at-rest", key)
    coordinator = shell.up("coordinator", "--insecure", "--no-page", *arguments)
    words = coordinator.first_words()
    way = ("--insecure", "--initial-peers", words["addresses"][0])
    first = shell.spawn("serve-stage", *way, "--layers", "0-2")
    shell.spawn("serve-stage", *way, "--layers", "2-3")
    shell.spawn("serve-stage", *way, "--layers", "0-2")
    job = ("--model", sample.model_dir, "--dataset", sample.train_file, "--seq-length", 32)
    client = shell.spawn(
        *("client", "train", *way, *job, "--batch-size", 4, "--steps", 30),
        *("--out", shell.cwd / "out"),
    )
    client.wait_for("err", "step 9/30")
    first.process.kill()
    assert client.ends(150) == 0, client.err

    def replayed(*options: object) -> Any:
        result = run_here("replay", journal, "--encrypt-at-rest", key, "--json", *options)
        assert result.code == 0, result.err
        return json.loads(result.out)

    def lives() -> Any:
        status = shell.spawn("status", "--insecure", "--coordinator", words["endpoint"], "--json")
        assert status.ends() == 0
        return status.first_words()

    living = lives()
    while (found := replayed())["next_event"] < living["next_event"]:
        pass  # at most a second behind
    assert still(found) == still(living)

    (run,) = living["runs"]
    at_nine = replayed("--at", 9)
    assert at_nine["runs"][0]["steps"] == 9
    assert at_nine["runs"][0]["phase"] == "training"
    assert len(at_nine["peers"]) == 3
    assert at_nine["runs"][0]["run"] == run["run"]
    assert replayed("--at-time", at_nine["unix_s"] + 1e-3)["runs"][0]["steps"] == 9

    trace = shell.cwd / "trace.json"
    peers = [peer["peer"] for peer in at_nine["peers"]]
    compared = replayed("--at", 9, "--trace", trace, "--what-if", f"peer {peers[0]}: 0.1 Mbps")
    assert (compared["run_id"], compared["step"]) == (run["run"], 9)
    assert compared["changed"]["num_steps"] == compared["baseline"]["num_steps"] == 20
    assert compared["changed"]["step_s"] > compared["baseline"]["step_s"]
    assert {event["args"].get("step") for event in json.loads(trace.read_text())} >= {0, 8}
    lines = run_here(
        *("replay", journal, "--encrypt-at-rest", key, "--at", 9),
        *("--what-if", f"peer {peers[0]}: 2x compute"),
    ).out.splitlines()
    assert lines[1].split() == ["without", "with", "it"]
    assert lines[2].startswith("seconds per step")
    refused = run_here(
        *("replay", journal, "--encrypt-at-rest", key, "--at", 9),
        *("--what-if", f"peer {peers[0]}: faster"),
    )
    assert refused.code == 2
    assert "expected 'peer NAME: 20 Mbps'" in refused.err

    page = shell.up("replay", journal, "--encrypt-at-rest", key, "--at", 9, "--page")
    at, _, token = page.first_words()["page"].partition("?token=")
    begin = Request(f"{at}session", data=json.dumps({"token": token}).encode())
    with closing(urlopen(begin, timeout=30)) as answer:
        session = json.load(answer)["session"]
    losses = Request(f"{at}losses?run={run['run']}&first=0", headers={"X-Swarm-FT": session})
    with closing(urlopen(losses, timeout=30)) as answer:
        rows = json.load(answer)
    assert [row["step"] for row in rows if "loss" in row] == list(range(9))
    assert page.interrupted() == 0

    coordinator.process.kill()
    coordinator.ends()
    assert replayed("--at", 30)["runs"][0]["steps"] == 30
    refused = run_here("replay", journal)
    assert refused.code == 2
    assert "it is encrypted" in refused.err
    beyond = run_here("replay", journal, "--encrypt-at-rest", key, "--at", 31)
    assert beyond.code == 2
    assert "has steps 0 to 30" in beyond.err


def test_what_is_no_recording_is_refused_in_one_line(run_here: RunHere, tmp_path: Path) -> None:
    journal, other = tmp_path / "journal.db", tmp_path / "notes.txt"
    Journal(str(journal)).close()
    other.write_text("not a journal")
    for arguments, words in (
        ((tmp_path / "none.db",), "No such file"),
        ((other,), "this is no coordinator's journal"),
        ((journal,), "expected its recording in"),
        ((journal, "--at-time", "noon"), "expected a time such as"),
        ((journal, "--at", 3, "--at-time", "5"), "--at, --at-time: expected one of the two"),
        ((journal, "--encrypt-at-rest", tmp_path / "key"), "no such file"),
    ):
        result = run_here("replay", *arguments)
        assert result.code == 2, words
        assert words in result.err
        assert result.err.count("\n") == 1
    assert not (tmp_path / "key").exists()

    folder = tmp_path / "journal.db.recording"
    folder.mkdir()
    (folder / "00000001").write_bytes(b"something else\n" * 9)
    result = run_here("replay", journal)
    assert result.code == 2
    assert "expected a coordinator's recording, got another kind of file" in result.err
    assert "version" not in result.err
