"""`swarm-ft sample`: the input of the demo, to look at or to train on by hand."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarm_ft.cli.options import examples, json_flag


@click.command(
    short_help="Write the demo's input, to train on by hand.",
    epilog=examples("swarm-ft sample ./sample"),
)
@click.argument("directory")
@click.option(
    "--seed",
    default=42,
    show_default=True,
    type=click.IntRange(0),
    help="Draws the model's weights.",
)
@json_flag
def sample(directory: str, seed: int, as_json: bool) -> None:
    """Write a small GPT-2-type model and Python's own source text into DIRECTORY."""
    from swarm_ft.client.sample import write_sample

    made = write_sample(Path(directory), seed=seed)
    shown = {
        "model": str(made.model_dir),
        "dataset": str(made.train_file),
        "eval_dataset": str(made.eval_file),
    }
    if as_json:
        click.echo(json.dumps(shown))
    else:
        click.echo(
            f"--model {shown['model']} --dataset {shown['dataset']} "
            f"--eval-dataset {shown['eval_dataset']}"
        )
