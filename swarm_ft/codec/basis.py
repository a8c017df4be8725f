"""A basis for what crosses a boundary: the directions over channels in which it varies.

Changes of activations between two visits lie in few directions (their Karhunen-Loeve basis, the
eigenvectors of their covariance): coded along these, most values are zero. The sender learns a
basis from what it sent in one step and says it to the receiver before the first frame that needs
it; `directional` codes in it.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from swarm_ft.codec.base import as_tensor, bfloat16_bytes, read_bfloat16
from swarm_ft.codec.entropy import CLASSES
from swarm_ft.errors import BadFrame
from swarm_ft.protocol.spec.digest import fingerprint_of

MAX_DIRECTIONS = 1024
NAME_BYTES = 4
PLAIN = bytes(NAME_BYTES)
"""In place of a name: coded along the channels themselves."""
_HEADER = struct.Struct("<HIB")
_LARGEST = 127
_LEAST_EXPONENT, _MOST_EXPONENT = 6, 13
"""A unit vector's largest coefficient is between 1 / sqrt(channels) and 1."""
_FLOOR = 0.3
"""Of a step: what varies less along a direction is nearly always a code of zero; a uniform
quantiser's error is 1 / sqrt(12) = 0.29 steps (reverse water-filling, Cover and Thomas 10.3.3)."""
_WHOLE_CHANNELS = 512
"""Up to here all eigenvectors are found, beyond it the leading ones, by subspace iteration."""
_FIRST_RANK, _SPARE, _ITERATIONS = 128, 16, 2
_AN_OCTAVE = 2.0
_LEAST_SQUARE = 0.01
"""Of a combination of directions with unit weights: rounding orthonormal ones leaves far more."""


@dataclass(frozen=True, eq=False)
class Basis:
    """Directions over channels, in order of falling variance; nearly orthonormal.

    Attributes:
        coefficients: int8 [directions, channels].
        exponents: uint8 [directions]: direction r is coefficients[r] * 2^-exponents[r].
        classes: uint8 [directions], 0 to 7: how widely values along it spread.
        mean: float32 [channels], exactly bfloat16s: what is subtracted first; None for nothing.
    """

    coefficients: Tensor
    exponents: Tensor
    classes: Tensor
    mean: Tensor | None = None
    _synthesis: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _analysis: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def directions(self) -> int:
        """How many."""
        return len(self.coefficients)

    @property
    def channels(self) -> int:
        """How many."""
        return self.coefficients.shape[1]

    @functools.cached_property
    def name(self) -> bytes:
        """What frames call it."""
        name = fingerprint_of(self.to_bytes())[:NAME_BYTES]
        return name if name != PLAIN else b"\1" * NAME_BYTES

    @property
    def is_usable(self) -> bool:
        """Whether values can be coded along it; any can be decoded."""
        rows = self.synthesis(torch.device("cpu")).double()
        _, failed = torch.linalg.cholesky_ex(rows @ rows.T - _LEAST_SQUARE * torch.eye(len(rows)))
        return not int(failed)

    def synthesis(self, device: torch.device) -> Tensor:
        """The directions as exact float32 [directions, channels]: codes times it make values."""
        found = self._synthesis.get(device)
        if found is None:
            found = torch.ldexp(self.coefficients.float(), -self.exponents.int()[:, None])
            self._synthesis[device] = found = found.to(device)
        return found

    def analysis(self, device: torch.device) -> Tensor:
        """float32 [channels, directions]: values times it are their least-squares codes."""
        found = self._analysis.get(device)
        if found is None:
            rows = self.synthesis(torch.device("cpu")).double()
            found = rows.T @ torch.linalg.inv(rows @ rows.T)
            self._analysis[device] = found = found.float().to(device)
        return found

    def to_bytes(self) -> bytes:
        """As it is sent: counts, the mean if there is one, exponents and classes, coefficients."""
        head = _HEADER.pack(self.directions, self.channels, self.mean is not None)
        mean = b"" if self.mean is None else bfloat16_bytes(self.mean)
        pairs = (self.exponents << 4 | self.classes).numpy().tobytes()
        return head + mean + pairs + self.coefficients.numpy().tobytes()

    @staticmethod
    def from_bytes(data: bytes, channels: int) -> Basis:
        """What `to_bytes` wrote; it may come from a stranger.

        Raises:
            BadFrame: it is none for so many channels.
        """
        if len(data) < _HEADER.size:
            raise BadFrame(f"basis: expected a header of {_HEADER.size} bytes, got {len(data)}")
        directions, claimed, has_mean = _HEADER.unpack_from(data)
        if claimed != channels or not 1 <= directions <= most_directions(channels) or has_mean > 1:
            raise BadFrame(f"basis: {directions} directions of {claimed} channels; {channels} here")
        size = _HEADER.size + 2 * channels * has_mean + directions * (1 + channels)
        if len(data) != size:
            raise BadFrame(f"basis: expected {size} bytes, got {len(data)}")
        at = _HEADER.size + 2 * channels * has_mean
        pairs = as_tensor(data[at : at + directions])
        exponents, classes = pairs >> 4, pairs & 15
        if int(exponents.min()) < _LEAST_EXPONENT or int(exponents.max()) > _MOST_EXPONENT:
            raise BadFrame(f"basis: exponents {exponents.min()} to {exponents.max()}")
        if int(classes.max()) >= CLASSES:
            raise BadFrame(f"basis: a class of {classes.max()}")
        rows = as_tensor(data[at + directions :]).view(torch.int8).view(directions, channels)
        mean = read_bfloat16(data[_HEADER.size : at]) if has_mean else None
        if mean is not None and not bool(mean.isfinite().all()):
            raise BadFrame("basis: a mean that is not finite")
        return Basis(rows, exponents, classes, mean)


