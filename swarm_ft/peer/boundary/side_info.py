"""Side information of this peer's ends of boundaries, and the times at which it is learned.

Some steps learn side information from everything that they sent. The first one is used from the
next step on, later ones from the step after that, so that they are learned and sent while links are
idle. A step that is redone learns the same: side information depends on the run alone. It is state
of the stage, as its weights are, and is part of snapshots. The receiving end only holds copies,
which are sent again over every new connection. This module uses no network and no clock.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from swarm_ft.codec import Codec, read_side_info
from swarm_ft.codec.base import as_tensor
from swarm_ft.codec.side_info import MAX_GATHERED_ROWS, Learning, Observation, SideInfo
from swarm_ft.errors import BadFrame
from swarm_ft.ids import BlockIndex, SampleId

_MOST_DIGITS = 9
_COMING, _STEPS, _TOKENS, _ROWS = "/coming", "/steps", "/tokens", "/rows"
"""Suffixes of a key in an export: the side information that replaces the present one from the next
step on, the number of steps that used it, the tokens since it was learned, the rows gathered for
the next one.
"""


class TensorKind(IntEnum):
    """Kind of the tensors in frames; the frames of each have side information of their own."""

    FIRST = 1
    """Activations without a buffer."""
    CHANGE = 2
    """Changes of activations since a sample's last visit."""
    GRADIENT = 3


class SideInfoKey(NamedTuple):
    """Identity of side information of this stage, in any version."""

    boundary: BlockIndex
    kind: TensorKind

    def __str__(self) -> str:
        return f"{self.boundary}/{self.kind.value}"

    @staticmethod
    def named(text: str) -> SideInfoKey:
        """Parse a key from its text.

        Raises:
            BadFrame: The text is no key.
        """
        boundary, _, kind = text.partition("/")
        if boundary[:_MOST_DIGITS].isdecimal() and kind in ("1", "2", "3"):
            key = SideInfoKey(BlockIndex(int(boundary[:_MOST_DIGITS])), TensorKind(int(kind)))
            if str(key) == text:
                return key
        raise BadFrame(f"side information {text[:40]!a}: expected a boundary and a kind")


class _Uses(NamedTuple):
    """Use of side information: steps that used it, and tokens since it was learned."""

    steps: int = 0
    tokens: int = 0


class _Lesson(NamedTuple):
    """A codec, with the observations from which it learns."""

    codec: Codec
    seen: list[Observation]


