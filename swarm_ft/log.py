"""Logs for people: one line an event, `event key=value ...`. Nothing ever parses them."""

from __future__ import annotations

import logging
import sys

ROOT = "swarm_ft"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def configure(level: str) -> None:
    """Send this package's logs to standard error. Only commands call it.

    Args:
        level: a standard level name.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
