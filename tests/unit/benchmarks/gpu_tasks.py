"""Tasks for the processes of `benchmarks.gpu.pool`, which import nothing else."""

from benchmarks.gpu.report import Row


def ends() -> list[Row]:
    """Find a row."""
    return [{"n": 1}]


def fails() -> list[Row]:
    """Find none, and raise the reason."""
    raise ValueError("it says why")
