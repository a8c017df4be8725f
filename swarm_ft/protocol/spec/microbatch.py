"""Microbatch of plans and messages. Values only."""

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
        index: Number of the microbatch in its step.
        samples: Samples of the microbatch.
        route: Number of the replica that it passes at each stage, from 0; empty if every stage
            has one.
        done: Stages that finished it in an earlier attempt at the step.
        entry: Number of the first stage that it passes. Above 0, that stage has cached the output
            of the frozen ones in front of it.
    """

    index: MicrobatchIndex
    samples: Annotated[tuple[SampleId, ...], Length(MAX_BATCH_SIZE, 1)]
    route: Annotated[tuple[int, ...], Length(MAX_BLOCKS)] = ()
    done: Annotated[frozenset[int], Length(MAX_BLOCKS)] = frozenset()
    entry: Annotated[int, Range(0, MAX_BLOCKS)] = 0

    def replica_at(self, stage_index: int) -> int:
        """Return the number of the replica that it passes at a stage."""
        return self.route[stage_index] if self.route else 0

    def is_to_do(self, stage_index: int) -> bool:
        """Whether a stage has yet to compute it."""
        return stage_index >= self.entry and stage_index not in self.done
