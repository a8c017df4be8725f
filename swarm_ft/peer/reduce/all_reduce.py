"""Peers sum their gradients: one member's part in it, on streams to all others.

`protocol.all_reduce` decides, the coder computes in the codec threads; this shell only moves
things between them and the streams. Pieces are encoded, sent, received and summed side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from concurrent.futures import Executor
from functools import partial
from itertools import count

import torch
from torch import Tensor

from swarm_ft.clock import Clock
from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.discovery.directory import Directory
from swarm_ft.errors import MalformedMessage, NonFinite, OutOfTurn
from swarm_ft.ids import Attempt, PeerId, RunId, StepNumber
from swarm_ft.peer.links.dialling import Redialler
from swarm_ft.peer.reduce.gradient_coder import (
    BadPiece,
    EncodedSum,
    GradientCoder,
    Residuals,
    SumKeeper,
)
from swarm_ft.peer.reduce.member_link import (
    LinkEvents,
    MemberLink,
    ReduceStream,
    check_reduce_hello,
    receive_reduce_hello,
)
from swarm_ft.protocol.machines.all_reduce import AllReduce, BreakOff, ReduceEffect, Transmit
from swarm_ft.protocol.messages.boundary import EncodedTensor
from swarm_ft.protocol.messages.reduction import (
    Division,
    EncodeShare,
    GradientPiece,
    PieceTask,
    ReduceHello,
    ReduceMessage,
    SumShares,
    TakeSum,
)
from swarm_ft.protocol.messages.reports import GradientTraffic
from swarm_ft.protocol.spec.codec_spec import CodecSpec
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.transport.base import Channel, Transport
from swarm_ft.transport.methods import ALL_REDUCE

_TASKS_AT_WORK = 2
"""Beside each other in the codec threads."""
_Coder = GradientCoder | SumKeeper


class GradientReducer:
    """One member's part during one attempt; `run` has to be at work for the rest to proceed.

    Attributes:
        connected: set while streams to all other members are up.
    """

    def __init__(  # noqa: PLR0913 - what an attempt shares with its parts, by name
        self,
        *,
        run_id: RunId,
        attempt: Attempt,
        spec: RunSpec,
        layers: LayerRange,
        members: tuple[PeerId, ...],
        own: PeerId,
        num_values: int,
        codec: CodecSpec,
        residuals: Residuals,
        pool: Executor,
        directory: Directory,
        transport: Transport,
        clock: Clock,
    ) -> None:
        """Nothing is dialled before `run`.

        Args:
            run_id: names the run.
            attempt: its fence.
            spec: its digest must be that of the other members.
            layers: the stage that the members are replicas of, or all of the model where they are
                its two ends.
            members: all of them, in the order in which their gradients are added up.
            own: which of them this peer is.
            num_values: of the gradient; 0 if this peer has no weights yet, and only listens.
            codec: of the pieces.
            residuals: of error feedback; the caller commits them with the step.
            pool: the codec threads.
            directory: where the members' endpoints are found.
            transport: carries the streams.
            clock: tells how long a member could not be reached.
        """
        self.connected = asyncio.Event()
        self._hello = ReduceHello(
            run_id=run_id,
            spec_digest=spec.digest(),
            attempt=attempt,
            peer_id=own,
            layers=layers,
            num_values=num_values,
        )
        self._members = members
        self._own = members.index(own)
        self._residuals = residuals
        self._pool = pool
        self._codec = PieceCodec(codec)
        self._machine = AllReduce(attempt=attempt, num_members=len(members), own=self._own)
        others = (i for i in range(len(members)) if i != self._own)
        self._links = {i: MemberLink(members[i], self._events(i)) for i in others}
        self._redialler = partial(Redialler, directory=directory, transport=transport, clock=clock)
        self._told_values = {self._own: num_values}
        self._division = Division(1, len(members))
        self._coder: _Coder | None = None
        self._tasks: asyncio.PriorityQueue[tuple[bool, int, _Coder, PieceTask]] = (
            asyncio.PriorityQueue()
        )
        self._order = count()
        self._changed = asyncio.Event()
        self._failure: NonFinite | None = None
        self._traffic = GradientTraffic()
        self._note_connections()

    # ---- a step

    async def reduce(
        self, step: StepNumber, gradient: Tensor, listeners: Set[PeerId] = frozenset()
    ) -> Tensor:
        """The sum of all members' gradients; every member gets the same bits.

        Returns once the others have acknowledged all that was sent to them. Residuals are staged.

        Args:
            step: its number, higher than that of the last one.
            gradient: float32 [n] on the CPU, n the same at all members; not written to, and the
                result where there is one member only.
            listeners: members that have no gradient and get the sum.

        Raises:
            MalformedMessage: the gradient has another shape or dtype.
            NonFinite: this member's gradient is infinite, NaN or as good as that.
            OutOfTurn: the step is not a later one.
        """
        if gradient.dtype != torch.float32 or gradient.dim() != 1 or not len(gradient):
            shape = f"{gradient.dtype} {list(gradient.shape)}"
            raise MalformedMessage(f"gradient: expected float32 [n], got {shape}")
        if len(self._members) == 1:
            return gradient
        self._divide(len(gradient), listeners)
        residuals = None
        if not self._codec.is_exact:
            residuals = self._residuals.begin(len(gradient), self._division.shard(self._own))
        coder = GradientCoder(self._codec, step, gradient, residuals)
        await self._run_step(step, coder)
        return coder.result

    async def listen(self, step: StepNumber, listeners: Set[PeerId]) -> EncodedSum:
        """What `reduce` gives the others, still encoded; this member is one of the listeners.

        Raises:
            OutOfTurn: the step is not a later one, or no member said how long a gradient is.
        """
        num_values = max(self._told_values.values())
        if not num_values:
            raise OutOfTurn(f"all-reduce of step {step}: nobody here has weights")
        self._divide(num_values, listeners)
        keeper = SumKeeper(self._codec)
        await self._run_step(step, keeper)
        return keeper.result

    def _divide(self, num_values: int, listeners: Set[PeerId]) -> None:
        listening = {i for i, member in enumerate(self._members) if member in listeners}
        self._division = Division(num_values, len(self._members), listening)

    async def _run_step(self, step: StepNumber, coder: _Coder) -> None:
        self._failure, self._coder = None, coder
        try:
            self._apply(self._machine.begin(step, self._division))
            await self._settled()
        finally:
            self._coder = None

    async def _settled(self) -> None:
        while not self._machine.is_settled:
            self._changed.clear()
            await self._changed.wait()
            if self._failure is not None:
                raise self._failure

    def take_traffic(self) -> GradientTraffic:
        """What was sent since the last call."""
        taken, self._traffic = self._traffic, GradientTraffic()
        return taken

    # ---- work

    async def run(self) -> None:
        """Keep the streams and compute until cancelled.

        Raises:
            ExceptionGroup: of Unavailable, if a member could not be reached; of ProtocolError, if
                its streams were broken off too often.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(_TASKS_AT_WORK):
                group.create_task(self._work())
            for member, link in self._links.items():
                group.create_task(link.watch())
                if member > self._own:
                    converse = partial(self._converse, member)
                    dialler = self._redialler(self._members[member], converse)
                    group.create_task(dialler.run())

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            _, _, coder, task = await self._tasks.get()
            if coder is not self._coder:
                continue
            try:
                made = await loop.run_in_executor(self._pool, coder.work, task)
            except NonFinite as error:
                self._failure = error
                self._changed.set()
                continue
            if coder is self._coder:
                self._apply(self._done(task, made))

    def _done(self, task: PieceTask, made: EncodedTensor | BadPiece | None) -> list[ReduceEffect]:
        match task, made:
            case EncodeShare(span), EncodedTensor():
                return self._machine.encoded(span, made)
            case SumShares(span), EncodedTensor():
                return self._machine.summed(span, made)
            case SumShares(span), BadPiece(member, error):
                self._machine.share_refused(span, member)
                self._links[member].break_off(error)
            case TakeSum(span), BadPiece(member, error):
                self._machine.sum_refused(span)
                self._links[member].break_off(error)
            case TakeSum(span), _:
                return self._machine.taken(span)
        return []

    def _apply(self, effects: list[ReduceEffect]) -> None:
        for effect in effects:
            match effect:
                case Transmit(member, message):
                    self._links[member].say(message)
                case BreakOff(member, error):
                    self._links[member].break_off(error)
                case EncodeShare() | SumShares() | TakeSum() if self._coder is not None:
                    # What others wait for goes before what they will have to wait for anyway.
                    is_later = isinstance(effect, EncodeShare)
                    self._tasks.put_nowait((is_later, next(self._order), self._coder, effect))
        self._changed.set()

    # ---- streams

    async def serve(self, stream: ReduceStream, hello: ReduceHello) -> None:
        """Answer a member's call, whose first message was read; until the stream ends.

        Raises:
            RunMismatch: it works by another RunSpec.
            OutOfTurn: it is not a member that is to call, or at another stage or attempt.
            SwarmError: why the stream ended.
        """
        if hello.peer_id not in self._members[: self._own]:
            raise OutOfTurn(
                f"all-reduce of layers {self._hello.layers}: {self._hello.peer_id} expected a call "
                f"of a replica before it, got one of {hello.peer_id}"
            )
        check_reduce_hello(self._hello, hello, hello.peer_id)
        await stream.send(self._hello)
        member = self._members.index(hello.peer_id)
        self._told_values[member] = hello.num_values
        await self._links[member].serve(stream)

    async def _converse(self, member: int, channel: Channel, greeted: Callable[[], None]) -> None:
        stream = channel.open(ALL_REDUCE)
        await stream.send(self._hello)
        theirs = await receive_reduce_hello(stream)
        check_reduce_hello(self._hello, theirs, self._members[member])
        greeted()
        self._told_values[member] = theirs.num_values
        await self._links[member].serve(stream)

    def _events(self, member: int) -> LinkEvents:
        return LinkEvents(
            connected=partial(self._connected, member),
            disconnected=partial(self._disconnected, member),
            received=partial(self._received, member),
            sent=self._sent,
        )

    def _connected(self, member: int) -> None:
        self._note_connections()
        self._apply(self._machine.connected(member))

    def _disconnected(self, member: int) -> None:
        self._machine.disconnected(member)
        self._note_connections()

    def _note_connections(self) -> None:
        if all(link.is_up for link in self._links.values()):
            self.connected.set()
        else:
            self.connected.clear()

    def _received(self, member: int, message: ReduceMessage) -> None:
        if isinstance(message, GradientPiece):
            self._codec.check(message.tensor)  # before it is held: that bounds the memory
        self._apply(self._machine.receive(member, message))

    def _sent(self, piece: GradientPiece, wire_bytes: int) -> None:
        plain = 4 * self._division.spans[piece.key.piece].num_values
        self._traffic += GradientTraffic(sent_bytes=wire_bytes, uncompressed_bytes=plain)
