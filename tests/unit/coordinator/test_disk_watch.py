"""A coordinator's disk that fills, and has room again: one event each, with a text."""

import pytest

from swarm_ft.coordinator.disk_watch import CHECK_EVERY_S, DiskWatch
from swarm_ft.coordinator.reason_texts import as_text
from swarm_ft.protocol.messages.events import EventKind

RESERVED = 100_000_000


class Disk:
    free: int | None = 10 * RESERVED


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def watch(disk: Disk) -> DiskWatch:
    return DiskWatch(lambda: disk.free, RESERVED)


def kinds(watch: DiskWatch, disk: Disk, *free: int | None) -> list[EventKind | None]:
    found = []
    for number, disk.free in enumerate(free):
        event = watch.look(number * CHECK_EVERY_S)
        found.append(event.kind if event else None)
    return found


def test_a_disk_that_fills_is_one_event_and_so_is_its_room_afterwards(
    watch: DiskWatch, disk: Disk
) -> None:
    free = [10 * RESERVED, RESERVED, RESERVED // 2, 10 * RESERVED, 10 * RESERVED]
    assert kinds(watch, disk, *free) == [
        None,
        EventKind.DISK_LOW,
        None,
        EventKind.DISK_FREE,
        None,
    ]
    assert watch.low is None


def test_a_job_that_comes_and_goes_at_the_threshold_is_no_event_each_time(
    watch: DiskWatch, disk: Disk
) -> None:
    above, below = 2 * RESERVED + 1, 2 * RESERVED - 1
    assert kinds(watch, disk, above, below, above, below, above) == [
        None,
        EventKind.DISK_LOW,
        None,
        None,
        None,
    ]


def test_a_disk_that_does_not_tell_is_not_low(watch: DiskWatch, disk: Disk) -> None:
    assert kinds(watch, disk, None, None) == [None, None]


def test_the_words_have_the_free_and_the_reserved_room(watch: DiskWatch, disk: Disk) -> None:
    disk.free = 27_000_000
    event = watch.look(0.0)
    assert event is not None
    assert as_text(event.reason) == (
        "the coordinator's disk is nearly full: 27 MB free; it refuses jobs that would leave less "
        "than 100 MB, which current runs need; free some space"
    )
