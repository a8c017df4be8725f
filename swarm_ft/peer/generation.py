"""Texts that clients continue at a trained stage, until the peer releases it.

A text lives as long as its call: nothing of it remains afterwards. This module bounds the number,
memory and duration of texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from swarm_ft.base.log import get_logger
from swarm_ft.errors import Busy, MalformedMessage, NotFound, OutOfTurn, Unavailable
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
"""Texts at one stage at a time; they take turns in the compute thread."""
SILENCE_S = 600.0
"""Seconds between two parts of a text; meanwhile its client waits for the other stages."""
MAX_TEXT_S = 3600.0
"""Seconds from a text's beginning to its end."""

TextStream = MessageStream[FromStage, ToStage]


class GenerationSessions:
    """The texts at one trained stage; see the module.

    Args:
        context: Context of the peer.
        engine: Engine of the stage with its trained weights; nothing trains it meanwhile.
        channels: Channels of the run's hidden states.
    """

    def __init__(self, context: PeerContext, engine: Engine, channels: int) -> None:
        self._context = context
        self._engine = engine
        self._channels = channels
        self._bytes_of: dict[Text, int] = {}
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End all texts, because the stage is released."""
        self._closed.set()

    async def serve(self, stream: TextStream, begin: BeginText) -> None:
        """Continue one text until its client ends it.

        Raises:
            Busy: There are too many texts, or no memory for another.
            NotFound: The stage was released meanwhile.
            Unavailable: The client was silent, or at work, for too long.
            MalformedMessage, NonFinite, BadModel: See `Text` and `Engine.begin_text`.
        """
        self._check_count()
        text = await run_in(self._context.compute, self._engine.begin_text, begin.max_tokens)
        with self._reserve(text, begin):
            try:
                async with asyncio.timeout(MAX_TEXT_S):
                    await until_one_ends(self._continue(stream, text, begin), self._wait_closed())
            except TimeoutError:
                raise Unavailable(
                    f"expected a text to end within {MAX_TEXT_S:g} s; begin another"
                ) from None

    def _check_count(self) -> None:
        if len(self._bytes_of) >= MAX_TEXTS:
            raise Busy(f"{MAX_TEXTS} texts are continued here already; try again later")

    @contextmanager
    def _reserve(self, text: Text, begin: BeginText) -> Iterator[None]:
        self._check_count()  # other texts may have begun meanwhile
        room = self._context.room_bytes(self._engine.state_bytes) - sum(self._bytes_of.values())
        if text.num_bytes > room:
            raise Busy(
                f"a text of {begin.max_tokens} tokens takes {text.num_bytes} bytes here, and "
                f"{max(0, room)} are free; try again later, or ask for fewer tokens"
            )
        self._bytes_of[text] = text.num_bytes
        try:
            yield
        finally:
            del self._bytes_of[text]

    async def _wait_closed(self) -> None:
        await self._closed.wait()
        raise NotFound("this peer released the trained stage")

    async def _continue(self, stream: TextStream, text: Text, begin: BeginText) -> None:
        while (part := await self._next(stream)) is not None:
            x = self._input(part, stream.remote)
            await stream.send(await run_in(self._context.compute, self._reply, text, x, begin))

    async def _next(self, stream: TextStream) -> ToStage | None:
        try:
            async with asyncio.timeout(SILENCE_S):
                return await stream.receive()
        except TimeoutError:
            raise Unavailable(f"{stream.remote}: sent nothing for {SILENCE_S:g} s") from None

    def _input(self, part: ToStage, remote: str) -> Tensor:
        """Return the stage's input: tokens [1, T], or activations [1, T, C]."""
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

    def _reply(self, text: Text, x: Tensor, begin: BeginText) -> FromStage:
        """Compute the reply; runs in the compute thread."""
        output = text.read(x)
        if self._engine.is_last:
            return NextToken(token=text.next_token(output, begin.sampling))
        return TextActivation(values=output.numpy().astype("<f4").tobytes())


async def receive_begin(stream: TextStream) -> BeginText:
    """Receive the first message of a call.

    Raises:
        OutOfTurn: The call begins with another message.
    """
    begin = await stream.receive()
    if not isinstance(begin, BeginText):
        raise OutOfTurn(f"{stream.remote}: expected the beginning of a text as the first message")
    return begin
