"""`swarm-ft demo` as a newcomer runs it: one command, a report, a checkpoint that loads."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import Shell

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.xdist_group("swarm")]

START_S = 240
"""Five demos that start at once on two cores take up to 118 s to their twentieth step."""

SEQ_LENGTH = 128
KEYS = {
    "run_id",
    "model_dir",
    "losses",
    "eval",
    "eval_before",
    "evaluations",
    "stopped_early",
    "result_step",
    "went_back",
    "steered",
    "eval_samples",
    "eval_weights_dtype",
    "result_dtype",
    "bytes",
    "bytes_by_kind",
    "codecs",
    "quality",
    "relayed_bytes",
    "forecast",
    "steps",
    "samples",
    "seconds",
    "samples_per_second",
}
TRAFFIC = (
    "forward",
    "backward",
    "forward_uncompressed",
    "backward_uncompressed",
    "key_frames",
    "delta_frames",
    "relayed",
    "evaluation",
    "evaluation_uncompressed",
    "evaluation_relayed",
)


def perplexity(
    model_dir: str | Path, text_file: str | Path, seq_length: int, samples: int | None = None
) -> float:
    """Compute the perplexity of so many samples with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    text = Path(text_file).read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ids = torch.tensor(ids[: len(ids) // seq_length * seq_length]).view(-1, seq_length)[:samples]
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).exp().item()


def assert_documented(report: dict[str, Any], *, steps: int, boundaries: list[str]) -> None:
    assert set(report) == KEYS
    assert report["went_back"] == []
    assert report["steps"] == steps == len(report["losses"])
    assert all(isinstance(loss, float) for loss in report["losses"])
    for name in ("eval", "eval_before"):
        assert set(report[name]) == {"loss", "perplexity"}
    evaluations = report["evaluations"]
    assert [one["step"] for one in (evaluations[0], evaluations[-1])] == [0, steps]
    losses = [one["loss"] for one in (evaluations[0], evaluations[-1])]
    assert losses == [report[name]["loss"] for name in ("eval_before", "eval")]
    assert set(report["bytes"]) == set(boundaries)
    for counts in report["bytes"].values():
        assert set(counts) == set(TRAFFIC)
        assert all(isinstance(count, int) for count in counts.values())
    assert set(report["bytes_by_kind"]) == {
        "forward",
        "backward",
        "gradients",
        "state",
        "evaluation",
    }
    assert report["bytes_by_kind"]["gradients"] == {"sent": 0, "uncompressed": 0}
    for way in ("forward", "backward", "evaluation"):
        sent = sum(counts[way] for counts in report["bytes"].values())
        assert report["bytes_by_kind"][way]["sent"] == sent
    assert report["seconds"] > 0
    assert report["samples_per_second"] == pytest.approx(report["samples"] / report["seconds"])
    assert Path(report["model_dir"]).name == "swarm-ft-output"


def test_the_demo_trains_its_own_model_and_tells_what_came_of_it(shell: Shell) -> None:
    demo = shell.spawn("demo", "--steps", 6, "--json", "report.json")
    assert demo.ends(240) == 0, demo.err
    report = json.loads((shell.cwd / "report.json").read_text())
    assert_documented(report, steps=6, boundaries=["2", "4"])
    assert report["samples"] == 48
    assert report["losses"][-1] < report["losses"][0]
    assert report["eval"]["loss"] < report["eval_before"]["loss"]
    for counts in report["bytes"].values():
        assert (counts["key_frames"], counts["delta_frames"]) == (48, 0)
        assert counts["forward_uncompressed"] == 48 * SEQ_LENGTH * 128 * 4
        assert counts["forward"] < counts["forward_uncompressed"] / 7
        assert counts["backward"] < counts["backward_uncompressed"] / 9
    held_out = shell.cwd / "swarm-ft-output-demo" / "input" / "heldout.txt"
    own = perplexity(shell.cwd / "swarm-ft-output", held_out, SEQ_LENGTH)
    assert report["eval"]["perplexity"] == pytest.approx(own, rel=1e-3)
    logs = sorted(path.name for path in (shell.cwd / "swarm-ft-output-demo" / "logs").iterdir())
    assert logs == ["coordinator.log", "stage-1.log", "stage-2.log", "stage-3.log"]
    log = (shell.cwd / "swarm-ft-output-demo" / "logs" / "coordinator.log").read_text()
    assert log.count(" enrolled from ") == 4, "three peers and a client, by invitation"
    summary = "\n".join(demo.out)
    assert "perplexity  " in summary
    assert "swarm-ft-output" in summary
    assert shell.all_gone(), shell.alive()


@pytest.mark.variant
def test_the_demo_trains_an_adapter_that_peft_loads(shell: Shell) -> None:
    chosen = ("--adapter", "lora", "--lora_r", 4, "--train-layers", "3-")
    demo = shell.spawn("demo", *chosen, "--steps", 6, "--json", "report.json")
    assert demo.ends(240) == 0, demo.err
    report = json.loads((shell.cwd / "report.json").read_text())
    assert report["losses"][-1] < report["losses"][0]
    assert [report["bytes"][name]["backward"] > 0 for name in ("2", "4")] == [False, True]
    out, made = shell.cwd / "swarm-ft-output", shell.cwd / "swarm-ft-output-demo" / "input"
    base = AutoModelForCausalLM.from_pretrained(made / "model")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, out).merge_and_unload().state_dict()
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    blocks = {name.split(".")[2] for name in changed}
    assert blocks == {"3", "4", "5"}
    assert all(name.endswith(".weight") for name in changed)
    own = perplexity(out, made / "heldout.txt", SEQ_LENGTH)
    assert report["eval"]["perplexity"] == pytest.approx(own, rel=1e-3)
    assert shell.all_gone(), shell.alive()


