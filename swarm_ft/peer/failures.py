"""Conversion of a peer's exceptions to errors with a stable code, for reports.

A failure belongs to the run whose message caused it. It never ends the connection to the
coordinator, which all runs share.
"""

from __future__ import annotations

from swarm_ft.base.log import get_logger
from swarm_ft.errors import InternalError, OutOfMemory, SwarmError, Unavailable
from swarm_ft.ids import Attempt, PeerId, RunId
from swarm_ft.protocol.messages.control import StageFailed
from swarm_ft.transport.base import first_error

logger = get_logger(__name__)


def failure_of(error: Exception, run_id: RunId) -> SwarmError:
    """Return the error to report for an exception, and log what is not reported.

    A full or broken disk is `Unavailable`; its report contains no path of this machine. Any
    unexpected exception is a bug: the log gets the traceback, the coordinator `InternalError`.

    Args:
        error: Any exception, or a group of them as `TaskGroup` raises it.
        run_id: Run whose message or task raised it.
    """
    known = first_error(error)
    if known is not None:
        return known
    cause = _cause(error)
    if isinstance(cause, OSError):
        logger.warning("run %s: %s", run_id, cause)
        return Unavailable(f"this peer's disk: {cause.strerror or type(cause).__name__}")
    logger.error("run %s: a bug ended the attempt", run_id, exc_info=error)
    if isinstance(cause, MemoryError):
        return OutOfMemory("this peer has no memory left for what the run asks")
    return InternalError("a bug; the peer's log has the details")


def stage_failed(run_id: RunId, attempt: Attempt, error: SwarmError) -> StageFailed:
    """Return the message that reports a failure of an attempt."""
    about = PeerId(error.about) if error.about is not None else None
    return StageFailed(
        run_id=run_id, attempt=attempt, code=error.code, message=error.message, about=about
    )


def _cause(error: BaseException) -> BaseException:
    """Return the only exception of nested groups, or the error itself."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
