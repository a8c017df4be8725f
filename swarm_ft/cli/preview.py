"""`swarm-ft client preview`: what a job would learn, before anything is submitted."""

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
"""Of a piece of a sample; the rest is counted."""


_UNUSED = "Of `client train`, without effect here."
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
"""Options of `client train` that have no effect here, so that its command line will do."""


@click.command(
    cls=GroupedCommand,
    short_help="Show what a job would learn, before anything begins.",
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
    help="Samples to show, the first ones.",
)
@json_flag
@_OF_TRAIN
@log_option
def preview(options: JobOptions, num_shown: int, as_json: bool) -> None:
    """Show what a job would learn; needs no swarm, and submits nothing.

    Takes the options of `client train`, and reads the model's config and tokenizer and all data as
    it does: documents and samples, tokens that are learned and only read, those that are cut or
    left out with the reason, and the first samples, in which learned tokens are marked.
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
    """A preview for people: how the data was read, counts, and the first samples."""
    from swarm_ft.client.words import printable

    yield from map(printable, found.lines)
    yield f"it would train for {found.run_words()}"
    tokens, learned = found.train.num_tokens, found.train.num_targets
    marks = "green" if is_coloured else "what stands outside of [brackets]"
    yield f"{tokens:,} tokens, of which {learned:,} are learned: {marks}"
    for title, samples in (("sample", found.samples), ("held-out sample", found.eval_samples)):
        for number, sample in enumerate(samples, 1):
            counts = f"{len(sample.input_ids)} tokens, {sum(sample.loss_mask)} learned"
            yield f"{title} {number} ({counts}):"
            for _, pieces in groupby(sample.pieces, key=lambda piece: piece.document):
                words = (_piece(piece, is_coloured=is_coloured) for piece in pieces)
                yield f"  {' '.join(words)}"


def _piece(piece: TextPiece, *, is_coloured: bool) -> str:
    """A piece in quotes, by which spaces and line breaks are seen and nothing steers a terminal."""
    from swarm_ft.client.words import printable

    more = len(piece.text) - SHOWN_CHARS
    text = f"{piece.text[:SHOWN_CHARS]!r}{f'... ({more:,} letters more)' if more > 0 else ''}"
    if piece.class_name:
        text = f"{text} is of class {printable(piece.class_name)}"
    if is_coloured:
        return click.style(text, fg="green" if piece.is_learned else None, dim=not piece.is_learned)
    return text if piece.is_learned else f"[{text}]"
