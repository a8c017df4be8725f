"""Metrics of a run by the Trainer's names, as they arrive."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

from swarm_ft.client.options import Outputs
from swarm_ft.client.reporting import log_dir, open_reporters, parse_reporters
from swarm_ft.errors import BadOption
from swarm_ft.ids import StepNumber
from swarm_ft.protocol.messages.client import Evaluated, RunEvent, StepCommitted
from swarm_ft.protocol.spec.run_spec import TaskKind
from tests.specs import train_spec


def step(number: int, loss: float) -> StepCommitted:
    return StepCommitted(
        step=StepNumber(number),
        loss=loss,
        learning_rate=1e-3,
        grad_norm=2.0,
        num_samples=4,
        seconds=0.5,
    )


def evaluated(number: int, loss: float, counts: tuple[int, ...] = ()) -> Evaluated:
    return Evaluated(step=StepNumber(number), num_samples=5, eval_loss=loss, counts=counts)


def rows_of(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "out-runs" / "run-1" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_step_is_a_line_as_soon_as_it_counts(tmp_path: Path) -> None:
    spec = train_spec(num_samples=8, num_steps=4)
    outputs = Outputs(out=tmp_path / "out", report_to="csv")
    events: list[RunEvent] = [evaluated(0, 3.0), step(0, 2.5), step(1, 2.0), evaluated(2, 1.5)]
    with open_reporters(outputs, "run-1", spec) as take:
        for count, event in enumerate(events, start=1):
            take(event)
            assert len(rows_of(tmp_path)) == count
    first, second, third, last = rows_of(tmp_path)
    assert (first["step"], first["eval/loss"], first["train/loss"]) == ("0", "3.0", "")
    assert (second["step"], second["train/loss"], second["train/epoch"]) == ("1", "2.5", "0.5")
    assert (third["train/grad_norm"], third["train/learning_rate"]) == ("2.0", "0.001")
    assert third["train/epoch"] == "1.0"
    assert float(last["eval/perplexity"]) == pytest.approx(4.4817, rel=1e-4)


def test_what_is_told_again_is_written_once_and_what_is_trained_again_twice(
    tmp_path: Path,
) -> None:
    outputs = Outputs(out=tmp_path / "out", report_to="csv")
    with open_reporters(outputs, "run-1", train_spec(num_samples=8)) as take:
        for event in (step(0, 2.5), step(1, 2.0), step(0, 2.5), step(1, 1.9), step(2, 1.8)):
            take(event)
    found = [(row["step"], row["train/loss"]) for row in rows_of(tmp_path)]
    assert found == [("1", "2.5"), ("2", "2.0"), ("2", "1.9"), ("3", "1.8")]


def test_classes_have_their_metrics(tmp_path: Path) -> None:
    spec = train_spec(task_kind=TaskKind.CLASSIFICATION, label_names="no,yes", seq_length=8)
    outputs = Outputs(out=tmp_path / "out", report_to="csv,csv")
    with open_reporters(outputs, "run-1", spec) as take:
        take(evaluated(0, 0.7, (1, 1, 2, 1, 1, 2)))
    (row,) = rows_of(tmp_path)
    assert set(row) > {"eval/accuracy", "eval/f1", "eval/matthews_correlation"}
    assert 0 < float(row["eval/accuracy"]) < 1


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outputs = Outputs(out=tmp_path / "out", report_to="tensorboard", logging_dir=tmp_path / "logs")
    with open_reporters(outputs, "run-1", train_spec(num_samples=8)) as take:
        take(step(0, 2.5))
        take(evaluated(1, 1.5))
    found = EventAccumulator(str(tmp_path / "logs" / "run-1"))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(1, 2.5)]
    assert {"eval/loss", "train/grad_norm", "train/epoch"} <= set(found.Tags()["scalars"])


def test_what_cannot_be_reported_to_is_told_before_anything_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert parse_reporters("none") == ()
    with pytest.raises(BadOption, match="expected some of csv, tensorboard, wandb, trackio, none"):
        parse_reporters("csv,comet")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert parse_reporters("csv") == ("csv",)
    with pytest.raises(BadOption, match="pip install trackio"):
        parse_reporters("csv,trackio")
    (tmp_path / "file").write_text("")
    outputs = Outputs(out=tmp_path / "out", report_to="csv", logging_dir=tmp_path / "file")
    with (
        pytest.raises(BadOption, match=r"--report-to csv: .*file"),
        open_reporters(outputs, "run-1", train_spec()),
    ):
        pass
    assert log_dir(Outputs(out=Path(".")), "run-1").parent.name.endswith("-runs")


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "\N{OCTOPUS}" * 16, "a b", "a*"])
def test_no_odd_name_of_a_run_becomes_a_folder(tmp_path: Path, name: str) -> None:
    outputs = Outputs(out=tmp_path / "out")
    folder = log_dir(outputs, name)
    assert folder.parent == tmp_path / "out-runs"
    assert re.fullmatch("run-[0-9a-f]{32}", folder.name)
    assert log_dir(outputs, "run-1a.2_b").name == "run-1a.2_b"
