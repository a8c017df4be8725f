"""The ledger keeps the promises of docs/explanation/buffers.md, at its full size."""

from pathlib import Path

from benchmarks.ledger import measure


def test_a_million_samples_at_eight_boundaries_load_fast_and_stay_small(tmp_path: Path) -> None:
    figures = measure(1_000_000, 8, 2, tmp_path)
    assert figures.load_s < 5.0
    assert figures.bytes_per_entry < 5.0
    assert figures.journal_bytes_per_entry < 16.0


def test_with_one_boundary_an_entry_is_hardly_larger(tmp_path: Path) -> None:
    assert measure(100_000, 1, 2, tmp_path).bytes_per_entry < 6.0
