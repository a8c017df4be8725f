"""What joins a stage to the rest of its run during one attempt: neighbours, replicas, other end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from torch import Tensor

from swarm_ft.ids import BlockIndex, PeerId
from swarm_ft.peer.boundary.coder import TimedCoder
from swarm_ft.peer.boundary.end import Boundary
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.links import LinkChannel
from swarm_ft.peer.reduce.all_reduce import GradientReducer
from swarm_ft.peer.reduce.gradient_coder import Residuals
from swarm_ft.peer.reduce.tied_embeddings import tied_pairs
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.protocol.machines.session import WINDOW_FRAMES, BoundarySession
from swarm_ft.protocol.messages.boundary import BoundaryHello, Frame, FrameKey
from swarm_ft.protocol.messages.control import Assign, stages_of
from swarm_ft.protocol.messages.reports import Traffic
from swarm_ft.protocol.spec.codec_spec import CodecSpec, Direction, parse_dp_spec
from swarm_ft.protocol.spec.layers import LayerRange


class Connections:
    """See the module's docstring.

    Attributes:
        pipeline: the run's stages and all of their peers.
        index: of this peer's stage.
        upstream: boundaries to the replicas of the stage in front, by peer; none at the first.
        downstream: to those of the stage behind; none at the last.
        reducer: sums gradients with the other replicas of this stage; None if there are none.
        tied: by the other end's peer, what sums the gradient of tied embeddings with it.
    """

    def __init__(
        self,
        context: PeerContext,
        assign: Assign,
        state: StageState,
        *,
        num_values: int,
        deliver: Callable[[FrameKey, Tensor], None],
    ) -> None:
        """Connect in `start`.

        Args:
            context: of the peer.
            assign: names the attempt and its peers; its digest was checked against its spec.
            state: the stage, with its ends of the buffers.
            num_values: of the stage's gradient; 0 if that is not known yet.
            deliver: called with every sample that neighbours sent.
        """
        self._context = context
        self._assign = assign
        self._state = state
        self._deliver = deliver
        self._endpoints = {stage.peer_id: stage.endpoint for stage in assign.stages}
        self.pipeline = stages_of(assign.stages)
        self.index = next(
            i for i, stage in enumerate(self.pipeline) if context.peer_id in stage.peers
        )
        self.upstream = self._boundaries(self.index - 1, Direction.BACKWARD)
        self.downstream = self._boundaries(self.index + 1, Direction.FORWARD)
        self.reducer = self._make_reducer(num_values)
        self.tied = self._make_tied()

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """All of them."""
        return (*self.upstream.values(), *self.downstream.values())

    @property
    def _reducers(self) -> tuple[GradientReducer, ...]:
        return (*([self.reducer] if self.reducer is not None else ()), *self.tied.values())

    def start(self, group: asyncio.TaskGroup) -> None:
        """Connect, and work until the group is cancelled."""
        for boundary in self.boundaries:
            group.create_task(boundary.run())
        for reducer in self._reducers:
            group.create_task(reducer.run())

    async def connected(self) -> None:
        """Wait until all of them are there."""
        for boundary in self.boundaries:
            await boundary.is_connected.wait()
        for reducer in self._reducers:
            await reducer.is_connected.wait()

    async def settled(self) -> None:
        """Wait until neighbours have everything that was sent to them in this step."""
        for boundary in self.boundaries:
            await boundary.settled()

    def sent(self) -> Iterator[tuple[FrameKey, Tensor | Frame]]:
        """What was given to boundaries to send in this step."""
        for boundary in self.boundaries:
            yield from boundary.sent()

    def take_traffic(self) -> Iterator[Traffic]:
        """What was sent upstream and downstream, each over all boundaries together."""
        for boundaries in (self.upstream, self.downstream):
            sent = [boundary.take_traffic() for boundary in boundaries.values()]
            if sent:
                yield sum(sent[1:], sent[0])

    def _make_reducer(self, num_values: int) -> GradientReducer | None:
        stage = self.pipeline[self.index]
        if len(stage.peers) == 1:
            return None
        codec = self._assign.spec.train.reduction_codec
        return self._reducer_of(
            stage.peers, stage.layers, num_values, codec=codec, residuals=self._state.residuals
        )

    def _make_tied(self) -> dict[PeerId, GradientReducer]:
        model, own = self._assign.spec.model, self._context.peer_id
        if not self._assign.spec.train.sync_tied_embeddings or len(self.pipeline) == 1:
            return {}
        return {
            last if own == first else first: self._reducer_of(
                (first, last),
                model.layers,
                model.vocab_size * model.hidden_size,
                codec=parse_dp_spec("none"),
                residuals=Residuals(),
            )
            for first, last in tied_pairs(self.pipeline[0], self.pipeline[-1])
            if own in (first, last)
        }

    def _reducer_of(
        self,
        members: tuple[PeerId, ...],
        layers: LayerRange,
        num_values: int,
        *,
        codec: CodecSpec,
        residuals: Residuals,
    ) -> GradientReducer:
        own = self._context.peer_id
        return GradientReducer(
            run_id=self._assign.run_id,
            attempt=self._assign.attempt,
            spec_digest=self._assign.spec_digest,
            layers=layers,
            members=members,
            channels={peer: self._channel(peer) for peer in members if peer != own},
            own=own,
            num_values=num_values,
            codec=codec,
            residuals=residuals,
            pool=self._context.codecs,
        )

    def _channel(self, peer: PeerId) -> LinkChannel:
        return self._context.links.channel(peer, self._endpoints[peer])

    def _boundaries(self, index: int, sends: Direction) -> dict[PeerId, Boundary]:
        """This peer's ends of the boundaries to all replicas of stage `index`, if there is one."""
        if not 0 <= index < len(self.pipeline):
            return {}
        block = BlockIndex(self.pipeline[max(index, self.index)].layers.start)
        coder = TimedCoder(
            self._assign.spec,
            run_id=self._assign.run_id,
            boundary=block,
            store=self._state.store,
            timeline=self._context.timeline,
        )
        return {
            peer: self._boundary(self._channel(peer), block, sends, coder)
            for peer in self.pipeline[index].peers
        }

    def _boundary(
        self, channel: LinkChannel, block: BlockIndex, sends: Direction, coder: TimedCoder
    ) -> Boundary:
        hello = BoundaryHello(
            run_id=self._assign.run_id,
            spec_digest=self._assign.spec_digest,
            boundary=block,
            peer_id=self._context.peer_id,
            attempt=self._assign.attempt,
            window_frames=WINDOW_FRAMES,
        )
        return Boundary(
            hello,
            channel,
            session=BoundarySession(attempt=self._assign.attempt, sends=sends),
            coder=coder,
            pool=self._context.codecs,
            deliver=self._deliver,
            timeline=self._context.timeline,
        )
