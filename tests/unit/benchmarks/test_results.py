"""The table of what `--json` wrote."""

import json
from pathlib import Path

from benchmarks.slow_network.results import read_rows, to_markdown
from tests.unit.benchmarks.result_rows import row

OURS, TORCH = "swarm-ft aq4/q8@fp16", "torch GPipe float32"


def test_rows_of_one_shape_become_lines_ours_first_and_fast_links_first(tmp_path: Path) -> None:
    unknown = {"limit_per_s": None, "efficiency": None, "forward_bytes": 0, "backward_bytes": 0}
    late = {"delay_ms": 50.0, "idle_restart": False}
    rows = [
        row(OURS, 100.0, 3.0, **late),
        row(TORCH, 100.0, 0.6, batch_size=8, **unknown),
        row(OURS, 100.0, 4.0, congestion_control="bbr"),
        row(OURS, 25.0, 2.0, shrink=16),
        row(OURS, 10_000.0, 4.5, dilation=2.5),
        row(OURS, 100.0, 9.0, stages=4),
        row(OURS, 100.0, 9.0, down_mbps=20.0),
        row(OURS, None, 9.0),
    ]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"rows": rows}))
    header, rule, *lines = to_markdown(read_rows([path]))
    assert header.count("|") == rule.count("|")
    assert lines == [
        "| 10 Gbps | `aq4/q8@fp16` | 4.50 | 5.00 | 0.90 | 0.82 / 1.64 | 2.5 | 0.50 |",
        "| 100 Mbps, bbr | `aq4/q8@fp16` | 4.00 | 5.00 | 0.80 | 0.82 / 1.64 | 4 | 0.50 |",
        "| 25 Mbps, tensors of 1/16 | `aq4/q8@fp16` | 2.00 | 5.00 | 0.40 | 0.82 / 1.64 "
        "| 4 | 0.50 |",
        "| 100 Mbps, batch of 8 | torch GPipe float32 | 0.60 | - | - | - | 4 | 0.50 |",
        "| 100 Mbps, 50 ms, no idle restart | `aq4/q8@fp16` | 3.00 | 5.00 | 0.60 | 0.82 / 1.64 "
        "| 4 | 0.50 |",
    ]
