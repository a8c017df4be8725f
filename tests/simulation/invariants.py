"""The invariants that hold at every moment of a simulation, with any fault.

Of several runs that share a swarm all of it holds for each, as if it was alone.

1. A step that is applied has each of its samples' gradients once in every block.
2. Weights are, after every applied step, those of the run without faults.
3. A step is applied only if the coordinator's journal has its commit, and the journal commits
   each step once, in order, unless it reports a rollback.
4. Neighbours that are both about to run the next step hold equal buffers of every sample that the
   last step took from one to the other.
5. Nothing ends with an error that is not of this package's tree.
6. A job that is submitted again is the same run.
7. An evaluation has each held-out sample once, with the weights of its step, and each that is due
   is there at the end.
8. A run that evaluations may end is trained to the step at which the run without faults ends, and
   the result has the best weights, of those that were saved when they were evaluated.
9. Once nothing goes wrong any more, the run finishes and the client gets the result.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm_ft.buffers import BufferKey, BufferStore, End
from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    ContributionRecord,
    EvaluationRecord,
    EventRecord,
    PlanRecord,
    Record,
    ReputationRecord,
    RollbackRecord,
    RunRecord,
    SnapshotRecord,
)
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.ids import BlockIndex, RunId, SampleId, StepNumber
from swarm_ft.peer.node import PeerNode
from swarm_ft.protocol.messages.boundary import Frame
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.training_plan import evaluates_at, step_samples
from tests.simulation.engine import Applied, TinyEngine
from tests.simulation.quiet_run import quiet_run
from tests.simulation.trace import Trace


class Violated(Exception):
    """An invariant does not hold."""


@dataclass(slots=True)
class _Stage:
    """An engine that is about to run a step.

    Attributes:
        histories: how often the run had gone back when the step began.
    """

    engine: TinyEngine
    store: BufferStore
    step: StepNumber
    histories: int


class Invariants:
    """Observes writes, applied steps and fetches. `failures` lists the broken invariants.

    Each run is looked at as if it was alone.

    Args:
        specs: of the jobs, no two of which are equal.
    """

    def __init__(self, specs: Sequence[RunSpec], trace: Trace) -> None:
        self.on_moment: Callable[[str], None] = lambda _moment: None
        """Told of every moment that a fault may wait for."""
        self.failures: list[str] = []
        self._trace = trace
        self._of_jobs = {spec.digest(): _OfRun(spec, trace, self) for spec in specs}
        self._of_runs: dict[RunId, _OfRun] = {}

    @property
    def num_commits(self) -> int:
        """Count the commits of all runs."""
        return sum(run.num_commits for run in self._of_jobs.values())

    @property
    def num_rollbacks(self) -> int:
        """Count the rollbacks of all runs."""
        return sum(run.num_rollbacks for run in self._of_jobs.values())

    def fail(self, text: str) -> None:
        """Something does not hold."""
        self._trace.say(f"VIOLATED: {text}")
        self.failures.append(text)

    def bug(self, text: str, error: BaseException | None) -> None:
        """Something ended with an error that nobody foresaw."""
        where = "".join(traceback.format_exception(error)) if error is not None else ""
        self.fail(f"{text}\n{where}".rstrip())

    def written(self, records: Sequence[Record]) -> None:
        """Records became durable."""
        for record in records:
            if isinstance(record, ReputationRecord | ContributionRecord | EventRecord):
                continue
            if isinstance(record, RunRecord):
                job = self._of_jobs[record.run.spec.digest()]
                if self._of_runs.setdefault(record.run.run_id, job) is not job:
                    self.fail("a run became another job's")
                if len(self._of_runs) > len(self._of_jobs):
                    self.fail("the job became two runs")
                job.written(record.run.run_id, record)
            elif record.run_id in self._of_runs:
                self._of_runs[record.run_id].written(record.run_id, record)

    def watcher(self, machine: str) -> StageWatcher:
        """Return the watcher of one peer's engines."""
        return StageWatcher(self, machine)

    def began(self, machine: str, engine: TinyEngine, node: PeerNode, step: StepNumber) -> None:
        """A stage is about to run a step: its buffers are as of all steps before."""
        for run_id, other in self._of_runs.items():
            if run_id not in node.buffers:
                other.left_by(machine)
        self._of_jobs[engine.spec.digest()].began(machine, engine, node, step)

    def moved(self, run_id: RunId, source: str, target: str, frame: Frame) -> None:
        """A frame that makes a buffer arrived; once its step commits, both ends are to hold it."""
        if run_id in self._of_runs:
            self._of_runs[run_id].moved(source, target, frame)

    def applied(self, machine: str, applied: Applied) -> None:
        """A stage applied a step."""
        self._of_jobs[applied.engine.spec.digest()].applied(machine, applied)

    def fetched(self, spec: RunSpec, weights: bytes) -> None:
        """A client has the result of its job."""
        self._of_jobs[spec.digest()].fetched(weights)


