"""The benchmark of a head's memory compares two ways that give the same."""

from __future__ import annotations

import pytest

from benchmarks import head_memory


def test_each_case_has_a_row_in_which_chunks_take_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--tokens", "256", "--words", "200000", "--hidden", "16", "--repeats", "1")
    monkeypatch.setattr("sys.argv", ["head_memory", *sizes])
    head_memory.main()
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == list(head_memory.CASES)
    for _, whole_mib, _, chunked_mib, _, _, loss, gradients in rows:
        assert float(chunked_mib) < float(whole_mib)
        assert float(loss) < 1e-6
        assert float(gradients) < 1e-6
