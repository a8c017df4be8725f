"""All-reduce of gradients: one member's part, on channels to the other members.

`protocol.machines.all_reduce` decides, and the coder computes in the codec threads. This module
moves pieces between them and the channels. Pieces are encoded, sent, received and summed at the
same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor

from swarm_ft.base import failpoints
from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.codec.spec import CodecSpec
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.digest import check_spec_digest
from swarm_ft.errors import MalformedMessage, NonFinite, OutOfTurn, RunMismatch
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.peer.context import Pool, run_in
from swarm_ft.peer.links import LinkChannel, Send
from swarm_ft.peer.reduce.gradient_coder import (
    BadPiece,
    EncodedSum,
    GradientCoder,
    Residuals,
    SumCollector,
)
from swarm_ft.protocol.machines.all_reduce import AllReduce, BreakOff, ReduceEffect, TransmitPiece
from swarm_ft.protocol.messages.control import Stage
from swarm_ft.protocol.messages.reduction import (
    Division,
    EncodeShare,
    GradientPiece,
    PieceMessage,
    PieceTask,
    ReduceHello,
    SumShares,
    TakeSum,
)
from swarm_ft.protocol.messages.reports import GradientTraffic
from swarm_ft.protocol.wire.frames import wire_bytes
from swarm_ft.stage.base import Engine

_TASKS_AT_WORK = 2
"""Tasks that run in the codec threads at the same time."""
_Coder = GradientCoder | SumCollector


class GradientReducer:
    """A member's part in one attempt; the other methods proceed only while `run` works.

    Attributes:
        hello: First message to each of the other members.
        is_connected: Event that is set while all channels are connected.
    """

    def __init__(
        self,
        hello: ReduceHello,
        members: tuple[PeerId, ...],
        channels: Mapping[PeerId, LinkChannel],
        *,
        codec: CodecSpec,
        residuals: Residuals,
        pool: Executor,
    ) -> None:
        """Create the reducer; `run` connects it.

        Args:
            hello: First message to each of the other members. Its layers are the members' stage, or
                the whole model if they host several stages. Its `num_values` is 0 if this peer has
                no weights yet and only listens.
            members: All members, in the order in which their gradients are added.
            channels: Channels to the members with which this one exchanges messages.
            codec: Codec of the pieces.
            residuals: Residuals of error feedback; the caller commits them with the step.
            pool: Codec threads.
        """
        self.hello = hello
        self.is_connected = asyncio.Event()
        self._members = members
        self._own = members.index(hello.peer_id)
        self._residuals = residuals
        self._pool = pool
        self._codec = PieceCodec(codec)
        self._machine = AllReduce(
            attempt=hello.attempt, num_members=len(members), own=self._own, scope=hello.scope
        )
        self._channels = {members.index(peer): channel for peer, channel in channels.items()}
        self._connected: set[int] = set()
        self._known_values = {self._own: hello.num_values}
        self._division = Division(1, len(members))
        self._coder: _Coder | None = None
        # The windows of the all-reduce bound the queue.
        self._tasks: asyncio.PriorityQueue[tuple[bool, int, _Coder, PieceTask]] = (
            asyncio.PriorityQueue()
        )
        self._order = count()
        self._changed = asyncio.Event()
        self._failure: NonFinite | None = None
        self._traffic = GradientTraffic()
        self._update_connected()

    # ---- a step

    async def reduce(
        self, step: StepNumber, gradient: Tensor, listeners: Set[PeerId] = frozenset()
    ) -> Tensor:
        """Return the sum of all members' gradients; every member gets the same bits.

        The call returns once the others have acknowledged all messages. Residuals are staged.

        Args:
            step: Number of the step, higher than that of the last one.
            gradient: Gradient of this member, float32 [n] on the CPU, with the same n at all
                members. It is not modified, and is itself the result if there is only one member. A
                listener's gradient counts for its length alone.
            listeners: Members whose gradients do not count, and who receive the sum.

        Raises:
            MalformedMessage: The gradient has another shape or dtype.
            NonFinite: This member's gradient has inf, NaN or values above the limit.
            OutOfTurn: The step is not a later one.
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
        """Return the encoded sum that `reduce` returns elsewhere; this member is a listener.

        Raises:
            OutOfTurn: The step is not a later one, or no member knows the length of the gradient.
        """
        num_values = max(self._known_values.values())
        if not num_values:
            raise OutOfTurn(f"all-reduce of step {step}: no connected member has weights")
        self._divide(num_values, listeners)
        keeper = SumCollector(self._codec)
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
        """Return the traffic since the last call."""
        taken, self._traffic = self._traffic, GradientTraffic()
        return taken

    # ---- work

    async def run(self) -> None:
        """Stay connected and compute until cancelled.

        Raises:
            ExceptionGroup: `Unavailable` if a member cannot be reached; `ProtocolError` if one
                broke the protocol too often.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(_TASKS_AT_WORK):
                group.create_task(self._work())
            for member, channel in self._channels.items():
                group.create_task(channel.keep_connected(_MemberEnd(self, member)))

    async def _work(self) -> None:
        while True:
            _, _, coder, task = await self._tasks.get()
            if coder is not self._coder:
                continue
            try:
                made = await run_in(self._pool, coder.work, task)
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
                self._channels[member].break_off(error)
            case TakeSum(span), BadPiece(member, error):
                self._machine.sum_refused(span)
                self._channels[member].break_off(error)
            case TakeSum(span), _:
                return self._machine.taken(span)
        return []

    def _apply(self, effects: list[ReduceEffect]) -> None:
        for effect in effects:
            match effect:
                case TransmitPiece(member, message):
                    self._channels[member].send(message)
                case BreakOff(member, error):
                    self._channels[member].break_off(error)
                case EncodeShare() | SumShares() | TakeSum() if self._coder is not None:
                    # Sums precede the own shares, because other members wait for them.
                    is_later = isinstance(effect, EncodeShare)
                    self._tasks.put_nowait((is_later, next(self._order), self._coder, effect))
        self._changed.set()

    # ---- calls of the channels, see `ChannelEnd`

    def on_connected(self, member: int, hello: ReduceHello) -> None:
        """Connect a member.

        Raises:
            RunMismatch: The member has another RunSpec, or a gradient of another length.
            OutOfTurn: The member hosts another stage.
        """
        self._check(hello)
        self._known_values[member] = hello.num_values
        self._connected.add(member)
        self._update_connected()
        self._apply(self._machine.connected(member))

    def _check(self, hello: ReduceHello) -> None:
        ours = self.hello
        run, whose = f"run {ours.run_id}", f"peer {hello.peer_id}"
        check_spec_digest(run, ours.spec_digest, hello.spec_digest, whose)
        if hello.layers != ours.layers:
            raise OutOfTurn(f"all-reduce: expected layers {ours.layers}, got {hello.layers}")
        if ours.num_values and hello.num_values and ours.num_values != hello.num_values:
            raise RunMismatch(
                f"{run}, layers {ours.layers}: gradients have {ours.num_values} values here, "
                f"{hello.num_values} at {whose}"
            )

    def on_disconnected(self, member: int) -> None:
        """Disconnect a member."""
        self._machine.disconnected(member)
        self._connected.discard(member)
        self._update_connected()

    def receive(self, member: int, message: PieceMessage) -> None:
        """Handle a member's message.

        Raises:
            ProtocolError: The message is not allowed.
        """
        if isinstance(message, GradientPiece):
            self._codec.check(message.tensor)  # before the machine stores it: bounds the memory
        self._apply(self._machine.receive(member, message))

    async def write(self, member: int, message: PieceMessage, send: Send) -> None:
        """Send a message to a member, in its turn."""
        if isinstance(message, GradientPiece):  # counted first: the reply may come at once
            self._count(member, message)
        await send(message)
        if isinstance(message, GradientPiece):
            failpoints.reached("mid-reduce")

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """Members that are not connected."""
        return tuple(
            channel.peer_id
            for member, channel in self._channels.items()
            if member not in self._connected
        )

    @property
    def waits_for(self) -> tuple[PeerId, ...]:
        """Members that this member needs to continue the present step."""
        lacked = self._machine.waits_for if self._coder is not None else ()
        return tuple(self._members[member] for member in lacked)

    def _update_connected(self) -> None:
        if len(self._connected) == len(self._channels):
            self.is_connected.set()
        else:
            self.is_connected.clear()

    def _count(self, member: int, piece: GradientPiece) -> None:
        num_bytes, plain = wire_bytes(piece), 4 * self._division.spans[piece.key.piece].num_values
        self._traffic += GradientTraffic(
            sent_bytes=num_bytes,
            uncompressed_bytes=plain,
            relayed_bytes=num_bytes if self._channels[member].is_relayed else 0,
        )


class _MemberEnd:
    """The end of the channel to one other member."""

    def __init__(self, reducer: GradientReducer, member: int) -> None:
        self.hello = reducer.hello
        self.on_disconnected = partial(reducer.on_disconnected, member)
        self.on_connected = partial(reducer.on_connected, member)
        self.receive = partial(reducer.receive, member)
        self.write = partial(reducer.write, member)


# ---- equal copies of one weight: the stages that hold it add up their gradients of it
#
# Each of these peers is in one group. In a group one replica of each stage sends its stage's sum,
# uncompressed, and the others listen. All compute first + second + ... in float32 in the order of
# the stages, and so apply the same update to the same bits.


@dataclass(frozen=True, slots=True)
class ReduceGroup:
    """A group of peers that sum the gradients of shared weights.

    Attributes:
        givers: One peer of each stage, in the order of the stages.
        listeners: Other replicas of these stages.
    """

    givers: tuple[PeerId, ...]
    listeners: tuple[PeerId, ...]

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Peers of the group."""
        return self.givers + self.listeners

    def channel_peers(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Return the peers with which a member has a channel.

        Listeners have none among themselves.
        """
        others = self.givers if peer in self.listeners else self.members
        return tuple(other for other in others if other != peer)


def reduce_groups(stages: Sequence[Stage]) -> tuple[ReduceGroup, ...]:
    """Divide the replicas of several stages into groups with one giver of each stage.

    There are as many groups as the smallest stage has replicas; the other replicas listen, spread
    evenly. All replicas of a stage hold the same sum, so any of them gives the same bits.
    """
    count = min((len(stage.peers) for stage in stages), default=0)
    return tuple(
        ReduceGroup(
            givers=tuple(stage.peers[i] for stage in stages),
            listeners=tuple(peer for stage in stages for peer in stage.peers[count + i :: count]),
        )
        for i in range(count)
    )


async def synchronise(
    reducer: GradientReducer, group: ReduceGroup, step: StepNumber, engine: Engine, compute: Pool
) -> None:
    """Sum the step's gradients of shared weights over the stages, and set the sum in the engine.

    Args:
        reducer: Reducer of the group's members.
        group: Group of this peer.
        step: Number of the step.
        engine: Engine of the stage; its gradients are already summed over the replicas.
        compute: Compute thread, in which the engine lives.

    Raises:
        NonFinite: This stage's gradient has inf, NaN or values above the limit.
    """
    own = await run_in(compute, engine.shared_gradient)
    total = await reducer.reduce(step, own, frozenset(group.listeners))
    await run_in(compute, engine.set_shared_gradient, total)
