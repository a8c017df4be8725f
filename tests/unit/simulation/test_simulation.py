"""The simulator sees what is broken on purpose, and gives one seed one history."""

import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from torch import Tensor

from swarm_ft.buffers import BufferKey, BufferRecord, BufferStore, End
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.client.trace import TraceEvents
from swarm_ft.codec.gradient_pieces import PieceCodec
from swarm_ft.coordinator.facts.connectivity import Connectivity
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.plan import steps
from swarm_ft.errors import RunFailed
from swarm_ft.ids import MicrobatchIndex, RunId
from swarm_ft.peer.boundary.coder import FrameCoder
from swarm_ft.peer.reduce.gradient_coder import EncodedSum
from swarm_ft.protocol.messages.boundary import Frame, FrameKind
from swarm_ft.protocol.messages.client import RunEvent, RunStatus
from swarm_ft.protocol.messages.control import PlanStep
from swarm_ft.protocol.messages.timeline import PeerTimeline
from swarm_ft.protocol.spec.best import Judged
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.simulation.disk import DiskJournal
from tests.simulation.engine import TinyEngine
from tests.simulation.scenario import Fault, FaultKind, Moment, Scenario, draw, with_other_codecs
from tests.simulation.shrink import only, shrink
from tests.simulation.simulate import simulate

TWO_STAGES = 6
"""A seed with a peer for each of two stages."""
LISTENED = 66
"""A seed whose first fault is a newcomer that listens to some steps."""


def quiet(seed: int) -> Scenario:
    return replace(draw(seed), faults=())


def with_fault(seed: int, **fields: Any) -> Scenario:
    return replace(draw(seed), faults=(Fault(**fields),))


@pytest.mark.parametrize("seed", range(4))
def test_a_swarm_in_which_nothing_goes_wrong_gives_the_result(seed: int) -> None:
    outcome = simulate(quiet(seed))
    assert outcome.failures == ()
    train = quiet(seed).spec.train
    assert train.early_stopping_patience or outcome.num_commits == train.num_steps
    assert outcome.num_commits <= train.num_steps


@pytest.mark.parametrize("seed", range(110, 122))
@pytest.mark.sampled(4)
def test_whatever_goes_wrong_all_invariants_hold(seed: int) -> None:
    assert simulate(draw(seed)).failures == ()


STEERED = {
    "forward_codec": "aq8t",
    "backward_codec": "q8+ef21",
    "num_steps": 16,
    "early_stopping_patience": 0,
    "load_best_model_at_end": False,
    "train_layers": "",
}


def steered(seed: int, **changes: Any) -> Scenario:
    """A swarm of two stages in a longer run, whose owner changes both codecs on the way."""
    scenario = draw(seed)
    train = replace(quiet(TWO_STAGES).spec.train, **{**STEERED, **changes})
    spec = replace(quiet(TWO_STAGES).spec, train=train)
    layers = (*quiet(TWO_STAGES).layers, *quiet(TWO_STAGES).layers)
    changed = replace(scenario, spec=spec, layers=layers, others=(), mean_compute_s=0.02)
    return with_other_codecs(changed, Random(seed))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Frame, bool]]:
    """Frames that came, and whether before their step's plan."""
    found: list[tuple[Frame, bool]] = []
    check = FrameCoder.check

    def checking(self: FrameCoder, frame: Frame, *, is_early: bool = False) -> None:
        found.append((frame, is_early))
        check(self, frame, is_early=is_early)

    monkeypatch.setattr(FrameCoder, "check", checking)
    return found


def test_codecs_change_on_the_way_and_no_frame_is_refused(
    checked: list[tuple[Frame, bool]],
) -> None:
    """Links take their time, so that some of the new ones come before the plan that names them."""
    num_early = 0
    for seed in range(4):
        checked.clear()
        scenario = steered(seed)
        outcome = simulate(replace(scenario, faults=()), keep_trace=True)
        assert outcome.failures == ()
        assert outcome.num_commits == STEERED["num_steps"]
        assert not [line for line in outcome.lines if "in a step whose" in line]
        trained = [
            (f, is_early)
            for f, is_early in checked
            if f.kind is FrameKind.DELTA and not scenario.spec.train.is_held_out(f.key.sample)
        ]
        other = {f.key.step for f, _ in trained if f.tensor.codec.number == 7}
        first = min(other)
        assert first > scenario.codecs[0][0]
        assert other == set(range(first, 16))
        assert {f.key.step for f, _ in trained if f.tensor.codec.number == 8} < set(range(first))
        num_early += sum(is_early and f.key.step == first for f, is_early in trained)
    assert num_early


