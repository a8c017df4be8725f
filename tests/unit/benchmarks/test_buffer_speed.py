"""The figures of `benchmarks.buffer_speed` add up, and it leaves no files behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.buffer_speed import main, measure_hits, measure_speed
from swarm_ft.codec.stored import buffer_bytes

SHAPE = (16, 64)
OPTIONS = ("--shape", "16x64", "--gigabytes", "0.0002", "--repeats", "1", "--samples", "200")


def test_every_tier_at_every_precision_has_a_row(tmp_path: Path) -> None:
    measured = measure_speed(SHAPE, total_bytes=200_000, repeats=1, directory=tmp_path)
    rows = {(row.tier, row.bits): row for row in measured}
    tiers = ("mapped", "memory", "disk", "sealed")
    assert rows.keys() == {(tier, bits) for tier in tiers for bits in (16, 8, 4)}
    for (tier, bits), row in rows.items():
        assert row.sample_bytes == buffer_bytes(*SHAPE, bits)
        for name in ("first", "put", "get", "synced"):
            speed, ratio = getattr(row, f"{name}_gb_s"), getattr(row, f"{name}_ratio")
            assert speed > 0
            assert ratio == speed / getattr(rows["mapped", bits], f"{name}_gb_s")
            assert tier != "mapped" or ratio == 1
    assert list(tmp_path.iterdir()) == []


def test_needed_last_hits_as_often_as_the_budget_allows() -> None:
    hits = {row.budget: row for row in measure_hits(200)}
    assert hits.keys() == {0.1, 0.5, 1.0}
    for budget, row in hits.items():
        assert abs(row.needed_last - budget) < 0.06
        assert row.needed_last >= row.least_recently_used
    assert hits[0.1].least_recently_used < 0.05


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.buffer_speed", *options]
    env = os.environ | {"COLUMNS": "140"}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_the_tables_have_a_row_for_each() -> None:
    output = run(*OPTIONS).stdout
    words = [line.split() for line in output.splitlines()]
    for tier in ("mapped", "memory", "disk", "sealed"):
        assert sum(tier in line[:8] for line in words) == 3
    assert "needed last goes" in output
    assert "100%" in output


@pytest.mark.parametrize("text", ["16x64,8x8", "16", "0x8", "x"])
def test_one_shape_is_expected(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["buffer_speed", "--shape", text])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "expected TOKENSxCHANNELS" in capsys.readouterr().err
