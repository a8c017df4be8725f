"""The bases that this peer's ends of boundaries send along, and what they learn the next ones of.

Learned in some steps from what the whole step sent. The first is used from the next step on, later
ones from the step after that, so that they are learned and said while links idle. A step that is
redone learns what it did before, and what a basis is follows from the run alone. It is state of
the stage as its weights are, and goes into snapshots; at the other end it is only lent, and said
again over every new connection. Knows no wire and no clock.
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
from swarm_ft.codec.basis import Basis, learned
from swarm_ft.codec.codebook import LEAST_ROWS, learned_codebook
from swarm_ft.errors import BadFrame
from swarm_ft.ids import BlockIndex, SampleId

_EARLY_STEPS = 16
_MOST_DIGITS = 9
_MOST_ROWS = 256
"""Of a sample; a step's together are many more than the directions that matter."""
_COMING, _STEPS, _TOKENS, _ROWS = "/coming", "/steps", "/tokens", "/rows"
"""Behind the name of a basis: the one in its place from the next step on, how many steps sent along
it, of how many tokens since it was made, and what rows are gathered for the next."""


class Kind(IntEnum):
    """What is sent along it."""

    FIRST = 1
    """Activations that build on nothing."""
    CHANGE = 2
    """Changes since a sample's last visit."""
    GRADIENT = 3
    """Gradients, beside entries of a codebook."""

    @property
    def gathers(self) -> bool:
        """Whether it is learned of all steps since it was, as far as they are few."""
        return self is Kind.GRADIENT


TOKENS_A_CHANNEL = {Kind.FIRST: 64, Kind.CHANGE: 128, Kind.GRADIENT: 256}
"""After so many for each channel a basis is made anew: its bytes are few beside the frames'."""
_EARLY_EVERY = {Kind.FIRST: 1, Kind.CHANGE: 1, Kind.GRADIENT: 2}
"""Of the first, second, fourth, eighth and sixteenth step, which make one: a codebook has many more
bytes, and ages less."""
_MOST_GATHERED = 8192
"""Rows of a kind that gathers some: more make its codebook hardly better."""


class BasisKey(NamedTuple):
    """Names a basis of this stage, whichever it is by now."""

    boundary: BlockIndex
    kind: Kind

    def __str__(self) -> str:
        return f"{self.boundary}/{self.kind.value}"

    @staticmethod
    def named(text: str) -> BasisKey:
        """The key that `str` gave a name.

        Raises:
            BadFrame: it did not give this one.
        """
        boundary, _, kind = text.partition("/")
        if boundary[:_MOST_DIGITS].isdecimal() and kind in ("1", "2", "3"):
            key = BasisKey(BlockIndex(int(boundary[:_MOST_DIGITS])), Kind(int(kind)))
            if str(key) == text:
                return key
        raise BadFrame(f"basis {text[:40]!a}: expected a boundary and a kind")


class _Seen(NamedTuple):
    """What a sample's frame was made of.

    Attributes:
        rows: bfloat16 [rows, channels]: some tokens' values or changes; None where none is wanted.
        base: what changed, of the same shape; None of first activations.
        step_size: the quantiser's.
        tokens: of the sample.
    """

    rows: Tensor | None
    base: Tensor | None
    step_size: float
    tokens: int


class _Uses(NamedTuple):
    """Of a basis: the steps that sent along it, and the tokens since it was made."""

    steps: int = 0
    tokens: int = 0

    def is_due(self, kind: Kind, channels: int) -> bool:
        """Whether the next step makes a new one: often at first, when a run changes most."""
        step = self.steps + 1
        octave = step.bit_length() - 1
        is_early = step <= _EARLY_STEPS and step == 1 << octave and not octave % _EARLY_EVERY[kind]
        return is_early or self.tokens >= TOKENS_A_CHANNEL[kind] * channels


