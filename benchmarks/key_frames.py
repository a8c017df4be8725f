"""The share of frames that are key frames because their samples met other peers before.

    python -m benchmarks.key_frames [--json]

The coordinator's own plans, commits and ledger over shuffled epochs, and peers that are sets of
buffers. A frame is a delta if both ends have the same buffer of the sample, and a stale one if that
is not of its last visit, but of the last one that it made to these two. First visits are not
counted.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

from swarm_ft.coordinator.facts.state import AttemptState, PlannedStep, Run
from swarm_ft.coordinator.plan.routes import routes_of
from swarm_ft.coordinator.plan.steps import commit_step, plan_step, with_ledger
from swarm_ft.ids import Attempt, BlockIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.control import StageAssignment, StepReady
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 2048, 32, 4
PIPELINES = ((2, 2), (2, 2, 2, 2), (2, 1, 2), (3, 3), (2, 3))
MICRO_BATCH_SIZES = (1, 4)


class Way(StrEnum):
    """The rule by which samples find their peers."""

    DATA = "order of the data"
    PLACES = "drawn places"
    LEDGER = "ledger"


@dataclass(kw_only=True)
class Peers:
    """The state of all peers: for each buffer, the step that made it."""

    buffers: dict[tuple[PeerId, BlockIndex, SampleId], int] = field(default_factory=dict)
    latest: dict[tuple[BlockIndex, SampleId], int] = field(default_factory=dict)
    frames: int = 0
    key_frames: int = 0
    stale_frames: int = 0

    def visit(self, routes: dict[SampleId, tuple[PeerId, ...]], run: Run) -> None:
        """Count the frames of a step whose samples take these routes."""
        boundaries = [BlockIndex(stage.layers.start) for stage in run.stages[1:]]
        for sample, route in routes.items():
            for boundary, ends in zip(boundaries, pairwise(route), strict=True):
                made = {self.buffers.get((peer, boundary, sample)) for peer in ends}
                self.frames += 1
                is_key = None in made or len(made) > 1
                self.key_frames += is_key
                self.stale_frames += not is_key and self.latest[boundary, sample] not in made
                self.latest[boundary, sample] = run.committed_steps
                for peer in ends:
                    self.buffers[peer, boundary, sample] = run.committed_steps


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of frames after the first epoch.

    Attributes:
        key_frames: that began anew.
        stale_frames: that built on the buffer of an earlier visit than the last.
    """

    key_frames: float
    stale_frames: float


def measure(
    sizes: tuple[int, ...],
    micro_batch_size: int,
    way: Way,
    *,
    num_samples: int = NUM_SAMPLES,
    is_replaced: bool = False,
) -> Rates:
    """Measure the rates of key and stale frames of one way.

    Args:
        sizes: replicas of each stage.
        micro_batch_size: samples.
        way: how samples find their peers.
        num_samples: of an epoch.
        is_replaced: after two epochs another peer comes for the first stage's last replica.
    """
    run = _run(sizes, micro_batch_size, num_samples)
    run = with_ledger(run) if way is Way.LEDGER else run
    peers, train = Peers(), run.spec.train
    while run.committed_steps < train.num_steps:
        if is_replaced and run.committed_steps == 2 * train.steps_per_epoch:
            run = _with_another(run)
        run, _ = plan_step(run, 0.0)
        run = _in_order_of_data(run) if way is Way.DATA else run
        if run.committed_steps == train.steps_per_epoch:
            peers = Peers(buffers=peers.buffers, latest=peers.latest)
        step = run.step or PlannedStep(microbatches=())
        peers.visit(routes_of(step.microbatches, step.stages), run)
        run = _committed(run, step)
    return Rates(
        key_frames=peers.key_frames / peers.frames,
        stale_frames=peers.stale_frames / peers.frames,
    )


def _run(sizes: tuple[int, ...], micro_batch_size: int, num_samples: int) -> Run:
    assignments = tuple(
        StageAssignment(peer_id=PeerId(f"s{i}r{r}"), layers=LayerRange(i, i + 1))
        for i, replicas in enumerate(sizes)
        for r in range(replicas)
    )
    spec = RunSpec(model=_model(len(sizes)), train=_train(micro_batch_size, num_samples))
    attempt = AttemptState(number=Attempt(1), assignments=assignments)
    return Run(run_id=RunId("run"), spec=spec, attempt=attempt)


def _model(num_blocks: int) -> ModelSpec:
    return ModelSpec(
        reference="any",
        architecture="gpt2",
        num_blocks=num_blocks,
        hidden_size=768,
        vocab_size=50257,
        block_bytes=1,
        embed_digest=bytes(16),
        block_digests=(bytes(16),) * num_blocks,
        head_digest=bytes(16),
        nonce=bytes(16),
        tied_embeddings=False,
    )


def _train(micro_batch_size: int, num_samples: int) -> TrainSpec:
    return TrainSpec(
        num_samples=num_samples,
        seq_length=128,
        batch_size=BATCH_SIZE,
        micro_batch_size=micro_batch_size,
        num_steps=EPOCHS * num_samples // BATCH_SIZE,
        learning_rate=1e-4,
        lr_schedule=LrSchedule.CONSTANT,
        seed=0,
        shuffle=True,
        forward_codec="aq4",
        backward_codec="q8",
        key_codec="fp16",
        buffer_bits=4,
    )


def _in_order_of_data(run: Run) -> Run:
    """Microbatches go round the replicas, whoever had their samples."""
    step = run.step
    if step is None:
        return run
    batches = sorted(step.microbatches, key=lambda batch: min(batch.samples))
    lanes = [len(stage.peers) for stage in step.stages]
    routed = tuple(
        replace(batch, route=tuple(i % lane for lane in lanes)) for i, batch in enumerate(batches)
    )
    return replace(run, step=replace(step, microbatches=routed))


def _with_another(run: Run) -> Run:
    """Replace the last replica of the first stage by a newcomer."""
    removed = run.stages[0].peers[-1]
    return run.with_assignments(
        replace(assignment, peer_id=PeerId("newcomer"))
        if assignment.peer_id == removed
        else assignment
        for assignment in run.attempt.assignments
    )


def _committed(run: Run, step: PlannedStep) -> Run:
    ready = {
        peer: StepReady(
            run_id=run.run_id,
            attempt=run.attempt.number,
            step=StepNumber(run.committed_steps),
            squared_grad_norm=1.0,
        )
        for peer in run.peers
    }
    after, _, _ = commit_step(run, replace(step, ready=MappingProxyType(ready)), 0.0)
    return after


def main() -> None:
    """Print a table, or the same as JSON."""
    parser = argparse.ArgumentParser(description="Key frames by how samples find their peers.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    as_json = parser.parse_args().json
    cases = [(sizes, size, False) for sizes in PIPELINES for size in MICRO_BATCH_SIZES]
    cases += [((2, 2), size, True) for size in MICRO_BATCH_SIZES]
    for sizes, size, is_replaced in cases:
        rates = {way: measure(sizes, size, way, is_replaced=is_replaced) for way in Way}
        what = {"replicas": sizes, "micro_batch_size": size, "is_replaced": is_replaced}
        if as_json:
            print(json.dumps(what | {way.value: asdict(rates[way]) for way in Way}))  # noqa: T201
        else:
            print(*what.values(), *(_shown(way, rates[way]) for way in Way), sep="  ")  # noqa: T201


def _shown(way: Way, rates: Rates) -> str:
    return f"{way}: {rates.key_frames:.1%} key, {rates.stale_frames:.1%} stale"


if __name__ == "__main__":
    main()
