"""Calls that wait and calls that are awaited, over one loop in a thread of its own."""

import asyncio
import signal
import threading

import pytest

from swarm_ft.api.loop import awaitable, blocking, run_awaitable, run_blocking
from swarm_ft.errors import BadOption


async def where() -> str:
    return threading.current_thread().name


async def fails() -> None:
    raise ValueError("so it is")


def test_a_call_waits_and_gives_what_comes() -> None:
    assert run_blocking(where()) == "swarm-ft"
    with pytest.raises(ValueError, match="so it is"):
        run_blocking(fails())


async def test_a_call_waits_inside_of_a_running_loop() -> None:
    """A notebook's cells run in a loop."""
    assert run_blocking(where()) == "swarm-ft"


async def test_a_call_is_awaited_from_any_loop() -> None:
    assert await run_awaitable(where()) == "swarm-ft"
    with pytest.raises(ValueError, match="so it is"):
        await run_awaitable(fails())


async def test_what_is_cancelled_has_cleaned_up_when_its_caller_goes_on() -> None:
    begun, errors = threading.Event(), []

    async def long() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            errors.append("cleaned up")

    call = asyncio.create_task(run_awaitable(long()))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert errors == ["cleaned up"]


def test_ctrl_c_cancels_what_is_waited_for() -> None:
    errors = []
    main = threading.main_thread().ident or 0

    async def long() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            errors.append("cleaned up")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run_blocking(long())
    finally:
        signal.signal(signal.SIGINT, before)
    assert errors == ["cleaned up"]


def test_a_call_that_would_wait_for_itself_is_refused() -> None:
    async def inside() -> None:
        run_blocking(where())

    with pytest.raises(BadOption, match="expected the async form of this call"):
        run_blocking(inside())


async def test_both_forms_have_their_names_and_one_docstring() -> None:
    async def work(number: int) -> int:
        """Return it."""
        return number

    wait, wait_async = blocking("say", work), awaitable("say_async", work)
    assert (wait.__name__, wait_async.__name__) == ("say", "say_async")
    assert wait.__doc__ == wait_async.__doc__ == "Return it."
    assert wait(1) == await wait_async(1) == 1
