"""Division of a gradient among members: each value once, in rows, evenly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.codec.sizes import PIECE_ROWS, ROW_VALUES
from swarm_ft.protocol.messages.reduction import Division
from tests.draws import draws

PIECE = PIECE_ROWS * ROW_VALUES
property_test = settings(derandomize=True, deadline=None, max_examples=draws(200))


@property_test
@given(num_values=st.integers(1, 40 * PIECE), num_members=st.integers(1, 9))
def test_pieces_cover_every_value_once_and_shards_are_even(
    num_values: int, num_members: int
) -> None:
    division = Division(num_values, num_members)
    assert [span.index for span in division.spans] == list(range(len(division.spans)))
    stops = [span.stop for span in division.spans]
    assert [span.start for span in division.spans] == [0, *stops[:-1]]
    assert stops[-1] == num_values
    for span in division.spans:
        assert span.start % ROW_VALUES == 0
        assert 1 <= span.num_values <= PIECE
        assert (span.rows - 1) * ROW_VALUES < span.num_values <= span.rows * ROW_VALUES
        start, stop = division.shard(span.owner)
        assert start <= span.start < span.stop <= stop
    sizes = [stop - start for start, stop in map(division.shard, range(num_members))]
    assert sum(sizes) == num_values
    assert max(sizes) - min(sizes) <= 2 * ROW_VALUES


def test_a_gradient_of_few_values_leaves_members_without_a_shard() -> None:
    division = Division(7, 3)
    assert [division.shard(member) for member in range(3)] == [(0, 0), (0, 0), (0, 7)]
    (span,) = division.spans
    assert (span.owner, span.num_values, span.rows) == (2, 7, 1)


@pytest.mark.parametrize(("num_values", "pieces"), [(PIECE, 1), (PIECE + 1, 2), (3 * PIECE, 3)])
def test_a_shard_is_cut_into_full_pieces_and_a_rest(num_values: int, pieces: int) -> None:
    sizes = [span.num_values for span in Division(num_values, 1).spans]
    assert len(sizes) == pieces
    assert all(size == PIECE for size in sizes[:-1])


def test_members_that_listen_sum_nothing_and_the_others_share_it_out_as_if_alone() -> None:
    division, alone = Division(9 * PIECE + 7, 4, {0, 2}), Division(9 * PIECE + 7, 2)
    assert division.givers == (1, 3)
    assert [division.shard(member) for member in (0, 2)] == [(0, 0), (0, 0)]
    assert [division.shard(member) for member in (1, 3)] == [alone.shard(i) for i in range(2)]
    owners = {0: 1, 1: 3}
    for span, other in zip(division.spans, alone.spans, strict=True):
        assert (span.index, span.start, span.stop) == (other.index, other.start, other.stop)
        assert span.owner == owners[other.owner]
