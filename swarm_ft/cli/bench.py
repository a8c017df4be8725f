"""The command `swarm-ft bench`: its options and output. `codec_speed` measures."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.groups import CommandGroup
from swarm_ft.cli.options import examples, json_flag
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from rich.table import Table

    from swarm_ft.cli.codec_speed import SpeedRow
    from swarm_ft.codec.spec import CodecSpec

_MAX_VALUES = 1 << 28
"""Largest number of values in a tensor: a gigabyte of float32, and several are alive at once."""


@click.group(cls=CommandGroup, epilog=examples("swarm-ft bench codec --codecs aq4,aq2+z"))
def bench() -> None:
    """Measure the speed of this machine."""


@bench.command(
    short_help="Measure the speed of codecs.",
    epilog=examples(
        "swarm-ft bench codec",
        "swarm-ft bench codec --codecs aq4,aq2+z --shapes 1024x1600 --json",
        "swarm-ft bench codec --reference     compare with plain torch",
    ),
)
@click.option(
    "--codecs",
    metavar="SPECS",
    help="Codecs to measure, separated by commas.  [default: one of each kind]",
)
@click.option(
    "--shapes",
    default="1024x1600,2048x4096",
    show_default=True,
    metavar="TOKENSxCHANNELS",
    help="Shapes of the tensors, separated by commas.",
)
@click.option(
    "--repeats",
    default=9,
    show_default=True,
    type=click.IntRange(1),
    help="Number of measurements; the result is their median.",
)
@click.option(
    "--reference", is_flag=True, help="Measure the reference kernels in plain torch too; slow."
)
@json_flag
def codec(codecs: str | None, shapes: str, repeats: int, reference: bool, as_json: bool) -> None:
    """Measure the speed of codecs on one thread, relative to a copy of the same tensor."""
    specs, parsed_shapes = _specs(codecs), _shapes(shapes)

    from swarm_ft.cli.codec_speed import cuda_name, devices_here, measure

    devices = devices_here()
    rows = measure(specs, parsed_shapes, devices=devices, repeats=repeats, reference=reference)
    if as_json:
        document = {"cuda": cuda_name(), "threads": 1, "rows": [asdict(row) for row in rows]}
        click.echo(json.dumps(document))
        return

    from rich.console import Console

    for _, of_one_shape in itertools.groupby(rows, lambda row: (row.tokens, row.channels)):
        Console().print(_table(list(of_one_shape)))
    if cuda_name() is None:
        click.echo("no CUDA device found: the Triton kernels were not measured")


def _specs(codecs: str | None) -> list[CodecSpec]:
    from swarm_ft.codec.spec import Direction, parse_codec_spec

    if codecs is None:
        from swarm_ft.cli.codec_speed import DEFAULT_CODECS

        codecs = DEFAULT_CODECS
    return [parse_codec_spec(name, Direction.FORWARD) for name in codecs.split(",")]


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", part)
        if match is None or int(match[1]) * int(match[2]) > _MAX_VALUES:
            raise BadOption(f"--shapes {part}: expected TOKENSxCHANNELS, such as 1024x1600")
        shapes.append((int(match[1]), int(match[2])))
    return shapes


def _table(rows: list[SpeedRow]) -> Table:
    """Return the table of one shape's rows."""
    from rich.table import Table

    shape = f"{rows[0].tokens} x {rows[0].channels}"
    table = Table("codec", "backend", title=f"{shape}: GB/s of float32, one thread")
    for name in ("encode", "/ copy", "decode", "/ copy", "bits", "error"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (row.encode_gb_s, row.encode_ratio, row.decode_gb_s, row.decode_ratio)
        formatted = [f"{number:.2f}" for number in (*numbers, row.bits_a_value)]
        table.add_row(row.codec, row.backend, *formatted, f"{row.error:.4f}")
    return table
