"""The availability of a volunteer's machine, and the loop that pauses and resumes its peer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from swarm_ft.base.log import get_logger
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from pathlib import Path

    from swarm_ft.peer.availability import Availability, MonthlyUse, PauseWhen
    from swarm_ft.peer.node import PeerNode
    from swarm_ft.reach.shaping import Shape

logger = get_logger(__name__)

LOOK_EVERY_S = 5.0
MBPS = 125_000.0
"""Bytes per second of one Mbps."""
GB = 1e9
USE_FILE = "month.json"


def parse_availability(hours: str | None, pause_when: tuple[str, ...]) -> Availability:
    """Parse the options `--hours` and `--pause-when`.

    Raises:
        BadOption: The hours are malformed, or this system can detect none of the cases. The
            function logs a warning if it can detect only some.
    """
    from swarm_ft.base.machine_use import CannotTell
    from swarm_ft.peer.availability import Availability, PauseWhen, parse_hours

    cases, refusals = [], []
    for case in (PauseWhen(name) for name in dict.fromkeys(pause_when)):
        try:
            applies_now(case)
        except CannotTell as why:
            refusals.append(f"--pause-when {case}: this system cannot detect it: {why}")
        else:
            cases.append(case)
    if refusals and not cases:
        raise BadOption(refusals[0])
    for refusal in refusals:
        logger.warning("%s; ignoring this case", refusal)
    return Availability(hours=parse_hours(hours) if hours else None, pause_when=tuple(cases))


def shape_of(upload_mbps: float | None, download_mbps: float | None) -> Shape:
    """Return the rate limiter for the options `--upload-mbps` and `--download-mbps`."""
    from swarm_ft.reach.shaping import Gate, Shape

    up, down = (Gate(MBPS * mbps if mbps else math.inf) for mbps in (upload_mbps, download_mbps))
    return Shape(up=up, down=down)


class MonthlyTraffic:
    """The month's traffic of this peer's link, in a file in its home.

    Args:
        file: Path of the file.
        limit_gb: Maximum traffic per month, in GB.
        shape: Rate limiter of the link, which counts its bytes.
    """

    def __init__(self, file: Path, limit_gb: float, shape: Shape) -> None:
        self._file = file
        self._limit_gb = limit_gb
        self._shape = shape
        self._counted_bytes = 0
        self._use = self._kept = read_monthly_use(file)

    def left_bytes(self) -> float:
        """Return the bytes that are left this month; any thread may call it."""
        uncounted = self._shape.passed_bytes - self._counted_bytes
        return max(0.0, GB * self._limit_gb - self._use.num_bytes - uncounted)

    def used_up(self) -> str:
        """Return the reason why no traffic is left this month; empty if some is left."""
        from swarm_ft.base.private_files import atomic_write

        passed = self._shape.passed_bytes
        today = datetime.now().astimezone().date()
        self._use = self._use.after(today, passed - self._counted_bytes)
        self._counted_bytes = passed
        if self._use != self._kept:
            with atomic_write(self._file) as new:
                new.write_text(json.dumps(asdict(self._use)), encoding="ascii")
            self._kept = self._use
        return self._use.used_up(self._limit_gb)


def read_monthly_use(file: Path) -> MonthlyUse:
    """Read the month's traffic; log a warning and start at zero if the file is not readable."""
    from swarm_ft.peer.availability import MonthlyUse

    try:
        kept = json.loads(file.read_text(encoding="ascii"))
        return MonthlyUse(month=str(kept["month"]), num_bytes=int(kept["num_bytes"]))
    except FileNotFoundError:
        return MonthlyUse()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: cannot read this month's traffic, counting from 0: %s", file, error)
        return MonthlyUse()


def applies_now(case: PauseWhen) -> bool:
    """Whether a case of `--pause-when` applies now. Blocks for a moment.

    Raises:
        CannotTell: This system cannot detect the case.
    """
    from swarm_ft.base import machine_use
    from swarm_ft.peer.availability import PauseWhen

    checks: dict[PauseWhen, Callable[[], bool]] = {
        PauseWhen.GPU_BUSY: machine_use.gpu_busy,
        PauseWhen.ON_BATTERY: machine_use.on_battery,
        PauseWhen.USER_ACTIVE: machine_use.user_active,
    }
    return checks[case]()


@dataclass
class AvailabilityController:
    """The controller that pauses and resumes a peer by its volunteer's options and requests.

    Attributes:
        manners: Options that limit when the peer works.
        on_change: Callback for a line to the volunteer when the peer pauses or resumes.
        used_up: Function that returns why no traffic is left this month, or an empty text.
        node: The peer; set before `look`.
        is_pause_requested: Whether the volunteer requested a pause.
    """

    manners: Availability
    on_change: Callable[[str], object] = logger.info
    used_up: Callable[[], str] = str
    node: PeerNode | None = None
    is_pause_requested: bool = False
    _why: str = ""
    _holding: frozenset[PauseWhen] = frozenset()
    _has_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def request_pause(self, *, to_pause: bool) -> None:
        """Set or end the volunteer's request to pause."""
        self.is_pause_requested = to_pause
        self._decide()
        self._has_changed.set()

    async def run(self) -> None:
        """Check and decide every few seconds, until cancelled."""
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
        from swarm_ft.base.machine_use import CannotTell

        found = set()
        for case in self.manners.pause_when:
            try:
                if applies_now(case):
                    found.add(case)
            except CannotTell as why:  # The system could detect it when the peer started.
                logger.warning("%s: %s", case, why)
        return frozenset(found)

    def _decide(self) -> None:
        from swarm_ft.peer.availability import Observations, pause_reason

        seen = Observations(
            local=datetime.now().astimezone().time(),
            conditions=self._holding,
            is_requested=self.is_pause_requested,
            used_up=self.used_up(),
        )
        why = pause_reason(self.manners, seen)
        if self.node is None or self.node.is_draining or why == self._why:
            return
        self._why = why
        if why:
            self.on_change(f"pausing: {why}")
            self.node.pause(why)
        else:
            self.on_change("resumed")
            self.node.resume()
