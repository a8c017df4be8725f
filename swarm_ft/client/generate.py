"""A text continued by the trained stages of a run, where they are. Knows no model, no torch.

The client carries what one stage made to the next itself. So each peer answers one caller about one
stage and knows no other, the way to it is the one by which its result is fetched, and whoever
dies is named at once: the tokens so far are told to others that hold the same stages, whose caches
are then as if the whole text had passed there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import numpy as np

from swarm_ft.client.swarm import SwarmClient, holders, result_name
from swarm_ft.errors import (
    BadInput,
    BadOption,
    MalformedMessage,
    NotAllowed,
    RunFailed,
    SwarmError,
    Unavailable,
    from_code,
)
from swarm_ft.ids import PeerId
from swarm_ft.protocol.messages.client import RunPhase, RunStatus
from swarm_ft.protocol.messages.control import Stage, stages_of
from swarm_ft.protocol.messages.enrolment import name_lookup
from swarm_ft.protocol.messages.generation import (
    BeginText,
    FromStage,
    NextToken,
    TextActivation,
    TextTokens,
    ToStage,
    tokens_in_part,
)
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import BYTES_PER_FLOAT, ModelSpec
from swarm_ft.protocol.spec.sampling import MAX_TEXT_TOKENS, Sampling
from swarm_ft.transport.base import MessageStream
from swarm_ft.transport.methods import GENERATE

ANSWER_S = 120.0
"""How long a stage may take over a part of a text: it may compute for others first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is to be generated.

    Attributes:
        prompt: token ids, one at least.
        max_new_tokens: behind it, one at least.
        ends: tokens behind which nothing follows.
        sampling: None chooses the likeliest token each time.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    ends: frozenset[int] = frozenset()
    sampling: Sampling | None = None

    @property
    def max_tokens(self) -> int:
        """That stages read at most: all but the last."""
        return len(self.prompt) + self.max_new_tokens - 1

    def check(self, positions: int | None) -> None:
        """Refuse a text that is too long.

        Args:
            positions: that the model has; None if any number.

        Raises:
            BadOption: the text is empty or too long.
        """
        if not self.prompt:
            raise BadOption("prompt: expected a token at least, got none")
        longest = min(positions or MAX_TEXT_TOKENS, MAX_TEXT_TOKENS)
        if self.max_tokens > longest:
            raise BadOption(
                f"--max-new-tokens {self.max_new_tokens}: the prompt has {len(self.prompt)} "
                f"tokens, and together they may be {longest + 1} at most"
            )


def check_generates(status: RunStatus) -> None:
    """Whether a run's trained stages lie at peers, and continue texts.

    Raises:
        BadOption: it tells classes.
        RunFailed: there is no result any more, or there will be none.
        Unavailable: it is not finished yet.
    """
    if status.spec.train.has_classes:
        raise BadOption(
            f"run {status.run_id}: expected a causal language model, this run trains "
            f"{status.spec.train.task_kind.name.lower().replace('_', ' ')}"
        )
    if status.phase is RunPhase.COLLECTED:
        raise RunFailed(
            f"run {status.run_id}: its result was fetched and deleted from the swarm; "
            "generate with transformers, from where it was saved"
        )
    if status.phase > RunPhase.COLLECTED:
        raise RunFailed(f"run {status.run_id} {status.phase.in_words(status.detail)}")
    if status.phase is not RunPhase.FINISHED:
        raise Unavailable(
            f"run {status.run_id} is {status.phase.name.lower()}, at step "
            f"{status.committed_steps} of {status.spec.train.num_steps}; its stages continue texts "
            "once it is finished, until the result is fetched"
        )


async def generate(
    client: SwarmClient,
    status: RunStatus,
    wanted: Wanted,
    on_token: Callable[[int], None],
    on_trouble: Callable[[str], None],
) -> list[int]:
    """Continue a text; the new tokens, with the one that ends it.

    Args:
        client: of the swarm.
        status: of the run, which `check_generates` let pass.
        wanted: the text; checked.
        on_token: told of each new token as it comes.
        on_trouble: told which peer failed, and that others go on.

    Raises:
        SwarmError: the last of a stage's peers failed, with its reason; or the model's family
            cannot generate so (BadModel).
    """
    new: list[int] = []
    holding = _Holding(status)
    chosen = holding.chosen()
    while True:
        try:
            async with _chain(client, status, wanted, chosen) as chain:
                unread: Sequence[int] = (*wanted.prompt, *new)
                while len(new) < wanted.max_new_tokens and wanted.ends.isdisjoint(new[-1:]):
                    new.append(await chain.read(unread))
                    on_token(new[-1])
                    unread = new[-1:]
                return new
        except _PeerFailed as failed:
            holding.drop(failed)
            chosen = holding.chosen()
            name = name_lookup(status.names)(failed.peer)
            words = str(failed).replace(failed.peer, name)
            on_trouble(f"{words}; the text so far goes to others")


