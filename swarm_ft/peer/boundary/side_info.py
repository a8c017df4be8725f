"""The bases of this peer's ends of boundaries, and how the next ones are learned.

Some steps learn a basis from everything that they sent. The first basis is used from the next step
on, later ones from the step after that, so that they are learned and sent while links are idle. A
step that is redone learns the same basis: a basis depends on the run alone. Bases are state of the
stage, as its weights are, and are part of snapshots. The receiving end only holds copies, which are
sent again over every new connection. This module uses no network and no clock.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Container, Mapping
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_ft.codec.base import as_tensor
from swarm_ft.codec.basis import Basis, learn_basis
from swarm_ft.codec.codebook import LEAST_ROWS, learn_codebook
from swarm_ft.errors import BadFrame
from swarm_ft.ids import BlockIndex, SampleId

_EARLY_STEPS = 16
_MOST_DIGITS = 9
_MOST_ROWS = 256
"""Rows of one sample; a step's rows together are many more than the directions that matter."""
_COMING, _STEPS, _TOKENS, _ROWS = "/coming", "/steps", "/tokens", "/rows"
"""Suffixes of a basis's name in an export: the basis that replaces it from the next step on, the
number of steps that used it, the tokens since it was learned, the rows gathered for the next one.
"""


class BasisKind(IntEnum):
    """Kind of tensors that a basis encodes."""

    FIRST = 1
    """Activations without a buffer."""
    CHANGE = 2
    """Changes of activations since a sample's last visit."""
    GRADIENT = 3
    """Gradients; their basis contains a codebook."""

    @property
    def gathers(self) -> bool:
        """Whether a basis is learned from the rows of several steps, up to a limit."""
        return self is BasisKind.GRADIENT


TOKENS_A_CHANNEL = {BasisKind.FIRST: 64, BasisKind.CHANGE: 128, BasisKind.GRADIENT: 256}
"""Tokens for each channel after which a new basis is learned.

The basis then has few bytes beside those of the frames.
"""
_EARLY_EVERY = {BasisKind.FIRST: 1, BasisKind.CHANGE: 1, BasisKind.GRADIENT: 2}
"""Interval between the early steps (1, 2, 4, 8, 16) that learn a basis.

A codebook has many more bytes, and ages more slowly.
"""
_MOST_GATHERED = 8192
"""Rows that a kind gathers at most; more rows hardly improve a codebook."""


class BasisKey(NamedTuple):
    """Identity of a basis of this stage, in any version."""

    boundary: BlockIndex
    kind: BasisKind

    def __str__(self) -> str:
        return f"{self.boundary}/{self.kind.value}"

    @staticmethod
    def named(text: str) -> BasisKey:
        """Parse a key from its text.

        Raises:
            BadFrame: The text is no key.
        """
        boundary, _, kind = text.partition("/")
        if boundary[:_MOST_DIGITS].isdecimal() and kind in ("1", "2", "3"):
            key = BasisKey(BlockIndex(int(boundary[:_MOST_DIGITS])), BasisKind(int(kind)))
            if str(key) == text:
                return key
        raise BadFrame(f"basis {text[:40]!a}: expected a boundary and a kind")


class _FrameStats(NamedTuple):
    """Statistics of one sample's frame.

    Attributes:
        rows: Some tokens' values or changes, bfloat16 [rows, channels]; None if not needed.
        base: Values of the same tokens before the change, of the same shape; None without a buffer.
        step_size: Step size of the quantiser.
        tokens: Tokens of the sample.
    """

    rows: Tensor | None
    base: Tensor | None
    step_size: float
    tokens: int


class _Uses(NamedTuple):
    """Use of a basis: steps that used it, and tokens since it was learned."""

    steps: int = 0
    tokens: int = 0

    def is_due(self, kind: BasisKind, channels: int) -> bool:
        """Whether the next step learns a new basis.

        Early steps do so often, since the run changes most.
        """
        step = self.steps + 1
        octave = step.bit_length() - 1
        is_early = step <= _EARLY_STEPS and step == 1 << octave and not octave % _EARLY_EVERY[kind]
        return is_early or self.tokens >= TOKENS_A_CHANNEL[kind] * channels


