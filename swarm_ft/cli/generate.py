"""The command `swarm-ft client generate`, which continues a text with a run's trained stages."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import IO

import click

from swarm_ft.api.connections import SwarmAddress, connect
from swarm_ft.cli.options import examples, json_flag, log_option, run_option, takes
from swarm_ft.cli.running import run_async, show_start
from swarm_ft.cli.swarm_options import way_in
from swarm_ft.client.options import GenerateOptions
from swarm_ft.errors import BadOption


@click.command(
    short_help="Continue a text with a finished run's model.",
    epilog=examples(
        'swarm-ft client generate "Once upon a time" --invite @invitation.txt',
        "swarm-ft client generate --chat --do-sample --invite @invitation.txt < question.txt",
        "swarm-ft client generate --prompt-file text.txt --max-new-tokens 200 --json \\",
        "    --run run-1a2b3c4d --invite @invitation.txt",
    ),
)
@click.argument("prompt", required=False)
@click.option(
    "--prompt-file",
    metavar="FILE",
    type=click.File(encoding="utf-8"),
    help="File with the prompt; - is standard input.  [default: standard input, without PROMPT]",
)
@takes("options", GenerateOptions)
@run_option
@click.option(
    "--model",
    metavar="DIR|HUB_ID",
    help="The run's model, if it lies at another place on this machine.",
)
@way_in()
@json_flag
@log_option
def generate(
    prompt: str | None,
    prompt_file: IO[str] | None,
    options: GenerateOptions,
    run_name: str | None,
    model: str | None,
    way: SwarmAddress,
    as_json: bool,
) -> None:
    """Continue PROMPT with a finished run's model, before its result is fetched.

    The trained stages stay on their peers, and this machine only needs the tokenizer. The command
    works until `client train` or `client attach` has fetched the result.
    """
    text = _prompt(prompt, prompt_file)
    show_start("looking for the run; libraries take some seconds to load", as_json=as_json)

    async def work() -> None:
        from swarm_ft.api.generation import generate_in
        from swarm_ft.client.prompt_text import showable

        def show(piece: str) -> None:
            if not as_json:
                click.echo(showable(piece), nl=False)

        async with connect(way) as swarm:
            found = await generate_in(
                swarm,
                text,
                options,
                run_id=run_name,
                model=model,
                on_text=show,
                on_trouble=lambda words: click.echo(showable(words), err=True),
            )
        click.echo(json.dumps(asdict(found)) if as_json else "")

    run_async(work)


def _prompt(prompt: str | None, prompt_file: IO[str] | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise BadOption("--prompt-file: expected a file or PROMPT, got both")
    if prompt is not None:
        return prompt
    if prompt_file is None and sys.stdin.isatty():
        raise BadOption("expected PROMPT, --prompt-file FILE or standard input, got none of them")
    try:
        return str((prompt_file or sys.stdin).read())
    except UnicodeDecodeError as error:
        raise BadOption(f"prompt: expected text in UTF-8 ({error.reason})") from None
