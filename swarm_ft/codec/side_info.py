"""Side information: numbers that an encoder learned from earlier tensors and its decoder needs too.

The sender of frames learns it during a run, and sends it to the receiver before the first frame
that names it. Those who move it know its name and its bytes. `Codec` has the methods to learn and
to use it: the codecs along a `basis` and those beside a `codebook` implement them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

NAME_BYTES = 4
PLAIN = bytes(NAME_BYTES)
"""Name in a payload that needs no side information."""
MAX_GATHERED_ROWS = 8192
"""Rows that a codec gathers over several steps at most; more hardly improve what it learns."""
_EARLY_STEPS = 16
_MOST_ROWS = 256
"""Rows of one sample; a step's rows together are many more than the directions that matter."""


class SideInfo(Protocol):
    """Learned numbers of a codec; immutable."""

    @property
    def name(self) -> bytes:
        """Fingerprint of all numbers; payloads refer to the side information by it."""

    @property
    def data(self) -> bytes:
        """Encoded form, which `read_side_info` decodes."""


@dataclass(frozen=True, slots=True)
class Learning:
    """Rule by which a codec learns its side information during a run.

    Attributes:
        tokens_a_channel: Tokens for each channel after which it learns again. The side information
            then has few bytes beside those of the frames.
        early_every: Interval between the early steps (1, 2, 4, 8, 16) that learn; larger if the
            side information has more bytes and ages more slowly.
        gathers: Whether it learns from the rows of several steps, of up to `MAX_GATHERED_ROWS`.
        least_rows: Rows other than zero without which it learns nothing.
    """

    tokens_a_channel: int
    early_every: int = 1
    gathers: bool = False
    least_rows: int = 0

    def is_due(self, steps: int, tokens: int, channels: int) -> bool:
        """Whether the next step learns.

        Early steps do so often, since the run changes most.

        Args:
            steps: Steps that used the codec.
            tokens: Tokens that it encoded since it last learned.
            channels: Channels of a token.
        """
        octave = (steps + 1).bit_length() - 1
        is_power = steps + 1 == 1 << octave
        is_early = steps < _EARLY_STEPS and is_power and not octave % self.early_every
        return is_early or tokens >= self.tokens_a_channel * channels


class Observation(NamedTuple):
    """Statistics of one sample's tensor, from which a codec learns.

    Attributes:
        tokens: Tokens of the sample.
        rows: Some tokens' values or changes, bfloat16 [rows, channels]; None if not needed.
        base: Values of the same tokens before the change, of the same shape; None without a buffer.
        step_size: Step size of the quantiser; 0 without one.
    """

    tokens: int
    rows: Tensor | None = None
    base: Tensor | None = None
    step_size: float = 0.0


def observed(x: Tensor, base: Tensor | None, step_size: float = 0.0) -> Observation:
    """Return the observation of a sample with some of its rows.

    Args:
        x: Tensor before encoding, float32 [tokens, channels].
        base: Buffer that the encoding changes; None without one.
        step_size: Step size of the quantiser.
    """
    every = -(-len(x) // _MOST_ROWS)
    rows, base_rows = x[::every], None if base is None else base[::every].to(x.device)
    rows = _stored(rows if base_rows is None else rows - base_rows)
    return Observation(len(x), rows, None if base_rows is None else _stored(base_rows), step_size)


def _stored(rows: Tensor) -> Tensor:
    return rows.to("cpu", torch.bfloat16)
