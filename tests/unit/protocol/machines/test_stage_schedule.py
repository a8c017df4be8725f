"""Pipelines of schedules, joined by links, on a virtual clock."""

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import MicrobatchIndex
from swarm_ft.protocol.machines.pipeline import (
    ALLOCATED,
    EVALUATED_AHEAD,
    KEPT_FREE,
    PARTS,
    StageSchedule,
    StepDone,
    Task,
    TaskKind,
    max_microbatches,
    min_microbatches,
)
from tests.draws import draws

FORWARD, BACKWARD, WEIGHTS = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHTS
BOTH = TaskKind.FORWARD_BACKWARD


def first(num_microbatches: int) -> list[MicrobatchIndex]:
    return [MicrobatchIndex(m) for m in range(num_microbatches)]


class Pipeline:
    """Pipeline of all stages of one step; `duration_of` returns the time of a task or a transfer.

    Each link carries one microbatch at a time each way. `more_held[i]`: microbatches that stage i
    may hold beyond the need of plain 1F1B.
    """

    def __init__(
        self,
        num_stages: int,
        num_microbatches: int,
        duration_of: Callable[[Any], int],
        more_held: Sequence[int] | None = None,
    ) -> None:
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.duration_of = duration_of
        more_held = more_held or [0] * num_stages
        self.max_held = [min_microbatches(num_stages, i) + more_held[i] for i in range(num_stages)]
        self.stages = [
            StageSchedule(
                is_first=i == 0,
                is_last=i == num_stages - 1,
                microbatches=first(num_microbatches),
                max_held=self.max_held[i],
            )
            for i in range(num_stages)
        ]
        self.events: list[tuple[int, int, int, str, Any]] = []
        self.tie = itertools.count()
        self.now = 0
        self.link_free_at: dict[tuple[int, str], int] = defaultdict(int)
        self.running: dict[int, Task | None] = dict.fromkeys(range(num_stages))
        self.done: set[int] = set()
        self.computed: dict[int, list[tuple[TaskKind, MicrobatchIndex]]] = defaultdict(list)
        self.finished_at: dict[int, list[int]] = defaultdict(list)
        self.most_held: dict[int, int] = defaultdict(int)

    def run(self) -> Self:
        for microbatch in first(self.num_microbatches):
            self.after(self.duration_of("input"), 0, "input_ready", microbatch)
        while self.events:
            self.now, _, stage, happening, what = heapq.heappop(self.events)
            if happening == "computed":
                self.finish(stage, what)
            self.take(stage, getattr(self.stages[stage], happening)(what))
        return self

    def after(self, duration: int, stage: int, happening: str, what: Any) -> None:
        self.at(self.now + duration, stage, happening, what)

    def at(self, when: int, stage: int, happening: str, what: Any) -> None:
        heapq.heappush(self.events, (when, next(self.tie), stage, happening, what))

    def send(self, stage: int, happening: str, microbatch: MicrobatchIndex) -> None:
        begins = max(self.now, self.link_free_at[stage, happening])
        arrives = self.link_free_at[stage, happening] = begins + self.duration_of(happening)
        self.at(arrives, stage, happening, microbatch)

    def take(self, stage: int, decision: Task | StepDone | None) -> None:
        if isinstance(decision, Task):
            assert self.running[stage] is None, "two tasks at once"
            self.running[stage] = decision
            self.after(self.duration_of(decision.kind), stage, "computed", decision)
        elif isinstance(decision, StepDone):
            self.done.add(stage)

    def finish(self, stage: int, task: Task) -> None:
        self.running[stage] = None
        self.computed[stage].append((task.kind, task.microbatch))
        self.finished_at[stage].append(self.now)
        kinds = [kind for kind, _ in self.computed[stage]]
        num_stored = kinds.count(FORWARD) + kinds.count(BOTH) - kinds.count(WEIGHTS)
        self.most_held[stage] = max(self.most_held[stage], num_stored)
        if task.kind is FORWARD:
            self.send(stage + 1, "input_ready", task.microbatch)
        elif task.kind is not WEIGHTS and stage > 0:
            self.send(stage - 1, "gradient_ready", task.microbatch)