@pytest.mark.parametrize("seed", range(30, 40))
@pytest.mark.sampled(4)
def test_codecs_change_whatever_goes_wrong(seed: int) -> None:
    assert simulate(steered(seed)).failures == ()


@pytest.fixture
def timelines(monkeypatch: pytest.MonkeyPatch) -> list[PeerTimeline]:
    """Collect peers' timelines; the client of every simulated run requests them now."""
    collected: list[PeerTimeline] = []
    watch = SwarmClient.watch

    def watch_timelines(
        self: SwarmClient, run_id: RunId | None, on_trouble: Callable[[str], None]
    ) -> AsyncGenerator[RunEvent, None]:
        return watch(self, run_id, on_trouble, collected.append)

    monkeypatch.setattr(SwarmClient, "watch", watch_timelines)
    return collected


def test_invariants_hold_in_runs_that_are_traced(timelines: list[PeerTimeline]) -> None:
    for seed in range(100, 105):
        assert simulate(draw(seed)).failures == (), seed
    assert timelines
    trace = TraceEvents()
    assert all(list(trace.add(timeline)) for timeline in timelines)


def test_peers_of_a_traced_run_know_the_coordinators_clock(timelines: list[PeerTimeline]) -> None:
    """All clocks of a quiet simulation show the same time."""
    scenario = judged()
    assert simulate(scenario).failures == ()
    clocks = [peer_timeline.timeline.clock for peer_timeline in timelines]
    assert len(clocks) == 2 * scenario.spec.train.num_steps
    assert all(0 < clock.error_us < 100_000 for clock in clocks)
    assert all(abs(clock.offset_us) <= clock.error_us for clock in clocks)
    assert any(clock.offset_us for clock in clocks), "the ways there and back are uneven"


@pytest.mark.parametrize("kind", FaultKind)
@pytest.mark.sampled(3)
def test_every_kind_of_fault_alone_is_survived(kind: FaultKind) -> None:
    machine_name = "peer-new" if kind is FaultKind.JOIN else "peer-0"
    fault = {"kind": kind, "at_s": 0.1, "duration_s": 3.0, "machine": machine_name, "amount": 0.5}
    other = draw(TWO_STAGES).layers[0] if kind is FaultKind.JOIN else "peer-1"
    scenario = with_fault(TWO_STAGES, other=other, moment=Moment.BACKWARD, **fault)
    outcome = simulate(scenario)
    assert outcome.failures == ()
    assert outcome.faults[kind] == 1


@pytest.mark.parametrize(("loads_best", "num_rollbacks"), [(False, 1), (True, 0)])
def test_a_result_that_its_peer_took_along_is_made_again(
    *, loads_best: bool, num_rollbacks: int
) -> None:
    """The last step is trained anew; the best weights are loaded anew, from where they lie."""
    fault = with_fault(
        TWO_STAGES,
        kind=FaultKind.POWER_CUT,
        at_s=0.0,
        duration_s=3.0,
        machine="peer-1",
        moment=Moment.FINISHED,
    )
    train = judged(load_best_model_at_end=loads_best).spec.train
    train = train if loads_best else replace(train, save_steps=0)
    outcome = simulate(replace(fault, spec=replace(fault.spec, train=train)))
    assert outcome.failures == ()
    assert outcome.num_rollbacks == num_rollbacks


def scenario_of_two_runs(*faults: Fault) -> Scenario:
    """Two runs for which the same two peers are needed, each of which has room for both."""
    scenario = draw(TWO_STAGES)
    train = replace(
        scenario.spec.train,
        num_steps=8,
        num_eval_samples=0,
        eval_steps=0,
        save_steps=2,
        early_stopping_patience=0,
        load_best_model_at_end=False,
    )
    spec = replace(scenario.spec, train=train)
    other = replace(spec, train=replace(train, seed=train.seed + 1, learning_rate=0.25))
    return replace(scenario, spec=spec, others=((0.0, other),), max_beside=1, faults=faults)


def test_two_runs_train_at_the_same_time_on_the_same_peers() -> None:
    outcome = simulate(scenario_of_two_runs(), keep_trace=True)
    assert outcome.failures == ()
    assert outcome.num_commits == 16
    phases = [line for line in outcome.lines if " training, attempt" in line or "finished," in line]
    assert [
        word for line in phases for word in ("training", "finished") if f" {word}," in line
    ] == [*("training", "training", "finished", "finished")]


