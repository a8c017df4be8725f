"""`swarm-ft bench buffers`: what it measures adds up, and it leaves nothing behind."""

import json

from swarm_ft.codec.stored import buffer_bytes

OPTIONS = ("--shape", "16x64", "--gigabytes", "0.0002", "--repeats", "1", "--samples", "200")


def test_every_tier_at_every_precision_has_a_row(run_here, tmp_path):
    result = run_here("bench", "buffers", *OPTIONS, "--directory", tmp_path, "--json")
    assert result.code == 0
    document = json.loads(result.out)
    rows = {(row["tier"], row["bits"]): row for row in document["speeds"]}
    tiers = ("mapped", "memory", "disk")
    assert rows.keys() == {(tier, bits) for tier in tiers for bits in (16, 8, 4)}
    for (tier, bits), row in rows.items():
        assert row["sample_bytes"] == buffer_bytes(16, 64, bits)
        for name in ("first", "put", "get", "synced"):
            mapped = rows["mapped", bits][f"{name}_gb_s"]
            assert row[f"{name}_gb_s"] > 0
            assert row[f"{name}_ratio"] == row[f"{name}_gb_s"] / mapped
            assert tier != "mapped" or row[f"{name}_ratio"] == 1
    assert list(tmp_path.iterdir()) == []


def test_needed_last_hits_as_often_as_the_budget_allows(run_here):
    result = run_here("bench", "buffers", *OPTIONS, "--json")
    hits = {row["budget"]: row for row in json.loads(result.out)["hits"]}
    assert hits.keys() == {0.1, 0.5, 1.0}
    for budget, row in hits.items():
        assert abs(row["needed_last"] - budget) < 0.06
        assert row["needed_last"] >= row["least_recently_used"]
    assert hits[0.1]["least_recently_used"] < 0.05


def test_the_tables_have_a_row_for_each(run_here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    output = run_here("bench", "buffers", *OPTIONS).out
    words = [line.split() for line in output.splitlines()]
    for tier in ("mapped", "memory", "disk"):
        assert sum(tier in line[:8] for line in words) == 3
    assert "needed last goes" in output
    assert "100%" in output


def test_one_shape_is_expected(run_here):
    result = run_here("bench", "buffers", "--shape", "16x64,8x8")
    assert result.code == 2
    assert "expected one shape" in result.err
