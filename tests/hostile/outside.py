"""All cells of real processes: floods of strangers, bad jobs of clients, harm by members."""

from tests.hostile import jobs, members  # noqa: F401 - they list their attacks
from tests.hostile.processes import ATTACKS, run_cells

__all__ = ["ATTACKS", "run_cells"]
