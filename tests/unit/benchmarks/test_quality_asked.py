"""The losses of runs with a quality limit, and the codecs that the study uses for them."""

from typing import Any

import pytest

from benchmarks.quality.asked import print_within_limit
from benchmarks.quality.boundary import Cuts
from benchmarks.quality.configs import parse_config


def record(config: str, end: float, **changes: Any) -> dict[str, Any]:
    known = {"task": "lm", "regime": "r", "planned_epochs": 6, "seed": 0, "rate": 0.002}
    found = {"diverged": "", "epochs": [{"ppl": 99.0}, {"ppl": end}]}
    return {
        "config": config,
        "trains": "all",
        "bits_fw": 1.25,
        "bits_bw": 2.0,
        **known,
        **found,
        **changes,
    }


WITH_LIMIT = "quality0.01/q2+z"


def shown(capsys: pytest.CaptureFixture[str], *records: dict[str, Any]) -> str:
    print_within_limit(list(records))
    return capsys.readouterr().out


def test_a_row_has_what_each_seed_lost_against_its_own_uncompressed_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = shown(
        capsys,
        record("none", 50.0),
        record("none", 100.0, seed=1),
        record(WITH_LIMIT, 50.4),
        record(WITH_LIMIT, 101.1, seed=1, bits_fw=1.75),
        record("q2/q4", 60.0),
    )
    assert (
        "| all (`lm`) | 0.002 | 6 | `quality0.01/q2+z` | +0.80, +1.10 | 1.50 + 2.00 | 1 of 2 |"
        in printed
    )
    assert printed.endswith("\n`quality0.01/q2+z`: 1 of 2 within what was asked.\n")
    assert "`q2/q4`" not in printed


def test_a_run_is_held_against_one_of_its_rate_and_counted_by_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = [record("none", 50.0), record("none", 40.0, rate=0.001)]
    limited = [record(WITH_LIMIT, 49.0), record(WITH_LIMIT, 41.0, rate=0.001)]
    printed = shown(capsys, *plain, *limited, record(WITH_LIMIT, 70.0, rate=0.004))
    assert "| 0.002 | 6 | `quality0.01/q2+z` | -2.00 |" in printed
    assert "| 0.001 | 6 | `quality0.01/q2+z` | +2.50 |" in printed
    assert printed.endswith(": 1 of 2 within what was asked.\n"), (
        "one has nothing to be held against"
    )


def test_a_run_that_diverged_lost_all(capsys: pytest.CaptureFixture[str]) -> None:
    printed = shown(capsys, record("none", 50.0), record(WITH_LIMIT, 50.0, diverged="nan"))
    assert "+inf" in printed
    assert printed.endswith(": 0 of 1 within what was asked.\n")


def test_the_study_codes_adapters_more_finely_and_follows_what_is_measured() -> None:
    config = parse_config(WITH_LIMIT)
    whole, adapters = (Cuts(config, 1, adapts=adapts) for adapts in (False, True))
    assert whole.control is not None
    assert adapters.control is not None
    assert adapters.control.step_size < whole.control.step_size
    began = whole.control.step_size
    whole.measured(0.5)
    assert whole.control.step_size < began
