"""How far data was read, and who is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSoFar:
    """How far data was read.

    Attributes:
        num_blank: documents without text, which are left out.
        done: of all data, from 0 to 1; None if that is not known.
    """

    source: str
    num_documents: int = 0
    num_blank: int = 0
    num_samples: int = 0
    done: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Who is told how data is read.

    Attributes:
        tell: of what was found, a line for people; once it begins well, and at the end.
        show: of how far it was read, again and again; what it raises ends the reading.
    """

    tell: Callable[[str], None] = lambda _line: None
    show: Callable[[ReadSoFar], None] = lambda _so_far: None
