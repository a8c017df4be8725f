"""A volunteer's manners, and the watch over them while a peer works."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from swarm_ft.errors import BadOption
from swarm_ft.log import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from swarm_ft.peer.manners import Manners, MonthlyUse, PauseWhen
    from swarm_ft.peer.node import PeerNode
    from swarm_ft.reach.shaping import Shape

logger = get_logger(__name__)

LOOK_EVERY_S = 5.0
MBPS = 125_000.0
"""Bytes a second."""
GB = 1e9
USE_FILE = "month.json"


def manners_of(hours: str | None, pause_when: tuple[str, ...]) -> Manners:
    """What the options say.

    Raises:
        BadOption: hours that are none, or cases none of which this system can tell. One of
            several that it cannot tell is logged.
    """
    from swarm_ft.machine_use import CannotTell
    from swarm_ft.peer.manners import Manners, PauseWhen, parse_hours

    cases, refusals = [], []
    for case in (PauseWhen(name) for name in dict.fromkeys(pause_when)):
        try:
            holds(case)
        except CannotTell as why:
            refusals.append(f"--pause-when {case}: not on this system: {why}")
        else:
            cases.append(case)
    if refusals and not cases:
        raise BadOption(refusals[0])
    for refusal in refusals:
        logger.warning("%s; the others count", refusal)
    return Manners(hours=parse_hours(hours) if hours else None, pause_when=tuple(cases))


def shape_of(upload_mbps: float | None, download_mbps: float | None) -> Shape:
    """What the options say of the link."""
    from swarm_ft.reach.shaping import Gate, Shape

    up, down = (Gate(MBPS * mbps if mbps else math.inf) for mbps in (upload_mbps, download_mbps))
    return Shape(up=up, down=down)


class MonthlyCount:
    """What passed this peer's link this month, kept in its home across restarts.

    Args:
        file: where it is kept.
        limit_gb: that may pass in a month.
        shape: the link.
    """

    def __init__(self, file: Path, limit_gb: float, shape: Shape) -> None:
        self._file = file
        self._limit_gb = limit_gb
        self._shape = shape
        self._counted_bytes = 0
        self._use = self._kept = read_use(file)

    def left_bytes(self) -> float:
        """Return the bytes that may still pass this month; any thread may call it."""
        uncounted = self._shape.passed_bytes - self._counted_bytes
        return max(0.0, GB * self._limit_gb - self._use.num_bytes - uncounted)

    def used_up(self) -> str:
        """Why nothing more may pass this month; empty if more may."""
        from swarm_ft.private_files import replacing

        passed = self._shape.passed_bytes
        today = datetime.now().astimezone().date()
        self._use = self._use.after(today, passed - self._counted_bytes)
        self._counted_bytes = passed
        if self._use != self._kept:
            with replacing(self._file) as new:
                new.write_text(json.dumps(asdict(self._use)), encoding="ascii")
            self._kept = self._use
        return self._use.used_up(self._limit_gb)


def read_use(file: Path) -> MonthlyUse:
    """What is kept there; what cannot be read counts as nothing, and is told."""
    from swarm_ft.peer.manners import MonthlyUse

    try:
        kept = json.loads(file.read_text(encoding="ascii"))
        return MonthlyUse(month=str(kept["month"]), num_bytes=int(kept["num_bytes"]))
    except FileNotFoundError:
        return MonthlyUse()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: the month is counted anew: %s", file, error)
        return MonthlyUse()


def holds(case: PauseWhen) -> bool:
    """Whether a case is given now. Blocks for a moment.

    Raises:
        CannotTell: the system does not say.
    """
    from swarm_ft import machine_use
    from swarm_ft.peer.manners import PauseWhen

    asks: dict[PauseWhen, Callable[[], bool]] = {
        PauseWhen.GPU_BUSY: machine_use.gpu_busy,
        PauseWhen.ON_BATTERY: machine_use.on_battery,
        PauseWhen.USER_ACTIVE: machine_use.user_active,
    }
    return asks[case]()


@dataclass
class Keeper:
    """Sees to it that a peer works when it may, and not else.

    Attributes:
        manners: when it may.
        say: tells its volunteer that it pauses, or works again.
        node: the peer; set before `look`.
        used_up: tells why nothing more is sent this month, or nothing.
        is_asked: whether its volunteer asked it to pause.
    """

    manners: Manners
    say: Callable[[str], object] = logger.info
    used_up: Callable[[], str] = str
    node: PeerNode | None = None
    is_asked: bool = False
    _why: str = ""
    _holding: frozenset[PauseWhen] = frozenset()
    _has_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self, *, to_pause: bool) -> None:
        """Its volunteer asks it to pause, or to go on."""
        self.is_asked = to_pause
        self._decide()
        self._has_changed.set()

    async def look(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self._holding = await asyncio.to_thread(self._look_once)
            self._decide()
            self._has_changed.clear()
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._has_changed.wait()
            except TimeoutError:
                continue

    def _look_once(self) -> frozenset[PauseWhen]:
        from swarm_ft.machine_use import CannotTell

        found = set()
        for case in self.manners.pause_when:
            try:
                if holds(case):
                    found.add(case)
            except CannotTell as why:  # it could when the peer was started
                logger.warning("%s: %s", case, why)
        return frozenset(found)

    def _decide(self) -> None:
        from swarm_ft.peer.manners import Seen, why_paused

        seen = Seen(
            local=datetime.now().astimezone().time(),
            holds=self._holding,
            is_asked=self.is_asked,
            used_up=self.used_up(),
        )
        why = why_paused(self.manners, seen)
        if self.node is None or self.node.leaves or why == self._why:
            return
        self._why = why
        if why:
            self.say(f"pausing: {why}")
            self.node.pause(why)
        else:
            self.say("working again")
            self.node.resume()
