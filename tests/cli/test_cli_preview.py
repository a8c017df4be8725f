"""`client preview` shows what a job would learn, and calls nobody."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import RunHere
from tests.doubles.dataset_hub import NAME, serving_dataset

PAIRS = [
    {"id": 1, "prompt": "What is 2+2?\n", "completion": f"Four\x1b[31m {n}."} for n in range(6)
]


@pytest.fixture
def job(sample: DemoInput, tmp_path: Path) -> Path:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(f"{json.dumps(pair)}\n" for pair in PAIRS))
    path = tmp_path / "job.yaml"
    path.write_text(
        f"base_model: {sample.model_dir}\ndatasets: [{{path: {data}}}]\nsequence_len: 64\n"
        "sample_packing: false\ninvite: '@nowhere.txt'\njson: report.json\nout: nowhere/at/all\n"
    )
    return path


def test_a_preview_for_people(run_here: RunHere, job: Path) -> None:
    done = run_here("client", "preview", job, "--show", "1", "--eval-size", "2", "--detach")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert "JSON lines, 2 documents held out; a document is 'prompt' and 'completion'" in lines[0]
    assert "; not used: 'id'" in lines[0]
    assert "4 documents, 4 samples of up to 64 tokens; " in lines[5]
    assert lines[6].startswith("the job would train for 3 steps of 8 samples (3 epochs); 2 samp")
    assert lines[8].startswith("sample 1 (")
    assert lines[9].startswith("  ['What is 2+2?\\n'] 'Four\\x1b[31m ")
    assert lines[10].startswith("held-out sample 1 (")
    assert len(lines) == 12
    assert "\x1b" not in done.out


def test_a_preview_for_programs(run_here: RunHere, job: Path) -> None:
    done = run_here("client", "preview", job, "--json", "--show", "2")
    found = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert done.out.isascii()
    train = found["train"]
    assert (train["documents"], train["samples"], train["not_used"]) == (6, 6, ["'id'"])
    assert found["held_out"] is None
    assert len(train["first_samples"]) == 2
    for sample in train["first_samples"]:
        assert len(sample["input_ids"]) == len(sample["labels"]) == len(sample["loss_mask"])
        labels = zip(sample["labels"], sample["input_ids"], sample["loss_mask"], strict=True)
        assert all(label == (token if learned else -100) for label, token, learned in labels)
        question, answer = sample["pieces"]
        assert (question["text"], question["learned"]) == ("What is 2+2?\n", False)
        assert answer["text"].startswith("Four\x1b[31m ")
    assert found["run"]["steps"] == 3


def test_what_train_would_refuse_is_refused(run_here: RunHere, job: Path) -> None:
    done = run_here("client", "preview", job, "--data-format", "csv")
    assert (done.code, done.out) == (2, "")
    done = run_here("client", "preview", job, "--assistant-only-loss")
    assert "--assistant-only-loss: has no effect where" in done.err


@pytest.mark.thorough
def test_a_dataset_that_no_disk_holds_is_streamed(sample: DemoInput, tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "swarm_ft", "client", "preview", "--json", "--show", "0"]
    job = ["--model", sample.model_dir, "--dataset", NAME, "--max-samples", "40"]
    with serving_dataset() as hub:
        done = subprocess.run(
            [*command, *job, "--eval-size", "0.25"],
            env=os.environ | hub.environment(home),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["train"]["samples"] == 40
    assert hub.sent_bytes < 1 << 30
    assert sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) < 1 << 20
