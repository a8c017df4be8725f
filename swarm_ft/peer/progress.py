"""What of the open step is done at this peer, kept until the step commits.

When an attempt ends before the step did, because somebody died, the next one goes on from here:
microbatches whose gradients are summed are not computed again, and what was sent of them is sent
again to whoever has yet to get it. What was under way is dropped; it runs again from the same
bases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import BlockIndex, MicrobatchIndex, SampleId, StepNumber
from swarm_ft.protocol.codec_spec import Direction
from swarm_ft.protocol.frame import Frame, FrameKey
from swarm_ft.protocol.traffic import Traffic
from swarm_ft.protocol.training_plan import Microbatch


@dataclass(slots=True)
class StepProgress:
    """See the module's docstring.

    Attributes:
        step: its number.
        done: microbatches whose gradients the engine has summed.
        loss_sum: of these, at the last stage.
        gradient: their sum, float32 [n], once the engine was given that of all replicas; else None.
    """

    step: StepNumber
    done: dict[MicrobatchIndex, tuple[SampleId, ...]] = field(default_factory=dict)
    loss_sum: float = 0.0
    gradient: Tensor | None = None
    _traffic: dict[BlockIndex, Traffic] = field(default_factory=dict)
    _sent: dict[tuple[Direction, SampleId], Tensor | Frame] = field(default_factory=dict)

    @property
    def samples(self) -> frozenset[SampleId]:
        """Of the microbatches that are done."""
        return frozenset(sample for samples in self.done.values() for sample in samples)

    def check(self, done: Iterable[Microbatch]) -> None:
        """Whether these, by the plan, are the microbatches that are done here.

        Raises:
            OutOfTurn: they are not.
        """
        planned = {batch.index: batch.samples for batch in done}
        if planned != self.done:
            raise OutOfTurn(
                f"step {self.step}: by the plan, microbatches {sorted(planned)} are done here, but "
                f"it is {sorted(self.done)}"
            )

    def keep(self, sent: Iterable[tuple[FrameKey, Tensor | Frame]]) -> None:
        """An attempt is over: keep what it sent, or was to send, of what is done."""
        for key, value in sent:
            if key.microbatch in self.done:
                self._sent[key.direction, key.sample] = value

    def hold(self, key: FrameKey, x: Tensor) -> None:
        """Keep what nobody waits for now; who takes a neighbour's place later may."""
        self._sent[key.direction, key.sample] = x

    def sent(self, key: FrameKey) -> Tensor | Frame:
        """What an earlier attempt sent, or held, of a sample.

        Raises:
            OutOfTurn: nothing.
        """
        found = self._sent.get((key.direction, key.sample))
        if found is None:
            raise OutOfTurn(f"frame {key}: nothing of it is kept")
        return found

    def count(self, traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
        """What was sent by now in the step, over all attempts, with this added."""
        for sent in traffic:
            known = self._traffic.get(sent.boundary)
            self._traffic[sent.boundary] = known + sent if known else sent
        return tuple(self._traffic.values())
