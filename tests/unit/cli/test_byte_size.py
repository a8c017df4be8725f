"""Sizes are given as people write them."""

import click
import pytest

from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.api.serve_options import ServeOptions
from swarm_ft.cli.options import ByteSize
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.options import option_fields
from swarm_ft.protocol.spec.sizes import format_size, parse_size, size_word


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096B", 4096),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("3k", 3000),
        ("3KB", 3000),
        ("0B", 0),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_understood(text: str, num_bytes: int) -> None:
    assert ByteSize().convert(text, None, None) == num_bytes


@pytest.mark.parametrize("text", ["", "much", "-1", "1e9", "2 PiB", "GiB", "1,5GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected a size such as 2GiB"):
        ByteSize().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("5", "write 5GiB or 5MiB"),
        ("1.5", "write 1.5GiB or 1.5MiB"),
        ("500", "write 500GiB or 500MiB"),
        ("8589934592", "write 8589934592B or 8589934592MiB"),
    ],
)
def test_a_number_without_a_unit_is_refused_with_its_two_readings(text: str, readings: str) -> None:
    with pytest.raises(click.BadParameter, match="which has no unit") as refusal:
        ByteSize().convert(text, None, None)
    assert readings in refusal.value.message


def test_a_size_may_have_a_minimum() -> None:
    with pytest.raises(BadOption, match="--memory: expected 1 or more, got 0"):
        ServeOptions(stage_memory_bytes=0)
    with pytest.raises(BadOption, match="--keep-disk: expected 0 or more, got -1"):
        ServeOptions(keep_disk_bytes=-1)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (5 << 30, "5 GiB"),
        (3 << 29, "1.5 GiB"),
        (300 << 20, "300 MiB"),
        (500_000_000, "477 MiB"),
        (500 << 30, "500 GiB"),
        (2 << 40, "2 TiB"),
    ],
)
def test_a_size_is_shown_in_the_units_in_which_it_is_given(num_bytes: int, words: str) -> None:
    assert format_size(num_bytes) == words


@pytest.mark.parametrize(
    ("num_bytes", "word"),
    [(0, "0"), (500, "500B"), (1 << 10, "1KiB"), (3 << 29, "1536MiB"), (50 << 30, "50GiB")],
)
def test_a_size_is_written_as_an_option_reads_it(num_bytes: int, word: str) -> None:
    assert size_word(num_bytes) == word
    assert parse_size(word) == num_bytes


def test_the_defaults_that_help_tells_are_those_that_are_used() -> None:
    sizes = [
        one
        for one in option_fields(BufferOptions)
        if one.flag != "--buffer-days" and one.kind is int
    ]
    assert [ByteSize().convert(one.default_word, None, None) for one in sizes] == [
        one.default for one in sizes
    ]
    assert len(sizes) == 2


def test_a_size_goes_to_another_process_and_comes_back() -> None:
    sizes = [one for one in option_fields(BufferOptions) if one.is_size]
    assert len(sizes) == 2
    for one in sizes:
        for num_bytes in (0, 5, 3 << 30):
            flag, word = one.arguments(num_bytes)
            assert flag == one.flag
            assert ByteSize().convert(word, None, None) == one.value_of(word) == num_bytes
        with pytest.raises(BadOption, match=f"{one.flag}: expected a size .* write 5GiB or 5MiB"):
            one.value_of("5")
