"""The connections of an attempt: boundaries to neighbours, and reducers over other peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from torch import Tensor

from swarm_ft.codec.spec import Direction, parse_dp_spec
from swarm_ft.ids import BlockIndex, PeerId
from swarm_ft.peer.boundary.coder import FrameCoder
from swarm_ft.peer.boundary.end import Boundary
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.links import LinkChannel
from swarm_ft.peer.reduce.all_reduce import GradientReducer, ReduceGroup, reduce_groups
from swarm_ft.peer.reduce.gradient_coder import Residuals
from swarm_ft.peer.state.stage_state import StageState
from swarm_ft.protocol.machines.session import WINDOW_FRAMES
from swarm_ft.protocol.messages.boundary import BoundaryHello, Frame, FrameKey
from swarm_ft.protocol.messages.control import Assign, stages_of
from swarm_ft.protocol.messages.reduction import ReduceHello, Scope
from swarm_ft.protocol.messages.reports import Traffic
from swarm_ft.protocol.spec.layers import LayerRange


class Connections:
    """Connections of a stage: neighbours, replicas and stages that hold the same weights.

    Attributes:
        pipeline: Stages of the run, with all of their peers.
        index: Index of this peer's stage.
        upstream: Boundaries to the replicas of the previous stage, by peer; empty at the first
            stage.
        downstream: Boundaries to the replicas of the next stage, by peer; empty at the last stage.
        input_cache: Coder of `upstream`, if it also stores the stage's inputs for later epochs;
            None otherwise.
        reducer: Sums gradients over this stage's replicas; None if it has no other replica.
        shared_group: This peer's group. A group has a peer of each stage that holds a copy of the
            run's shared weights, such as tied embeddings. None if no shared weight trains, or this
            stage has none.
        shared_reducer: Sums gradients of shared weights over `shared_group`; None without a group.
    """

    def __init__(
        self,
        context: PeerContext,
        assign: Assign,
        state: StageState,
        *,
        num_values: int,
        deliver: Callable[[FrameKey, Tensor], None],
        on_consumed: Callable[[FrameKey], None],
    ) -> None:
        """Create the connections; `start` connects them.

        Args:
            context: Context of the peer.
            assign: Assignment that names the attempt and its peers. Its digest has been checked.
            state: State of the stage: its buffers and residuals.
            num_values: Number of values in the stage's gradient; 0 while this peer has no weights.
            deliver: Callback for every decoded sample of a neighbour.
            on_consumed: Callback for every held-out sample that a neighbour has consumed.
        """
        self._context = context
        self._assign = assign
        self._state = state
        self._deliver = deliver
        self._on_consumed = on_consumed
        self._endpoints = {stage.peer_id: stage.endpoint for stage in assign.assignments}
        self.pipeline = stages_of(assign.assignments)
        self.index = next(
            i for i, stage in enumerate(self.pipeline) if context.peer_id in stage.peers
        )
        self.input_cache: FrameCoder | None = None  # `_boundaries` replaces it
        self.upstream = self._boundaries(self.index - 1, Direction.BACKWARD)
        self.downstream = self._boundaries(self.index + 1, Direction.FORWARD)
        self.reducer = self._make_reducer(num_values)
        self.shared_group = self._find_shared_group()
        self.shared_reducer = self._make_shared_reducer()

    @property
    def boundaries(self) -> tuple[Boundary, ...]:
        """Boundaries to both sides."""
        return (*self.upstream.values(), *self.downstream.values())

    @property
    def _reducers(self) -> tuple[GradientReducer, ...]:
        return tuple(one for one in (self.reducer, self.shared_reducer) if one is not None)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Connect, and run all connections in `tasks` until it is cancelled."""
        for boundary in self.boundaries:
            tasks.create_task(boundary.run())
        for reducer in self._reducers:
            tasks.create_task(reducer.run())

    async def wait_connected(self) -> None:
        """Wait until all peers are connected."""
        for boundary in self.boundaries:
            await boundary.is_connected.wait()
        for reducer in self._reducers:
            await reducer.is_connected.wait()

    @property
    def missing(self) -> tuple[PeerId, ...]:
        """Peers that are not connected yet."""
        boundaries = (*self.upstream.items(), *self.downstream.items())
        neighbours = [peer for peer, one in boundaries if not one.is_connected.is_set()]
        return (*neighbours, *(peer for reducer in self._reducers for peer in reducer.missing))

    @property
    def waits_for(self) -> tuple[PeerId, ...]:
        """Peers that this stage needs to continue.

        While gradients are summed these are the members that owe a piece; otherwise the neighbours
        that owe an acknowledgement.
        """
        owe_pieces = dict.fromkeys(peer for one in self._reducers for peer in one.waits_for)
        owe_acknowledgements = (b.peer_id for b in self.boundaries if not b.is_acknowledged)
        return tuple(owe_pieces or owe_acknowledgements)

    async def wait_settled(self) -> None:
        """Wait until neighbours have acknowledged everything that was sent in this step."""
        for boundary in self.boundaries:
            await boundary.wait_settled()

    def sent(self) -> Iterator[tuple[FrameKey, Tensor | Frame]]:
        """Yield the tensors and frames that boundaries sent, or queued to send, in this step."""
        for boundary in self.boundaries:
            yield from boundary.sent()

    def take_traffic(self) -> Iterator[Traffic]:
        """Yield the traffic since the last call: one sum upstream, one downstream."""
        for boundaries in (self.upstream, self.downstream):
            sent = [boundary.take_traffic() for boundary in boundaries.values()]
            if sent:
                yield sum(sent[1:], sent[0])

    def _make_reducer(self, num_values: int) -> GradientReducer | None:
        """Return the reducer over the replicas of this stage, with the run's reduction codec."""
        stage = self.pipeline[self.index]
        if len(stage.peers) == 1:
            return None
        codec = self._assign.spec.train.reduction_codec
        others = tuple(peer for peer in stage.peers if peer != self._context.peer_id)
        return GradientReducer(
            self._reduce_hello(Scope.REPLICAS, stage.layers, num_values),
            stage.peers,
            self._channels(others),
            codec=codec,
            residuals=self._state.residuals,
            pool=self._context.codecs,
        )

    def _find_shared_group(self) -> ReduceGroup | None:
        """Return the group of this peer among those that share weights between stages."""
        sharing_stages = self._assign.spec.sharing(self.pipeline)
        groups = reduce_groups(sharing_stages)
        return next((group for group in groups if self._context.peer_id in group.members), None)

    def _make_shared_reducer(self) -> GradientReducer | None:
        """Return the reducer over the stages with the same weights; it does not compress."""
        group, spec = self.shared_group, self._assign.spec
        if group is None:
            return None
        return GradientReducer(
            self._reduce_hello(Scope.STAGES, spec.model.layers, spec.shared_values),
            group.members,
            self._channels(group.channel_peers(self._context.peer_id)),
            codec=parse_dp_spec("none"),
            residuals=Residuals(),  # stays empty: "none" is exact
            pool=self._context.codecs,
        )

    def _reduce_hello(self, scope: Scope, layers: LayerRange, num_values: int) -> ReduceHello:
        return ReduceHello(
            run_id=self._assign.run_id,
            spec_digest=self._assign.spec_digest,
            attempt=self._assign.attempt,
            peer_id=self._context.peer_id,
            layers=layers,
            scope=scope,
            num_values=num_values,
        )

    def _boundaries(self, index: int, sends: Direction) -> dict[PeerId, Boundary]:
        """Return this peer's ends of the boundaries to the replicas of stage `index`.

        Args:
            index: Index of the stage before or behind this one; no boundaries if there is none.
            sends: Direction of the frames that this end sends.
        """
        if not 0 <= index < len(self.pipeline):
            return {}
        assign, context = self._assign, self._context
        stage_behind = self.pipeline[max(index, self.index)]
        block = BlockIndex(stage_behind.layers.start)
        hello = BoundaryHello(
            run_id=assign.run_id,
            spec_digest=assign.spec_digest,
            boundary=block,
            peer_id=context.peer_id,
            attempt=assign.attempt,
            window_frames=WINDOW_FRAMES,
        )
        own = self.pipeline[self.index].layers
        keeps_input = index < self.index and assign.spec.caches_input(own)
        coder = FrameCoder(
            assign.spec,
            run_id=assign.run_id,
            boundary=block,
            store=self._state.store,
            side_info=self._state.side_info,
            keeps_input=keeps_input,
            device=context.codec_device,
        )
        if keeps_input:
            self.input_cache = coder
        return {
            peer: Boundary(
                hello,
                self._channel(peer),
                sends=sends,
                coder=coder,
                pool=context.codecs,
                deliver=self._deliver,
                timeline=context.timeline,
                on_consumed=self._on_consumed,
            )
            for peer in self.pipeline[index].peers
        }

    def _channels(self, peers: tuple[PeerId, ...]) -> dict[PeerId, LinkChannel]:
        return {peer: self._channel(peer) for peer in peers}

    def _channel(self, peer: PeerId) -> LinkChannel:
        return self._context.links.channel(peer, self._endpoints[peer])
