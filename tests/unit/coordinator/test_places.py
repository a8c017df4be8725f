"""Places for long calls: a member with many makes room for one with none."""

import asyncio
from contextlib import ExitStack

import pytest

from swarm_ft.coordinator.places import Place, Places
from swarm_ft.errors import Busy


async def is_lost(place: Place) -> bool:
    waiting = asyncio.ensure_future(place.lost())
    await asyncio.sleep(0)
    if waiting.done():
        assert isinstance(waiting.exception(), Busy)
        return True
    waiting.cancel()
    return False


async def test_a_member_has_so_many_and_room_again_when_one_ends() -> None:
    places = Places(4, 2, "followers")
    with ExitStack() as stack:
        first = places.taken("a")
        first.__enter__()
        stack.enter_context(places.taken("a"))
        with pytest.raises(Busy, match="2 followers of yours are open already"):
            stack.enter_context(places.taken("a"))
        first.__exit__(None, None, None)
        stack.enter_context(places.taken("a"))
        assert places.num_taken == 2
    assert places.num_taken == 0


async def test_two_members_cannot_take_all_places() -> None:
    places = Places(4, 4, "followers")
    with ExitStack() as stack:
        taken = [stack.enter_context(places.taken(member)) for member in "aaab"]
        honest = stack.enter_context(places.taken("c"))
        assert [await is_lost(place) for place in taken] == [False, False, True, False]
        assert not await is_lost(honest)
        with pytest.raises(Busy, match="4 followers are open already"):
            stack.enter_context(places.taken("c"))  # it would only change who has two
        assert places.num_taken == 4
    assert places.num_taken == 0


async def test_where_nobody_has_keys_only_all_together_are_counted() -> None:
    places = Places(3, 1, "followers")
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(places.taken(""))
        with pytest.raises(Busy, match="3 followers are open already"):
            stack.enter_context(places.taken(""))
