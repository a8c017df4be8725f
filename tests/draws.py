"""The number of examples that property tests draw: a quarter, or all of them.

CI has all in `make test-rest`, and a quarter elsewhere.
"""

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
QUICK_PART = 4


def draws(count: int) -> int:
    """Return how many of `count` examples the profile draws."""
    return max(1, count // QUICK_PART) if PROFILE == "quick" else count
