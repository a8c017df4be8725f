"""The benchmark of the coordinator's stalls measures something of every kind, on a small job."""

from pathlib import Path

from benchmarks.coordinator_stalls import KINDS, measure


def test_every_kind_of_wait_is_measured_before_and_during_a_submission(tmp_path: Path) -> None:
    figures = measure(mib=64, seq_length=64, step_s=0.01, folder=tmp_path, quiet_s=0.5)
    for phase in (figures.quiet, figures.submitting):
        assert tuple(phase.spreads) == KINDS
        for spread in phase.spreads.values():
            assert spread.count > 0
            assert spread.p50_ms <= spread.p99_ms <= spread.max_ms
    assert figures.submitting.peak_mib - figures.quiet.peak_mib < 32, "64 MiB came in"