@pytest.mark.parametrize("moment", [Moment.BACKWARD, Moment.COMMITTED, Moment.COPIED])
@pytest.mark.parametrize(
    "kind", [FaultKind.CRASH, FaultKind.POWER_CUT, FaultKind.REPLACED, FaultKind.LEAVE]
)
@pytest.mark.sampled(5)
def test_who_dies_with_stages_of_two_runs_takes_nothing_along(
    kind: FaultKind, moment: Moment
) -> None:
    fault = Fault(kind=kind, at_s=0.4, duration_s=3.0, machine="peer-0", amount=0.5, moment=moment)
    outcome = simulate(scenario_of_two_runs(fault))
    assert outcome.failures == ()
    assert outcome.faults[kind] == 1


@pytest.mark.parametrize("seed", [24, 32])
def test_invariants_hold_where_drawn_peers_host_several_runs(seed: int) -> None:
    scenario = draw(seed)
    assert scenario.others
    assert scenario.max_beside
    assert simulate(scenario).failures == ()


PRINT_DIGESTS = """
import sys
from tests.simulation.many import settle
from tests.simulation.scenario import draw
from tests.simulation.simulate import simulate
settle()
for seed in map(int, sys.argv[1:]):
    print(simulate(draw(seed)).trace_digest)
"""