class Bases:
    """The bases of a stage; see the module. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._known: dict[BasisKey, Basis] = {}
        self._coming: dict[BasisKey, Basis] = {}
        self._uses: dict[BasisKey, _Uses] = {}
        self._open: dict[BasisKey, dict[SampleId, _FrameStats]] = {}
        self._to_learn: dict[BasisKey, list[_FrameStats]] = {}
        self._gathered: dict[BasisKey, Tensor] = {}
        self._new: set[BasisKey] = set()

    def get(self, key: BasisKey) -> Basis | None:
        """Return the basis of the open step; None before the first one is learned.

        The first call after the step that learns the first basis computes it.
        """
        if (basis := self.cached(key)) is not None:
            return basis
        with self._learning:
            if self.cached(key) is None:
                self._learn(key)
            return self.cached(key)

    def cached(self, key: BasisKey) -> Basis | None:
        """Return the basis of the open step without computing it, after another caller did."""
        with self._lock:
            return self._known.get(key)

    def first_used(self, key: BasisKey) -> Basis | None:
        """Return the basis of the open step if no earlier step used it; else None."""
        basis = self.get(key)
        with self._lock:
            return basis if key in self._new else None

    def next_basis(self, key: BasisKey) -> Basis | None:
        """Return the basis that replaces this one once the open step commits.

        None if there is none.

        The first call after the step that learns it computes it.
        """
        with self._learning:
            self._learn(key)
            return self._coming.get(key)

    def next_if_ready(self, key: BasisKey) -> Basis | None:
        """Return the basis that replaces this one, if it is computed already."""
        with self._lock:
            return self._coming.get(key)

    def record_frame(
        self, key: BasisKey, sample: SampleId, x: Tensor, base: Tensor | None, step_size: float
    ) -> None:
        """Record a frame of the open step.

        Args:
            key: Key of the frame's basis.
            sample: Sample of the frame; a second frame of a sample replaces the first.
            x: Tensor before encoding, float32 [tokens, channels].
            base: Buffer that the frame changes; None if there is none.
            step_size: Step size of the quantiser.
        """
        self.get(key)
        rows = base_rows = None
        if self._is_due(key, x.shape[1]) or self._gathers(key):
            every = -(-len(x) // _MOST_ROWS)
            rows, base_rows = x[::every], None if base is None else base[::every].to(x.device)
            rows = _stored_rows(rows if base_rows is None else rows - base_rows)
            base_rows = None if base_rows is None else _stored_rows(base_rows)
        seen = _FrameStats(rows, base_rows, step_size, len(x))
        with self._lock:
            self._open.setdefault(key, {})[sample] = seen

    def _is_due(self, key: BasisKey, channels: int) -> bool:
        """Whether the open step learns a new basis."""
        is_missing = key not in self._known
        return is_missing or self._uses.get(key, _Uses()).is_due(key.kind, channels)

    def _gathers(self, key: BasisKey) -> bool:
        """Whether the open step's rows are gathered for the next basis."""
        gathered = self._gathered.get(key)
        is_full = gathered is not None and len(gathered) >= _MOST_GATHERED
        return key.kind.gathers and not is_full

    def rollback(self, but: Container[SampleId] = ()) -> None:
        """Discard the open step's frames, except those of the samples in `but`."""
        with self._lock:
            for key, seen in self._open.items():
                self._open[key] = {sample: s for sample, s in seen.items() if sample in but}

    @property
    def has_changes(self) -> bool:
        """Whether `commit` changes anything; always False in runs whose codecs have no bases."""
        with self._lock:
            return bool(self._open or self._to_learn or self._coming or self._new)

    def commit(self) -> None:
        """Commit the open step: its replacements become the bases in use.

        The call computes the replacements that no caller requested before.
        """
        with self._learning:
            with self._lock:
                self._new.clear()
            self._learn_all()
            with self._lock:
                self._known |= self._coming
                self._new |= self._coming.keys()
                self._coming.clear()
                self._close_step()

    def learn(self) -> None:
        """Compute the bases that the last step learns, before a caller needs them."""
        with self._learning:
            self._learn_all()

    def export(self) -> dict[str, Tensor]:
        """Return all state as of the last commit, as tensors by name."""
        found: dict[str, Tensor] = {}
        with self._learning:  # also waits for a basis that another thread is computing
            self._learn_all()
            known, coming = dict(self._known), dict(self._coming)
            uses, gathered = dict(self._uses), dict(self._gathered)
        for key, basis in known.items():
            found[str(key)] = as_tensor(basis.data)
        for key, basis in coming.items():
            found[f"{key}{_COMING}"] = as_tensor(basis.data)
        for key, (steps, tokens) in uses.items():
            found[f"{key}{_STEPS}"] = torch.tensor(steps)
            found[f"{key}{_TOKENS}"] = torch.tensor(tokens)
        for key, rows in gathered.items():
            found[f"{key}{_ROWS}"] = rows
        return found

    def restore(self, exported: Mapping[str, Tensor], channels: int) -> None:
        """Replace all state by an export.

        Raises:
            BadFrame: A tensor is no basis for this number of channels, or has an unknown name.
        """
        known: dict[BasisKey, Basis] = {}
        coming: dict[BasisKey, Basis] = {}
        uses: dict[BasisKey, _Uses] = {}
        gathered: dict[BasisKey, Tensor] = {}
        for name, data in exported.items():
            key = _key_in(name)
            if name.endswith(_STEPS):
                uses[key] = uses.get(key, _Uses())._replace(steps=_count(data))
            elif name.endswith(_TOKENS):
                uses[key] = uses.get(key, _Uses())._replace(tokens=_count(data))
            elif name.endswith(_ROWS):
                gathered[key] = _checked_rows(data, channels)
            elif name.endswith(_COMING):
                coming[key] = _read(data, channels)
            else:
                known[key] = _read(data, channels)
        with self._learning, self._lock:
            self._open.clear()
            self._to_learn.clear()
            self._new.clear()
            self._known, self._coming = known, coming
            self._uses, self._gathered = uses, gathered

    # The caller holds `_lock`:

    def _close_step(self) -> None:
        """Add the open step's frames to the committed ones."""
        for key, seen in self._open.items():
            if not seen:
                continue
            # The order of samples is fixed, independent of the order in which frames were encoded.
            in_order = [seen[sample] for sample in sorted(seen)]
            steps, tokens = self._uses.get(key, _Uses())
            tokens += sum(one.tokens for one in in_order)
            if found := self._rows_to_learn(key, in_order):
                self._to_learn[key], tokens = found, 0
            self._uses[key] = _Uses(steps + 1, tokens)
        self._open.clear()

    def _rows_to_learn(self, key: BasisKey, step: list[_FrameStats]) -> list[_FrameStats]:
        """Return the rows from which this step learns the next basis; empty if it learns none."""
        rows = [one.rows for one in step if one.rows is not None]
        if not key.kind.gathers:
            return step if len(rows) == len(step) else []
        if not rows:
            return []
        is_due = self._is_due(key, rows[0].shape[1])
        before = [self._gathered[key]] if key in self._gathered else []
        gathered = torch.cat(before + rows)[-_MOST_GATHERED:]
        # The last token of a sample has no target, and a gradient of zero.
        if not is_due or int(gathered.any(1).sum()) < LEAST_ROWS:
            self._gathered[key] = gathered
            return []
        self._gathered.pop(key, None)
        return [step[-1]._replace(rows=gathered)]

    # The caller holds `_learning`:

    def _learn_all(self) -> None:
        for key in list(self._to_learn):
            self._learn(key)

    def _learn(self, key: BasisKey) -> None:
        with self._lock:
            seen = self._to_learn.pop(key, None)
        basis = _learned_of(key, seen) if seen is not None else None
        if basis is None:
            return
        _ = basis.data  # cached here, so that no thread that others wait for has to encode it
        with self._lock:
            if key in self._known:
                self._coming[key] = basis
            else:
                self._known[key] = basis
                self._new.add(key)


