"""Rows as a table for people and as a document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.slow_network.cases import Row
from benchmarks.slow_network.swarm import PLAINTEXT
from benchmarks.slow_network.work import Network, describe_tcp


def to_table(rows: Sequence[Row]) -> Table:
    """One line a row."""
    table = Table("link", "system", box=SIMPLE_HEAD)
    for name in ("samples/s", "limit", "of limit", "MB each way", "slower by", "CPUs"):
        table.add_column(name, justify="right")
    for row in rows:
        measured = row.measured
        each_way = f"{measured.forward_bytes / 1e6:.2f} / {measured.backward_bytes / 1e6:.2f}"
        table.add_row(
            describe(row.trial.network),
            row.system,
            f"{row.samples_per_s:.2f}",
            _short(row.limit_per_s),
            _short(row.efficiency),
            each_way,
            f"{row.trial.scale.dilation:g}",
            f"{measured.cpus_used:.2f}",
        )
    return table


def cost_of_tls(rows: Sequence[Row]) -> Iterator[str]:
    """Yield for each case in turns the speed with TLS as a share of that in plaintext."""
    pairs: dict[tuple[str, str], list[float]] = {}
    for row, other in pairwise(rows):
        if other.system == f"{row.system}{PLAINTEXT}" and row.trial == other.trial:
            case = describe(row.trial.network), row.system
            pairs.setdefault(case, []).append(row.samples_per_s / other.samples_per_s)
    for (link, system), ratios in pairs.items():
        turns = f"turns: {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f}"
        yield f"{link}, {system}: TLS has {median(ratios):.3f} of plaintext's speed ({turns})"


def _short(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def describe(network: Network) -> str:
    """Format a network in a few characters."""
    up, down = network.up_mbps, network.down_mbps
    rate = "unshaped" if up is None else f"{up:g} Mbps" if up == down else f"{down:g}/{up:g} Mbps"
    delay = f", {network.delay_ms:g} ms" if network.delay_ms else ""
    tcp = describe_tcp(network.congestion_control, idle_restart=network.idle_restart)
    homes = f", homes: {network.nat}" if network.nat else ""
    return f"{rate}{delay}{tcp}{homes}"


def to_document(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All that is known of each row."""
    return [
        {
            "system": row.system,
            "up_mbps": row.trial.network.up_mbps,
            "down_mbps": row.trial.network.down_mbps,
            "delay_ms": row.trial.network.delay_ms,
            "idle_restart": row.trial.network.idle_restart,
            "congestion_control": row.trial.network.congestion_control,
            "links": row.trial.network.topology.value,
            "nat": row.trial.network.nat,
            "stages": row.trial.work.stages,
            "replicas": row.trial.work.replicas,
            "batch_size": row.trial.work.batch_size,
            **asdict(row.trial.scale),
            "samples_per_s": row.samples_per_s,
            "limit_per_s": row.limit_per_s,
            "efficiency": row.efficiency,
            **asdict(row.measured),
        }
        for row in rows
    ]
