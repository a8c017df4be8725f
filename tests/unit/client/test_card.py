"""Model card of a result, and its upload to the hub."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, RepoUrl
from huggingface_hub.errors import HfHubHTTPError

from swarm_ft.client.card import model_card
from swarm_ft.client.hub import check_push, push
from swarm_ft.client.options import EvalOptions, JobOptions
from swarm_ft.client.report import RunReport, StepTotals
from swarm_ft.errors import BadOption, RunFailed
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import CodecChange, CompressionCost, Evaluated
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.messages.reports import ByteCounts
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import Adapter, Codecs, TrainOptions
from tests.specs import run_spec

SENT = ByteCounts(forward_bytes=300, forward_uncompressed_bytes=3200)
REPORT = RunReport(
    run_id=RunId("run-1"),
    losses=(3.0, 2.0),
    totals=StepTotals(step=1, loss=2.0, num_samples=8, seconds=1.0, sent=SENT),
    evaluations=tuple(
        Evaluated(step=StepNumber(step), num_samples=5, eval_loss=loss)
        for step, loss in ((0, 3.5), (2, 2.5))
    ),
    model_dir="out",
    num_steps=2,
)
ASSIGNED = tuple(
    StageAssignment(peer_id=PeerId(name), layers=LayerRange(start, start + 2))
    for name, start in (("ann", 0), ("bob", 0), ("eve\x1b[31m", 2))
)
OPTIONS = JobOptions(
    model="openai-community/gpt2",
    dataset="/home/ann/secret place/notes.txt",
    evaluation=EvalOptions(eval_dataset="/home/ann/others.txt"),
    train=TrainOptions(adapter=Adapter.LORA, learning_rate=1e-4),
)


def spec_of(reference: str, **train: Any) -> Any:
    spec = run_spec(**train)
    return replace(spec, model=replace(spec.model, reference=reference))


def metadata(text: str) -> dict[str, Any]:
    """Return the card's metadata, parsed by the hub's library."""
    found: dict[str, Any] = yaml.safe_load(ModelCard(text).data.to_yaml())
    return found


def test_a_card_has_the_runs_facts_and_what_the_hub_expects() -> None:
    spec = spec_of("openai-community/gpt2", adapter=Adapter.LORA)
    text = model_card(REPORT, spec, ASSIGNED, OPTIONS)
    assert metadata(text) == {
        "base_model": "openai-community/gpt2",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["swarm-ft", "lora"],
    }
    for words in (
        "| training loss | 3.000 to 2.000 |",
        "| loss | 3.500 | 2.500 |",
        f"| activations | `{spec.train.forward_codec}`: 3.00 bits a value",
        "| 0-2 | `ann`, `bob` |",
        "swarm-ft client train --model openai-community/gpt2 --dataset notes.txt",
        "--eval-dataset others.txt --lr 0.0001 --adapter lora",
    ):
        assert words in text, words


def test_a_card_tells_no_paths_and_steers_no_terminal() -> None:
    text = model_card(REPORT, spec_of("/home/ann/gpt2"), ASSIGNED, OPTIONS)
    assert "/home" not in text
    assert "secret place" not in text
    assert "\x1b" not in text
    assert "base_model" not in metadata(text)
    assert metadata(text)["library_name"] == "transformers"


def test_a_run_that_was_found_again_has_a_card_too() -> None:
    text = model_card(replace(REPORT, losses=(), evaluations=()), spec_of("gpt2"), (), None)
    assert "## How" not in text
    assert "## Evaluation" not in text
    assert metadata(text)["base_model_relation"] == "finetune"


class Hub:
    """Double of `HfApi` that records calls; tests cannot reach a hub."""

    calls: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012 - of all of them
    error: Exception | None = None

    def create_repo(self, repo_id: str, **arguments: Any) -> RepoUrl:
        self.calls.append(("create_repo", {"repo_id": repo_id, **arguments}))
        if self.error is not None:
            raise self.error
        return RepoUrl(f"https://huggingface.co/ann/{repo_id}")

    def upload_folder(self, **arguments: Any) -> None:
        self.calls.append(("upload_folder", arguments))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    return Hub


def test_a_result_is_uploaded_in_one_commit_to_a_repository_of_ones_own(
    hub: type[Hub], tmp_path: Path
) -> None:
    assert push(tmp_path, "tuned", is_private=True) == "https://huggingface.co/ann/tuned"
    (made, how), (uploaded, what) = hub.calls
    assert (made, how) == (
        "create_repo",
        {"repo_id": "tuned", "private": True, "exist_ok": True},
    )
    assert (uploaded, what["repo_id"], what["folder_path"]) == (
        "upload_folder",
        "ann/tuned",
        tmp_path,
    )


def test_a_hub_that_says_no_costs_no_result(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "error", OSError("no route"))
    with pytest.raises(
        RunFailed, match=f"not uploaded to the hub: no route; the result is in {tmp_path}"
    ):
        push(tmp_path, "tuned", is_private=True)
    assert issubclass(HfHubHTTPError, OSError)


def test_who_could_not_push_is_told_before_anything_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(BadOption, match="not logged in"):
        check_push("ann/tuned")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    check_push("ann/tuned")
    with pytest.raises(BadOption, match="expected NAME or OWNER/NAME"):
        check_push("../tuned")


def test_a_card_tells_the_codecs_that_followed_each_other() -> None:
    changes = (
        CodecChange(StepNumber(1), Codecs("aq2", "q2")),
        CodecChange(StepNumber(4), Codecs("aq2", "q1")),
    )
    spec = spec_of("gpt2", forward_codec="aq4", backward_codec="q4")
    text = model_card(replace(REPORT, codecs=changes), spec, ASSIGNED, OPTIONS)
    assert "| activations | `aq4`, from step 1 on `aq2`: 3.00 bits a value" in text


def test_a_card_of_a_run_that_asked_for_a_quality_tells_the_first_and_the_last_codec() -> None:
    spec = spec_of("gpt2", forward_codec="aqk0.5", backward_codec="q2+z")
    report = replace(REPORT, quality=CompressionCost(asked=0.01, num_measured=3))
    last = CodecChange(StepNumber(9), Codecs("aqk0.7", "q2+z"))
    for changes, words in (
        ((), "`aqk0.5`: 3.00 bits"),
        ((last,), "`aqk0.5` at first, `aqk0.7` at last: 3.00 bits"),
    ):
        text = model_card(replace(report, codecs=changes), spec, ASSIGNED, OPTIONS)
        assert f"| activations | {words} a value" in text