@given(
    num_stages=st.integers(1, 6),
    num_microbatches=st.integers(1, 12),
    more_held=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    seed=st.integers(0, 999),
)
@settings(derandomize=True, deadline=None, max_examples=draws(300))
def test_every_stage_computes_every_microbatch_once_and_in_order(
    num_stages: int, num_microbatches: int, more_held: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    durations = {"input_ready": 60, "gradient_ready": 90}
    pipeline = Pipeline(
        num_stages,
        num_microbatches,
        lambda what: chance.randrange(durations.get(what, 20)),
        more_held,
    ).run()
    in_order = list(range(num_microbatches))
    assert pipeline.done == set(range(num_stages)), "deadlock"
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        expected = (BOTH, WEIGHTS) if is_last else (FORWARD, BACKWARD, WEIGHTS)
        assert {kind for kind, _ in pipeline.computed[stage]} == set(expected)
        assert sum(kind.num_parts for kind in expected) == PARTS
        for kind in expected:
            assert [m for k, m in pipeline.computed[stage] if k is kind] == in_order
        assert pipeline.most_held[stage] <= pipeline.max_held[stage]


@given(seed=st.integers(0, 999), num_stages=st.integers(2, 5))
@settings(derandomize=True, deadline=None, max_examples=draws(50))
def test_room_for_one_microbatch_is_enough_to_get_through(seed: int, num_stages: int) -> None:
    chance = random.Random(seed)
    too_few = [1 - min_microbatches(num_stages, i) for i in range(num_stages)]
    pipeline = Pipeline(num_stages, 6, lambda _: chance.randrange(20), too_few).run()
    assert pipeline.done == set(range(num_stages))
    assert set(pipeline.most_held.values()) == {1}


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_links_as_slow_as_a_forward_leave_the_last_stage_no_gap(num_stages: int) -> None:
    durations = {"input": 0, FORWARD: 1, BACKWARD: 1, BOTH: 2, WEIGHTS: 1}
    links = {"input_ready": 1, "gradient_ready": 1}
    pipeline = Pipeline(num_stages, 20, (durations | links).__getitem__).run()
    finished = [0, *pipeline.finished_at[num_stages - 1]]
    gaps = [b - a for a, b in itertools.pairwise(finished)]
    kinds = [kind for kind, _ in pipeline.computed[num_stages - 1]]
    assert gaps[1:] == [durations[kind] for kind in kinds[1:]]


SLOW_LINKS: dict[str | TaskKind, int] = {
    "input": 0,
    "input_ready": 66,
    "gradient_ready": 131,
    FORWARD: 68,
    BACKWARD: 75,
    BOTH: 68 + 75,
    WEIGHTS: 62,
}


def test_slow_links_need_more_in_flight_than_1f1b_and_then_cost_their_latency_alone() -> None:
    stages, batches = 8, 32
    few, many = (
        Pipeline(stages, batches, SLOW_LINKS.__getitem__, [more] * stages).run().now
        for more in (0, batches)
    )
    to_the_last = (stages - 1) * (SLOW_LINKS[FORWARD] + SLOW_LINKS["input_ready"])
    least = to_the_last + batches * (SLOW_LINKS[BOTH] + SLOW_LINKS[WEIGHTS])
    assert many == least, "the last stage, once it has begun, never waits"
    assert few > 1.15 * many


def schedule(
    num_stages: int = 2, stage_index: int = 0, num_microbatches: int = 3, more_held: int = 0
) -> StageSchedule:
    return StageSchedule(
        is_first=stage_index == 0,
        is_last=stage_index == num_stages - 1,
        microbatches=first(num_microbatches),
        max_held=min_microbatches(num_stages, stage_index) + more_held,
    )


def drive(
    stage: StageSchedule, *, inputs: Iterable[int] = (), gradients: Iterable[int] = ()
) -> list[tuple[TaskKind, int]]:
    """Return all tasks of a stage for these events, if tasks take no time."""
    ready = [stage.input_ready(MicrobatchIndex(m)) for m in inputs]
    ready += [stage.gradient_ready(MicrobatchIndex(m)) for m in gradients]
    pending = next((task for task in ready if task is not None), None)
    done: list[tuple[TaskKind, int]] = []
    while isinstance(pending, Task):
        done.append((pending.kind, pending.microbatch))
        pending = stage.computed(pending)
    return done


def finish(stage: StageSchedule, task: Task | StepDone | None) -> Task | StepDone | None:
    assert isinstance(task, Task)
    return stage.computed(task)


def test_what_upstream_waits_for_goes_first_then_forwards_then_what_nobody_waits_for() -> None:
    stage = schedule(num_stages=3, stage_index=1, num_microbatches=2)
    order = drive(stage, inputs=(0, 1), gradients=(0,))
    assert order == [(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (WEIGHTS, 0)]


def test_at_the_first_stage_nobody_waits_for_a_backward() -> None:
    order = drive(schedule(num_microbatches=3), inputs=range(3), gradients=(0, 1))
    forwards = [(FORWARD, m) for m in range(3)]
    rest = [(BACKWARD, 0), (WEIGHTS, 0), (BACKWARD, 1), (WEIGHTS, 1)]
    assert order == forwards + rest, "what was begun is completed, which makes room"


def lacked(stage: StageSchedule) -> list[tuple[TaskKind, int]]:
    return [(task.kind, task.microbatch) for task in stage.lacks]


def test_what_it_lacks_is_what_comes_next_and_there_is_room_for() -> None:
    stage = schedule(num_stages=2, num_microbatches=5)
    assert lacked(stage) == [(FORWARD, 0)]
    task = stage.input_ready(MicrobatchIndex(0))
    assert lacked(stage) == [], "it computes"
    assert finish(stage, task) is None
    drive(stage, inputs=(2,))
    assert lacked(stage) == [(FORWARD, 1), (BACKWARD, 0)]
    drive(stage, inputs=(1,))
    assert lacked(stage) == [(BACKWARD, 0)], "there is no room for another forward"
    drive(stage, inputs=(3, 4), gradients=range(5))
    assert lacked(stage) == []


def test_without_room_weights_make_it() -> None:
    stage = schedule(num_stages=1, num_microbatches=3)
    expected = [(kind, m) for m in range(3) for kind in (BOTH, WEIGHTS)]
    assert drive(stage, inputs=range(3)) == expected
    roomy = schedule(num_stages=1, num_microbatches=3, more_held=1)
    order = [(BOTH, 0), (BOTH, 1), (WEIGHTS, 0), (BOTH, 2), (WEIGHTS, 1), (WEIGHTS, 2)]
    assert drive(roomy, inputs=range(3)) == order


def test_microbatches_that_arrive_out_of_order_wait_for_their_turn() -> None:
    stage = schedule()
    assert stage.input_ready(MicrobatchIndex(2)) is None
    assert stage.input_ready(MicrobatchIndex(1)) is None
    assert stage.input_ready(MicrobatchIndex(0)) == Task(FORWARD, MicrobatchIndex(0))


def test_forwards_ahead_are_bounded() -> None:
    stage = schedule(num_microbatches=5)
    task = stage.input_ready(MicrobatchIndex(0))
    for microbatch in first(5)[1:]:
        stage.input_ready(microbatch)
    for _ in range(2):
        task = finish(stage, task)
    assert finish(stage, task) is None
    assert stage.gradient_ready(MicrobatchIndex(0)) == Task(BACKWARD, MicrobatchIndex(0))
    assert stage.computed(Task(BACKWARD, MicrobatchIndex(0))) == Task(WEIGHTS, MicrobatchIndex(0))
    assert stage.computed(Task(WEIGHTS, MicrobatchIndex(0))) == Task(FORWARD, MicrobatchIndex(3))


def test_a_gradient_that_comes_before_its_forward_waits() -> None:
    stage = schedule()
    assert stage.gradient_ready(MicrobatchIndex(0)) is None
    assert stage.input_ready(MicrobatchIndex(0)) == Task(FORWARD, MicrobatchIndex(0))
    assert stage.computed(Task(FORWARD, MicrobatchIndex(0))) == Task(BACKWARD, MicrobatchIndex(0))


def test_the_last_stage_has_no_use_for_gradients() -> None:
    stage = schedule(num_stages=1, num_microbatches=1)
    assert stage.gradient_ready(MicrobatchIndex(0)) is None
    assert stage.input_ready(MicrobatchIndex(0)) == Task(BOTH, MicrobatchIndex(0))
    assert stage.computed(Task(BOTH, MicrobatchIndex(0))) == Task(WEIGHTS, MicrobatchIndex(0))
    assert stage.computed(Task(WEIGHTS, MicrobatchIndex(0))) == StepDone()


@pytest.mark.parametrize(
    "wrong",
    [
        Task(FORWARD, MicrobatchIndex(1)),
        Task(BACKWARD, MicrobatchIndex(0)),
        Task(WEIGHTS, MicrobatchIndex(0)),
    ],
)
def test_another_task_than_the_one_handed_out_is_out_of_turn(wrong: Task) -> None:
    stage = schedule()
    stage.input_ready(MicrobatchIndex(0))
    with pytest.raises(OutOfTurn, match="was under way"):
        stage.computed(wrong)


def test_a_task_is_finished_once() -> None:
    stage = schedule()
    task = stage.input_ready(MicrobatchIndex(0))
    finish(stage, task)
    with pytest.raises(OutOfTurn, match="None was under way"):
        finish(stage, task)


@pytest.mark.parametrize("microbatch", [-1, 3])
def test_a_microbatch_outside_the_step_is_out_of_turn(microbatch: MicrobatchIndex) -> None:
    with pytest.raises(OutOfTurn, match="does not pass here"):
        schedule().input_ready(microbatch)
    with pytest.raises(OutOfTurn, match="does not pass here"):
        schedule().gradient_ready(microbatch)


def test_microbatches_of_other_replicas_do_not_pass() -> None:
    stage = StageSchedule(
        is_first=True,
        is_last=True,
        microbatches=[MicrobatchIndex(1), MicrobatchIndex(4)],
        max_held=1,
    )
    assert stage.begin() is None
    with pytest.raises(OutOfTurn, match="microbatch 0 does not pass"):
        stage.input_ready(MicrobatchIndex(0))
    assert stage.input_ready(MicrobatchIndex(4)) is None
    order = [Task(kind, MicrobatchIndex(m)) for m in (1, 4) for kind in (BOTH, WEIGHTS)]
    task = stage.input_ready(MicrobatchIndex(1))
    for expected in order:
        assert task == expected
        task = finish(stage, task)
    assert task == StepDone()


def test_a_step_in_which_nothing_passes_is_done_when_it_begins() -> None:
    nothing = StageSchedule(is_first=False, is_last=False, microbatches=[], max_held=3)
    assert nothing.begin() == StepDone()


def test_plain_1f1b_holds_two_for_each_stage_behind_and_one() -> None:
    assert [min_microbatches(4, index) for index in range(4)] == [7, 5, 3, 1]


@pytest.mark.parametrize(
    ("room", "each", "expected"),
    [
        (0, 0, 5),
        (10**12, 0, 5),
        (-1, 100, 5),
        ((6 + KEPT_FREE) * 125 - 1, 100, 5),
        ((6 + KEPT_FREE) * 125, 100, 6),
        ((40 + KEPT_FREE) * 125 + 124, 100, 40),
    ],
)
def test_as_many_are_held_as_fit_but_no_fewer_than_needed(
    room: int, each: int, expected: int
) -> None:
    assert max_microbatches(5, room_bytes=room, microbatch_bytes=each) == expected


@given(least=st.integers(1, 63), room=st.integers(-(10**12), 10**15), each=st.integers(1, 10**10))
@settings(derandomize=True, deadline=None)
def test_what_is_held_beyond_the_least_fits_into_the_room(least: int, room: int, each: int) -> None:
    most = max_microbatches(least, room_bytes=room, microbatch_bytes=each)
    assert most >= least
    assert most == least or (most + KEPT_FREE) * ALLOCATED * each <= room * (1 + 1e-12)


# ---- held-out microbatches


def happenings(num_trained: int, num_held_out: int) -> list[tuple[str, int]]:
    """Return all events of a stage in a step, in no order."""
    trained, held_out = range(num_trained), range(num_trained, num_trained + num_held_out)
    return [
        *(("input_ready", m) for m in (*trained, *held_out)),
        *(("gradient_ready", m) for m in trained),
    ]


class Alone:
    """A stage with instant tasks, whose neighbour processes outputs on request."""

    def __init__(self, stage: StageSchedule) -> None:
        self.stage = stage
        self.done: list[Task] = []
        self.is_over = False

    def after(self, happening: str, microbatch: int) -> list[Task]:
        """Return the tasks that follow an event."""
        before = len(self.done)
        pending = getattr(self.stage, happening)(MicrobatchIndex(microbatch))
        while isinstance(pending, Task):
            self.done.append(pending)
            pending = self.stage.computed(pending)
        self.is_over |= isinstance(pending, StepDone)
        return self.done[before:]


@given(
    place=st.sampled_from([(1, 0), (2, 0), (3, 1), (2, 1)]),
    num_trained=st.integers(0, 6),
    num_held_out=st.integers(0, 6),
    more_held=st.integers(0, 4),
    seed=st.integers(0, 9999),
)
@settings(derandomize=True, deadline=None, max_examples=draws(500))
def test_what_is_evaluated_neither_delays_nor_reorders_what_trains(
    place: tuple[int, int], num_trained: int, num_held_out: int, more_held: int, seed: int
) -> None:
    num_stages, index = place
    held_out = [MicrobatchIndex(num_trained + m) for m in range(num_held_out)]
    plain, whole = (
        Alone(
            StageSchedule(
                is_first=index == 0,
                is_last=index == num_stages - 1,
                microbatches=first(num_trained),
                max_held=min_microbatches(num_stages, index) + more_held,
                held_out=some,
            )
        )
        for some in ((), held_out)
    )
    chance = random.Random(seed)
    left = happenings(num_trained, num_held_out)
    evaluated: list[int] = []
    taken = 0
    while left or taken < len(evaluated) < num_held_out or not whole.is_over:
        can_take = index < num_stages - 1 and taken < len(evaluated)
        if not left and not can_take:
            break
        if can_take and (not left or chance.random() < 0.3):
            happening = "output_taken", evaluated[taken]
            taken += 1
        else:
            happening = left.pop(chance.randrange(len(left)))
        computed = whole.after(*happening)
        evaluated += [t.microbatch for t in computed if t.kind is TaskKind.EVALUATE]
        if index < num_stages - 1:
            assert len(evaluated) - taken <= EVALUATED_AHEAD
        is_training = happening[1] < num_trained and happening[0] != "output_taken"
        expected = plain.after(*happening) if is_training else []
        assert [t for t in computed if t.kind is not TaskKind.EVALUATE] == expected
    assert evaluated == held_out, "each once, in order"
    assert whole.is_over or not (num_trained or num_held_out)


def test_what_is_evaluated_waits_for_the_stage_behind() -> None:
    stage = StageSchedule(
        is_first=True, is_last=False, microbatches=[], max_held=1, held_out=first(4)
    )
    alone = Alone(stage)
    for m in range(4):
        alone.after("input_ready", m)
    assert [task.microbatch for task in alone.done] == [0, 1]
    assert stage.lacks == (), "it lacks no input"
    assert [task.microbatch for task in alone.after("output_taken", 1)] == [2]
    assert [task.microbatch for task in alone.after("output_taken", 0)] == [3]
    assert alone.is_over


def test_the_last_stage_evaluates_what_comes_and_lacks_what_does_not() -> None:
    stage = StageSchedule(
        is_first=False, is_last=True, microbatches=[], max_held=1, held_out=first(3)
    )
    assert stage.lacks == (Task(TaskKind.EVALUATE, MicrobatchIndex(0)),)
    alone = Alone(stage)
    assert alone.after("input_ready", 1) == []
    assert [task.microbatch for task in alone.after("input_ready", 0)] == [0, 1]
    with pytest.raises(OutOfTurn, match="does not pass here"):
        stage.input_ready(MicrobatchIndex(3))
