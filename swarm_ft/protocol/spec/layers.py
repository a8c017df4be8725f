"""Ranges of transformer blocks. Pure; knows no model and no peer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from swarm_ft.errors import BadLayers

MAX_BLOCKS = 4096
"""Blocks of a model: no transformer has more, and the bound limits every list of blocks."""


@dataclass(frozen=True, order=True, slots=True)
class LayerRange:
    """Blocks start..stop-1, as in `--layers 12-24`."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= MAX_BLOCKS:
            raise BadLayers(
                f"layers {self.start}-{self.stop}: expected START-STOP with "
                f"0 <= START < STOP <= {MAX_BLOCKS} (12-24 means blocks 12 to 23)"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}-{self.stop}"

    def overlaps(self, other: LayerRange) -> bool:
        """Whether a block is in both."""
        return self.start < other.stop and other.start < self.stop


def parse_layers(text: str) -> LayerRange | None:
    """Return `12-24` as a range, `auto` as None.

    Raises:
        BadLayers: The text is neither.
    """
    if text == "auto":
        return None
    match = re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", text)
    if match is None:
        raise BadLayers(f"layers '{text}': expected START-STOP, for example 12-24, or 'auto'")
    return LayerRange(int(match[1]), int(match[2]))


def parse_trained(text: str, num_blocks: int) -> LayerRange:
    """Return the blocks that train: `16-24`, `16-` for all from 16 on, nothing for all.

    Raises:
        BadLayers: The text has another form, or names blocks that the model does not have.
    """
    match = re.fullmatch(r"([0-9]{1,6})-([0-9]{0,6})", text or "0-")
    if match is None:
        raise BadLayers(f"layers '{text}': expected START- or START-STOP, for example 16-")
    start, stop = int(match[1]), int(match[2] or num_blocks)
    if not start < stop <= num_blocks:
        raise BadLayers(f"layers '{text}': the model has blocks 0-{num_blocks}")
    return LayerRange(start, stop)


def split_evenly(whole: LayerRange, parts: int) -> tuple[LayerRange, ...]:
    """Cut `whole` into `parts` adjoining ranges whose lengths differ by at most one.

    Raises:
        BadLayers: There are fewer blocks than parts.
    """
    if not 1 <= parts <= len(whole):
        raise BadLayers(f"expected 1 to {len(whole)} stages, at most one a layer, got {parts}")
    cuts = [whole.start + len(whole) * i // parts for i in range(parts + 1)]
    return tuple(LayerRange(a, b) for a, b in pairwise(cuts))
