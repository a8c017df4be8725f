"""Logs on standard error: dated lines for people, or JSON, a line each, for what collects them.

A message is written once, for people: `run %s: step %d of %d`. Which run and which peer it is about
follows from it, so that JSON has them too.
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
"""A place for an argument in a message, and what it names, if it names something."""


def get_logger(name: str, lines_per_s: int | None = None) -> logging.Logger:
    """The logger of a module; pass `__name__`.

    Args:
        name: of the module.
        lines_per_s: how many lines it writes in a second at most, for a module that logs what
            callers do; None: all.
    """
    logger = logging.getLogger(name)
    if lines_per_s is not None:
        logger.addFilter(_AtMost(lines_per_s))
    return logger


class _AtMost(logging.Filter):
    """Passes so many records of each second; the next one tells how many were left out."""

    def __init__(self, lines_per_s: int) -> None:
        super().__init__()
        self._lines_per_s = lines_per_s
        self._second = 0
        self._count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        second = int(record.created)
        if second != self._second:
            num_left_out = self._count - self._lines_per_s
            self._second, self._count = second, 0
            if num_left_out > 0:
                record.msg = f"{record.msg} ({num_left_out} lines before this were left out)"
        self._count += 1
        return self._count <= self._lines_per_s


def configure(level: str) -> None:
    """Send this package's logs to standard error. Only commands call it.

    Args:
        level: a standard level name.
    """
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [_handler]
    logger.setLevel(level)
    logger.propagate = False


def use_format(name: str) -> None:
    """From now on: `text` or `json`."""
    _handler.setFormatter(_Json() if name == "json" else _text)


def is_json() -> bool:
    """Whether standard error has JSON alone, a line for each record."""
    return isinstance(_handler.formatter, _Json)


class _Standard(logging.Handler):
    """Standard error as it is then: something that draws there may stand in front of it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # closed by whoever read it
            self.handleError(record)


LEVELS = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}
"""By number: some libraries give levels other names."""


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
    """The run and the peer that it is about."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    places = _NAMED.finditer(str(record.msg).replace("%%", ""))
    for place, argument in zip(places, arguments, strict=False):
        if place["kind"]:
            yield place["kind"], str(argument)


_text = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S")
_handler = _Standard()
use_format("text")
