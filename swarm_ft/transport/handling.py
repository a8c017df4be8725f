"""Running a handler to its end, whatever carries its call. It knows no transport."""

from __future__ import annotations

import asyncio
from typing import Any

from swarm_ft.errors import InternalError, SwarmError, Unavailable
from swarm_ft.log import get_logger
from swarm_ft.transport.base import Handler, MessageStream, Method

LOST_GRACE_S = 1.0
"""How long a handler may go on after its call is lost before it is cancelled."""

HIDDEN = "the other side failed at this call; its log says why"

_logger = get_logger(__name__)


async def run_handler(
    handler: Handler,
    stream: MessageStream[Any, Any],
    method: Method[Any, Any],
    lost: asyncio.Future[str],
) -> SwarmError | None:
    """Run `handler`; return the error that the other side is to be told, None for a clean end.

    Args:
        handler: what to run.
        stream: its end of the call.
        method: names the call in the log.
        lost: done when the call is no more, with the reason. `stream` must then raise
            Unavailable; a handler that does not notice is cancelled after LOST_GRACE_S.
    """
    running = asyncio.create_task(_outcome(handler, stream, method))
    try:
        await first_done(running, lost)
        await asyncio.wait({running}, timeout=LOST_GRACE_S)
    finally:
        running.cancel()
        await asyncio.wait({running})
    return Unavailable("the call was dropped") if running.cancelled() else running.result()


async def _outcome(
    handler: Handler, stream: MessageStream[Any, Any], method: Method[Any, Any]
) -> SwarmError | None:
    # Anything but a SwarmError is our bug: it is logged here, and the other side learns no
    # detail of it.
    try:
        await handler(stream)
    except SwarmError as error:
        return error
    except ExceptionGroup as group:
        spoken = _spoken(group)
        if spoken is None:
            _logger.exception("handler_failed method=%s remote=%s", method, stream.remote)
        return spoken or InternalError(HIDDEN)
    except Exception:
        _logger.exception("handler_failed method=%s remote=%s", method, stream.remote)
        return InternalError(HIDDEN)
    return None


async def first_done(*futures: asyncio.Future[Any]) -> None:
    """Wait until one of them is done; cancelling this cancels none of them."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _spoken(group: ExceptionGroup[Exception]) -> SwarmError | None:
    """Of a TaskGroup's error that holds SwarmErrors alone, the first; None for all others."""
    if group.split(SwarmError)[1] is not None:
        return None
    first: Exception = group
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, SwarmError) else None
