"""The 1F1B schedule: pipelines of schedules, joined by links, on a virtual clock."""

import heapq
import itertools
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.errors import OutOfTurn
from swarm_ft.protocol.pipeline import StageSchedule, StepDone, Task, TaskKind

FORWARD, BACKWARD, BOTH = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.FORWARD_BACKWARD


class Pipeline:
    """All stages of one step. `duration_of` says how long a task or a transfer takes."""

    def __init__(self, num_stages, num_microbatches, duration_of):
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.duration_of = duration_of
        self.stages = [
            StageSchedule(
                num_stages=num_stages, stage_index=i, microbatches=range(num_microbatches)
            )
            for i in range(num_stages)
        ]
        self.events = []
        self.tie = itertools.count()
        self.now = 0
        self.running = dict.fromkeys(range(num_stages))
        self.done = set()
        self.computed = defaultdict(list)
        self.finished_at = defaultdict(list)
        self.most_in_flight = defaultdict(int)

    def run(self):
        for microbatch in range(self.num_microbatches):
            self.after(self.duration_of("input"), 0, "input_ready", microbatch)
        while self.events:
            self.now, _, stage, happening, what = heapq.heappop(self.events)
            if happening == "computed":
                self.finish(stage, what)
            self.take(stage, getattr(self.stages[stage], happening)(what))
        return self

    def after(self, duration, stage, happening, what):
        heapq.heappush(self.events, (self.now + duration, next(self.tie), stage, happening, what))

    def take(self, stage, decision):
        if isinstance(decision, Task):
            assert self.running[stage] is None, "two tasks at once"
            self.running[stage] = decision
            self.after(self.duration_of(decision.kind), stage, "computed", decision)
        elif isinstance(decision, StepDone):
            self.done.add(stage)

    def finish(self, stage, task):
        self.running[stage] = None
        self.computed[stage].append((task.kind, task.microbatch))
        self.finished_at[stage].append(self.now)
        kinds = [kind for kind, _ in self.computed[stage]]
        in_flight = kinds.count(FORWARD) - kinds.count(BACKWARD)
        self.most_in_flight[stage] = max(self.most_in_flight[stage], in_flight)
        if task.kind is FORWARD:
            self.after(self.duration_of("link"), stage + 1, "input_ready", task.microbatch)
        elif stage > 0:
            self.after(self.duration_of("link"), stage - 1, "gradient_ready", task.microbatch)


@given(num_stages=st.integers(1, 6), num_microbatches=st.integers(1, 12), seed=st.integers(0, 999))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_every_stage_computes_every_microbatch_once_and_in_order(
    num_stages, num_microbatches, seed
):
    chance = random.Random(seed)
    pipeline = Pipeline(num_stages, num_microbatches, lambda _: chance.randrange(20)).run()
    in_order = list(range(num_microbatches))
    assert pipeline.done == set(range(num_stages)), "deadlock"
    for stage in range(num_stages):
        expected = (BOTH,) if stage == num_stages - 1 else (FORWARD, BACKWARD)
        assert {kind for kind, _ in pipeline.computed[stage]} == set(expected)
        for kind in expected:
            assert [m for k, m in pipeline.computed[stage] if k is kind] == in_order
        assert pipeline.most_in_flight[stage] <= 2 * (num_stages - 1 - stage) + 1


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_links_as_slow_as_a_forward_leave_the_last_stage_no_gap(num_stages):
    durations = {"input": 0, "link": 1, FORWARD: 1, BACKWARD: 1, BOTH: 2}
    pipeline = Pipeline(num_stages, 20, durations.__getitem__).run()
    finished = pipeline.finished_at[num_stages - 1]
    assert {b - a for a, b in itertools.pairwise(finished)} == {durations[BOTH]}


def schedule(num_stages=2, stage_index=0, num_microbatches=3):
    return StageSchedule(
        num_stages=num_stages, stage_index=stage_index, microbatches=range(num_microbatches)
    )


def test_backward_goes_before_forward():
    stage = schedule()
    task = stage.input_ready(0)
    stage.input_ready(1)
    task = stage.computed(task)
    stage.input_ready(2)
    stage.gradient_ready(0)
    assert stage.computed(task) == Task(BACKWARD, 0)


def test_microbatches_that_arrive_out_of_order_wait_for_their_turn():
    stage = schedule()
    assert stage.input_ready(2) is None
    assert stage.input_ready(1) is None
    assert stage.input_ready(0) == Task(FORWARD, 0)


def test_forwards_ahead_are_bounded_by_the_stages_behind():
    stage = schedule(num_microbatches=5)
    task = stage.input_ready(0)
    for microbatch in range(1, 5):
        stage.input_ready(microbatch)
    for _ in range(2):
        task = stage.computed(task)
    assert stage.computed(task) is None
    assert stage.gradient_ready(0) == Task(BACKWARD, 0)


def test_a_gradient_that_comes_before_its_forward_waits():
    stage = schedule()
    assert stage.gradient_ready(0) is None
    assert stage.input_ready(0) == Task(FORWARD, 0)
    assert stage.computed(Task(FORWARD, 0)) == Task(BACKWARD, 0)


def test_the_last_stage_has_no_use_for_gradients():
    stage = schedule(num_stages=1, num_microbatches=1)
    assert stage.gradient_ready(0) is None
    assert stage.input_ready(0) == Task(BOTH, 0)
    assert stage.computed(Task(BOTH, 0)) == StepDone()


@pytest.mark.parametrize("wrong", [Task(FORWARD, 1), Task(BACKWARD, 0)])
def test_another_task_than_the_one_handed_out_is_out_of_turn(wrong):
    stage = schedule()
    stage.input_ready(0)
    with pytest.raises(OutOfTurn, match="was under way"):
        stage.computed(wrong)


def test_a_task_is_finished_once():
    stage = schedule()
    task = stage.input_ready(0)
    stage.computed(task)
    with pytest.raises(OutOfTurn, match="None was under way"):
        stage.computed(task)


@pytest.mark.parametrize("microbatch", [-1, 3])
def test_a_microbatch_outside_the_step_is_out_of_turn(microbatch):
    with pytest.raises(OutOfTurn, match="does not pass here"):
        schedule().input_ready(microbatch)
    with pytest.raises(OutOfTurn, match="does not pass here"):
        schedule().gradient_ready(microbatch)


def test_microbatches_of_other_replicas_do_not_pass():
    stage = StageSchedule(num_stages=1, stage_index=0, microbatches=[1, 4])
    assert stage.begin() is None
    with pytest.raises(OutOfTurn, match="microbatch 0 does not pass"):
        stage.input_ready(0)
    assert stage.input_ready(4) is None
    first = stage.input_ready(1)
    assert first == Task(TaskKind.FORWARD_BACKWARD, 1)
    assert stage.computed(first) == Task(TaskKind.FORWARD_BACKWARD, 4)


def test_a_step_in_which_nothing_passes_is_done_when_it_begins():
    assert StageSchedule(num_stages=3, stage_index=1, microbatches=[]).begin() == StepDone()
