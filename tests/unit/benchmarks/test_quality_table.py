"""The rows and tables of the study's results."""

from typing import Any

import pytest

from benchmarks.quality.configs import configs_of
from benchmarks.quality.table import print_tables
from benchmarks.quality.train import RATES


def record(task: str, config: str, *last: float) -> dict[str, Any]:
    name = "held_out_loss" if task == "cola" else "ppl"
    scores = ("accuracy", "matthews", "held_out_loss") if task == "cola" else ("ppl",)
    epochs = [
        {"loss": 1.0}
        | dict.fromkeys(scores, value)
        | {f"{score}_compressed": value for score in scores}
        for value in last
    ]
    known = {"task": task, "config": config, "planned_epochs": 6, "seed": 0, "rate": RATES[task]}
    ran = {"diverged": "", "epochs": epochs, "start": {name: 9.0}, "bits_fw": 2.0, "bits_bw": 4.0}
    return known | ran


RECORDS = [
    record("lm", "none", 5.0, 4.0),
    record("lm", "q2/q4", 4.4, 5.0),
    record("cola", "none", 0.5),
    record("cola", "q2/q4", 0.25),
]


def rows(text: str, config: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| `{config}` |")]


def test_configs_that_differ_in_a_key_they_do_not_use_are_one_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs = configs_of("none,q2/q4,q2/q4@q8", 6)
    assert len(configs) == 3
    print_tables(RECORDS[:2], None, configs)
    assert len(rows(capsys.readouterr().out, "q2/q4")) == 1


def test_a_group_shows_the_runs_of_its_task_only(capsys: pytest.CaptureFixture[str]) -> None:
    print_tables(RECORDS, "main", None)
    main = capsys.readouterr().out
    print_tables(RECORDS, "cola", None)
    cola = capsys.readouterr().out
    assert "### lm" in main
    assert "### cola" not in main
    assert "### cola" in cola
    assert "### lm" not in cola


def test_a_row_has_the_last_perplexity_the_change_and_that_of_the_best_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_tables(RECORDS, "main", None)
    (row,) = rows(capsys.readouterr().out, "q2/q4")
    assert row == "| `q2/q4` | 6 | 1 | 5.00 | +25.00 | 4.40 | 5.00 | - | 2.00 | 4.00 |"