class _OfRun:
    """The invariants of one run."""

    def __init__(self, spec: RunSpec, trace: Trace, all_runs: Invariants) -> None:
        self.num_commits = 0
        self.num_rollbacks = 0
        self.fail = all_runs.fail
        self._all_runs = all_runs
        self._run_id: RunId | None = None
        self._committed = 0
        self._spec = spec
        self._trace = trace
        self._expected, self._eval_losses = quiet_run(spec)
        self._evaluated: set[int] = set()
        self._saved: frozenset[StepNumber] = frozenset()
        self._loadable: set[int] = set()
        self._result_step: int | None = None
        self._ever_committed = 0
        self._last_attempt = 0
        self._stages: dict[str, _Stage] = {}
        self._applied_in: dict[str, TinyEngine] = {}
        self._moved: dict[tuple[int, int], dict[tuple[str, str, int], None]] = {}

    # ---- the journal

    def written(self, run_id: RunId, record: Record) -> None:
        """A record of the run became durable."""
        self._run_id = run_id
        match record:
            case CommitRecord():
                self._commit(record)
            case RollbackRecord(first_void_step=first_void_step, is_evaluated=is_evaluated):
                self._trace.say(f"journal: {run_id} goes back to step {first_void_step}")
                self._committed = min(self._committed, first_void_step)
                first_void = first_void_step + is_evaluated
                self._evaluated = {s for s in self._evaluated if s < first_void}
                self._loadable = {s for s in self._loadable if s < first_void}
                self.num_rollbacks += 1
            case RunRecord(run):
                self._trace.say(
                    f"journal: {run_id} {run.phase.name.lower()}, attempt {run.attempt.number}, "
                    f"{run.committed_steps} steps; {run.detail}"
                )
                if run.phase is RunPhase.FINISHED:
                    self._all_runs.on_moment("finished")
                    self._check_evaluations(run)
            case SnapshotRecord(kept=kept):
                self._saved = kept
            case EvaluationRecord():
                self._evaluation(record)
            case PlanRecord():
                self._all_runs.on_moment("planned")
            case _:
                pass

    def _evaluation(self, record: EvaluationRecord) -> None:
        found = record.evaluated
        self._trace.say(f"journal: evaluation of {found.step} steps: {found.loss}")
        if found.step != self._committed or found.step in self._evaluated:
            self.fail(f"the journal has an evaluation of {found.step} steps at the wrong time")
        self._evaluated.add(found.step)
        if found.step and (found.step in self._saved or found.step == self._spec.train.num_steps):
            self._loadable.add(found.step)
        passes, losses = self._spec.train.eval_passes, (found.eval_loss, found.compressed_eval_loss)
        expected = self._eval_losses[found.step]
        if losses != tuple(expected if one in passes else None for one in (False, True)):
            self.fail(
                f"evaluation of {found.step} steps: {losses}, expected {expected} of {passes}"
            )

    def _check_evaluations(self, run: Run) -> None:
        train, trained = self._spec.train, self._last_step()
        steps = map(StepNumber, range(trained + 1))
        due = {step for step in steps if evaluates_at(train, step)}
        if self._evaluated != due:
            self.fail(f"evaluations of {sorted(self._evaluated)} steps, expected {sorted(due)}")
        if run.past.all_steps != trained:
            self.fail(f"{run.past.all_steps} steps were trained, expected {trained}")
        self._result_step = trained
        if train.load_best_model_at_end and self._loadable:
            self._result_step = min(
                sorted(self._loadable), key=lambda step: self._eval_losses[step]
            )
        if run.committed_steps != self._result_step:
            expected = f"expected {self._result_step} of {sorted(self._loadable)}"
            self.fail(f"the result has {run.committed_steps} steps, {expected}")

    def _last_step(self) -> int:
        """Return the number of steps that are trained without any fault."""
        train, best, num_worse = self._spec.train, math.inf, 0
        for step in map(StepNumber, range(1, train.num_steps)):
            if evaluates_at(train, step):
                loss = self._eval_losses[step]
                num_worse = 0 if loss < best else num_worse + 1
                best = min(best, loss)
            if 0 < train.early_stopping_patience <= num_worse:
                return step
        return train.num_steps

    def _commit(self, record: CommitRecord) -> None:
        step = record.step.step
        self._trace.say(f"journal: commit of step {step}")
        committed = self._committed
        if step != committed:
            self.fail(f"the journal commits step {step} when {committed} are committed")
        self.num_commits += 1
        self._committed = step + 1
        self._last_attempt = record.commit.attempt
        self._ever_committed = max(self._ever_committed, step + 1)
        self._all_runs.on_moment("committed")

    # ---- engines

    def left_by(self, machine: str) -> None:
        """It works for the run no more."""
        self._stages.pop(machine, None)

    def began(self, machine: str, engine: TinyEngine, node: PeerNode, step: StepNumber) -> None:
        """A stage is about to run a step: its buffers are as of all steps before."""
        store = node.buffers.get(self._run_id) if self._run_id is not None else None
        if store is None:
            return
        self._stages[machine] = mine = _Stage(engine, store, step, self.num_rollbacks)
        for pair in self._moved.get((step - 1, self._last_attempt), {}):
            if machine in pair[:2]:
                other = self._stages.get(pair[1] if pair[0] == machine else pair[0])
                if other and (other.step, other.histories) == (step, mine.histories):
                    self._compare(pair)

    def moved(self, source: str, target: str, frame: Frame) -> None:
        """A frame that makes a buffer arrived; once its step commits, both ends are to hold it."""
        key = frame.key
        moved = self._moved.setdefault((key.step, key.attempt), {})
        moved[source, target, key.sample] = None

    def _compare(self, pair: tuple[str, str, int]) -> None:
        sender, receiver = self._stages[pair[0]], self._stages[pair[1]]
        if any(self._applied_in.get(m) is not self._stages[m].engine for m in pair[:2]):
            return  # one was loaded since, perhaps from another replica's snapshot
        boundary = BlockIndex(max(sender.engine.layers.start, receiver.engine.layers.start))
        run_id, sample = self._run_id, SampleId(pair[2])
        if run_id is None:
            return
        sent = sender.store.get(BufferKey(run_id, boundary, End.SENT, sample))
        received = receiver.store.get(BufferKey(run_id, boundary, End.RECEIVED, sample))
        if sent and received and sent.digest != received.digest:
            self.fail(
                f"boundary {boundary}, sample {sample}: the buffers of {pair[0]} and {pair[1]} "
                f"differ after step {sender.step - 1}"
            )

    def applied(self, machine: str, applied: Applied) -> None:
        """A stage applied a step."""
        step = applied.step
        self._trace.say(f"{machine}: applies step {step} to layers {applied.engine.layers}")
        self._stages.pop(machine, None)
        self._applied_in[machine] = applied.engine
        if step >= self._ever_committed:
            self.fail(f"{machine} applied step {step}, which the journal never committed")
        planned = set(step_samples(self._spec.train, step))
        expected = tuple(int(s in planned) for s in range(self._spec.train.num_samples))
        is_constant = self._spec.is_cacheable(applied.engine.layers.stop)
        for block, tally in applied.tallies.items():
            # What frozen stages made of a sample may be kept above them, from an earlier visit.
            is_less = all(count <= most for count, most in zip(tally, expected, strict=True))
            if tally != expected and not (is_constant and is_less):
                self.fail(
                    f"{machine}, block {block}, step {step}: gradients of samples counted "
                    f"{tally}, expected {expected}"
                )
        for block, weights in applied.weights.items():
            if weights != self._expected[step + 1][block]:
                self.fail(f"{machine}, block {block}: wrong weights after step {step}")

    # ---- the end

    def fetched(self, weights: bytes) -> None:
        """The client has the result."""
        self._trace.say("client: has the result")
        step = self._spec.train.num_steps if self._result_step is None else self._result_step
        if weights != b"".join(self._expected[step].values()):
            self.fail("the client's result is not that of the run without faults")


class StageWatcher:
    """See `EngineWatcher`; one peer process's."""

    def __init__(self, invariants: Invariants, machine: str) -> None:
        self.node: PeerNode | None = None
        self._invariants = invariants
        self._machine = machine

    def began(self, engine: TinyEngine, step: StepNumber) -> None:
        """See `EngineWatcher`."""
        if self.node is not None:
            self._invariants.began(self._machine, engine, self.node, step)
        self._invariants.on_moment("began")

    def happened(self, what: str) -> None:
        """See `EngineWatcher`."""
        self._invariants.on_moment(what)

    def applied(self, applied: Applied) -> None:
        """See `EngineWatcher`."""
        self._invariants.applied(self._machine, applied)
        self._invariants.on_moment("applied")
