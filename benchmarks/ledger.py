"""The cost of a large run's ledger: memory, start, one commit, one plan, one inventory.

    python -m benchmarks.ledger [--samples N] [--boundaries B] [--replicas R] [--json]

A run is generated in a journal, as the coordinator writes it, and loaded by the real `Journal`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from swarm_ft.coordinator.facts.events import LedgerRecord, RunRecord
from swarm_ft.coordinator.facts.ledger import CHUNK_SAMPLES, Ledger, change_of
from swarm_ft.coordinator.facts.state import AttemptState, CommittedState, Run
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.routes import plan_microbatches, routes_of
from swarm_ft.ids import BlockIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.messages.control import StageAssignment
from swarm_ft.protocol.messages.reports import SampleSet
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import LrSchedule, ModelSpec, RunSpec, TrainSpec
from swarm_ft.protocol.spec.training_plan import step_samples

BATCH_SIZE, REPEATS = 32, 20


@dataclass(frozen=True, kw_only=True)
class Figures:
    """See the names; seconds are medians but of `load_s`, which is once.

    Attributes:
        bytes_per_entry: in memory, of an entry for a boundary and a sample.
        journal_bytes_per_entry: of the file.
        commit_s: that a commit takes more, journal included.
        plan_s: the microbatches of a step.
        inventory_s: a peer reports all of its buffers.
        overview_s: samples buffered at each boundary.
    """

    samples: int
    boundaries: int
    replicas: int
    load_s: float
    bytes_per_entry: float
    journal_bytes_per_entry: float
    commit_s: float
    plan_s: float
    inventory_s: float
    overview_s: float


def measure(num_samples: int, num_boundaries: int, replicas: int, folder: Path) -> Figures:
    """Generate the run, load it, use it."""
    path = folder / "journal.db"
    run = _run(num_samples, num_boundaries, replicas)
    _write(run, path)
    journal_bytes = sum(file.stat().st_size for file in folder.iterdir())
    run_id = run.run_id
    del run
    began_s = time.perf_counter()
    journal = Journal(str(path))
    (loaded,) = journal.load(0.0)
    load_s = time.perf_counter() - began_s
    entries = num_samples * num_boundaries
    run, bytes_held = _with_memory(lambda: journal.load(0.0)[0])
    ledger = run.past.ledger
    if ledger is None or ledger != loaded.past.ledger or run.run_id != run_id:
        raise SystemExit("the journal gave back another run")
    figures = Figures(
        samples=num_samples,
        boundaries=num_boundaries,
        replicas=replicas,
        load_s=load_s,
        bytes_per_entry=bytes_held / entries,
        journal_bytes_per_entry=journal_bytes / entries,
        **_use(run, ledger, journal),
    )
    journal.close()
    return figures


def _use(run: Run, ledger: Ledger, journal: Journal) -> dict[str, float]:
    train, stages = run.spec.train, run.stages
    first = step_samples(train, StepNumber(0))  # the epoch's order is drawn once, not each step
    planned = plan_microbatches(train, StepNumber(0), stages, {}, ledger)
    # As after a step in which all samples changed sides.
    routes = {sample: route[::-1] for sample, route in routes_of(planned, stages).items()}

    def commit() -> None:
        change = change_of(ledger, ledger.after(routes))
        journal.write([LedgerRecord(run.run_id, change)])

    peer, boundary = stages[0].peers[0], ledger.boundaries[0]
    lost = set(first[:10])
    samples = SampleSet.of(SampleId(s) for s in range(train.num_samples) if s not in lost)
    return {
        "commit_s": _median_s(commit),
        "plan_s": _median_s(lambda: plan_microbatches(train, StepNumber(0), stages, {}, ledger)),
        "inventory_s": _median_s(lambda: ledger.with_inventory(peer, {boundary: samples})),
        "overview_s": _median_s(lambda: ledger.buffered(stages)),
    }


def _run(num_samples: int, num_boundaries: int, replicas: int) -> Run:
    assignments = tuple(
        StageAssignment(peer_id=PeerId(f"peer-{i}-{r}"), layers=LayerRange(i, i + 1))
        for i in range(num_boundaries + 1)
        for r in range(replicas)
    )
    boundaries = tuple(BlockIndex(i) for i in range(1, num_boundaries + 1))
    empty = Ledger.empty(boundaries, num_samples)
    lanes = np.random.default_rng(0).integers(replicas, size=len(empty.chunks) * CHUNK_SAMPLES)
    up = lanes[:, None] + np.arange(num_boundaries) * replicas + 1
    entries = np.stack([up, up + replicas], axis=2).astype("<u2")
    chunks = entries.reshape(len(empty.chunks), -1)
    ledger = replace(
        empty,
        peers=tuple(assignment.peer_id for assignment in assignments),
        chunks=tuple(chunk.tobytes() for chunk in chunks),
    )
    spec = RunSpec(model=_model(num_boundaries + 1), train=_train(num_samples))
    attempt = AttemptState(assignments=assignments)
    return Run(
        run_id=RunId("run-1"), spec=spec, past=CommittedState(ledger=ledger), attempt=attempt
    )


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


def _train(num_samples: int) -> TrainSpec:
    return TrainSpec(
        num_samples=num_samples,
        seq_length=128,
        batch_size=BATCH_SIZE,
        micro_batch_size=1,
        num_steps=3 * num_samples // BATCH_SIZE,
        learning_rate=1e-4,
        lr_schedule=LrSchedule.CONSTANT,
        seed=0,
        shuffle=True,
        forward_codec="aq4",
        backward_codec="q8",
        key_codec="fp16",
        buffer_bits=4,
    )


def _write(run: Run, path: Path) -> None:
    """Write the journal of a killed coordinator, without the run's data."""
    journal = Journal(str(path))
    journal.write_run(run.with_ledger(None), bytes(16))
    if run.past.ledger is not None:
        change = change_of(None, run.past.ledger)
        journal.write([RunRecord(run), LedgerRecord(run.run_id, change)])
    journal.close()


def _with_memory(load: Callable[[], Run]) -> tuple[Run, int]:
    """Load a run and count its bytes, as Python and numpy count them."""
    tracemalloc.start()
    run = load()
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return run, held_bytes


def _median_s(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return sorted(taken)[REPEATS // 2]


def main() -> None:
    """Print a line for each figure, or all as JSON."""
    parser = argparse.ArgumentParser(description="What the ledger of a large run takes.")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--boundaries", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ledger-benchmark-") as folder:
        figures = measure(args.samples, args.boundaries, args.replicas, Path(folder))
    fields = {name: getattr(figures, name) for name in Figures.__dataclass_fields__}
    if args.json:
        print(json.dumps(fields))  # noqa: T201
        return
    for name, value in fields.items():
        print(f"{name:<24} {value:.6g}")  # noqa: T201


if __name__ == "__main__":
    main()