@pytest.mark.variant
def test_the_demo_stops_early_and_gives_its_best_weights(shell: Shell) -> None:
    overfits = ("--max-samples", 16, "--lr", 0.01, "--lr-schedule", "constant", "--steps", 80)
    judged = ("--eval_steps", 2, "--max-eval-samples", 16, "--early_stopping_patience", 3)
    saving = ("--load_best_model_at_end", "--save_steps", 2, "--save_total_limit", 1)
    options = ("--stages", 2, *overfits, *judged, *saving, "--json", "report.json")
    demo = shell.spawn("demo", *options)
    assert demo.ends(400) == 0, demo.err
    report = json.loads((shell.cwd / "report.json").read_text())
    losses = {one["step"]: one["loss"] for one in report["evaluations"]}
    trained, best = report["steps"], report["result_step"]
    assert report["stopped_early"]
    assert losses.keys() == set(range(0, trained + 1, 2))
    assert (trained, losses[best]) == (best + 6, min(losses[step] for step in losses if step))
    assert report["eval"]["loss"] == losses[best] < losses[trained]
    held_out = shell.cwd / "swarm-ft-output-demo" / "input" / "heldout.txt"
    own = perplexity(shell.cwd / "swarm-ft-output", held_out, SEQ_LENGTH, 16)
    assert report["eval"]["perplexity"] == pytest.approx(own, rel=1e-3)
    words = f"stopped early        after step {trained} of 80"
    assert any(line.startswith(words) for line in demo.out)
    assert f"best weights         from step {best}" in demo.out
    assert shell.all_gone(), shell.alive()


@pytest.fixture
def llama(shell: Shell, sample: DemoInput) -> str:
    """A Llama-type model directory, a directory of texts and a held-out text, beside `shell`."""
    AutoTokenizer.from_pretrained(sample.model_dir).save_pretrained(shell.cwd / "llama")
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(shell.cwd / "llama")
    text = Path(sample.train_file).read_text(encoding="utf-8")
    (shell.cwd / "texts").mkdir()
    (shell.cwd / "texts" / "a.txt").write_text(text[:2000])
    (shell.cwd / "texts" / "b.txt").write_text(text[2000:4000])
    (shell.cwd / "texts" / "notes.md").write_text("not read")
    (shell.cwd / "held-out.txt").write_text(text[4000:6000])
    return "llama"


