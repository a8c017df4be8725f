"""`swarm-ft client generate` with a real swarm: a finished run generates before it is fetched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import RunHere, Shell, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("swarm")]

PROMPT, NEW_TOKENS = "def read(self", 24


def of_transformers(model_dir: Path) -> tuple[list[int], str]:
    """New tokens and their text."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    prompt = tokenizer(PROMPT, return_tensors="pt")
    text = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    new: list[int] = text[0, prompt.input_ids.shape[1] :].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


def test_a_finished_run_speaks_until_it_is_fetched(
    shell: Shell, sample: DemoInput, run_here: RunHere
) -> None:
    port, journal = free_port(), ("--journal", shell.cwd / "journal.db")
    assert shell.spawn("init", *journal).ends() == 0
    place = ("--address", f"127.0.0.1:{port}", "--uses", 10, *journal)
    peer_way = shell.invited(*place)
    way = ("--invite", shell.invited("--role", "client", *place))
    dht = shell.up("dht").first_words()["addresses"][0]
    shell.up("coordinator", "--port", port, *journal, "--initial-peers", dht)
    for layers in ("0-1", "1-2"):
        shell.up("serve-stage", peer_way, "--layers", layers)
    job = ("--model", sample.model_dir, "--dataset", sample.train_file, "--max-samples", 40)
    more = ("--steps", 20, "--batch-size", 4, "--seq-length", 32, "--lr", "1e-2")
    left = run_here("client", "train", *job, *more, "--detach", *way)
    assert left.code == 0, left.err
    (run_id,) = set(re.findall(r"run-[0-9a-f]+", left.out))
    command = ("client", "generate", PROMPT, "--max-new-tokens", NEW_TOKENS, *way)
    early = run_here(*command)
    assert (early.code, early.out) == (1, ""), early.err
    assert f"run {run_id} is waiting, at step 0 of 20" in early.err

    shell.up("serve-stage", peer_way, "--layers", "2-3")
    wait_until_finished(run_here, run_id, way)
    printed = run_here(*command, "--json")
    assert printed.code == 0, printed.err
    words: dict[str, Any] = json.loads(printed.out)
    plain = run_here(*command)
    drawn = [run_here(*command, "--do-sample", "--seed", 3).out for _ in range(2)]

    out = shell.cwd / "out"
    fetched = run_here("client", "attach", "--run", run_id, "--out", out, *way)
    assert fetched.code == 0, fetched.err
    token_ids, text = of_transformers(out)
    assert (words["run"], words["token_ids"], words["text"]) == (run_id, token_ids, text)
    assert plain.out == f"{text}\n"
    assert drawn[0] == drawn[1] != plain.out, "a seed says what is drawn"
    late = run_here(*command)
    assert late.code == 1
    assert "was fetched and deleted from the swarm" in late.err


def wait_until_finished(run_here: RunHere, run_id: str, way: tuple[str, str]) -> None:
    while True:
        runs = json.loads(run_here("status", "--json", *way).out)["runs"]
        (phase,) = (run["phase"] for run in runs if run["run"] == run_id)
        if phase == "finished":
            return
        assert phase in ("queued", "waiting", "loading", "training", "exporting"), phase
