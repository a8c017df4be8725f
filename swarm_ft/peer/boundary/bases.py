"""The bases that this peer's ends of boundaries send along, and what they learn the next ones of.

Learned in some steps from what the whole step sent, and used from the next step on: so a step that
is redone learns what it did before, and what a basis is follows from the run alone. It is state of
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
from swarm_ft.errors import BadFrame
from swarm_ft.ids import BlockIndex, SampleId

LEARNS_EVERY_STEPS = 32
_STEPS = "/steps"
"""Behind the name of a basis: that of how many steps sent along it."""
_MOST_DIGITS = 9
_MOST_ROWS = 128
"""Of a sample; a step's together are many more than the directions that matter."""


class Kind(IntEnum):
    """What is sent along it."""

    FIRST = 1
    """Activations that build on nothing."""
    CHANGE = 2
    """Changes since a sample's last visit."""


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
        if boundary[:_MOST_DIGITS].isdecimal() and kind in ("1", "2"):
            key = BasisKey(BlockIndex(int(boundary[:_MOST_DIGITS])), Kind(int(kind)))
            if str(key) == text:
                return key
        raise BadFrame(f"basis {text[:40]!a}: expected a boundary and a kind")


class _Seen(NamedTuple):
    """What a sample's frame was made of: bfloat16 [rows, channels], and its step."""

    rows: Tensor
    step_size: float


def learns_after(count: int) -> bool:
    """Whether the `count`th step that sends along a basis makes a new one: often at first."""
    return count % LEARNS_EVERY_STEPS == 0 or (
        count < LEARNS_EVERY_STEPS and count & (count - 1) == 0
    )


class Bases:
    """See the module's docstring. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._known: dict[BasisKey, Basis] = {}
        self._num_steps: dict[BasisKey, int] = {}
        self._open: dict[BasisKey, dict[SampleId, _Seen]] = {}
        self._to_learn: dict[BasisKey, list[_Seen]] = {}

    def get(self, key: BasisKey) -> Basis | None:
        """The basis of the open step; None before the first is learned.

        The first call after a step that makes one takes as long as that does.
        """
        with self._learning:
            with self._lock:
                seen = self._to_learn.pop(key, None)
            basis = _learned_of(key, seen) if seen is not None else None
            with self._lock:
                if basis is not None:
                    self._known[key] = basis
                return self._known.get(key)

    def known(self, key: BasisKey) -> Basis | None:
        """As `get`, without learning one: for who cannot wait, after somebody did."""
        with self._lock:
            return self._known.get(key)

    def wants(self, key: BasisKey) -> bool:
        """A frame of the open step is sent along it, or would be: whether to `note` its rows."""
        is_missing = self.get(key) is None
        with self._lock:
            self._open.setdefault(key, {})
            return is_missing or learns_after(self._num_steps.get(key, 0) + 1)

    def note(self, key: BasisKey, sample: SampleId, rows: Tensor, step_size: float) -> None:
        """A frame of the open step.

        Args:
            key: of its basis.
            sample: that it was of; noted again, the last one counts.
            rows: float32 [tokens, channels], before it was coded.
            step_size: the quantiser's.
        """
        every = -(-len(rows) // _MOST_ROWS)
        seen = _Seen(rows[::every].to("cpu", torch.bfloat16), step_size)
        with self._lock:
            self._open.setdefault(key, {})[sample] = seen

    def rollback(self, but: Container[SampleId] = ()) -> None:
        """The step is to be redone, but for these samples."""
        with self._lock:
            for key, seen in self._open.items():
                self._open[key] = {sample: s for sample, s in seen.items() if sample in but}

    def commit(self) -> None:
        """The step counts: from now on bases are what its frames say."""
        with self._lock:
            for key, seen in self._open.items():
                self._num_steps[key] = self._num_steps.get(key, 0) + 1
                if seen:
                    # In an order that is always the same, whenever frames were made.
                    self._to_learn[key] = [seen[sample] for sample in sorted(seen)]
            self._open.clear()

    def export(self) -> dict[str, Tensor]:
        """All of it as of the last commit, as tensors by names."""
        for key in list(self._to_learn):
            self.get(key)
        with self._lock:
            known = {str(key): as_tensor(basis.to_bytes()) for key, basis in self._known.items()}
            steps = {f"{key}{_STEPS}": torch.tensor(n) for key, n in self._num_steps.items()}
        return known | steps

    def restore(self, exported: Mapping[str, Tensor], channels: int) -> None:
        """Take what `export` gave, in place of all there is.

        Raises:
            BadFrame: a basis is none for so many channels, or its name none.
        """
        steps = {n.removesuffix(_STEPS): x for n, x in exported.items() if n.endswith(_STEPS)}
        bases = {n: x for n, x in exported.items() if not n.endswith(_STEPS)}
        known = {BasisKey.named(name): _read(data, channels) for name, data in bases.items()}
        num_steps = {BasisKey.named(name): _count(x) for name, x in steps.items()}
        with self._learning, self._lock:
            self._open.clear()
            self._to_learn.clear()
            self._known, self._num_steps = known, num_steps


def boundary_of(name: str) -> BlockIndex:
    """Whose part of an export it is.

    Raises:
        BadFrame: no export has such a name.
    """
    return BasisKey.named(name.removesuffix(_STEPS)).boundary


def _learned_of(key: BasisKey, seen: list[_Seen]) -> Basis | None:
    rows = torch.cat([one.rows for one in seen]).float()
    step_size = statistics.fmean(one.step_size for one in seen)
    return learned(rows, step_size, has_mean=key.kind is Kind.FIRST)


def _read(data: Tensor, channels: int) -> Basis:
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise BadFrame(f"basis: expected bytes, got {data.dtype} {list(data.shape)}")
    basis = Basis.from_bytes(data.numpy().tobytes(), channels)
    if not basis.is_usable:
        raise BadFrame("basis: its directions depend on each other; nothing is sent along them")
    return basis


def _count(x: Tensor) -> int:
    if x.dtype != torch.int64 or x.numel() != 1 or int(x) < 0:
        raise BadFrame(f"basis: expected a number of steps, got {x.dtype} {list(x.shape)}")
    return int(x)