@pytest.mark.variant
def test_the_demo_takes_a_llama_a_directory_of_texts_and_other_codecs(
    shell: Shell, llama: str
) -> None:
    demo = shell.spawn(
        *("demo", "--model", llama, "--dataset", "texts", "--eval-dataset", "held-out.txt"),
        *(
            "--stages",
            2,
            "--fw",
            "aq2+z",
            "--bw",
            "q4",
            "--key",
            "q8",
            "--seq-length",
            32,
            "--lr",
            "3e-3",
        ),
        *("--epochs", 2, "--batch-size", 4, "--shuffle", "--lr-schedule", "cosine"),
        *("--warmup-steps", 2, "--weight-decay", 0.1, "--json", "report.json"),
    )
    assert demo.ends(240) == 0, demo.err
    report = json.loads((shell.cwd / "report.json").read_text())
    (boundary,) = report["bytes"].values()
    distinct = boundary["key_frames"]
    assert boundary["delta_frames"] == distinct
    assert_documented(report, steps=2 * -(-distinct // 4), boundaries=["1"])
    own = perplexity(shell.cwd / "swarm-ft-output", shell.cwd / "held-out.txt", 32)
    assert report["eval"]["perplexity"] == pytest.approx(own, rel=1e-3)
    assert report["eval"]["loss"] < report["eval_before"]["loss"]


def test_ctrl_c_takes_the_whole_swarm_down_and_leaves_a_trace_that_opens(shell: Shell) -> None:
    long = ("--steps", 200, "--max-eval-samples", 4)
    demo = shell.spawn("demo", "--stages", 2, *long, "--trace", "trace.json")
    demo.wait_for("err", "step 20/", timeout_s=START_S)
    demo.signal(signal.SIGINT)
    assert demo.ends(20) == 130
    assert demo.err[-1] == "swarm-ft: interrupted"
    assert "Traceback" not in "\n".join(demo.err)
    assert shell.all_gone(), shell.alive()
    assert not (shell.cwd / "swarm-ft-output").exists()
    events = json.loads((shell.cwd / "trace.json").read_text())
    assert {event["pid"] for event in events if event["name"] == "step"} == {1, 2}
    for log in (shell.cwd / "swarm-ft-output-demo" / "logs").iterdir():
        assert "Traceback" not in log.read_text(), log


def test_a_stage_that_dies_ends_the_demo_with_its_last_words_and_the_next_one_forgets_it(
    shell: Shell,
) -> None:
    demo = shell.spawn("demo", "--stages", 2, "--steps", 100_000, "--max-eval-samples", 4)
    demo.wait_for("err", "step 1/", timeout_s=START_S)
    shell.kill("serve-stage --layers 3-6")
    assert demo.ends(30) == 1
    assert "stage-2 ended with" in demo.err[-1]
    assert shell.all_gone(), shell.alive()
    # In the same folder: one that went on with the run of before would not end.
    again = shell.spawn("demo", "--stages", 1, "--steps", 1, "--max-eval-samples", 1)
    assert again.ends(START_S) == 0, again.err
    assert shell.all_gone(), shell.alive()


@pytest.mark.variant
def test_the_demo_takes_a_directory_of_rows_and_says_what_their_columns_mean(
    shell: Shell, sample: DemoInput
) -> None:
    text = Path(sample.train_file).read_text(encoding="utf-8")
    rows = [{"prompt": text[i : i + 40], "completion": text[i + 40 : i + 90]} for i in range(200)]
    (shell.cwd / "rows").mkdir()
    for name, part in (("train", rows[:150]), ("test", rows[150:])):
        lines = "".join(f"{json.dumps(row)}\n" for row in part)
        (shell.cwd / "rows" / f"{name}.jsonl").write_text(lines)
    demo = shell.spawn(
        *("demo", "--model", sample.model_dir, "--dataset", "rows", "--eval-split", "test"),
        *("--stages", 2, "--seq-length", 32, "--steps", 4, "--lr", "3e-3", "--json", "report.json"),
    )
    assert demo.ends(240) == 0, demo.err
    shown = "\n".join(demo.err)
    assert "rows: JSON lines, split 'train'; a document is 'prompt' and 'completion'" in shown
    assert "rows: JSON lines, split 'test'; " in shown
    assert "rows: 150 documents, " in shown
    assert shown.index("first document") < shown.index("starting a coordinator")
    report = json.loads((shell.cwd / "report.json").read_text())
    assert report["steps"] == 4
    assert report["eval"]["loss"] < report["eval_before"]["loss"]