class Bases:
    """See the module's docstring. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._known: dict[BasisKey, Basis] = {}
        self._coming: dict[BasisKey, Basis] = {}
        self._uses: dict[BasisKey, _Uses] = {}
        self._open: dict[BasisKey, dict[SampleId, _Seen]] = {}
        self._to_learn: dict[BasisKey, list[_Seen]] = {}
        self._gathered: dict[BasisKey, Tensor] = {}
        self._new: set[BasisKey] = set()

    def get(self, key: BasisKey) -> Basis | None:
        """The basis of the open step; None before the first is learned.

        The first call after the step that makes the first takes as long as that does.
        """
        if (basis := self.known(key)) is not None:
            return basis
        with self._learning:
            if self.known(key) is None:
                self._learn(key)
            return self.known(key)

    def known(self, key: BasisKey) -> Basis | None:
        """As `get`, without learning one: for who cannot wait, after somebody did."""
        with self._lock:
            return self._known.get(key)

    def new(self, key: BasisKey) -> Basis | None:
        """As `get`, if no earlier step used it."""
        basis = self.get(key)
        with self._lock:
            return basis if key in self._new else None

    def coming(self, key: BasisKey) -> Basis | None:
        """The basis that takes the place of this one when the open step counts, if one does.

        The first call after the step that makes it takes as long as that does.
        """
        with self._learning:
            self._learn(key)
            return self._coming.get(key)

    def learned(self, key: BasisKey) -> Basis | None:
        """As `coming`, if it is learned by now."""
        with self._lock:
            return self._coming.get(key)

    def note(
        self, key: BasisKey, sample: SampleId, x: Tensor, base: Tensor | None, step_size: float
    ) -> None:
        """A frame of the open step.

        Args:
            key: of its basis.
            sample: that it was of; noted again, the last one counts.
            x: float32 [tokens, channels], before it was coded.
            base: what it is a change of; None if it builds on nothing.
            step_size: the quantiser's.
        """
        self.get(key)
        rows = kept = None
        if self._is_due(key, x.shape[1]) or self._gathers(key):
            every = -(-len(x) // _MOST_ROWS)
            rows, kept = x[::every], None if base is None else base[::every].to(x.device)
            rows = _kept(rows if kept is None else rows - kept)
            kept = None if kept is None else _kept(kept)
        seen = _Seen(rows, kept, step_size, len(x))
        with self._lock:
            self._open.setdefault(key, {})[sample] = seen

    def _is_due(self, key: BasisKey, channels: int) -> bool:
        """Whether the open step makes one."""
        is_missing = key not in self._known
        return is_missing or self._uses.get(key, _Uses()).is_due(key.kind, channels)

    def _gathers(self, key: BasisKey) -> bool:
        """Whether the next one is learned of the open step's rows, too, whichever step makes it."""
        gathered = self._gathered.get(key)
        is_full = gathered is not None and len(gathered) >= _MOST_GATHERED
        return key.kind.gathers and not is_full

    def rollback(self, but: Container[SampleId] = ()) -> None:
        """The step is to be redone, but for these samples."""
        with self._lock:
            for key, seen in self._open.items():
                self._open[key] = {sample: s for sample, s in seen.items() if sample in but}

    @property
    def has_news(self) -> bool:
        """Whether `commit` changes anything: not in runs whose codecs have no bases."""
        with self._lock:
            return bool(self._open or self._to_learn or self._coming or self._new)

    def commit(self) -> None:
        """The step counts: its bases make way for those that were coming.

        Takes as long as it takes to learn these, if nobody asked for them in the meantime.
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
        """Make what the last step's frames say, if they are to; else who asks for it does."""
        with self._learning:
            self._learn_all()

    def export(self) -> dict[str, Tensor]:
        """All of it as of the last commit, as tensors by names."""
        found: dict[str, Tensor] = {}
        with self._learning:  # waits for what another thread is making, too
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
        """Take what `export` gave, in place of all there is.

        Raises:
            BadFrame: a basis is none for so many channels, or its name none.
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

    # With `_lock` held:

    def _close_step(self) -> None:
        """Take the open step's frames for those of a step that counts."""
        for key, seen in self._open.items():
            if not seen:
                continue
            # In an order that is always the same, whenever frames were made.
            in_order = [seen[sample] for sample in sorted(seen)]
            steps, tokens = self._uses.get(key, _Uses())
            tokens += sum(one.tokens for one in in_order)
            if found := self._rows_to_learn(key, in_order):
                self._to_learn[key], tokens = found, 0
            self._uses[key] = _Uses(steps + 1, tokens)
        self._open.clear()

    def _rows_to_learn(self, key: BasisKey, step: list[_Seen]) -> list[_Seen]:
        """What the step that ends has the next basis learned of; nothing if it makes none."""
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

    # With `_learning` held:

    def _learn_all(self) -> None:
        for key in list(self._to_learn):
            self._learn(key)

    def _learn(self, key: BasisKey) -> None:
        with self._lock:
            seen = self._to_learn.pop(key, None)
        basis = _learned_of(key, seen) if seen is not None else None
        if basis is None:
            return
        _ = basis.data  # kept: who says it is no codec thread, and others wait for that one
        with self._lock:
            if key in self._known:
                self._coming[key] = basis
            else:
                self._known[key] = basis
                self._new.add(key)


def _kept(rows: Tensor) -> Tensor:
    return rows.to("cpu", torch.bfloat16)


def _key_in(name: str) -> BasisKey:
    for ending in (_COMING, _STEPS, _TOKENS, _ROWS):
        if name.endswith(ending):
            return BasisKey.named(name.removesuffix(ending))
    return BasisKey.named(name)


def boundary_of(name: str) -> BlockIndex:
    """Whose part of an export it is.

    Raises:
        BadFrame: no export has such a name.
    """
    return _key_in(name).boundary


def _learned_of(key: BasisKey, seen: list[_Seen]) -> Basis | None:
    rows = [one.rows.float() for one in seen if one.rows is not None]
    if key.kind is Kind.GRADIENT:
        return learned_codebook(rows)
    bases = [one.base.float() for one in seen if one.base is not None]
    step_size = statistics.fmean(one.step_size for one in seen)
    return learned(rows, step_size, bases=bases, has_mean=key.kind is Kind.FIRST)


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
