"""`swarm-ft client generate`: a text continued by a run's trained stages, where they are."""

from __future__ import annotations

import json
import secrets
import sys
import time
from dataclasses import replace
from typing import IO, TYPE_CHECKING

import click

from swarm_ft.api.joining import WayIn, connected
from swarm_ft.cli.joining import way_in
from swarm_ft.cli.options import examples, json_flag, log_option, run_option, takes
from swarm_ft.cli.running import run_async
from swarm_ft.client.options import GenerateOptions
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from swarm_ft.client.generate import Wanted
    from swarm_ft.client.swarm import SwarmClient
    from swarm_ft.protocol.messages.client import RunStatus
    from swarm_ft.stage.words import Words


@click.command(
    epilog=examples(
        'swarm-ft client generate "Once upon a time" --invite @invitation.txt',
        "swarm-ft client generate --chat --do-sample --invite @invitation.txt < question.txt",
        "swarm-ft client generate --prompt-file text.txt --max-new-tokens 200 --json \\",
        "    --run run-1a2b3c4d --invite @invitation.txt",
    )
)
@click.argument("prompt", required=False)
@click.option(
    "--prompt-file",
    metavar="FILE",
    type=click.File(encoding="utf-8"),
    help="Read the prompt from there, - for standard input.  [default: that, without PROMPT]",
)
@takes("options", GenerateOptions)
@run_option
@click.option("--model", metavar="DIR|HUB_ID", help="The model, if not where the run says.")
@way_in()
@json_flag
@log_option
def generate(
    prompt: str | None,
    prompt_file: IO[str] | None,
    options: GenerateOptions,
    run_name: str | None,
    model: str | None,
    way: WayIn,
    as_json: bool,
) -> None:
    """Continue PROMPT with a finished run's model, before its result is fetched.

    The trained stages stay where they are; nothing but the tokenizer is needed here. They are at
    their peers until `client train` or `client attach` has fetched the result.
    """
    text = _prompt(prompt, prompt_file)

    async def work() -> None:
        import asyncio

        from swarm_ft.client.generate import check_generates
        from swarm_ft.ids import RunId

        async with connected(way) as swarm:
            status = await swarm.run(RunId(run_name) if run_name else None)
            check_generates(status)
            words = await asyncio.to_thread(_words_of, status, model)
            for name in words.unheeded:
                click.echo(f"the model's generation_config asks for {name}: left out", err=True)
            wanted = _wanted(text, words, options)
            fields = await _written(swarm, status, wanted, words, is_shown=not as_json)
        click.echo(json.dumps(fields) if as_json else "")

    run_async(work)


async def _written(
    swarm: SwarmClient, status: RunStatus, wanted: Wanted, words: Words, *, is_shown: bool
) -> dict[str, object]:
    """Generate and show a text; what `--json` prints of it."""
    from swarm_ft.client.generate import generate as generated
    from swarm_ft.client.text import NewText, showable

    new, pieces = NewText(words.tokenizer, wanted.prompt), list[str]()

    def write(piece: str) -> None:
        pieces.append(piece)
        if is_shown:
            click.echo(showable(piece), nl=False)

    started_s = time.monotonic()
    token_ids = await generated(
        swarm,
        status,
        wanted,
        on_token=lambda token: write(new.add(token)),
        on_trouble=lambda trouble: click.echo(showable(trouble), err=True),
    )
    write(new.end())
    return {
        "run": status.run_id,
        "text": "".join(pieces),
        "token_ids": token_ids,
        "prompt_tokens": len(wanted.prompt),
        "ended": token_ids[-1] in wanted.ends,
        "seed": wanted.sampling.seed if wanted.sampling else None,
        "seconds": time.monotonic() - started_s,
    }


def _prompt(prompt: str | None, prompt_file: IO[str] | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise BadOption("--prompt-file: expected a file or PROMPT, got both")
    if prompt is not None:
        return prompt
    if prompt_file is None and sys.stdin.isatty():
        raise BadOption("expected a PROMPT, --prompt-file FILE, or one on standard input")
    try:
        return str((prompt_file or sys.stdin).read())
    except UnicodeDecodeError as error:
        raise BadOption(f"prompt: expected text in UTF-8 ({error.reason})") from None


def _words_of(status: RunStatus, model: str | None) -> Words:
    """The tokenizer of a run's model, and where its texts end.

    Raises:
        BadModel: it is not there; `--model` may say where it is.
        RunMismatch: it is another model's.
    """
    from swarm_ft.errors import RunMismatch
    from swarm_ft.stage.words import open_words

    words = open_words(model or status.spec.model.reference)
    if len(words.tokenizer) > status.spec.model.vocab_size:
        raise RunMismatch(
            f"--model: expected a tokenizer of at most {status.spec.model.vocab_size} tokens, as "
            f"run {status.run_id} has, got one of {len(words.tokenizer)}"
        )
    return replace(words, ends=words.ends.union(status.spec.train.end_token_ids))


def _wanted(text: str, words: Words, options: GenerateOptions) -> Wanted:
    from swarm_ft.client.ends import turn_end_of
    from swarm_ft.client.generate import Wanted
    from swarm_ft.client.text import asked

    ends = words.ends
    if options.chat:  # a turn's, which a model's own may not be
        of_turn = words.tokenizer.eos_token_id, turn_end_of(words.tokenizer)
        ends |= {token for token in of_turn if token is not None}
    wanted = Wanted(
        prompt=asked(text, words.tokenizer, is_chat=options.chat),
        max_new_tokens=options.max_new_tokens,
        ends=ends,
        sampling=options.sampling(secrets.randbelow(1 << 32)),
    )
    wanted.check(words.positions)
    return wanted
