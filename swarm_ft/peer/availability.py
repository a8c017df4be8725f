"""Availability of a volunteer's machine, from the wall clock and observations. Pure."""

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
    """Conditions of the machine that pause the peer."""

    GPU_BUSY = "gpu-busy"
    ON_BATTERY = "on-battery"
    USER_ACTIVE = "user-active"

    @property
    def description(self) -> str:
        """Reason of the pause, for people."""
        return {
            PauseWhen.GPU_BUSY: "another program uses the GPU",
            PauseWhen.ON_BATTERY: "the machine runs on its battery",
            PauseWhen.USER_ACTIVE: "somebody uses the machine",
        }[self]


@dataclass(frozen=True, slots=True)
class Hours:
    """A daily period by the machine's own clock; it may pass midnight.

    Attributes:
        start: First minute of the day in which the machine works.
        stop: First minute of the day in which it no longer works.
    """

    start: int
    stop: int

    def covers(self, now: time) -> bool:
        """Whether a moment is in the period."""
        minute = 60 * now.hour + now.minute
        if self.start < self.stop:
            return self.start <= minute < self.stop
        return minute >= self.start or minute < self.stop

    def __str__(self) -> str:
        return f"{_clock(self.start)}-{_clock(self.stop)}"


def parse_hours(text: str) -> Hours:
    """Parse `22-7` or `22:30-6:45`.

    Raises:
        BadOption: The text is not a period.
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
class Availability:
    """A volunteer's settings for when the machine works.

    Attributes:
        hours: Period of the day in which it works; None: all day.
        pause_when: Conditions in which it pauses.
    """

    hours: Hours | None = None
    pause_when: tuple[PauseWhen, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """Observations of the present moment.

    Attributes:
        local: Time of the machine's clock.
        conditions: Conditions that are present.
        is_requested: Whether the volunteer requested a pause.
        used_up: Reason why nothing more is sent this month; empty if more may be sent.
    """

    local: time
    conditions: Collection[PauseWhen] = ()
    is_requested: bool = False
    used_up: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonthlyUse:
    """Traffic of the link in one month, both ways.

    Attributes:
        month: Month, such as `2026-11`; empty before any traffic.
        num_bytes: Bytes in that month.
    """

    month: str = ""
    num_bytes: int = 0

    def after(self, today: date, more_bytes: int) -> MonthlyUse:
        """Return the use with more bytes added; a new month begins at zero."""
        month = f"{today:%Y-%m}"
        before = self.num_bytes if month == self.month else 0
        return MonthlyUse(month=month, num_bytes=before + more_bytes)

    def used_up(self, limit_gb: float) -> str:
        """Return the reason why nothing more may pass this month; empty if more may."""
        if self.num_bytes < limit_gb * 1e9:
            return ""
        return f"the {limit_gb:g} GB of {self.month} are used up; it works again next month"


def pause_reason(manners: Availability, seen: Observations) -> str:
    """Return the reason why the machine may not work now, for people; empty if it may.

    The text stays the same as long as the reason does.
    """
    if seen.is_requested:
        return "its volunteer asked for it"
    if seen.used_up:
        return seen.used_up
    if manners.hours is not None and not manners.hours.covers(seen.local):
        again = _clock(manners.hours.start)
        return f"outside of its hours ({manners.hours}); it works again at {again}"
    first = next((case for case in manners.pause_when if case in seen.conditions), None)
    return first.description if first is not None else ""
