"""The command `swarm-ft client preview`, which shows a job's samples without a swarm."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.cli.help_groups import GroupedCommand
from swarm_ft.cli.job_file import takes_job
from swarm_ft.cli.options import examples, json_flag, log_option, stack
from swarm_ft.cli.running import load, reading_bar, show_start
from swarm_ft.client.options import JobOptions

if TYPE_CHECKING:
    from swarm_ft.client.preview import Preview, TextPiece

SHOWN_CHARS = 2000
"""Letters of a piece of a sample that are shown; the rest is counted."""


_UNUSED = "Option of `client train` without effect on a preview."
_KINDS: dict[str, dict[str, Any]] = {
    "invite": {},
    "initial-peers": {"multiple": True},
    "dht-prefix": {},
    "insecure": {"is_flag": True},
    "detach": {"is_flag": True},
}
_OF_TRAIN = stack(
    *(
        click.option(f"--{name}", hidden=True, expose_value=False, help=_UNUSED, **kind)
        for name, kind in _KINDS.items()
    )
)
"""Options of `client train` without effect on a preview, so that its command lines work here."""


@click.command(
    cls=GroupedCommand,
    short_help="Show a job's samples, and which tokens it would learn.",
    epilog=examples(
        "swarm-ft client preview --model gpt2 --dataset questions.jsonl",
        "swarm-ft client preview job.yaml --show 10",
        "swarm-ft client preview job.yaml --json | jq .train.first_samples[0].loss_mask",
    ),
)
@takes_job("options", without=("json_file",))
@click.option(
    "--show",
    "num_shown",
    default=3,
    show_default=True,
    type=click.IntRange(0),
    help="Number of first samples to show.",
)
@json_flag
@_OF_TRAIN
@log_option
def preview(options: JobOptions, num_shown: int, as_json: bool) -> None:
    """Show a job's samples, and which tokens it would learn; submits nothing.

    The command takes the options of `client train`, and reads the tokenizer and the data like it.
    It counts documents, samples and tokens, gives the reasons for dropped ones, and marks the
    learned tokens of the first samples. It needs no swarm.
    """
    from swarm_ft.client.data.stored import check_data
    from swarm_ft.stage.names import check_model_place

    check_model_place(options.model)
    for path in filter(None, (*options.datasets, options.evaluation.eval_dataset)):
        check_data(path)
    show_start("reading the model and the data", as_json=as_json)
    load("swarm_ft.client.preview")
    with reading_bar() as listener:
        from swarm_ft.client.preview import preview as read

        found = read(options, listener, num_shown=num_shown)
    if as_json:
        click.echo(json.dumps(found.fields()))
        return
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in lines_of(found, is_coloured=is_coloured):
        click.echo(line)


def lines_of(found: Preview, *, is_coloured: bool = False) -> Iterator[str]:
    """Yield a preview for people: how the data was read, counts, and the first samples."""
    from swarm_ft.client.formatting import printable

    yield from map(printable, found.lines)
    yield f"the job would train for {found.run_words()}"
    tokens, learned = found.train.num_tokens, found.train.num_targets
    marks = "green" if is_coloured else "those outside of [brackets]"
    yield f"{tokens:,} tokens, of which {learned:,} are learned: {marks}"
    for title, samples in (("sample", found.samples), ("held-out sample", found.eval_samples)):
        for number, sample in enumerate(samples, 1):
            counts = f"{len(sample.input_ids)} tokens, {sum(sample.loss_mask)} learned"
            yield f"{title} {number} ({counts}):"
            for _, pieces in groupby(sample.pieces, key=lambda piece: piece.document):
                words = (_piece(piece, is_coloured=is_coloured) for piece in pieces)
                yield f"  {' '.join(words)}"


def _piece(piece: TextPiece, *, is_coloured: bool) -> str:
    """Quote a piece, which shows its spaces and escapes control characters."""
    from swarm_ft.client.formatting import printable

    more = len(piece.text) - SHOWN_CHARS
    text = f"{piece.text[:SHOWN_CHARS]!r}{f'... ({more:,} letters more)' if more > 0 else ''}"
    if piece.class_name:
        text = f"{text} is of class {printable(piece.class_name)}"
    if is_coloured:
        return click.style(text, fg="green" if piece.is_learned else None, dim=not piece.is_learned)
    return text if piece.is_learned else f"[{text}]"
