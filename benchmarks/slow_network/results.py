"""Results that `--json` wrote: read, and as the table of benchmarks/reports/performance.md.

    python -m benchmarks.slow_network.results RESULT.json ...

Rows of other shapes than the preset's are left out of the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.slow_network.work import GPT2_XL_V100, Topology, describe_tcp

Row = Mapping[str, Any]
SHAPE = {"stages": GPT2_XL_V100.stages, "replicas": 1, "links": Topology.PAIR.value}
"""Of the rows that a table compares."""
BATCH_SIZE = GPT2_XL_V100.batch_size
COLUMNS = "link", "system", "samples/s", "limit", "of it", "MB each way", "k", "CPUs"


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """All rows of these documents, in order."""
    documents = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    return [row for document in documents for row in document["rows"]]


def is_comparable(row: Row) -> bool:
    """Whether it has that SHAPE, on links with the same rate both ways."""
    is_even = row["up_mbps"] is not None and row["up_mbps"] == row["down_mbps"]
    return is_even and all(row[name] == value for name, value in SHAPE.items())


def to_markdown(rows: Iterable[Row]) -> Iterator[str]:
    """Lines of a table: ours first, by system, fast links first; links with a delay last."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    for row in sorted(filter(is_comparable, rows), key=_order):
        yield f"| {' | '.join(_cells(row))} |"


def _order(row: Row) -> tuple[float, bool, str, float, float]:
    is_other = not row["system"].startswith("swarm-ft")
    return row["delay_ms"], is_other, row["system"], -row["up_mbps"], row["dilation"]


def _cells(row: Row) -> Iterator[str]:
    yield _link(row)
    name = row["system"]
    yield f"`{name.removeprefix('swarm-ft ')}`" if name.startswith("swarm-ft ") else name
    for number in (row["samples_per_s"], row["limit_per_s"], row["efficiency"]):
        yield "-" if number is None else f"{number:.2f}"
    each_way = row["forward_bytes"] / 1e6, row["backward_bytes"] / 1e6
    yield "{:.2f} / {:.2f}".format(*each_way) if any(each_way) else "-"
    yield f"{row['dilation']:g}"
    yield f"{row['cpus_used']:.2f}"


def _link(row: Row) -> str:
    mbps = row["up_mbps"]
    rate = f"{mbps:g} Mbps" if mbps < 1000 else f"{mbps / 1000:g} Gbps"
    delay = f", {row['delay_ms']:g} ms" if row["delay_ms"] else ""
    tcp = describe_tcp(row["congestion_control"], idle_restart=row["idle_restart"])
    batch = "" if row["batch_size"] == BATCH_SIZE else f", batch of {row['batch_size']}"
    tensors = "" if row["shrink"] == 1 else f", tensors of 1/{row['shrink']}"
    return rate + delay + tcp + batch + tensors


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    lines = to_markdown(read_rows(parser.parse_args().results))
    sys.stdout.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    main()
