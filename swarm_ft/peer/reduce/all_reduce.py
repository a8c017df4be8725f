"""Peers sum their gradients: one member's part in it, on channels to the others.

`protocol.machines.all_reduce` decides, the coder computes in the codec threads; this shell only
moves things between them and the channels. Pieces are encoded, sent, received and summed side by
side.
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

from swarm_ft import failpoints
from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.errors import MalformedMessage, NonFinite, OutOfTurn, RunMismatch
from swarm_ft.ids import PeerId, StepNumber
from swarm_ft.peer.context import Pool, run_in
from swarm_ft.peer.links import LinkChannel, Send
from swarm_ft.peer.reduce.gradient_coder import (
    BadPiece,
    EncodedSum,
    GradientCoder,
    Residuals,
    SumKeeper,
)
from swarm_ft.protocol.machines.all_reduce import AllReduce, BreakOff, ReduceEffect, TransmitPiece
from swarm_ft.protocol.messages.boundary import EncodedTensor
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
from swarm_ft.protocol.spec.codec_spec import CodecSpec
from swarm_ft.protocol.spec.digest import check_spec_digest
from swarm_ft.protocol.wire.frames import wire_bytes
from swarm_ft.stage.base import Engine

_TASKS_AT_WORK = 2
"""Beside each other in the codec threads."""
_Coder = GradientCoder | SumKeeper


class GradientReducer:
    """One member's part during one attempt; `run` has to be at work for the rest to proceed.

    Attributes:
        hello: what to say to each of the others first.
        is_connected: set while channels to all other members are connected.
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
        """Nothing is connected before `run`.

        Args:
            hello: what to say to each of the others first. Its layers are the stage that the
                members are replicas of, or all of the model where they are of several; it has
                no values if this peer has no weights yet, and only listens.
            members: all of them, in the order in which their gradients are added up.
            channels: the ways to the others that it says something to, or hears from.
            codec: of the pieces.
            residuals: of error feedback; the caller commits them with the step.
            pool: the codec threads.
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
        self._told_values = {self._own: hello.num_values}
        self._division = Division(1, len(members))
        self._coder: _Coder | None = None
        # Bounded by the windows of the all-reduce.
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
                result where there is one member only. Of one that listens it tells n alone.
            listeners: members whose gradient does not count, and who get the sum.

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
        """Keep connected and compute until cancelled.

        Raises:
            ExceptionGroup: of Unavailable, if a member could not be reached; of ProtocolError, if
                its streams were broken off too often.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(_TASKS_AT_WORK):
                group.create_task(self._work())
            for member, channel in self._channels.items():
                group.create_task(channel.attend(_MemberEnd(self, member)))

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
                    self._channels[member].say(message)
                case BreakOff(member, error):
                    self._channels[member].break_off(error)
                case EncodeShare() | SumShares() | TakeSum() if self._coder is not None:
                    # What others wait for goes before what they will have to wait for anyway.
                    is_later = isinstance(effect, EncodeShare)
                    self._tasks.put_nowait((is_later, next(self._order), self._coder, effect))
        self._changed.set()

    # ---- what the channels call, see `ChannelEnd`

    def connected(self, member: int, hello: ReduceHello) -> None:
        """A member is there.

        Raises:
            RunMismatch: it works by another RunSpec, or its gradient has another length.
            OutOfTurn: it is at another stage.
        """
        self._check(hello)
        self._told_values[member] = hello.num_values
        self._connected.add(member)
        self._note_connections()
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

    def disconnected(self, member: int) -> None:
        """It is there no more."""
        self._machine.disconnected(member)
        self._connected.discard(member)
        self._note_connections()

    def receive(self, member: int, message: PieceMessage) -> None:
        """It said this.

        Raises:
            ProtocolError: it must not.
        """
        if isinstance(message, GradientPiece):
            self._codec.check(message.tensor)  # before it is held: that bounds the memory
        self._apply(self._machine.receive(member, message))

    async def write(self, member: int, message: PieceMessage, send: Send) -> None:
        """Send a member a message, in its turn."""
        if isinstance(message, GradientPiece):  # counted first: its answer may come at once
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
        """Members without which the step under way cannot go on here."""
        lacked = self._machine.lacks if self._coder is not None else ()
        return tuple(self._members[member] for member in lacked)

    def _note_connections(self) -> None:
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
    """The end of the channel to one other member; see `ChannelEnd`."""

    def __init__(self, reducer: GradientReducer, member: int) -> None:
        self.hello = reducer.hello
        self.disconnected = partial(reducer.disconnected, member)
        self.connected = partial(reducer.connected, member)
        self.receive = partial(reducer.receive, member)
        self.write = partial(reducer.write, member)


# ---- copies of one weight stay one: the stages that hold it add up their gradients of it
#
# Each of these peers is in one group. In a group one replica of each stage gives its stage's sum,
# uncompressed, and the others listen. All end with first + second + ... in float32, in the order
# of the stages, and so apply the same update to the same bits.


@dataclass(frozen=True, slots=True)
class Group:
    """Who sums with whom.

    Attributes:
        givers: one of each stage, in the order of the stages.
        listeners: other replicas of theirs.
    """

    givers: tuple[PeerId, ...]
    listeners: tuple[PeerId, ...]

    @property
    def members(self) -> tuple[PeerId, ...]:
        """All of them."""
        return self.givers + self.listeners

    def heard_by(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Whom one of them has a channel to: those who listen say nothing to each other."""
        others = self.givers if peer in self.listeners else self.members
        return tuple(other for other in others if other != peer)


def groups_of(stages: Sequence[Stage]) -> tuple[Group, ...]:
    """As many groups as the stage with the fewest replicas has, the others' shared out evenly.

    All replicas of a stage hold the same sum by then, so whichever gives it gives the same bits.
    """
    count = min((len(stage.peers) for stage in stages), default=0)
    return tuple(
        Group(
            givers=tuple(stage.peers[i] for stage in stages),
            listeners=tuple(peer for stage in stages for peer in stage.peers[count + i :: count]),
        )
        for i in range(count)
    )


async def synchronise(
    reducer: GradientReducer, group: Group, step: StepNumber, engine: Engine, compute: Pool
) -> None:
    """Sum the step's gradients of weights that several stages hold; the engine then has the sum.

    Args:
        reducer: of the group's members.
        group: that this peer is in.
        step: its number.
        engine: its gradients summed over the replicas.
        compute: the thread in which it lives.

    Raises:
        NonFinite: this stage's gradient is infinite, NaN or as good as that.
    """
    own = await run_in(compute, engine.shared_gradient)
    total = await reducer.reduce(step, own, frozenset(group.listeners))
    await run_in(compute, engine.set_shared_gradient, total)
