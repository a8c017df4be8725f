"""The events of a simulation, in order: lines to read, and one digest over everything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


class Trace:
    """Grows line by line.

    Args:
        now_s: virtual time.
        folder: where the disks are; it has another name each time, so lines do not show it.
        keep: whether lines are kept to be read; the digest covers them all in any case.
    """

    def __init__(self, now_s: Callable[[], float], *, folder: str = "", keep: bool) -> None:
        self.lines: list[str] = []
        self._now_s = now_s
        self._folder = folder
        self._keep = keep
        self._digest = hashlib.blake2b(digest_size=16)

    def say(self, text: str) -> None:
        """Record a line for readers."""
        if self._folder:
            text = text.replace(self._folder, "")
        line = f"{self._now_s():9.3f}  {text}"
        self._digest.update(line.encode())
        if self._keep:
            self.lines.append(line)

    def note(self, text: str) -> None:
        """Something that only the digest is to cover, such as every message."""
        self._digest.update(f"{self._now_s()!r} {text}".encode())

    @property
    def digest(self) -> str:
        """Equal for equal histories, down to every message and its time."""
        return self._digest.copy().hexdigest()
