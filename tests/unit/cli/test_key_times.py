"""Times that people read are this machine's; those that programs read are UTC."""

import time
from collections.abc import Iterator

import pytest

from swarm_ft.cli.keys import local_time, utc_time


@pytest.fixture
def east_of_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC-5:30")  # POSIX counts the other way
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("east_of_utc")
def test_people_get_local_time_and_programs_utc() -> None:
    assert utc_time(1_795_822_566) == "2026-11-27T23:36:06+00:00"
    assert local_time(1_795_822_566) == "2026-11-28 05:06:06"
