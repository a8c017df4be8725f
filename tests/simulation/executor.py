"""A thread pool's threads in virtual time: what runs when, and what a cancellation still stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Lanes:
    """The threads of an executor, each busy until some moment.

    Args:
        count: threads.
    """

    def __init__(self, count: int) -> None:
        self._free_at_s = [0.0] * count

    def submit(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[[], T],
        takes_s: float,
        *,
        at_end: bool,
    ) -> asyncio.Future[T]:
        """Run `function` in the lane that is free first; the future gets its outcome.

        Args:
            takes_s: virtual seconds that it takes.
            at_end: whether its effects show at the end of them; else at their beginning.
        """
        lane = min(range(len(self._free_at_s)), key=self._free_at_s.__getitem__)
        begins_s = max(loop.time(), self._free_at_s[lane])
        self._free_at_s[lane] = begins_s + takes_s
        future: asyncio.Future[T] = loop.create_future()

        def begin() -> None:
            if future.cancelled():
                return
            if at_end:
                loop.call_at(begins_s + takes_s, lambda: _settle(future, _outcome(function)))
            else:
                outcome = _outcome(function)
                loop.call_at(begins_s + takes_s, lambda: _settle(future, outcome))

        loop.call_at(begins_s, begin)
        return future


def _outcome(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 - handed to whoever awaits it, as threads do
        return None, error


def _settle(future: asyncio.Future[T], outcome: tuple[T | None, BaseException | None]) -> None:
    if future.done():
        return
    value, error = outcome
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)  # type: ignore[arg-type]
