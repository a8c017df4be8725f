"""Samples that travel together, as plans and messages name them. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.ids import MicrobatchIndex, SampleId
from swarm_ft.protocol.spec.bounds import Length, Range
from swarm_ft.protocol.spec.layers import MAX_BLOCKS
from swarm_ft.protocol.spec.run_spec import MAX_BATCH_SIZE


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A few samples that travel together through all stages.

    Attributes:
        route: the replica of each stage that it passes, first stage to last, counted from 0;
            empty where every stage has one.
        done: stages that are done with it, as an earlier attempt at the step got so far.
        entry: the first stage that it passes, counted from 0: if it is not the first of all, it
            has kept what comes of the frozen ones in front of it.
    """

    index: MicrobatchIndex
    samples: Annotated[tuple[SampleId, ...], Length(MAX_BATCH_SIZE, 1)]
    route: Annotated[tuple[int, ...], Length(MAX_BLOCKS)] = ()
    done: Annotated[frozenset[int], Length(MAX_BLOCKS)] = frozenset()
    entry: Annotated[int, Range(0, MAX_BLOCKS)] = 0

    def replica_at(self, stage_index: int) -> int:
        """Which replica of a stage it passes."""
        return self.route[stage_index] if self.route else 0

    def is_to_do(self, stage_index: int) -> bool:
        """Whether a stage has yet to compute it."""
        return stage_index >= self.entry and stage_index not in self.done