def most_directions(channels: int) -> int:
    """No basis of so many channels has more."""
    return min(channels, MAX_DIRECTIONS)


def max_basis_bytes(channels: int) -> int:
    """No basis of so many channels is larger."""
    return _HEADER.size + 2 * channels + most_directions(channels) * (1 + channels)


def name_in(payload: bytes) -> bytes:
    """The name of the basis that a frame's payload needs; empty if it needs none."""
    name = payload[:NAME_BYTES]
    return b"" if name == PLAIN else name


# ---- learning one


def learned(rows: Tensor, step: float, *, has_mean: bool) -> Basis | None:
    """The basis of rows like these, for values that are coded in such steps.

    As many directions as vary by more than the coding errs along any (reverse water-filling).

    Args:
        rows: float32 [n, channels]: tokens' values.
        step: of the quantiser, in the rows' units.
        has_mean: whether rows vary around another value than zero.

    Returns:
        None if nothing varies so much, or the rows or the step are not finite.
    """
    mean = rows.mean(0).to(torch.bfloat16).float() if has_mean else None
    centred = rows if mean is None else rows - mean
    if not (math.isfinite(step) and step > 0 and bool(centred.isfinite().all())):
        return None
    spreads, vectors = _leading(centred, _FLOOR * step)
    count = min(int((spreads > _FLOOR * step).sum()), most_directions(rows.shape[1]))
    if count == 0:
        return None
    coefficients, exponents = _rounded(vectors[:, :count].T.contiguous())
    classes = _classes(spreads[:count])
    return Basis(coefficients, exponents, classes, None if mean is None else mean.cpu())


def _leading(rows: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Spreads, falling, and their unit vectors, [k] and [channels, k]: all that reach the floor."""
    count, channels = rows.shape
    if channels <= _WHOLE_CHANNELS:
        exact = rows.double()
        squares, vectors = torch.linalg.eigh(exact.T @ exact / count)
        return squares.flip(0).clamp(min=0).sqrt(), vectors.flip(1)
    rank, most = _FIRST_RANK, min(most_directions(channels), count)
    while True:
        span = _leading_span(rows, min(rank + _SPARE, channels, count))
        _, values, vectors = torch.linalg.svd(rows @ span, full_matrices=False)
        spreads = values[:rank] / math.sqrt(count)
        if rank >= most or float(spreads[-1]) <= floor:
            return spreads, span @ vectors[:rank].T
        rank *= 2


def _leading_span(rows: Tensor, rank: int) -> Tensor:
    """An orthonormal [channels, rank] that holds about all that rows vary by most."""
    # Halko, Martinsson and Tropp 2011, algorithm 4.4; drawn by a generator of its own.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(rows), rank, generator=generator).to(rows.device)
    span: Tensor = torch.linalg.qr(rows.T @ drawn)[0]
    for _ in range(_ITERATIONS):
        span = torch.linalg.qr(rows.T @ torch.linalg.qr(rows @ span)[0])[0]
    return span


def _rounded(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors in rows as 8-bit coefficients, and each row's exponent; both on the CPU."""
    largest = vectors.abs().amax(1, keepdim=True).double().cpu()
    exponents = torch.log2(_LARGEST / largest).floor().clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
    scaled = torch.round(vectors.double().cpu() * 2.0**exponents)
    coefficients = scaled.clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return coefficients, exponents[:, 0].to(torch.uint8)


def _classes(spreads: Tensor) -> Tensor:
    """Half an octave each, or wider where there is more between the widest and the narrowest."""
    octaves = np.log2(spreads.double().cpu().numpy())
    low, high = octaves[-1], octaves[min(len(octaves) - 1, len(octaves) // 50)]
    an_octave = min(_AN_OCTAVE, (CLASSES - 1) / max(high - low, 1e-9))
    found = np.rint((octaves - low) * an_octave).clip(0, CLASSES - 1)
    return torch.from_numpy(found.astype(np.uint8))
