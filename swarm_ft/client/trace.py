"""The file of a trace, written as timelines come. What is in them is `trace_events`' to know.

It is a JSON array, an event a line. Should this process be killed, the bracket at the end is
missing, and viewers read it all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import Self

from swarm_ft.client.trace_events import TraceEvents
from swarm_ft.errors import BadOption
from swarm_ft.protocol.timeline import PeerTimeline

MAX_EVENTS = 4_000_000
"""About 700 MB, and more than viewers open with ease; what comes then is left out."""


class TraceFile:
    """See the module's docstring. Use it in a `with`.

    Args:
        path: of the file; one that is there is replaced.
        on_trouble: told why the file ends early, if it does.
    """

    def __init__(self, path: Path, on_trouble: Callable[[str], None]) -> None:
        self._path = path
        self._on_trouble = on_trouble
        self._events = TraceEvents()
        self._num_events = 0
        self._file: TextIOWrapper | None = None

    def __enter__(self) -> Self:
        """Raises BadOption: the file cannot be written."""
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise BadOption(f"--trace {self._path}: cannot be written: {error.strerror}") from error
        self._write("[")
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def add(self, timeline: PeerTimeline) -> None:
        """Write down what a peer did; nothing, once the file is full or the disk."""
        if self._file is None:
            return
        lines = []
        for event in self._events.add(timeline):
            lines.append(",\n" if self._num_events else "\n")
            lines.append(json.dumps(event, separators=(",", ":")))
            self._num_events += 1
        self._write("".join(lines))
        if self._num_events >= MAX_EVENTS:
            self._on_trouble(f"--trace {self._path}: is full; trace fewer steps, with --steps")
            self._end()

    def _end(self) -> None:
        self._write("\n]\n")
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, text: str) -> None:
        """Write it out at once, so that it is there if this process is not any more."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._on_trouble(f"--trace {self._path}: ends here: {error.strerror}")
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()


def open_trace(
    path: Path | None, on_trouble: Callable[[str], None]
) -> AbstractContextManager[TraceFile | None]:
    """A trace as long as the context lasts; None, if there is to be none."""
    return TraceFile(path, on_trouble) if path is not None else nullcontext()
