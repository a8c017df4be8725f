"""Bases in parts: a sent basis arrives, whichever frames go between the parts."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.codec import max_side_info_bytes
from swarm_ft.codec.basis import Basis, learn_basis
from swarm_ft.errors import BadFrame, OutOfTurn
from swarm_ft.peer.boundary.side_info_transfer import (
    LEAST_PART_BYTES,
    MAX_STORED,
    MOST_PART_BYTES,
    SideInfoReceiver,
    SideInfoSender,
)
from swarm_ft.protocol.messages.boundary import SideInfoPart

CHANNELS = 96


def basis_of(seed: int) -> Basis:
    """One of several parts."""
    generator = torch.Generator().manual_seed(seed)
    basis = learn_basis([torch.randn(256, CHANNELS, generator=generator)], 0.1)
    assert basis is not None
    assert len(basis.data) > 3 * LEAST_PART_BYTES
    return basis


BASES = [basis_of(seed) for seed in range(MAX_STORED + 1)]


def borrower() -> SideInfoReceiver:
    return SideInfoReceiver(max_side_info_bytes(CHANNELS))


def names_received(parts: Iterable[SideInfoPart], end: SideInfoReceiver) -> list[bytes]:
    """The names of what is whole by now."""
    whole = [data for part in parts if (data := end.receive(part)) is not None]
    bases = [Basis.from_bytes(data, CHANNELS) for data in whole]
    for basis in bases:
        end.keep(basis)
    return [basis.name for basis in bases]


def test_what_is_needed_later_goes_in_parts_of_a_quarter_of_the_frames() -> None:
    lender, end, frame_bytes = SideInfoSender(), borrower(), 8 * LEAST_PART_BYTES
    lender.begin(BASES[0])
    size, sizes = len(BASES[0].data), []
    while not lender.has_sent(BASES[0].name):
        (part,) = lender.part(frame_bytes)
        sizes.append(len(part.data))
        size -= sizes[-1]
        assert part.rest_bytes == size
        names_received([part], end)
    assert set(sizes[:-1]) == {frame_bytes // 4}
    assert not list(lender.part(frame_bytes)), "it is said"
    stored = end.get(BASES[0].name)
    assert stored is not None
    assert stored.data == BASES[0].data


@pytest.mark.parametrize(("frame_bytes", "size"), [(10, LEAST_PART_BYTES), (1 << 30, 1 << 16)])
def test_parts_are_neither_crumbs_nor_larger_than_a_slow_link_can_bear(
    frame_bytes: int, size: int
) -> None:
    lender = SideInfoSender()
    lender.begin(BASES[0])
    (part,) = lender.part(frame_bytes)
    assert len(part.data) == min(size, len(BASES[0].data))


def test_what_a_frame_needs_at_once_waits_for_no_frames() -> None:
    lender, end = SideInfoSender(), borrower()
    lender.begin(BASES[0])
    parts = [*lender.part(0), *lender.whole(BASES[1])]
    assert names_received(parts, end) == [BASES[0].name, BASES[1].name], (
        "behind the rest of the other"
    )
    assert not list(lender.whole(BASES[1])), "it was said"
    assert all(len(part.data) <= MOST_PART_BYTES for part in parts)


def test_a_basis_that_is_under_way_is_not_begun_again_nor_another() -> None:
    lender, end = SideInfoSender(), borrower()
    lender.begin(BASES[0])
    names_received(lender.part(0), end)
    lender.begin(BASES[0])
    lender.begin(BASES[1])
    assert names_received(lender.whole(BASES[0]), end) == [BASES[0].name]
    assert not lender.has_sent(BASES[1].name)


def test_over_a_new_connection_all_is_said_anew() -> None:
    lender, end = SideInfoSender(), borrower()
    names_received(lender.whole(BASES[0]), end)
    lender.begin(BASES[1])
    names_received(lender.part(0), end)
    lender.reconnected()
    end.reconnected()
    assert not lender.has_sent(BASES[0].name)
    assert not list(lender.part(0)), "nothing is under way"
    assert names_received(lender.whole(BASES[1]), end) == [BASES[1].name]


@given(st.lists(st.tuples(st.sampled_from(["begin", "part", "whole", "name"]), st.integers(0, 4))))
def test_who_lends_knows_what_the_other_end_has(turns: list[tuple[str, int]]) -> None:
    lender, end = SideInfoSender(), borrower()
    for what, which in turns:
        basis = BASES[which]
        match what:
            case "begin":
                lender.begin(basis)
            case "part":
                names_received(lender.part(0), end)
            case "whole":
                names_received(lender.whole(basis), end)
            case _ if lender.has_sent(basis.name):
                end.mark_used(basis.name)
        end.begin_step()
    has = {one.name for one in BASES if end.get(one.name) is not None}
    assert has == {one.name for one in BASES if lender.has_sent(one.name)}
    assert len(has) <= MAX_STORED


HOSTILE = {
    "nothing": ([SideInfoPart(b"")], "or more, got 0"),
    "crumbs": ([SideInfoPart(b"x", 2000)], "or more, got 1"),
    "too many bytes": ([SideInfoPart(bytes(1 << 20))], "expected at most"),
    "too many to come": ([SideInfoPart(bytes(2000), 1 << 31)], "expected at most"),
    "more than was to come": (
        [SideInfoPart(bytes(2000), 1500), SideInfoPart(bytes(2000))],
        "expected 1500 bytes more, got 2000 and 0",
    ),
    "less than was to come": (
        [SideInfoPart(bytes(2000), 1500), SideInfoPart(bytes(100))],
        "expected 1500 bytes more, got 100 and 0",
    ),
    "without end": (
        [SideInfoPart(bytes(2000), 1500), SideInfoPart(bytes(1100), 1500)],
        "expected 1500 bytes more, got 1100 and 1500",
    ),
}


@pytest.mark.parametrize(("parts", "match"), HOSTILE.values(), ids=HOSTILE)
def test_parts_that_make_no_basis_are_refused(parts: list[SideInfoPart], match: str) -> None:
    with pytest.raises(BadFrame, match=match):
        names_received(parts, borrower())


def test_more_than_a_step_can_need_are_out_of_turn() -> None:
    end = borrower()
    lender = SideInfoSender()
    for basis in BASES[:MAX_STORED]:
        names_received(lender.whole(basis), end)
    with pytest.raises(OutOfTurn, match="4 pieces in a step, got 5"):
        names_received(lender.whole(BASES[MAX_STORED]), end)
    end.begin_step()
    assert names_received(SideInfoSender().whole(BASES[MAX_STORED]), end) == [
        BASES[MAX_STORED].name
    ]
