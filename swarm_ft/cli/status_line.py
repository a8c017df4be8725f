"""The status line of a peer: its part of each run, the traffic of its link, and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarm_ft.protocol.spec.sizes import format_size, format_traffic

if TYPE_CHECKING:
    from swarm_ft.peer.current_work import RunWork
    from swarm_ft.peer.node import PeerNode
    from swarm_ft.reach.shaping import Gate, Shape


class StatusLine:
    """A callable that returns the status line of a peer.

    Args:
        node: Peer to describe.
        shape: Rate limiter of the peer's link, which counts its bytes. Links without keys do not
            pass it.
        now_s: Clock, in monotonic seconds.
    """

    def __init__(
        self, node: PeerNode, shape: Shape, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._node = node
        self._up, self._down = Meter(shape.up), Meter(shape.down)
        self._now_s = now_s

    def __call__(self) -> str:
        """Return the line, with rates since the previous call."""
        from swarm_ft.base.systems import resident_bytes

        doing, now_s = self._node.current_work, self._now_s()
        up, down = self._up.words(now_s), self._down.words(now_s)
        resident = resident_bytes()
        parts = ["; ".join(map(doing_words, doing)) if doing else self._idle()]
        parts += [f"up {up}", f"down {down}"] if up or down else []
        parts += [f"memory {format_size(resident)}"] if resident else []
        share = self._node.memory_share
        if share is not None:
            counted, offered = map(format_size, (share.memory_bytes, self._node.offered_bytes))
            parts.append(f"lends {counted} of {offered}, {share.num_peers} peers on this machine")
        return "  ".join(parts)

    def _idle(self) -> str:
        if self._node.presence.is_paused:
            return "paused; Ctrl-C leaves"
        return "idle; Ctrl-C leaves"


class Meter:
    """The rate and the total of the bytes that pass a gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._before: tuple[float, int] | None = None

    def words(self, now_s: float) -> str:
        """Return the rate since the previous call with the total; empty before the first byte."""
        passed = self._gate.passed_bytes
        before_s, before = self._before or (now_s, passed)
        self._before = now_s, passed
        if not passed:
            return ""
        mbps = 8e-6 * (passed - before) / (now_s - before_s) if now_s > before_s else 0.0
        return f"{mbps:.1f} Mbps ({format_traffic(passed)})"


def doing_words(doing: RunWork) -> str:
    """Describe the peer's part of a run: layers, step and share of the samples."""
    share = f"  {doing.samples} of {doing.batch} samples per step" if doing.batch else ""
    step = f"step {doing.step:,}/{doing.num_steps:,}"
    return f"{doing.run_id}  layers {doing.layers}  {step}{share}"
