"""The smallest model that the study of codecs can cut in two."""

from typing import Any

TINY: dict[str, Any] = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "vocabulary": 300,
    "tokens": 16,
    "cuts": (1,),
}
"""Of a `Regime`."""
