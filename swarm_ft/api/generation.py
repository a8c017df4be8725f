"""Generation with a finished run, from the text of the prompt to the new text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swarm_ft.client.generate import GenerationRequest, check_generates
from swarm_ft.client.generate import generate as continue_tokens
from swarm_ft.client.options import GenerateOptions
from swarm_ft.client.prompt_text import NewText, tokenize_prompt
from swarm_ft.client.stop_tokens import turn_stop_token
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.errors import RunMismatch
from swarm_ft.ids import RunId
from swarm_ft.protocol.messages.client import RunStatus

if TYPE_CHECKING:
    from swarm_ft.stage.tokenizer_files import GenerationInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedText:
    """A text that a run's trained stages generated; `str()` is the text alone.

    Attributes:
        run: Id of the run.
        text: New text, without the prompt.
        token_ids: New tokens, with the one that ends the text.
        prompt_tokens: Number of tokens of the prompt.
        ended: Whether the model ended the text; otherwise `max_new_tokens` cut it off.
        seed: Seed of the sampling; None without sampling.
        seconds: Duration of the generation in seconds.
    """

    run: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    ended: bool
    seed: int | None
    seconds: float

    def __str__(self) -> str:
        return self.text


async def generate_in(
    swarm: SwarmClient,
    prompt: str,
    options: GenerateOptions,
    *,
    run_id: str | None = None,
    model: str | None = None,
    on_text: Callable[[str], object] = lambda _piece: None,
    on_trouble: Callable[[str], None] = lambda _words: None,
) -> GeneratedText:
    """Continue a prompt with the trained stages of a finished run.

    Args:
        swarm: Connection to the run's swarm.
        prompt: Text to continue; with `options.chat` the user's message.
        options: Options of the decoding.
        run_id: Id of the run; None for this client's only run.
        model: Directory or hub id of the model's tokenizer, if it lies at another place here.
        on_text: Callback for each piece of the new text.
        on_trouble: Callback for a line about a failed peer or an ignored setting of the model.

    Raises:
        BadModel: The tokenizer is missing.
        RunMismatch: The tokenizer is another model's.
        Unavailable: The run is not finished, or no peer of a stage answers.
        RunFailed: The run has no result, or its result was fetched.
    """
    status = await swarm.run(RunId(run_id) if run_id else None)
    check_generates(status)
    words = await asyncio.to_thread(_words_of, status, model)
    for name in words.unsupported_settings:
        on_trouble(f"ignoring {name} of the model's generation_config")
    wanted = _wanted(prompt, words, options)
    new, pieces = NewText(words.tokenizer, wanted.prompt), list[str]()

    def take(piece: str) -> None:
        pieces.append(piece)
        on_text(piece)

    started_s = time.monotonic()
    token_ids = await continue_tokens(
        swarm,
        status,
        wanted,
        on_token=lambda token: take(new.add(token)),
        on_trouble=on_trouble,
    )
    take(new.end())
    return GeneratedText(
        run=status.run_id,
        text="".join(pieces),
        token_ids=token_ids,
        prompt_tokens=len(wanted.prompt),
        ended=token_ids[-1] in wanted.stop_tokens,
        seed=wanted.sampling.seed if wanted.sampling else None,
        seconds=time.monotonic() - started_s,
    )


def _words_of(status: RunStatus, model: str | None) -> GenerationInfo:
    """Open the tokenizer of a run's model, and find the tokens that end its texts.

    Raises:
        BadModel: The tokenizer is missing; `--model` may name its place.
        RunMismatch: The tokenizer is another model's.
    """
    from swarm_ft.stage.tokenizer_files import open_generation_info

    words = open_generation_info(model or status.spec.model.reference)
    if len(words.tokenizer) > status.spec.model.vocab_size:
        raise RunMismatch(
            f"--model: expected a tokenizer of at most {status.spec.model.vocab_size} tokens, like "
            f"that of {status.run_id}, got {len(words.tokenizer)}"
        )
    return replace(words, ends=words.ends.union(status.spec.train.end_token_ids))


def _wanted(prompt: str, words: GenerationInfo, options: GenerateOptions) -> GenerationRequest:
    ends = words.ends
    if options.chat:  # The end of a turn need not be among the model's own end tokens.
        of_turn = words.tokenizer.eos_token_id, turn_stop_token(words.tokenizer)
        ends |= {token for token in of_turn if token is not None}
    wanted = GenerationRequest(
        prompt=tokenize_prompt(prompt, words.tokenizer, is_chat=options.chat),
        max_new_tokens=options.max_new_tokens,
        stop_tokens=ends,
        sampling=options.sampling(secrets.randbelow(1 << 32)),
    )
    wanted.check(words.positions)
    return wanted