class SideInfoStore:
    """Side information of a stage; see the module. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._known: dict[SideInfoKey, SideInfo] = {}
        self._coming: dict[SideInfoKey, SideInfo] = {}
        self._uses: dict[SideInfoKey, _Uses] = {}
        self._codecs: dict[SideInfoKey, Codec] = {}
        self._open: dict[SideInfoKey, dict[SampleId, Observation]] = {}
        self._to_learn: dict[SideInfoKey, _Lesson] = {}
        self._gathered: dict[SideInfoKey, Tensor] = {}
        self._new: set[SideInfoKey] = set()

    def get(self, key: SideInfoKey) -> SideInfo | None:
        """Return the side information of the open step; None before the first one is learned.

        The first call after the step that learns the first one computes it.
        """
        if (info := self.cached(key)) is not None:
            return info
        with self._learning:
            if self.cached(key) is None:
                self._learn(key)
            return self.cached(key)

    def cached(self, key: SideInfoKey) -> SideInfo | None:
        """Return that of the open step without computing it, after another caller did."""
        with self._lock:
            return self._known.get(key)

    def first_used(self, key: SideInfoKey) -> SideInfo | None:
        """Return that of the open step if no earlier step used it; else None."""
        info = self.get(key)
        with self._lock:
            return info if key in self._new else None

    def next_info(self, key: SideInfoKey) -> SideInfo | None:
        """Return the replacement that is used once the open step commits; None if there is none.

        The first call after the step that learns it computes it.
        """
        with self._learning:
            self._learn(key)
            return self._coming.get(key)

    def next_if_ready(self, key: SideInfoKey) -> SideInfo | None:
        """Return the replacement if it is computed already."""
        with self._lock:
            return self._coming.get(key)

    def record_frame(
        self, key: SideInfoKey, sample: SampleId, codec: Codec, x: Tensor, base: Tensor | None
    ) -> None:
        """Record a frame of the open step, if its codec learns.

        Args:
            key: Key of the frame's side information.
            sample: Sample of the frame; a second frame of a sample replaces the first.
            codec: Codec of the frame.
            x: Tensor before encoding, float32 [tokens, channels].
            base: Buffer that the frame changes; None if there is none.
        """
        learning = codec.learning
        if learning is None:
            return
        self.get(key)
        is_needed = self._is_due(key, learning, x.shape[1]) or self._gathers(key, learning)
        seen = codec.observe(x, base) if is_needed else Observation(len(x))
        with self._lock:
            self._codecs[key] = codec
            self._open.setdefault(key, {})[sample] = seen

    def _is_due(self, key: SideInfoKey, learning: Learning, channels: int) -> bool:
        """Whether the open step learns new side information."""
        is_missing = key not in self._known
        return is_missing or learning.is_due(*self._uses.get(key, _Uses()), channels)

    def _gathers(self, key: SideInfoKey, learning: Learning) -> bool:
        """Whether the open step's rows are gathered for the next one."""
        gathered = self._gathered.get(key)
        is_full = gathered is not None and len(gathered) >= MAX_GATHERED_ROWS
        return learning.gathers and not is_full

    def rollback(self, but: Container[SampleId] = ()) -> None:
        """Discard the open step's frames, except those of the samples in `but`."""
        with self._lock:
            for key, seen in self._open.items():
                self._open[key] = {sample: s for sample, s in seen.items() if sample in but}

    @property
    def has_changes(self) -> bool:
        """Whether `commit` changes anything; always False in runs whose codecs learn nothing."""
        with self._lock:
            return bool(self._open or self._to_learn or self._coming or self._new)

    def commit(self) -> None:
        """Commit the open step: its replacements come into use.

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
        """Compute what the last step learns, before a caller needs it."""
        with self._learning:
            self._learn_all()

    def export(self) -> dict[str, Tensor]:
        """Return all state as of the last commit, as tensors by name."""
        found: dict[str, Tensor] = {}
        with self._learning:  # also waits for a computation in another thread
            self._learn_all()
            known, coming = dict(self._known), dict(self._coming)
            uses, gathered = dict(self._uses), dict(self._gathered)
        for key, info in known.items():
            found[str(key)] = as_tensor(info.data)
        for key, info in coming.items():
            found[f"{key}{_COMING}"] = as_tensor(info.data)
        for key, (steps, tokens) in uses.items():
            found[f"{key}{_STEPS}"] = torch.tensor(steps)
            found[f"{key}{_TOKENS}"] = torch.tensor(tokens)
        for key, rows in gathered.items():
            found[f"{key}{_ROWS}"] = rows
        return found

    def restore(self, exported: Mapping[str, Tensor], channels: int) -> None:
        """Replace all state by an export.

        Raises:
            BadFrame: A tensor is no side information for this number of channels, or has an
                unknown name.
        """
        known: dict[SideInfoKey, SideInfo] = {}
        coming: dict[SideInfoKey, SideInfo] = {}
        uses: dict[SideInfoKey, _Uses] = {}
        gathered: dict[SideInfoKey, Tensor] = {}
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
            in_order, codec = [seen[sample] for sample in sorted(seen)], self._codecs[key]
            steps, tokens = self._uses.get(key, _Uses())
            tokens += sum(one.tokens for one in in_order)
            learning = codec.learning
            if learning and (found := self._to_learn_from(key, learning, in_order)):
                self._to_learn[key], tokens = _Lesson(codec, found), 0
            self._uses[key] = _Uses(steps + 1, tokens)
        self._open.clear()

    def _to_learn_from(
        self, key: SideInfoKey, learning: Learning, step: list[Observation]
    ) -> list[Observation]:
        """Return the observations from which this step learns; empty if it learns nothing."""
        rows = [one.rows for one in step if one.rows is not None]
        if not learning.gathers:
            return step if len(rows) == len(step) else []
        if not rows:
            return []
        is_due = self._is_due(key, learning, rows[0].shape[1])
        before = [self._gathered[key]] if key in self._gathered else []
        gathered = torch.cat(before + rows)[-MAX_GATHERED_ROWS:]
        # The last token of a sample has no target, and a gradient of zero.
        if not is_due or int(gathered.any(1).sum()) < learning.least_rows:
            self._gathered[key] = gathered
            return []
        self._gathered.pop(key, None)
        return [step[-1]._replace(rows=gathered)]

    # The caller holds `_learning`:

    def _learn_all(self) -> None:
        for key in list(self._to_learn):
            self._learn(key)

    def _learn(self, key: SideInfoKey) -> None:
        with self._lock:
            lesson = self._to_learn.pop(key, None)
        info = None if lesson is None else lesson.codec.learn(lesson.seen)
        if info is None:
            return
        _ = info.data  # cached here, so that no thread that others wait for has to encode it
        with self._lock:
            if key in self._known:
                self._coming[key] = info
            else:
                self._known[key] = info
                self._new.add(key)


def _key_in(name: str) -> SideInfoKey:
    for ending in (_COMING, _STEPS, _TOKENS, _ROWS):
        if name.endswith(ending):
            return SideInfoKey.named(name.removesuffix(ending))
    return SideInfoKey.named(name)


def boundary_of(name: str) -> BlockIndex:
    """Return the boundary of a tensor of an export.

    Raises:
        BadFrame: The name is none of an export.
    """
    return _key_in(name).boundary


def _read(data: Tensor, channels: int) -> SideInfo:
    if data.dtype != torch.uint8 or data.dim() != 1:
        raise BadFrame(f"side information: expected bytes, got {data.dtype} {list(data.shape)}")
    return read_side_info(data.numpy().tobytes(), channels)


def _checked_rows(x: Tensor, channels: int) -> Tensor:
    fits = x.dim() == 2 and x.shape[1] == channels and 1 <= len(x) <= MAX_GATHERED_ROWS
    if x.dtype != torch.bfloat16 or not fits:
        raise BadFrame(
            f"side information: expected rows of {channels}, got {x.dtype} {list(x.shape)}"
        )
    return x


def _count(x: Tensor) -> int:
    if x.dtype != torch.int64 or x.numel() != 1 or int(x) < 0:
        raise BadFrame(
            f"side information: expected a number of steps, got {x.dtype} {list(x.shape)}"
        )
    return int(x)
