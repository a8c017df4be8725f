"""Tied embeddings stay tied: first and last stage add up their gradients, each for itself.

The last stage dials and sends its head's gradient; the first answers with its embeddings'. Both
compute first + last in float32, in that order, so both apply the same update to the same bits.
"""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import BadFrame, NonFinite, OutOfTurn, Unavailable
from swarm_ft.ids import PeerId
from swarm_ft.peer.context import PeerContext, run_in
from swarm_ft.peer.links.dialling import MAX_BACKOFF_S, find_peer
from swarm_ft.proto import peer_pb2 as pb
from swarm_ft.protocol.messages.control import Assign, PlanStep, stages_of
from swarm_ft.stage.base import Engine
from swarm_ft.transport.base import MessageStream, Transport
from swarm_ft.transport.blob import BlobName, receive_bytes, receive_header, send_bytes
from swarm_ft.transport.methods import TIED_GRADIENT

TiedStream = MessageStream[pb.BlobPart, pb.BlobPart]


class TiedGradients:
    """One peer's part in one attempt; nothing happens where nothing is tied."""

    def __init__(self, context: PeerContext, assign: Assign) -> None:
        self._context = context
        self._spec = assign.spec
        pipeline = stages_of(assign.stages)
        self._firsts, self._lasts = pipeline[0].peers, pipeline[-1].peers
        self._exchange: TiedExchange | None = None

    def open(self, plan: PlanStep, engine: Engine) -> None:
        """A step begins: at the first stage, the last one may call from now on."""
        if engine.exchanges_tied_gradient and engine.is_first:
            shape = self._spec.model.vocab_size, self._spec.model.hidden_size
            self._exchange = TiedExchange(_blob_name(plan), shape)

    async def synchronise(self, plan: PlanStep, engine: Engine) -> None:
        """Exchange the step's gradients; the engine then has their sum.

        Raises:
            NonFinite: this stage's gradient is inf or NaN.
            BadFrame: what the other stage sends is not a gradient.
        """
        if not engine.exchanges_tied_gradient:
            return
        own = await run_in(self._context.compute, engine.tied_gradient)
        if self._exchange is not None:
            total = await self._exchange.sum(own)
        else:
            calls = [
                exchange_from_last(
                    own,
                    _blob_name(plan),
                    first,
                    directory=self._context.directory,
                    transport=self._context.transport,
                )
                for first in self._to_call()
            ]
            total = (await asyncio.gather(*calls))[0]  # all have the same bits
        await run_in(self._context.compute, engine.set_tied_gradient, total)

    async def serve(self, stream: TiedStream) -> None:
        """First stage: answer a call of the last one.

        Raises:
            OutOfTurn: nothing is exchanged here now.
            BadFrame: what it sends is not a gradient.
        """
        if self._exchange is None:
            raise OutOfTurn("no tied gradient is expected here now")
        await self._exchange.serve(stream)

    def _to_call(self) -> list[PeerId]:
        """First-stage replicas that this last-stage replica calls; somebody calls each."""
        replica = self._lasts.index(self._context.peer_id)
        own = [peer for i, peer in enumerate(self._firsts) if i % len(self._lasts) == replica]
        return own or [self._firsts[replica % len(self._firsts)]]


def _blob_name(plan: PlanStep) -> BlobName:
    return BlobName(run_id=plan.run_id, attempt=plan.attempt, step=plan.step)


class TiedExchange:
    """One step's exchange, at the first stage: both gradients meet here."""

    def __init__(self, name: BlobName, shape: tuple[int, ...]) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self._shape = torch.Size(shape)
        self._first: asyncio.Future[bytes] = loop.create_future()
        self._last: asyncio.Future[bytes] = loop.create_future()

    async def sum(self, first: Tensor) -> Tensor:
        """First stage: the sum, once the last stage's gradient is here.

        Raises:
            NonFinite: this stage's gradient is inf or NaN.
        """
        self._first.set_result(_to_bytes(first))
        return first.cpu() + _from_bytes(await self._last, self._shape)

    async def serve(self, stream: TiedStream) -> None:
        """First stage: answer the last stage's call.

        Raises:
            OutOfTurn: it speaks of another step or attempt.
            BadFrame: what it sends is not a gradient.
        """
        blob = await receive_header(stream, max_bytes=4 * self._shape.numel())
        if blob.name != self.name:
            raise OutOfTurn(f"tied gradient: expected {self.name}, got {blob.name}")
        data = await receive_bytes(stream, blob)
        _from_bytes(data, self._shape)
        if not self._last.done():
            self._last.set_result(data)
        # Shielded: the loss of one call must not cancel what the next one waits for.
        await send_bytes(stream, self.name, await asyncio.shield(self._first))


async def exchange_from_last(
    last: Tensor,
    name: BlobName,
    first_peer: PeerId,
    *,
    directory: Directory,
    transport: Transport,
) -> Tensor:
    """Last stage: send the head's gradient, get the embeddings', return the sum.

    Tries again while the first stage cannot be reached; the coordinator notices if it is gone.

    Raises:
        NonFinite: this stage's gradient is inf or NaN.
        BadFrame: what the first stage sends is not a gradient.
    """
    while True:
        try:
            return await _exchange_once(last, name, first_peer, directory, transport)
        except Unavailable:
            await asyncio.sleep(MAX_BACKOFF_S)


async def _exchange_once(
    last: Tensor, name: BlobName, first_peer: PeerId, directory: Directory, transport: Transport
) -> Tensor:
    channel = transport.connect(await find_peer(directory, first_peer))
    try:
        stream = channel.open(TIED_GRADIENT)
        data = _to_bytes(last)
        await send_bytes(stream, name, data)
        blob = await receive_header(stream, max_bytes=len(data))
        first = _from_bytes(await receive_bytes(stream, blob), last.shape)
        return first + last.cpu()
    finally:
        await channel.close()


def _to_bytes(gradient: Tensor) -> bytes:
    if not bool(torch.isfinite(gradient).all()):
        raise NonFinite("the gradient of the tied embeddings is inf or NaN; try a smaller --lr")
    return gradient.detach().cpu().float().contiguous().numpy().tobytes()


def _from_bytes(data: bytes, shape: torch.Size) -> Tensor:
    if len(data) != 4 * shape.numel():
        raise BadFrame(f"tied gradient: expected {4 * shape.numel()} bytes, got {len(data)}")
    gradient = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
    if not bool(torch.isfinite(gradient).all()):
        raise BadFrame("tied gradient: expected finite numbers")
    return gradient