def _stored_rows(rows: Tensor) -> Tensor:
    return rows.to("cpu", torch.bfloat16)


def _key_in(name: str) -> BasisKey:
    for ending in (_COMING, _STEPS, _TOKENS, _ROWS):
        if name.endswith(ending):
            return BasisKey.named(name.removesuffix(ending))
    return BasisKey.named(name)


def boundary_of(name: str) -> BlockIndex:
    """Return the boundary of a tensor of an export.

    Raises:
        BadFrame: The name is none of an export.
    """
    return _key_in(name).boundary


def _learned_of(key: BasisKey, seen: list[_FrameStats]) -> Basis | None:
    rows = [one.rows.float() for one in seen if one.rows is not None]
    if key.kind is BasisKind.GRADIENT:
        return learn_codebook(rows)
    bases = [one.base.float() for one in seen if one.base is not None]
    step_size = statistics.fmean(one.step_size for one in seen)
    return learn_basis(rows, step_size, old_values=bases, has_mean=key.kind is BasisKind.FIRST)


def _read(data: Tensor, channels: int) -> Basis:
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise BadFrame(f"basis: expected bytes, got {data.dtype} {list(data.shape)}")
    return Basis.from_bytes(data.numpy().tobytes(), channels)


def _checked_rows(x: Tensor, channels: int) -> Tensor:
    fits = x.dim() == 2 and x.shape[1] == channels and 1 <= len(x) <= _MOST_GATHERED
    if x.dtype != torch.bfloat16 or not fits:
        raise BadFrame(f"basis: expected rows of {channels}, got {x.dtype} {list(x.shape)}")
    return x


def _count(x: Tensor) -> int:
    if x.dtype != torch.int64 or x.numel() != 1 or int(x) < 0:
        raise BadFrame(f"basis: expected a number of steps, got {x.dtype} {list(x.shape)}")
    return int(x)
