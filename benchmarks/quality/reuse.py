"""Threshold reuse: what hardly moved since its last visit is not sent; the receiver has it.

As SplitCom does (arXiv 2602.10564), of whole samples or token by token, ahead of any codec. What
is left out gets no dither and no forecast: its value is the buffer's. Written from the paper's
abstract, with a threshold that stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

_PATTERN = re.compile(r"(?P<unit>[ts])(?P<threshold>\d+(\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Reuse:
    """The rule that leaves tokens out.

    Attributes:
        by_token: each is judged by itself; else all tokens of a sample together.
        threshold: a change is left out whose norm is no more than this share of the value's.
    """

    by_token: bool
    threshold: float

    def moved(self, x: Tensor, base: Tensor) -> Tensor:
        """Return which tokens of x, [tokens, channels], must be sent: bool [tokens]."""
        change, size = (value.square().sum(1) for value in (x - base, x))
        if not self.by_token:
            change, size = (each.sum().expand(len(x)) for each in (change, size))
        return change > self.threshold**2 * size


@dataclass(frozen=True, slots=True)
class Partly:
    """A sample's frame of the tokens that moved, behind flags that mark them.

    Attributes:
        tokens: of the sample.
        flags: bool, one for each token, or one for the sample.
        frame: of the tokens that moved; None where none did.
    """

    tokens: int
    channels: int
    flags: Tensor
    frame: Any

    def to_bytes(self) -> bytes:
        """Encode a bit a flag, then the frame."""
        flags = np.packbits(self.flags.numpy()).tobytes()
        return flags if self.frame is None else flags + bytes(self.frame.to_bytes())


def parse_reuse(text: str) -> Reuse:
    """Parse `t0.2`, reuse by token, or `s0.2`, by sample.

    Raises:
        ValueError: the text is neither.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"reuse '{text}': expected t or s and a threshold")
    return Reuse(match["unit"] == "t", float(match["threshold"]))


def merged(moved: Tensor, sent: Tensor | None, base: Tensor) -> Tensor:
    """Return the receiver's rows: `sent`, [moved tokens, channels], and the base's others."""
    y = base.clone()
    if sent is not None:
        y[moved] = sent
    return y
