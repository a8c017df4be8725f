"""What an attempt does about buffers beside training: reads them ahead, and tells what is here.

None of it can fail the attempt: what is not there in time costs a key frame.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm_ft.ids import SampleId, StepNumber
from swarm_ft.peer.stage_buffers import StageBuffers
from swarm_ft.peer.stage_state import StageState
from swarm_ft.protocol.buffer_reports import BufferCounts, HeldBuffers
from swarm_ft.protocol.coordinator_messages import Assign
from swarm_ft.protocol.layers import LayerRange
from swarm_ft.protocol.training_plan import Microbatch, step_samples


class AttemptBuffers:
    """See the module's docstring.

    Args:
        state: the stage, with the store.
        layers: of the stage.
    """

    def __init__(self, assign: Assign, state: StageState, layers: LayerRange) -> None:
        self._assign = assign
        self._state = state
        self._kept = StageBuffers(assign.spec, assign.run_id, layers, state.store)

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
        store.prefetch(self._kept.keys(samples))
        following = StepNumber(step + 1)
        if following < train.num_steps:
            store.prefetch(self._kept.keys(step_samples(train, following)))

    def take_report(self) -> tuple[tuple[BufferCounts, ...], tuple[HeldBuffers, ...]]:
        """What is kept at each boundary, and what is here no more since the last call."""
        return self._kept.take_counts(), self._kept.take_lost()


def _samples_of(batches: Iterable[Microbatch]) -> list[SampleId]:
    return [sample for batch in batches for sample in batch.samples]
