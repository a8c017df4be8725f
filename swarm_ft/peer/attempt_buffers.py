"""What an attempt does about buffers beside training: reads them ahead, fetches and gives them.

None of it can fail the attempt: what is not there in time costs a key frame.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from swarm_ft.ids import SampleId, StepNumber
from swarm_ft.peer.buffer_donor import BufferStream, serve_buffers
from swarm_ft.peer.buffer_follower import BufferFollower
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.stage_buffers import StageBuffers
from swarm_ft.peer.stage_state import StageState
from swarm_ft.protocol.buffer_reports import BufferCounts, HeldBuffers
from swarm_ft.protocol.coordinator_messages import Assign, FollowBuffers
from swarm_ft.protocol.handover_wire import BuffersRequest
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.training_plan import Microbatch, step_samples


class AttemptBuffers:
    """See the module's docstring.

    Args:
        state: the stage, with the store.
        layers: of the stage.
        frames_sent: waits until no frame waits to be sent.
    """

    def __init__(
        self,
        context: PeerContext,
        assign: Assign,
        state: StageState,
        layers: LayerRange,
        frames_sent: Callable[[], Awaitable[object]],
    ) -> None:
        self._assign = assign
        self._state = state
        self._frames_sent = frames_sent
        self._kept = StageBuffers(assign.spec, assign.run_id, layers, state.store)
        self._follower = BufferFollower(context, assign, self._kept, state.store)

    async def run(self) -> None:
        """Fetch what is ordered, until cancelled."""
        await self._follower.run()

    # ---- steps

    def begin(self) -> tuple[HeldBuffers, ...]:
        """All are connected: what is here, as the next step finds it."""
        self._state.store.resume_at(StepNumber(self._assign.committed_steps))
        return self._kept.held()

    def planned(
        self, step: StepNumber, *, here: Iterable[Microbatch], elsewhere: Iterable[Microbatch]
    ) -> None:
        """A step begins: have its buffers in memory soon, and those of the next one after them.

        Which of the next step's samples pass here is not known yet; mostly those that did before.

        Args:
            step: its number.
            here: microbatches that pass this peer.
            elsewhere: that pass other replicas; what is here of them is out of date by its commit.
        """
        store, train, samples = self._state.store, self._assign.spec.train, _samples_of(here)
        self._state.elsewhere = tuple(self._kept.keys(_samples_of(elsewhere)))
        self._follower.begun(samples)
        store.prefetch(self._kept.keys(samples))
        following = StepNumber(step + 1)
        if following < train.num_steps:
            store.prefetch(self._kept.keys(step_samples(train, following)))

    def take_report(self) -> tuple[tuple[BufferCounts, ...], tuple[HeldBuffers, ...]]:
        """What is kept at each boundary, and what is here no more since the last call."""
        return self._kept.take_counts(), self._kept.take_lost()

    # ---- other peers

    def follow(self, order: FollowBuffers) -> None:
        """Fetch buffers whose samples are about to pass this peer."""
        self._follower.follow(order)

    async def serve(self, stream: BufferStream, request: BuffersRequest) -> None:
        """Give buffers to a peer that their samples pass next.

        Raises:
            RunMismatch: it works by another RunSpec.
        """
        await serve_buffers(
            stream,
            request,
            buffers=self._kept,
            store=self._state.store,
            spec_digest=self._assign.spec_digest,
            frames_sent=self._frames_sent,
        )


def _samples_of(batches: Iterable[Microbatch]) -> list[SampleId]:
    return [sample for batch in batches for sample in batch.samples]
