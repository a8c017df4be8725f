"""How the CPU backend's loops are compiled. Knows Numba's options; knows no loop.

Loops release the GIL, so that a peer's event loop goes on. Machine code is kept in `__pycache__`
or, where that cannot be written, in the user's cache; where neither can be, each process
compiles what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Loop = TypeVar("Loop", bound=Callable[..., Any])

_ANY_ORDER = {"reassoc", "contract", "nsz"}
"""Of LLVM's flags for fast arithmetic, those under which NaN and infinity stay what they are."""


def compiled(loop: Loop) -> Loop:
    """`loop` as machine code, with each rounding that is written and no other."""
    return _compile(loop, fastmath=False)


def compiled_loosely(loop: Loop) -> Loop:
    """As `compiled`, but sums may be taken in any order: for encoders."""
    return _compile(loop, fastmath=_ANY_ORDER)


def part(helper: Loop) -> Loop:
    """A helper, compiled into the loops that call it."""
    return cast(Loop, numba.njit(nogil=True)(helper))


def _compile(loop: Loop, fastmath: bool | set[str]) -> Loop:
    try:
        return cast(Loop, numba.njit(nogil=True, fastmath=fastmath, cache=True)(loop))
    except RuntimeError:  # Numba found no folder to keep machine code in
        return cast(Loop, numba.njit(nogil=True, fastmath=fastmath)(loop))
