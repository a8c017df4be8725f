"""What a volunteer's machine does, in a line: its part of a run, what passes its link, memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarm_ft.peer.current_work import Doing
    from swarm_ft.peer.node import PeerNode
    from swarm_ft.reach.shaping import Gate, Shape


class AtWork:
    """Calling it says what the peer does now; rates are since the call before.

    Args:
        node: the peer.
        shape: of its link, which counts what passes; nothing does where links have no keys.
        now_s: monotonic seconds.
    """

    def __init__(
        self, node: PeerNode, shape: Shape, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._node = node
        self._up, self._down = Meter(shape.up), Meter(shape.down)
        self._now_s = now_s

    def __call__(self) -> str:
        """A line."""
        from rich.filesize import decimal

        from swarm_ft.systems import resident_bytes

        doing, now_s = self._node.doing, self._now_s()
        up, down = self._up.words(now_s), self._down.words(now_s)
        resident = resident_bytes()
        words = ["; ".join(map(doing_words, doing)) if doing else self._idle()]
        words += [f"up {up}", f"down {down}"] if up or down else []
        words += [f"{decimal(resident)} of memory"] if resident else []
        return "  ".join(words)

    def _idle(self) -> str:
        if self._node.presence.is_paused:
            return "paused; Ctrl-C leaves"
        return "nothing to do yet; Ctrl-C leaves"


class Meter:
    """How fast bytes pass a gate, and how many did."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._before: tuple[float, int] | None = None

    def words(self, now_s: float) -> str:
        """Since the call before, and in all; empty before the first byte."""
        from rich.filesize import decimal

        passed = self._gate.passed_bytes
        before_s, before = self._before or (now_s, passed)
        self._before = now_s, passed
        if not passed:
            return ""
        mbps = 8e-6 * (passed - before) / (now_s - before_s) if now_s > before_s else 0.0
        return f"{mbps:.1f} Mbps ({decimal(passed)})"


def doing_words(doing: Doing) -> str:
    """Which part of a run's work is this machine's."""
    share = f"  {doing.samples} of {doing.batch} samples a step" if doing.batch else ""
    step = f"step {doing.step:,}/{doing.num_steps:,}"
    return f"{doing.run_id}  layers {doing.layers}  {step}{share}"
