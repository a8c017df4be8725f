"""One step at one stage: tasks in order, tensors by sample, plans checked."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Protocol, cast

import numpy as np
import pytest
import torch

from swarm_ft.base.clock import SystemClock
from swarm_ft.codec.spec import Direction
from swarm_ft.errors import MalformedMessage, NonFinite, OutOfTurn
from swarm_ft.ids import Attempt, MicrobatchIndex, RunId, SampleId, StepNumber
from swarm_ft.peer.boundary.end import Boundary
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.step import StageStep, StepProgress, StepRoutes
from swarm_ft.peer.timeline import Timeline
from swarm_ft.protocol.machines.pipeline import PARTS, min_microbatches
from swarm_ft.protocol.messages.boundary import FrameKey
from swarm_ft.protocol.messages.control import EvalSum, PlanStep
from swarm_ft.protocol.spec.microbatch import Microbatch
from swarm_ft.protocol.spec.run_spec import EvalCompression
from swarm_ft.protocol.spec.sample_rows import CONTEXT, NO_TOKEN, START
from swarm_ft.stage.base import Engine, Lengths, LossAndCounts, LossAndGradient
from tests.specs import train_spec

TOKENS, CHANNELS = 3, 2
PATIENCE_S = 30.0


@dataclass
class CountingEngine:
    """An engine whose arithmetic is plain: outputs are x + 1, gradients g * 2."""

    is_first: bool = False
    is_last: bool = False
    has_backward: bool = True
    done: list[tuple[str, int]] = field(default_factory=list)
    after: Callable[[], object] = lambda: None

    def did(self, kind: str, microbatch: MicrobatchIndex) -> None:
        self.done.append((kind, microbatch))
        self.after()

    def forward(
        self, microbatch: MicrobatchIndex, x: torch.Tensor, lengths: Lengths = None
    ) -> torch.Tensor:
        self.did("forward", microbatch)
        return x.float() + 1 if x.dim() == 3 else x.float()[..., None].expand(-1, -1, CHANNELS)

    def backward(self, microbatch: MicrobatchIndex, gradient: torch.Tensor) -> torch.Tensor | None:
        self.did("backward", microbatch)
        return None if self.is_first else gradient * 2

    def weight_gradients(self, microbatch: MicrobatchIndex) -> None:
        self.did("weights", microbatch)

    def infer(self, x: torch.Tensor, lengths: Lengths = None) -> torch.Tensor:
        self.did("evaluated", MicrobatchIndex(int(x.flatten()[0]) // 10))
        return x.float() if x.dim() == 3 else x.float()[..., None].expand(-1, -1, CHANNELS)

    def evaluate(
        self, x: torch.Tensor, labels: torch.Tensor, lengths: Lengths = None
    ) -> LossAndCounts:
        self.infer(x)
        return LossAndCounts(loss_sum=float(labels.sum()))

    def forward_backward(
        self,
        microbatch: MicrobatchIndex,
        x: torch.Tensor,
        labels: torch.Tensor,
        lengths: Lengths = None,
    ) -> LossAndGradient:
        self.did("both", microbatch)
        if not torch.isfinite(x.float()).all():
            raise NonFinite("an input is not finite")
        gradient = None if self.is_first else x * 2
        return LossAndGradient(loss_sum=float(labels.sum()), input_gradient=gradient)


@dataclass
class Outbox:
    """The messages of a stage to one of its boundaries."""

    sent: list[tuple[FrameKey, torch.Tensor]] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    is_fuller: asyncio.Event = field(default_factory=asyncio.Event)

    def acknowledge_consumed(self, key: FrameKey) -> None:
        self.acknowledged.append(key.sample)

    def send(self, key: FrameKey, x: torch.Tensor) -> None:
        self.sent.append((key, x))
        self.is_fuller.set()

    async def until(self, num_samples: int) -> None:
        """Wait until so many were given to it."""
        while len(self.sent) < num_samples:
            self.is_fuller.clear()
            await self.is_fuller.wait()

    @property
    def samples(self) -> Sequence[int]:
        return [key.sample for key, _ in self.sent]


def token_bytes(sample: int, *, count: int = TOKENS) -> bytes:
    return np.full(count, sample, "<u4").tobytes()


def plan_of(batches: tuple[Microbatch, ...], tokens: dict[SampleId, bytes]) -> PlanStep:
    return PlanStep(
        run_id=RunId("run"),
        attempt=Attempt(1),
        step=StepNumber(5),
        microbatches=batches,
        tokens=tokens,
        num_targets=1,
        lengths=(TOKENS,) * sum(len(batch.samples) for batch in batches),
    )


def make_plan(num_microbatches: int, *, with_tokens: bool) -> PlanStep:
    batches = tuple(
        Microbatch(MicrobatchIndex(i), (SampleId(10 * i), SampleId(10 * i + 1)))
        for i in range(num_microbatches)
    )
    samples = [sample for batch in batches for sample in batch.samples]
    tokens = {sample: token_bytes(sample) for sample in samples} if with_tokens else {}
    return plan_of(batches, tokens)


def key(sample: int, direction: Direction) -> FrameKey:
    return FrameKey(
        Attempt(1), StepNumber(5), MicrobatchIndex(sample // 10), SampleId(sample), direction
    )


def value(sample: float) -> torch.Tensor:
    return torch.full((TOKENS, CHANNELS), float(sample))


class MakeStep(Protocol):
    """See `make_step`."""

    def __call__(
        self,
        index: int,
        /,
        *,
        of: int,
        microbatches: int,
        plan: PlanStep | None = None,
        with_tokens: bool | None = None,
        more_held: int = 0,
        held_out: int = 0,
        has_backward: bool = True,
    ) -> tuple[StageStep, CountingEngine, Outbox, Outbox]:
        """The step, its engine, what it gives upstream and downstream."""
        ...


def routed(indices: Iterable[MicrobatchIndex], outbox: Outbox) -> dict[MicrobatchIndex, Boundary]:
    return dict.fromkeys(indices, cast("Boundary", outbox))


@pytest.fixture
def make_step() -> Iterator[MakeStep]:
    """`make_step(1, of=3, microbatches=4)`: the second of three stages."""
    with ThreadPoolExecutor(1) as compute:

        def make(
            index: int,
            *,
            of: int,
            microbatches: int,
            plan: PlanStep | None = None,
            with_tokens: bool | None = None,
            more_held: int = 0,
            held_out: int = 0,
            has_backward: bool = True,
        ) -> tuple[StageStep, CountingEngine, Outbox, Outbox]:
            engine = CountingEngine(
                is_first=index == 0, is_last=index == of - 1, has_backward=has_backward
            )
            needs = engine.is_first or engine.is_last
            plan = plan or make_plan(
                microbatches, with_tokens=needs if with_tokens is None else with_tokens
            )
            up, down = Outbox(), Outbox()
            indices = [MicrobatchIndex(i) for i in range(microbatches)]
            routes = StepRoutes(
                stage_index=index,
                batches={batch.index: batch for batch in plan.microbatches},
                upstream={} if engine.is_first else routed(indices, up),
                downstream={} if engine.is_last else routed(indices, down),
                held_out=frozenset(indices[microbatches - held_out :]),
            )
            clock = SystemClock()
            timeline = Timeline(clock, lambda _message: None)
            context = SimpleNamespace(
                compute=compute, background=compute, waited_s=0.0, clock=clock, timeline=timeline
            )
            step = StageStep(
                plan,
                routes,
                StepProgress(plan.step),
                engine=cast("Engine", engine),
                context=cast("PeerContext", context),
                max_held=min_microbatches(of, index) + more_held,
            )
            return step, engine, up, down

        yield make


def arrive(step: StageStep, samples: Iterable[int], direction: Direction) -> None:
    for sample in samples:
        step.on_arrival(key(sample, direction), value(sample))


async def test_a_single_stage_computes_everything_itself(make_step: MakeStep) -> None:
    step, engine, _, _ = make_step(0, of=1, microbatches=3)
    await step.run()
    assert engine.done == [(kind, i) for i in range(3) for kind in ("both", "weights")]
    assert step.parts_begun == 3 * PARTS
    assert step.progress.loss_sum == TOKENS * (0 + 1 + 10 + 11 + 20 + 21)


async def test_the_first_stage_sends_each_sample_under_its_own_name(make_step: MakeStep) -> None:
    step, engine, _, down = make_step(0, of=2, microbatches=2)
    running = asyncio.create_task(step.run())
    arrive(step, [0, 1, 10, 11], Direction.BACKWARD)
    await running
    assert [k for k, _ in down.sent] == [key(s, Direction.FORWARD) for s in (0, 1, 10, 11)]
    for k, x in down.sent:
        assert torch.equal(x, value(k.sample))
    assert sorted(engine.done) == [
        ("backward", 0),
        ("backward", 1),
        ("forward", 0),
        ("forward", 1),
        ("weights", 0),
        ("weights", 1),
    ]
    assert step.parts_begun == 2 * PARTS


async def test_the_last_stage_sums_losses_and_sends_gradients(make_step: MakeStep) -> None:
    step, engine, up, _ = make_step(1, of=2, microbatches=2)
    arrive(step, [0, 1, 10, 11], Direction.FORWARD)
    await step.run()
    assert engine.done == [(kind, i) for i in range(2) for kind in ("both", "weights")]
    assert step.progress.loss_sum == TOKENS * (0 + 1 + 10 + 11)
    assert step.progress.num_targets == 4 * (TOKENS - 1)
    assert [k for k, _ in up.sent] == [key(s, Direction.BACKWARD) for s in (0, 1, 10, 11)]
    assert all(torch.equal(x, 2 * value(k.sample)) for k, x in up.sent)


async def test_a_middle_stage_passes_both_ways_and_needs_no_tokens(make_step: MakeStep) -> None:
    step, engine, up, down = make_step(1, of=3, microbatches=2)
    arrive(step, [0, 1, 10, 11], Direction.FORWARD)
    arrive(step, [0, 1, 10, 11], Direction.BACKWARD)
    await step.run()
    assert engine.done == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
        ("weights", 0),
        ("weights", 1),
    ]
    assert step.progress.done == {0: (0, 1), 1: (10, 11)}
    assert up.samples == down.samples == [0, 1, 10, 11]
    assert all(torch.equal(x, value(k.sample) + 1) for k, x in down.sent)
    assert all(torch.equal(x, 2 * value(k.sample)) for k, x in up.sent)


@pytest.mark.parametrize("index", [0, 1])
async def test_where_nobody_waits_for_gradients_a_forward_is_all(
    make_step: MakeStep, index: int
) -> None:
    step, engine, up, down = make_step(index, of=3, microbatches=4, has_backward=False)
    if index:
        arrive(step, [0, 1, 10, 11, 20, 21, 30, 31], Direction.FORWARD)
    boundary = cast("Boundary", down)
    assert step.expected(boundary, Direction.BACKWARD) == {}
    await step.run()
    assert engine.done == [(kind, i) for i in range(4) for kind in ("forward", "weights")]
    assert set(step.progress.done) == set(range(4))
    assert (len(down.samples), len(up.samples)) == (8, 0)
    assert step.parts_begun == 4 * PARTS


async def test_microbatches_are_computed_in_order_however_samples_arrive(
    make_step: MakeStep,
) -> None:
    step, engine, up, _ = make_step(1, of=2, microbatches=3)
    running = asyncio.create_task(step.run())
    for sample in (21, 1, 11, 20, 10, 0):
        arrive(step, [sample], Direction.FORWARD)
    await running
    assert [index for kind, index in engine.done if kind == "both"] == [0, 1, 2]
    assert [index for kind, index in engine.done if kind == "weights"] == [0, 1, 2]
    assert up.samples == [0, 1, 10, 11, 20, 21]


async def test_only_so_many_forwards_run_ahead_of_the_first_backward(make_step: MakeStep) -> None:
    step, engine, _, down = make_step(0, of=2, microbatches=9)
    loop = asyncio.get_running_loop()
    ahead: list[int] = []

    def answer_the_oldest() -> None:
        """Answer like the last stage, which gets a microbatch behind two on their way."""
        kinds = Counter(kind for kind, _ in engine.done)
        ahead.append(kinds["forward"] - kinds["weights"])
        num_backwards = kinds["backward"]
        is_stuck = num_backwards == kinds["weights"] and (
            ahead[-1] == 3 or kinds["forward"] == 9 > num_backwards
        )
        if is_stuck:
            oldest = [10 * num_backwards, 10 * num_backwards + 1]
            loop.call_soon_threadsafe(arrive, step, oldest, Direction.BACKWARD)

    engine.after = answer_the_oldest
    await step.run()
    assert max(ahead) == 3, "twice the stages behind, links counted as stages, and one"
    assert [i for kind, i in engine.done if kind == "backward"] == list(range(9))
    assert down.samples == [s for i in range(9) for s in (10 * i, 10 * i + 1)]


def test_a_step_expects_every_sample_once_each_way(make_step: MakeStep) -> None:
    step, _, up, down = make_step(1, of=3, microbatches=2)
    for boundary, way in ((up, Direction.FORWARD), (down, Direction.BACKWARD)):
        assert step.expected(cast("Boundary", boundary), way) == {
            key(sample, way): TOKENS for sample in (0, 1, 10, 11)
        }
        assert not step.expected(cast("Boundary", Outbox()), way)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("tokens", [{}, {0: token_bytes(0)}], ids=["none", "too few"])
def test_a_plan_without_tokens_is_malformed_at_both_ends(
    make_step: MakeStep, index: int, tokens: dict[SampleId, bytes]
) -> None:
    whole = make_plan(1, with_tokens=False)
    plan = plan_of(whole.microbatches, tokens)
    with pytest.raises(MalformedMessage, match="plan of step 5: tokens missing or uneven"):
        make_step(index, of=2, microbatches=1, plan=plan)


def test_a_plan_with_samples_of_different_lengths_is_malformed(make_step: MakeStep) -> None:
    whole = make_plan(1, with_tokens=True)
    tokens = whole.tokens | {SampleId(1): token_bytes(1, count=TOKENS + 1)}
    plan = plan_of(whole.microbatches, tokens)
    with pytest.raises(MalformedMessage, match="uneven"):
        make_step(0, of=2, microbatches=1, plan=plan)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([1, NO_TOKEN, 1], "without gaps"),
        ([1, NO_TOKEN, NO_TOKEN], "2 tokens or more"),
        ([1, CONTEXT, CONTEXT], "all are only read"),
        ([1, 1, NO_TOKEN], r"lengths \[3, 3\] of \[3, 2\]"),
    ],
)
def test_a_plan_with_rows_that_are_no_samples_is_malformed(
    make_step: MakeStep, words: list[int], why: str
) -> None:
    whole = make_plan(1, with_tokens=True)
    tokens = whole.tokens | {SampleId(1): np.array(words, "<u4").tobytes()}
    plan = plan_of(whole.microbatches, tokens)
    for index in (0, 1):
        with pytest.raises(MalformedMessage, match=f"plan of step 5, microbatch 0: .*{why}"):
            make_step(index, of=2, microbatches=1, plan=plan)


DOCUMENTS = {SampleId(1): (2, 2)}


@pytest.mark.parametrize(
    ("words", "documents", "why"),
    [
        ([1, 1, 1, 1], DOCUMENTS, r"lengths \[4, \(2, 2\)\] of \[4, 4\]"),
        ([1, 1, START | 1, 1], {}, r"lengths \[4, 4\] of \[4, \(2, 2\)\]"),
        ([START | 1, 1, START | 1, 1], DOCUMENTS, "expected a document in front of a further one"),
        ([1, START | 1, 1, 1], DOCUMENTS, r"lengths \[4, \(2, 2\)\] of \[4, \(1, 3\)\]"),
    ],
)
def test_a_plan_whose_rows_have_other_documents_is_malformed(
    make_step: MakeStep, words: list[int], documents: dict[SampleId, tuple[int, ...]], why: str
) -> None:
    whole = make_plan(1, with_tokens=False)
    tokens = {SampleId(0): token_bytes(0, count=4), SampleId(1): np.array(words, "<u4").tobytes()}
    plan = replace(whole, tokens=tokens, lengths=(4, 4), documents=documents)
    for index in (0, 1):
        with pytest.raises(MalformedMessage, match=f"plan of step 5, microbatch 0: {why}"):
            make_step(index, of=2, microbatches=1, plan=plan)


@pytest.mark.parametrize(
    "documents",
    [{SampleId(1): (2, 3)}, {SampleId(7): (2, 2)}, {SampleId(1): (4,), SampleId(9): ()}],
)
def test_documents_are_of_samples_of_the_plan_and_as_long_as_these(
    documents: dict[SampleId, tuple[int, ...]],
) -> None:
    whole = make_plan(1, with_tokens=False)
    with pytest.raises(MalformedMessage, match=r"expected documents of [04] tokens in all, got"):
        replace(whole, lengths=(4, 4), documents=documents)


async def test_samples_of_different_lengths_are_padded_here_and_cut_again(
    make_step: MakeStep,
) -> None:
    whole = make_plan(1, with_tokens=False)
    plan = replace(whole, lengths=(TOKENS, 2))
    step, engine, up, down = make_step(1, of=3, microbatches=1, plan=plan)
    assert set(step.expected(cast("Boundary", up), Direction.FORWARD).values()) == {TOKENS, 2}
    step.on_arrival(key(0, Direction.FORWARD), value(5))
    step.on_arrival(key(1, Direction.FORWARD), value(7)[:2])
    step.on_arrival(key(0, Direction.BACKWARD), value(5))
    step.on_arrival(key(1, Direction.BACKWARD), value(7)[:2])
    await step.run()
    assert engine.done
    for sent, expected in ((down.sent, (6, 8)), (up.sent, (10, 14))):
        for sample, length in ((0, TOKENS), (1, 2)):
            ((_, x),) = (one for one in sent if one[0].sample == sample)
            assert torch.equal(x, torch.full((length, CHANNELS), float(expected[sample])))


async def test_what_the_engine_raises_ends_the_step(make_step: MakeStep) -> None:
    step, *_ = make_step(1, of=2, microbatches=1)
    step.on_arrival(key(0, Direction.FORWARD), value(float("nan")))
    arrive(step, [1], Direction.FORWARD)
    with pytest.raises(NonFinite):
        await step.run()


async def test_a_loss_counts_with_its_microbatch(make_step: MakeStep) -> None:
    step, engine, _, _ = make_step(1, of=2, microbatches=2, more_held=1)
    progress = step.progress
    seen: list[tuple[float, set[MicrobatchIndex]]] = []
    engine.after = lambda: seen.append((progress.loss_sum, set(progress.done)))
    arrive(step, [0, 1, 10, 11], Direction.FORWARD)
    await step.run()
    assert [kind for kind, _ in engine.done] == ["both", "both", "weights", "weights"]
    assert seen[:3] == [(0.0, set())] * 3
    assert seen[3] == (TOKENS * 1.0, {0})
    assert progress.loss_sum == TOKENS * (0 + 1 + 10 + 11)


async def test_a_step_that_is_interrupted_completes_what_has_had_its_backward(
    make_step: MakeStep,
) -> None:
    step, engine, up, _ = make_step(1, of=3, microbatches=3)
    begun, go_on = threading.Event(), threading.Event()

    def interrupt_here() -> None:
        if engine.done[-1] == ("backward", 1):
            begun.set()
            assert go_on.wait(PATIENCE_S)

    engine.after = interrupt_here
    arrive(step, [0, 1, 10, 11, 20, 21], Direction.FORWARD)
    arrive(step, [0, 1, 10, 11], Direction.BACKWARD)
    running = asyncio.create_task(step.run())
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    running.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    kinds = {kind: [i for k, i in engine.done if k == kind] for kind, _ in engine.done}
    assert kinds["backward"] == kinds["weights"] == [0, 1]
    assert step.progress.done == {0: (0, 1), 1: (10, 11)}
    assert up.samples == [0, 1, 10, 11], "what is done is with the stage upstream"


async def test_weights_that_fail_are_not_tried_again(
    make_step: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, engine, _, _ = make_step(1, of=2, microbatches=2, more_held=1)

    def fail(microbatch: MicrobatchIndex) -> None:
        engine.did("weights", microbatch)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "weight_gradients", fail)
    arrive(step, [0, 1, 10, 11], Direction.FORWARD)
    with pytest.raises(RuntimeError, match="out of memory"):
        await step.run()
    assert step.progress.done == {}
    assert engine.done == [(kind, i) for kind in ("both", "weights") for i in (0, 1)]


# ---- held-out microbatches


async def test_held_out_microbatches_go_forward_alone_and_behind_the_others(
    make_step: MakeStep,
) -> None:
    step, engine, up, down = make_step(1, of=3, microbatches=3, held_out=2)
    assert step.expected(cast("Boundary", down), Direction.BACKWARD) == {
        key(sample, Direction.BACKWARD): TOKENS for sample in (0, 1)
    }
    assert step.expected(cast("Boundary", up), Direction.FORWARD) == {
        key(sample, Direction.FORWARD): TOKENS for sample in (0, 1, 10, 11, 20, 21)
    }
    arrive(step, [20, 21, 0, 1], Direction.FORWARD)
    arrive(step, [0, 1], Direction.BACKWARD)
    arrive(step, [10, 11], Direction.FORWARD)
    await step.run()
    assert engine.done == [
        ("forward", 0),
        ("backward", 0),
        ("weights", 0),
        ("evaluated", 1),
        ("evaluated", 2),
    ]
    assert down.samples == [0, 1, 10, 11, 20, 21]
    assert up.acknowledged == [10, 11, 20, 21]
    assert step.parts_begun == PARTS + 2
    assert dict(step.progress.done).keys() == {0}, "nothing of them is kept"
    assert step.progress.evaluated == {}


async def test_a_stage_evaluates_no_further_ahead_than_the_next_one_takes(
    make_step: MakeStep,
) -> None:
    step, engine, _, down = make_step(0, of=2, microbatches=4, held_out=4)
    running = asyncio.create_task(step.run())
    for ahead in (2, 3, 4):
        await down.until(2 * ahead)
        assert len(engine.done) == ahead
        for sample in (10 * (ahead - 2), 10 * (ahead - 2) + 1):
            step.on_consumed(key(sample, Direction.FORWARD))
    await running
    assert down.samples == [0, 1, 10, 11, 20, 21, 30, 31]


async def test_the_last_stage_keeps_the_losses_of_each_pass(make_step: MakeStep) -> None:
    step, engine, up, _ = make_step(1, of=2, microbatches=3, held_out=2)
    arrive(step, [10, 11, 20, 21, 0, 1], Direction.FORWARD)
    await step.run()
    assert engine.done[-1] == ("evaluated", 2)
    assert up.samples == [0, 1]
    train = train_spec(
        num_samples=10, num_eval_samples=10, eval_compression=EvalCompression.BOTH, batch_size=2
    )
    num_targets = 2 * (TOKENS - 1)
    assert step.progress.eval_sums(train) == (
        EvalSum(loss_sum=TOKENS * (10 + 11), num_targets=num_targets),
        EvalSum(loss_sum=TOKENS * (20 + 21), num_targets=num_targets),
    )
    done = [Microbatch(index, one.samples) for index, one in step.progress.evaluated.items()]
    first = Microbatch(MicrobatchIndex(0), (SampleId(0), SampleId(1)))
    step.progress.check([first, *done])
    with pytest.raises(OutOfTurn, match="expected the plan to count"):
        step.progress.check([first])
