"""When a volunteer's machine may work: decided from the wall clock and from what is seen. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date, time
from enum import StrEnum

from swarm_ft.errors import BadOption

_HOURS = re.compile(r"(\d{1,2})(?::(\d{2}))?-(\d{1,2})(?::(\d{2}))?")
MINUTES_A_DAY = 24 * 60


class PauseWhen(StrEnum):
    """What a machine may be at that goes before the swarm's work."""

    GPU_BUSY = "gpu-busy"
    ON_BATTERY = "on-battery"
    USER_ACTIVE = "user-active"

    @property
    def in_words(self) -> str:
        """Why the peer pauses then."""
        return {
            PauseWhen.GPU_BUSY: "another program uses the GPU",
            PauseWhen.ON_BATTERY: "the machine runs on its battery",
            PauseWhen.USER_ACTIVE: "somebody uses the machine",
        }[self]


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of every day, by the machine's own clock; it may go over midnight.

    Attributes:
        start: the first minute of the day in which the machine works.
        stop: the first one in which it does not.
    """

    start: int
    stop: int

    def covers(self, now: time) -> bool:
        """Whether this moment is in it."""
        minute = 60 * now.hour + now.minute
        if self.start < self.stop:
            return self.start <= minute < self.stop
        return minute >= self.start or minute < self.stop

    def __str__(self) -> str:
        return f"{_clock(self.start)}-{_clock(self.stop)}"


def parse_hours(text: str) -> Hours:
    """`22-7` or `22:30-6:45` as hours.

    Raises:
        BadOption: it is something else.
    """
    found = _HOURS.fullmatch(text.strip())
    expected = f"--hours {text}: expected START-STOP of a day, for example 22-7 or 22:30-6:45"
    if found is None:
        raise BadOption(expected)
    start, stop = (60 * int(found[i]) + int(found[i + 1] or 0) for i in (1, 3))
    minutes_fit = all(int(found[i] or 0) < 60 for i in (2, 4))
    if not minutes_fit or max(start, stop) > MINUTES_A_DAY or start % MINUTES_A_DAY == stop:
        raise BadOption(expected)
    return Hours(start % MINUTES_A_DAY, stop % MINUTES_A_DAY)


def _clock(minute: int) -> str:
    return f"{minute // 60}:{minute % 60:02}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manners:
    """What a volunteer decided about when its machine works.

    Attributes:
        hours: of the day in which it does; None: all.
        pause_when: in which cases it does not.
    """

    hours: Hours | None = None
    pause_when: tuple[PauseWhen, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What is so just now.

    Attributes:
        local: what the machine's clock shows.
        holds: cases that are given.
        is_asked: whether its volunteer asked it to pause.
        used_up: why nothing more is sent this month; empty if more may be.
    """

    local: time
    holds: Collection[PauseWhen] = ()
    is_asked: bool = False
    used_up: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonthlyUse:
    """What passed a link in one month, both ways.

    Attributes:
        month: `2026-11`; empty before anything did.
        num_bytes: that passed in it.
    """

    month: str = ""
    num_bytes: int = 0

    def after(self, today: date, more_bytes: int) -> MonthlyUse:
        """With what passed since; a new month begins at nothing."""
        month = f"{today:%Y-%m}"
        before = self.num_bytes if month == self.month else 0
        return MonthlyUse(month=month, num_bytes=before + more_bytes)

    def used_up(self, limit_gb: float) -> str:
        """Why nothing more may pass in this month; empty if more may."""
        if self.num_bytes < limit_gb * 1e9:
            return ""
        return f"the {limit_gb:g} GB of {self.month} are used up; it goes on next month"


def why_paused(manners: Manners, seen: Seen) -> str:
    """Why the machine may not work now, for people; empty if it may.

    The words stay the same as long as the reason does.
    """
    if seen.is_asked:
        return "its volunteer asked for it"
    if seen.used_up:
        return seen.used_up
    if manners.hours is not None and not manners.hours.covers(seen.local):
        again = _clock(manners.hours.start)
        return f"outside of its hours ({manners.hours}); it works again at {again}"
    first = next((case for case in manners.pause_when if case in seen.holds), None)
    return first.in_words if first is not None else ""