@pytest.mark.thorough
def test_one_seed_has_one_history_in_every_process() -> None:
    """Sets have another order in another process, and the earlier seeds run in another order."""
    seeds = range(40, 42)
    command = [sys.executable, "-c", PRINT_DIGESTS, *map(str, reversed(seeds))]
    environment = {**os.environ, "PYTHONHASHSEED": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    own_digests = [str(simulate(draw(seed)).trace_digest) for seed in seeds]
    assert done.stdout.split() == own_digests[::-1]


def test_steps_are_committed_while_a_newcomer_takes_over() -> None:
    outcome = simulate(only(draw(LISTENED), (0,)), keep_trace=True)
    assert outcome.failures == ()
    (begun, *_) = (i for i, line in enumerate(outcome.lines) if "while the others train" in line)
    (ended, *_) = (i for i, line in enumerate(outcome.lines) if "has caught up" in line)
    commits = [line for line in outcome.lines[begun:ended] if "commit of step" in line]
    assert len(commits) > 3


# ---- broken on purpose


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated minutes in which nothing comes of it cost seconds."""
    monkeypatch.setattr("tests.simulation.simulate.PATIENCE_S", 20.0)


def patch_plans(monkeypatch: pytest.MonkeyPatch, altered: Callable[[PlanStep], PlanStep]) -> None:
    """Let the coordinator plan `altered(plan)` instead of `plan`."""
    plan_step = steps.plan_step

    def planned(run: Run, now_s: float, ways: Connectivity) -> tuple[Run, PlanStep]:
        run, plan = plan_step(run, now_s, ways)
        return run, altered(plan)

    for name, module in list(sys.modules.items()):
        if name.startswith("swarm_ft.") and getattr(module, "plan_step", None) is plan_step:
            monkeypatch.setattr(module, "plan_step", planned)


def test_a_peer_that_applies_a_commit_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = TinyEngine.apply

    def twice(self: TinyEngine, clip_factor: float, learning_rate: float) -> None:
        step = self._step
        apply(self, clip_factor, learning_rate)
        self._step = step
        apply(self, clip_factor, learning_rate)

    monkeypatch.setattr(TinyEngine, "apply", twice)
    assert any("wrong weights after step 0" in f for f in simulate(quiet(TWO_STAGES)).failures)


@pytest.mark.usefixtures("little_patience")
def test_a_plan_that_has_a_sample_twice_never_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(plan: PlanStep) -> PlanStep:
        index = MicrobatchIndex(len(plan.microbatches))
        again = replace(plan.microbatches[0], index=index)
        evaluation = tuple(
            replace(held_out, index=MicrobatchIndex(held_out.index + 1))
            for held_out in plan.evaluation
        )
        return replace(plan, microbatches=(*plan.microbatches, again), evaluation=evaluation)

    patch_plans(monkeypatch, twice)
    outcome = simulate(quiet(TWO_STAGES))
    assert "a bug in the coordinator; the run fails" in outcome.failures[0]
    assert "samples, each once" in outcome.failures[0]
    assert outcome.num_commits == 0


def test_a_run_that_does_not_stop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = judged(early_stopping_patience=1)
    assert simulate(scenario).failures == ()
    monkeypatch.setattr(Judged, "stops", lambda _self, _train: False)
    assert any("steps were trained, expected" in f for f in simulate(scenario).failures)


def test_a_result_that_is_not_the_best_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = judged(load_best_model_at_end=True)
    assert simulate(scenario).failures == ()
    monkeypatch.setattr(
        "swarm_ft.coordinator.decide.policies.ending.best_to_load", lambda _run: None
    )
    assert any("the result has" in f for f in simulate(scenario).failures)


def judged(**changes: object) -> Scenario:
    """Every step is evaluated and saved."""
    scenario = quiet(TWO_STAGES)
    every = {"num_eval_samples": 3, "eval_steps": 1, "save_steps": 1, "num_steps": 8}
    plain = {"early_stopping_patience": 0, "load_best_model_at_end": False}
    options: dict[str, Any] = {**every, **plain, **changes}
    train = replace(scenario.spec.train, **options)
    return replace(scenario, spec=replace(scenario.spec, train=train))


def test_a_plan_that_lacks_a_sample_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_few(plan: PlanStep) -> PlanStep:
        return replace(plan, microbatches=plan.microbatches[:-1])

    patch_plans(monkeypatch, too_few)
    scenario = quiet(TWO_STAGES)
    train = replace(scenario.spec.train, batch_size=4, micro_batch_size=2, num_eval_samples=0)
    scenario = replace(scenario, spec=replace(scenario.spec, train=train))
    assert any("gradients of samples counted" in f for f in simulate(scenario).failures)


def test_a_newcomer_that_applies_something_else_than_it_heard_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded = EncodedSum.decoded

    def altered(self: EncodedSum, codec: PieceCodec) -> Tensor:
        return decoded(self, codec) + 1.0

    monkeypatch.setattr(EncodedSum, "decoded", altered)
    failures = simulate(only(draw(LISTENED), (0,))).failures
    assert any("wrong weights after step" in failure for failure in failures)


def test_buffers_that_drift_apart_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = BufferStore.stage

    def drifting(self: BufferStore, key: BufferKey, record: BufferRecord) -> None:
        is_late = key.end is End.RECEIVED and key.sample == 1
        stage(self, key, replace(record, digest=bytes(16)) if is_late else record)

    monkeypatch.setattr(BufferStore, "stage", drifting)
    spec = quiet(TWO_STAGES).spec
    train = replace(spec.train, forward_codec="aq8t", num_steps=6)
    scenario = replace(quiet(TWO_STAGES), spec=replace(spec, train=train))
    assert any("buffers of peer-0 and peer-1 differ" in f for f in simulate(scenario).failures)


def test_a_commit_that_is_told_before_it_is_durable_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DiskJournal, "write", lambda _self, _records: None)
    failures = simulate(quiet(TWO_STAGES)).failures
    assert any("which the journal never committed" in f for f in failures)


def test_a_job_that_becomes_two_runs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = SwarmClient.submit

    async def twice(
        self: SwarmClient, spec: RunSpec, samples: Sequence[bytes], **named: Any
    ) -> RunStatus:
        await submit(self, spec, samples)
        return await submit(self, spec, samples, **named)

    monkeypatch.setattr(SwarmClient, "submit", twice)
    assert "the job became two runs" in simulate(quiet(TWO_STAGES)).failures


@pytest.mark.usefixtures("little_patience")
def test_a_swarm_that_hangs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        raise RunFailed("a peer does not answer")

    monkeypatch.setattr(SwarmClient, "fetch_result", never)
    (failure,) = simulate(quiet(TWO_STAGES)).failures
    assert failure.startswith("the run is not finished")


def test_a_failing_scenario_is_shrunk_to_the_faults_it_needs() -> None:
    scenario = next(s for s in map(draw, range(100)) if len(s.faults) > 4)
    needed = {scenario.faults[1], scenario.faults[3]}
    small = shrink(scenario, lambda tried: needed <= set(tried.faults))
    assert set(small.faults) == needed
    assert small == only(scenario, (1, 3))


def test_a_run_that_gives_replicas_away_saves_with_those_that_stay() -> None:
    """Its steps wait for the weights that they judge; who was let go of saved nothing any more."""
    assert simulate(draw(407)).failures == ()
