"""Texts that clients continue at a trained stage, until it is let go of.

A text is as long as its call: when that ends, for whatever reason, nothing is left of it. How many
there are, how much they hold and how long they stay is bounded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from swarm_ft.errors import Busy, MalformedMessage, NotFound, OutOfTurn, Unavailable
from swarm_ft.log import get_logger
from swarm_ft.peer.context import PeerContext, run_in
from swarm_ft.protocol.messages.generation import (
    MAX_PART_TOKENS,
    BeginText,
    FromStage,
    NextToken,
    TextActivation,
    TextTokens,
    ToStage,
)
from swarm_ft.protocol.spec.run_spec import BYTES_PER_FLOAT
from swarm_ft.stage.base import Engine, Text
from swarm_ft.transport.base import MessageStream, until_one_ends

logger = get_logger(__name__)

MAX_TEXTS = 16
"""At one stage, at a time; each computes in turn with the others."""
SILENCE_S = 600.0
"""Between two parts of a text; its client waits for all other stages meanwhile."""
MAX_TEXT_S = 3600.0
"""Of a text from its beginning."""

TextStream = MessageStream[FromStage, ToStage]


class Texts:
    """See the module's docstring.

    Args:
        context: of the peer.
        engine: of the stage, with its trained weights; nothing trains it meanwhile.
        channels: of the run's hidden states.
    """

    def __init__(self, context: PeerContext, engine: Engine, channels: int) -> None:
        self._context = context
        self._engine = engine
        self._channels = channels
        self._held: dict[Text, int] = {}
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End all of them: the stage is let go of."""
        self._closed.set()

    async def serve(self, stream: TextStream, begin: BeginText) -> None:
        """Continue one text until its client ends it.

        Raises:
            Busy: there are as many here as fit.
            NotFound: the stage was let go of meanwhile.
            Unavailable: its client said nothing for too long, or has been at it for too long.
            MalformedMessage, NonFinite, BadModel: see `Text` and `Engine.begin_text`.
        """
        self._check_count()
        text = await run_in(self._context.compute, self._engine.begin_text, begin.max_tokens)
        with self._keeping(text, begin):
            try:
                async with asyncio.timeout(MAX_TEXT_S):
                    await until_one_ends(self._continue(stream, text, begin), self._let_go())
            except TimeoutError:
                raise Unavailable(
                    f"expected a text to end within {MAX_TEXT_S:g} s; begin another"
                ) from None

    def _check_count(self) -> None:
        if len(self._held) >= MAX_TEXTS:
            raise Busy(f"{MAX_TEXTS} texts are continued here already; try again later")

    @contextmanager
    def _keeping(self, text: Text, begin: BeginText) -> Iterator[None]:
        self._check_count()  # others may have begun meanwhile
        room = self._context.room_bytes(self._engine.state_bytes) - sum(self._held.values())
        if text.num_bytes > room:
            raise Busy(
                f"a text of {begin.max_tokens} tokens takes {text.num_bytes} bytes here, and "
                f"{max(0, room)} are free; try again later, or ask for fewer tokens"
            )
        self._held[text] = text.num_bytes
        try:
            yield
        finally:
            del self._held[text]

    async def _let_go(self) -> None:
        await self._closed.wait()
        raise NotFound("this peer let go of the trained stage")

    async def _continue(self, stream: TextStream, text: Text, begin: BeginText) -> None:
        while (part := await self._next(stream)) is not None:
            x = self._input(part, stream.remote)
            await stream.send(await run_in(self._context.compute, self._answer, text, x, begin))

    async def _next(self, stream: TextStream) -> ToStage | None:
        try:
            async with asyncio.timeout(SILENCE_S):
                return await stream.receive()
        except TimeoutError:
            raise Unavailable(f"{stream.remote}: said nothing for {SILENCE_S:g} s") from None

    def _input(self, part: ToStage, remote: str) -> Tensor:
        """What the stage takes: tokens [1, T], or activations [1, T, C]."""
        match part:
            case TextTokens(token_ids=token_ids) if self._engine.is_first:
                return torch.from_numpy(np.frombuffer(token_ids, "<u4").astype(np.int64))[None]
            case TextActivation(values=values) if not self._engine.is_first:
                num_tokens, rest = divmod(len(values), BYTES_PER_FLOAT * self._channels)
                if rest or num_tokens > MAX_PART_TOKENS:
                    raise MalformedMessage(
                        f"{remote}: expected float32 of {self._channels} channels for each of at "
                        f"most {MAX_PART_TOKENS} tokens, got {len(values)} bytes"
                    )
                numbers = np.frombuffer(values, "<f4").astype(np.float32)
                return torch.from_numpy(numbers).view(1, -1, self._channels)
        kind = "tokens" if self._engine.is_first else "activations"
        raise OutOfTurn(f"{remote}: expected {kind} of the text, got {type(part).__name__}")

    def _answer(self, text: Text, x: Tensor, begin: BeginText) -> FromStage:
        """In the compute thread."""
        output = text.read(x)
        if self._engine.is_last:
            return NextToken(token=text.next_token(output, begin.sampling))
        return TextActivation(values=output.numpy().astype("<f4").tobytes())


async def first_of(stream: TextStream) -> BeginText:
    """What a call begins with.

    Raises:
        OutOfTurn: it begins with something else.
    """
    begin = await stream.receive()
    if not isinstance(begin, BeginText):
        raise OutOfTurn(f"{stream.remote}: expected the beginning of a text as the first message")
    return begin
