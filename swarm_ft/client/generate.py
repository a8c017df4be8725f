"""Text generation by the trained stages of a run, at the peers. Imports no torch.

The client itself carries the output of one stage to the next. Each peer therefore serves one caller
for one stage and needs no other peer, and the client reaches it as it does for the result. A peer
that fails is known at once: the client sends all tokens so far to another peer of the same stage,
whose cache is then as if the whole text had passed there.
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
"""Seconds that a stage may take for one part of a text; it may compute for others first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """A request to continue a text.

    Attributes:
        prompt: Token ids; at least one.
        max_new_tokens: Maximum number of new tokens; at least one.
        stop_tokens: Stop tokens.
        sampling: Sampling parameters; None for greedy decoding.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling | None = None

    @property
    def max_tokens(self) -> int:
        """Number of tokens that stages read at most: all but the last one."""
        return len(self.prompt) + self.max_new_tokens - 1

    def check(self, positions: int | None) -> None:
        """Refuse an empty prompt and a text that is too long.

        Args:
            positions: Maximum number of positions of the model; None for no limit.

        Raises:
            BadOption: The prompt is empty, or the text is too long.
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
    """Check that peers hold the trained stages of a run and can generate text.

    Raises:
        BadOption: The run trains a classifier.
        RunFailed: The result is gone, or there will be none.
        Unavailable: The run is not finished yet.
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
            f"{status.committed_steps} of {status.spec.train.num_steps}; generate works once it is "
            "finished, until the result is fetched"
        )


async def generate(
    client: SwarmClient,
    status: RunStatus,
    request: GenerationRequest,
    on_token: Callable[[int], None],
    on_trouble: Callable[[str], None],
) -> list[int]:
    """Continue a text and return the new tokens, the stop token included.

    Args:
        client: Connection to the swarm.
        status: Status of the run, accepted by `check_generates`.
        request: The request, checked.
        on_token: Callback for each new token.
        on_trouble: Callback for a message when a peer fails and others take over.

    Raises:
        SwarmError: All peers of a stage failed; the error is that of the last one. A BadModel error
            means that the model's family cannot generate in stages.
    """
    new: list[int] = []
    holding = _Holding(status)
    chosen = holding.chosen()
    while True:
        try:
            async with _chain(client, status, request, chosen) as chain:
                unread: Sequence[int] = (*request.prompt, *new)
                while len(new) < request.max_new_tokens and request.stop_tokens.isdisjoint(
                    new[-1:]
                ):
                    new.append(await chain.read(unread))
                    on_token(new[-1])
                    unread = new[-1:]
                return new
        except _PeerFailed as failed:
            holding.drop(failed)
            chosen = holding.chosen()
            name = name_lookup(status.names)(failed.peer)
            words = str(failed).replace(failed.peer, name)
            on_trouble(f"{words}; continuing at another peer")


class _PeerFailed(Exception):
    """Error of a peer that cannot continue the text."""

    def __init__(self, layers: LayerRange, peer: PeerId, error: SwarmError) -> None:
        words = error.message.removeprefix(f"peer {peer}: ")
        super().__init__(f"layers {layers}: peer {peer}: {words}")
        self.layers, self.peer, self.error = layers, peer, error


@dataclass
class _Holding:
    """Peers that hold the stages of a result and have not failed."""

    status: RunStatus
    failed: dict[PeerId, _PeerFailed] = field(default_factory=dict)

    def chosen(self) -> dict[LayerRange, PeerId]:
        """Return one peer for each stage, in order.

        Raises:
            SwarmError: A stage has no peer left; the error is that of the last one.
        """
        return {stage.layers: self._one_of(stage) for stage in stages_of(self.status.assignments)}

    def drop(self, failed: _PeerFailed) -> None:
        """Exclude a peer that failed.

        Raises:
            BadInput, NotAllowed: The request is at fault, so other peers would refuse it too.
        """
        if isinstance(failed.error, BadInput | NotAllowed):
            raise failed.error
        self.failed[failed.peer] = failed

    def _one_of(self, stage: Stage) -> PeerId:
        named = [peer for _, peers in holders(self.status, stage) for peer in peers]
        left = [peer for peer in named if peer not in self.failed]
        if left:
            return left[0]
        failures = [self.failed[peer] for peer in named if peer in self.failed]
        if not failures:
            raise Unavailable(f"layers {stage.layers}: no peer holds their part of the result now")
        raise from_code(
            failures[-1].error.code,
            f"{failures[-1]}; no other peer holds these layers. Try again when it is back",
        )


# ---- one text at one peer a stage


@dataclass(frozen=True, slots=True)
class _RemoteStage:
    """A stage at a peer, over its own call."""

    layers: LayerRange
    peer: PeerId
    model: ModelSpec
    stream: MessageStream[ToStage, FromStage]

    async def send(self, message: ToStage) -> None:
        """Send a message without a reply; raises _PeerFailed."""
        with self._named():
            await self.stream.send(message)

    async def activation(self, message: ToStage, num_tokens: int) -> TextActivation:
        """Return the stage's output for `num_tokens` more tokens; raises _PeerFailed."""
        with self._named():
            answer = await self._request(message)
            size = BYTES_PER_FLOAT * self.model.hidden_size * num_tokens
            if isinstance(answer, TextActivation) and len(answer.values) == size:
                return answer
            raise MalformedMessage(f"expected activations of {num_tokens} tokens, got others")

    async def token(self, message: ToStage) -> int:
        """Return the next token from the last stage; raises _PeerFailed."""
        with self._named():
            answer = await self._request(message)
            if isinstance(answer, NextToken) and answer.token < self.model.vocab_size:
                return answer.token
            raise MalformedMessage(f"expected a token below {self.model.vocab_size}, got another")

    async def _request(self, message: ToStage) -> FromStage:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.stream.send(message)
                answer = await self.stream.receive()
        except TimeoutError:
            raise Unavailable(f"it did not answer within {ANSWER_S:g} s") from None
        if answer is None:
            raise Unavailable("it closed the stream")
        return answer

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except SwarmError as error:
            raise _PeerFailed(self.layers, self.peer, error) from error


@dataclass(frozen=True, slots=True)
class _Chain:
    """Chain of a model's stages, first to last, each at one peer."""

    stages: Sequence[_RemoteStage]
    channels: int

    async def read(self, tokens: Sequence[int]) -> int:
        """Pass one or more tokens through all stages and return the next token.

        Raises:
            _PeerFailed: A peer failed.
        """
        size = tokens_in_part(self.channels)
        parts = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        return [await self._read_part(part) for part in parts][-1]

    async def _read_part(self, tokens: Sequence[int]) -> int:
        message: ToStage = TextTokens(token_ids=np.array(tokens, "<u4").tobytes())
        *others, last = self.stages
        for stage in others:
            message = await stage.activation(message, len(tokens))
        return await last.token(message)


@asynccontextmanager
async def _chain(
    client: SwarmClient,
    status: RunStatus,
    wanted: GenerationRequest,
    chosen: Mapping[LayerRange, PeerId],
) -> AsyncIterator[_Chain]:
    """Begin a text at all stages; the text ends with the context."""
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
            await stage.send(_beginning(status, stage.layers, wanted))
        yield _Chain(stages, model.hidden_size)


def _beginning(status: RunStatus, layers: LayerRange, wanted: GenerationRequest) -> BeginText:
    name = result_name(status, layers)
    return BeginText(name=name, max_tokens=wanted.max_tokens, sampling=wanted.sampling)
