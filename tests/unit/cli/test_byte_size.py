"""Sizes are given as people write them."""

import click
import pytest

from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.cli.options import ByteSize
from swarm_ft.protocol.spec.options import declared


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("3k", 3000),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_understood(text: str, num_bytes: int) -> None:
    assert ByteSize().convert(text, None, None) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "1e9", "2 PiB", "GiB", "1,5GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected a size such as 2GiB"):
        ByteSize().convert(text, None, None)


def test_the_defaults_that_help_tells_are_those_that_are_used() -> None:
    sizes = [
        one for one in declared(BufferOptions) if one.flag != "--buffer-days" and one.kind is int
    ]
    assert [ByteSize().convert(one.option.default, None, None) for one in sizes] == [
        one.default for one in sizes
    ]
    assert len(sizes) == 2
