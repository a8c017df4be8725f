"""A row as `--json` writes it."""

from typing import Any


def row(system: str, mbps: float | None, samples_per_s: float, **other: Any) -> dict[str, Any]:
    return {
        "system": system,
        "up_mbps": mbps,
        "down_mbps": mbps,
        "delay_ms": 0.0,
        "idle_restart": True,
        "congestion_control": "cubic",
        "links": "pair",
        "stages": 8,
        "replicas": 1,
        "batch_size": 32,
        "dilation": 4.0,
        "shrink": 1,
        "samples_per_s": samples_per_s,
        "limit_per_s": 5.0,
        "efficiency": samples_per_s / 5.0,
        "forward_bytes": 820_000.0,
        "backward_bytes": 1_640_000.0,
        "cpus_used": 0.5,
        **other,
    }
