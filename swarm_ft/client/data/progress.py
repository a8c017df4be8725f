"""Progress of reading data, and its listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadProgress:
    """Progress of reading data.

    Attributes:
        source: Name of the data.
        num_documents: Documents read, without blank ones.
        num_blank: Blank documents, which are left out.
        num_samples: Samples made so far.
        share_read: Share of all data, from 0 to 1; None if unknown.
    """

    source: str
    num_documents: int = 0
    num_blank: int = 0
    num_samples: int = 0
    share_read: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Callbacks of reading data.

    Attributes:
        on_line: Callback for a line for people, at the start and the end.
        on_progress: Callback for progress, called repeatedly; its exception ends the reading.
    """

    on_line: Callable[[str], None] = lambda _line: None
    on_progress: Callable[[ReadProgress], None] = lambda _so_far: None