class _PeerFailed(Exception):
    """A peer does not continue the text, or not any more."""

    def __init__(self, layers: LayerRange, peer: PeerId, error: SwarmError) -> None:
        words = error.message.removeprefix(f"peer {peer}: ")
        super().__init__(f"layers {layers}: peer {peer}: {words}")
        self.layers, self.peer, self.error = layers, peer, error


@dataclass
class _Holding:
    """Who holds the stages of a result, and may be asked."""

    status: RunStatus
    failed: dict[PeerId, _PeerFailed] = field(default_factory=dict)

    def chosen(self) -> dict[LayerRange, PeerId]:
        """A peer for each stage, in order.

        Raises:
            SwarmError: of a stage none is left; what the last one said.
        """
        return {stage.layers: self._one_of(stage) for stage in stages_of(self.status.assignments)}

    def drop(self, failed: _PeerFailed) -> None:
        """Ask a peer no more.

        Raises:
            BadInput, NotAllowed: others would say the same.
        """
        if isinstance(failed.error, BadInput | NotAllowed):
            raise failed.error
        self.failed[failed.peer] = failed

    def _one_of(self, stage: Stage) -> PeerId:
        named = [peer for _, peers in holders(self.status, stage) for peer in peers]
        left = [peer for peer in named if peer not in self.failed]
        if left:
            return left[0]
        told = [self.failed[peer] for peer in named if peer in self.failed]
        if not told:
            raise Unavailable(f"layers {stage.layers}: no peer holds their part of the result now")
        raise from_code(
            told[-1].error.code,
            f"{told[-1]}; no other peer holds these layers. Try again when it is back",
        )


# ---- one text at one peer a stage


@dataclass(frozen=True, slots=True)
class _RemoteStage:
    """A stage at a peer, over a call of its own."""

    layers: LayerRange
    peer: PeerId
    model: ModelSpec
    stream: MessageStream[ToStage, FromStage]

    async def tell(self, said: ToStage) -> None:
        """Say something that is not answered; raises _PeerFailed."""
        with self._named():
            await self.stream.send(said)

    async def activation(self, said: ToStage, num_tokens: int) -> TextActivation:
        """What it makes of so many tokens more; raises _PeerFailed."""
        with self._named():
            answer = await self._answer(said)
            size = BYTES_PER_FLOAT * self.model.hidden_size * num_tokens
            if isinstance(answer, TextActivation) and len(answer.values) == size:
                return answer
            raise MalformedMessage(f"expected activations of {num_tokens} tokens, got others")

    async def token(self, said: ToStage) -> int:
        """What the last stage lets follow; raises _PeerFailed."""
        with self._named():
            answer = await self._answer(said)
            if isinstance(answer, NextToken) and answer.token < self.model.vocab_size:
                return answer.token
            raise MalformedMessage(f"expected a token below {self.model.vocab_size}, got another")

    async def _answer(self, said: ToStage) -> FromStage:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.stream.send(said)
                answer = await self.stream.receive()
        except TimeoutError:
            raise Unavailable(f"it did not answer within {ANSWER_S:g} s") from None
        if answer is None:
            raise Unavailable("it ended the text")
        return answer

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except SwarmError as error:
            raise _PeerFailed(self.layers, self.peer, error) from error


@dataclass(frozen=True, slots=True)
class _Chain:
    """The stages of a model, first to last, each at one peer."""

    stages: Sequence[_RemoteStage]
    channels: int

    async def read(self, tokens: Sequence[int]) -> int:
        """Tell all stages some tokens more, one at least; the one that is to follow.

        Raises:
            _PeerFailed: of one of them.
        """
        size = tokens_in_part(self.channels)
        parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        return [await self._read_part(part) for part in parts][-1]

    async def _read_part(self, tokens: Sequence[int]) -> int:
        said: ToStage = TextTokens(token_ids=np.array(tokens, "<u4").tobytes())
        *others, last = self.stages
        for stage in others:
            said = await stage.activation(said, len(tokens))
        return await last.token(said)


@asynccontextmanager
async def _chain(
    client: SwarmClient, status: RunStatus, wanted: Wanted, chosen: Mapping[LayerRange, PeerId]
) -> AsyncIterator[_Chain]:
    """A text is begun at all stages; it ends there with the context."""
    model = status.spec.model
    async with AsyncExitStack() as stack:
        stages = []
        for layers, peer in chosen.items():
            try:
                channel = await client.peer_channel(peer)
            except SwarmError as error:
                raise _PeerFailed(layers, peer, error) from error
            stack.push_async_callback(channel.close)
            stream = channel.open(GENERATE)
            stack.push_async_callback(stream.cancel)
            stages.append(_RemoteStage(layers, peer, model, stream))
        for stage in stages:
            await stage.tell(_beginning(status, stage.layers, wanted))
        yield _Chain(stages, model.hidden_size)


def _beginning(status: RunStatus, layers: LayerRange, wanted: Wanted) -> BeginText:
    name = result_name(status, layers)
    return BeginText(name=name, max_tokens=wanted.max_tokens, sampling=wanted.sampling)
