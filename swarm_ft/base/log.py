"""Logs on standard error: dated lines for people, or one JSON object per line for programs.

A call logs one text for people, such as `run %s: step %d of %d`. The formatter derives the run and
the peer from this text, so that JSON lines have them as fields.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator

ROOT = "swarm_ft"
FORMATS = ("text", "json")
_NAMED = re.compile(r"(?:\b(?P<kind>run|peer) )?%[#0 +-]*[\d.]*[a-zA-Z]")
"""Placeholder of an argument in a log message, with the kind of thing that it names, if any."""


def get_logger(name: str, lines_per_s: int | None = None) -> logging.Logger:
    """Return the logger of a module.

    Args:
        name: Name of the module: pass `__name__`.
        lines_per_s: Lines per second that the logger writes at most, for events that other
            processes cause; None: no limit.
    """
    logger = logging.getLogger(name)
    if lines_per_s is not None:
        logger.addFilter(_AtMost(lines_per_s))
    return logger


class _AtMost(logging.Filter):
    """Filter that passes a number of records each second; the next record counts those dropped."""

    def __init__(self, lines_per_s: int) -> None:
        super().__init__()
        self._lines_per_s = lines_per_s
        self._second = 0
        self._count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(record.created)
        if second != self._second:
            num_left_out = self._count - self._lines_per_s
            self._second, self._count = second, 0
            if num_left_out > 0:
                record.msg = f"{record.msg} ({num_left_out} lines before this were left out)"
        self._count += 1
        return self._count <= self._lines_per_s


def configure(level: str) -> None:
    """Send this package's logs to standard error; only commands call it.

    Args:
        level: A standard level name.
    """
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [_handler]
    logger.setLevel(level)
    logger.propagate = False


def use_format(name: str) -> None:
    """Set the format of all following lines: `text` or `json`."""
    _handler.setFormatter(_Json() if name == "json" else _text)


def is_json() -> bool:
    """Whether the log is in JSON, one object per line."""
    return isinstance(_handler.formatter, _Json)


class _Standard(logging.Handler):
    """Handler for standard error, which it looks up per line: a progress display may replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # the reader closed it
            self.handleError(record)


LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}
"""Names of levels by number, because some libraries rename levels."""


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "unix_s": round(record.created, 3),
            "level": LEVELS.get(record.levelno, record.levelname.lower()),
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_named(record)),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def _named(record: logging.LogRecord) -> Iterator[tuple[str, str]]:
    """Yield the kinds and names of the run and the peer that a record is about."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    placeholders = _NAMED.finditer(str(record.msg).replace("%%", ""))
    for placeholder, argument in zip(placeholders, arguments, strict=False):
        if placeholder["kind"]:
            yield placeholder["kind"], str(argument)


_text = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S")
_handler = _Standard()
use_format("text")
