"""Repartitions: layers move between a run's stages while it trains, if that is much faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.facts.events import (
    CommitRecord,
    EmitEvent,
    RollbackRecord,
    RunPaused,
    RunResumed,
)
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.moving import APART_S, LOOK_S
from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import SaveStage, StepReady
from swarm_ft.protocol.messages.events import EventKind
from swarm_ft.protocol.spec.run_spec import RunSpec, SaveStrategy
from tests.reasons import kinds_in, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN, SECOND = RunId("run-1"), RunId("run-2")
EVEN = ["a: 0-3", "b: 3-6", "c: 6-9"]
FAST_S, SLOW_S = 0.1, 0.6
NUM_STEPS = 120
BLOCK_BYTES = 4 * 400_000
"""Bytes of a block, with gradients and optimizer state."""


class Worker(FakePeer):
    """A peer that takes any layers, with a given time for each block of a microbatch.

    Its link carries activations easily, and the replicas' sums of large blocks in seconds.
    """

    def __init__(self, name: str, block_s: float = FAST_S, layers: str = "auto") -> None:
        super().__init__(name, layers)
        self.block_s = block_s
        self.noise: Callable[[], float] = lambda: 1.0
        self.max_up_bytes_per_s = 2.5e5

    def step_ready(self, step: int) -> StepReady:
        blocks, microbatches = len(self._stage.layers), len(self.visited) // 2
        self.compute_s = self.block_s * blocks * microbatches * self.noise()
        return super().step_ready(step)


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return long_spec(make_spec)


def long_spec(make_spec: MakeSpec, **train: object) -> RunSpec:
    """A spec of nine large blocks, two microbatches per step, and codecs without buffers."""
    wanted: dict[str, object] = {
        "num_samples": 400,
        "num_steps": NUM_STEPS,
        "forward_codec": "none",
    }
    return make_spec(
        num_blocks=9, block_bytes=BLOCK_BYTES // 4, **wanted | {"backward_codec": "none"} | train
    )


def workers(*names: str) -> list[Worker]:
    return [Worker(name) for name in names]


def training(
    spec: RunSpec,
    peers: list[Worker],
    *,
    num_keepers: int = 2,
    keeps_snapshots: bool = True,
    moves_layers: bool = True,
) -> Swarm:
    """A swarm that trains on an even cut."""
    swarm = Swarm(Journal(":memory:"))
    swarm.state = replace(
        swarm.state,
        num_keepers=num_keepers,
        keeps_snapshots=keeps_snapshots,
        moves_layers=moves_layers,
    )
    for peer in peers:
        peer.keep_bytes = (num_keepers > 0) << 40
    swarm.submit(spec)
    swarm.join(*peers)
    swarm.wait(SETTLE_S)
    swarm.settle_until(lambda: swarm.run().committed_steps == 4)
    return swarm


def cut(swarm: Swarm, run: RunId = RUN) -> list[str]:
    return [f"{' '.join(stage.peers)}: {stage.layers}" for stage in swarm.run(run).stages]


def moves(swarm: Swarm) -> list[Reason | None]:
    happened = (effect for effect in swarm.effects if isinstance(effect, EmitEvent))
    return [one.reason for one in happened if one.kind is EventKind.RUN_MOVED]


def moves_at(swarm: Swarm) -> list[int]:
    """Return the steps after which layers moved."""
    happened = (effect for effect in swarm.effects if isinstance(effect, EmitEvent))
    return [one.to_step or 0 for one in happened if one.kind is EventKind.RUN_MOVED]


def committed(swarm: Swarm, run: RunId = RUN) -> list[int]:
    """Return the steps in the order of their commits, with repetitions."""
    records = (effect for effect in swarm.effects if isinstance(effect, CommitRecord))
    return [int(record.step.step) for record in records if record.run_id == run]


def until_moved(swarm: Swarm) -> None:
    swarm.settle_until(lambda: moves(swarm) and swarm.run().phase is RunPhase.TRAINING)


def until_moved_times(swarm: Swarm, times: int) -> None:
    swarm.settle_until(lambda: len(moves(swarm)) == times)


def until_step(swarm: Swarm, step: int) -> None:
    swarm.settle_until(lambda: swarm.run().committed_steps == step)


def finish(swarm: Swarm) -> None:
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.FINISHED)


def awaits_move(swarm: Swarm) -> bool:
    moving = swarm.run().moving
    return moving is not None and not moving.has_begun


# ---- a peer gets slow, a fast one comes


@pytest.mark.parametrize("num_keepers", [0, 2], ids=["one place", "keepers"])
def test_a_peer_that_got_slow_gives_layers_away_and_no_step_is_made_again(
    spec: RunSpec, num_keepers: int
) -> None:
    peers = workers("a", "b", "c")
    swarm = training(spec, peers, num_keepers=num_keepers)
    assert cut(swarm) == EVEN
    peers[1].block_s = SLOW_S
    finish(swarm)
    (moved,) = moves(swarm)
    assert cut(swarm) == ["a: 0-4", "b: 4-5", "c: 5-9"]
    assert moved is not None
    assert moved.parts == (
        reason(Kind.LAYERS_MOVED, "b", layers="3-4", others=(PeerId("a"),)),
        reason(Kind.LAYERS_MOVED, "b", layers="5-6", others=(PeerId("c"),)),
    )
    after, before = moved.amount, moved.limit
    taken, moved_at = [step.seconds for step in swarm.history[RUN]], moves_at(swarm)[0]
    assert taken[moved_at - 1] == pytest.approx(before, rel=0.1)
    assert taken[moved_at] == pytest.approx(after, rel=0.3)
    assert committed(swarm) == list(range(NUM_STEPS))


def test_a_fast_peer_that_comes_shows_first_how_fast_it_is_then_gets_most_layers(
    spec: RunSpec,
) -> None:
    swarm = training(spec, workers("a", "b", "c"))
    swarm.join(Worker("fast", FAST_S / 6))
    swarm.settle_until(lambda: "fast" in swarm.run().peers)
    assert not moves(swarm), "it is a replica first"
    until_moved(swarm)
    hosted = {str(a.peer_id): len(a.layers) for a in swarm.run().attempt.assignments}
    assert hosted["fast"] == max(hosted.values())
    assert hosted["fast"] >= 6
    finish(swarm)
    assert len(moves(swarm)) == 1
    assert committed(swarm) == list(range(NUM_STEPS))


def test_a_peer_far_faster_than_all_takes_all_layers(make_spec: MakeSpec) -> None:
    peers = workers("a", "b")
    peers[1].memory_bytes = 5 * BLOCK_BYTES  # it is no replica of all of them
    swarm = training(long_spec(make_spec, num_steps=600), peers)
    peers[0].block_s, peers[1].block_s = FAST_S / 8, 3 * SLOW_S
    until_moved(swarm)
    assert [str(stage.layers) for stage in swarm.run().stages] == ["0-9"]


def test_who_has_no_layers_any_more_is_released_and_told_why(spec: RunSpec) -> None:
    peers = workers("a", "b", "c")
    peers[1].memory_bytes = 3 * BLOCK_BYTES  # it is no replica of a larger stage
    swarm = training(spec, peers)
    peers[1].block_s = 4 * SLOW_S
    until_moved(swarm)
    assert "b" not in swarm.run().peers
    released = [message.reason for peer, message in swarm.said(Release) if peer == "b"]
    assert released == [reason(Kind.RELEASED_MOVED)]


# ---- what it takes


@pytest.mark.parametrize(
    ("train", "state"),
    [
        ({}, {"moves_layers": False}),
        ({}, {"keeps_snapshots": False, "num_keepers": 0}),
        ({"save_strategy": SaveStrategy.NO}, {}),
        ({"num_steps": 10}, {}),
    ],
    ids=["--no-moves", "nowhere to keep it", "--save-strategy no", "soon over"],
)
def test_layers_stay_where_they_are(
    make_spec: MakeSpec, train: dict[str, object], state: dict[str, Any]
) -> None:
    peers = workers("a", "b", "c")
    swarm = training(long_spec(make_spec, **train), peers, **state)
    peers[1].block_s = SLOW_S
    finish(swarm)
    assert not moves(swarm)
    assert cut(swarm) == EVEN


def test_who_names_its_layers_keeps_them(spec: RunSpec) -> None:
    peers = [Worker("a", layers="0-3"), Worker("b", layers="3-6"), Worker("c", layers="6-9")]
    swarm = training(spec, peers)
    peers[1].block_s = SLOW_S
    finish(swarm)
    assert not moves(swarm)


def test_a_little_slower_is_no_reason(spec: RunSpec) -> None:
    peers = workers("a", "b", "c")
    swarm = training(spec, peers)
    peers[1].block_s = 1.1 * FAST_S
    finish(swarm)
    assert not moves(swarm)


def test_a_single_slow_step_is_no_reason(spec: RunSpec) -> None:
    peers = workers("a", "b", "c")
    swarm = training(spec, peers)
    for at in (20, 50, 80, 110):
        until_step(swarm, at)
        peers[1].block_s = 20 * SLOW_S
        until_step(swarm, at + 1)
        peers[1].block_s = FAST_S
    finish(swarm)
    assert not moves(swarm)


# ---- it does not go to and fro


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1 << 32))
def test_noise_moves_nothing(spec: RunSpec, seed: int) -> None:
    random, peers = Random(seed), workers("a", "b", "c")
    for peer in peers:
        peer.noise = lambda: random.uniform(0.8, 1.25)
    swarm = training(spec, peers)
    finish(swarm)
    assert not moves(swarm)


def test_further_moves_wait_for_longer_each_time(make_spec: MakeSpec) -> None:
    peers = workers("a", "b", "c")
    swarm = training(long_spec(make_spec, num_steps=3000), peers)
    moved_s = []
    for turn in range(3):  # each time another one is slow, as if to keep the run busy
        for number, peer in enumerate(peers):
            peer.block_s = SLOW_S if number == turn else FAST_S
        until_moved_times(swarm, turn + 1)
        moved_s.append(swarm.now_s)
    assert moved_s[1] - moved_s[0] >= APART_S
    assert moved_s[2] - moved_s[1] >= 2 * APART_S


def test_what_peers_did_is_looked_at_now_and_then(spec: RunSpec) -> None:
    peers = workers("a", "b", "c")
    swarm = training(spec, peers)
    looked: list[float] = []
    while swarm.run().committed_steps < 100:
        swarm.step()
        looked += [swarm.run().moves.looked_s] * (looked[-1:] != [swarm.run().moves.looked_s])
    assert len(looked) > 3
    assert all(later - sooner >= LOOK_S for sooner, later in pairwise(looked))


# ---- whatever happens meanwhile


def saving(spec: RunSpec) -> tuple[Swarm, list[Worker]]:
    """A swarm that waits for the snapshot of a repartition, of which no stage is saved yet."""
    peers = workers("a", "b", "c")
    swarm = training(spec, peers)
    peers[1].block_s = SLOW_S
    swarm.settle_until(lambda: awaits_move(swarm))
    assert swarm.run().step is None, "no step is made meanwhile"
    assert kinds_in(swarm.run().detail) == [Kind.MOVE_SAVES_FIRST]
    return swarm, peers


def loading(spec: RunSpec) -> tuple[Swarm, list[Worker]]:
    """A swarm whose peers load their new stages."""
    swarm, peers = saving(spec)
    swarm.settle_until(lambda: moves(swarm))
    assert swarm.run().phase is RunPhase.LOADING
    return swarm, peers


def just_moved(spec: RunSpec) -> tuple[Swarm, list[Worker]]:
    """A swarm in the first step on the new stages."""
    swarm, peers = loading(spec)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    return swarm, peers


PHASES = {"saving": saving, "loading": loading, "first step": just_moved}
by_phase = pytest.mark.parametrize("begin", PHASES.values(), ids=PHASES.keys())


@by_phase
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_peer_that_dies_and_comes_back_costs_no_step(
    spec: RunSpec, begin: Callable[[RunSpec], tuple[Swarm, list[Worker]]], name: str
) -> None:
    swarm, peers = begin(spec)
    peer = next(one for one in peers if one.peer_id == name)
    steps = swarm.run().committed_steps
    swarm.lose(peer)
    swarm.wait(1.0)
    if begin is not saving:
        peer.forget()  # another process; a stage that it had on the old cut it is to keep
    swarm.join(peer)
    finish(swarm)
    assert committed(swarm)[:steps] == list(range(steps))
    assert [int(step.step) for step in swarm.history[RUN]] == list(range(NUM_STEPS))
    assert len(swarm.run().stages) == 3


@by_phase
def test_who_dies_for_ever_is_done_without(
    spec: RunSpec, begin: Callable[[RunSpec], tuple[Swarm, list[Worker]]]
) -> None:
    swarm, peers = begin(spec)
    swarm.lose(peers[0])
    swarm.wait(60.0)
    finish(swarm)
    assert "a" not in swarm.run().peers
    assert [int(step.step) for step in swarm.history[RUN]] == list(range(NUM_STEPS))


@by_phase
def test_a_coordinator_that_is_started_again_goes_on_with_it(
    spec: RunSpec, begin: Callable[[RunSpec], tuple[Swarm, list[Worker]]]
) -> None:
    swarm, peers = begin(spec)
    steps, expected = swarm.run().committed_steps, swarm.run().moving
    swarm.restart()
    assert swarm.run().moving == expected
    swarm.join(*peers)
    swarm.settle_until(lambda: swarm.run().committed_steps == steps + 2)
    assert cut(swarm) == ["a: 0-4", "b: 4-5", "c: 5-9"]
    finish(swarm)
    assert committed(swarm) == list(range(NUM_STEPS))


def test_a_stage_that_is_lost_soon_after_is_loaded_again_on_the_new_cut(spec: RunSpec) -> None:
    swarm, peers = just_moved(spec)
    after, step = cut(swarm), swarm.run().committed_steps
    swarm.settle_until(lambda: swarm.run().committed_steps == step + 2)
    swarm.lose(peers[2])
    peers[2].forget()
    swarm.join(peers[2])
    assert swarm.run().committed_steps == step
    assert cut(swarm) == after
    finish(swarm)
    assert [int(step.step) for step in swarm.history[RUN]] == list(range(NUM_STEPS))


def test_once_there_is_a_snapshot_of_the_new_stages_the_move_is_over(make_spec: MakeSpec) -> None:
    swarm, _ = just_moved(long_spec(make_spec, save_steps=10))
    assert swarm.run().moving is not None
    swarm.settle_until(lambda: swarm.run().moving is None)
    assert [stage.layers for stage in swarm.run().past.snapshots[-1].stages] == [
        stage.layers for stage in swarm.run().stages
    ]
    finish(swarm)
    assert committed(swarm) == list(range(NUM_STEPS))


def test_what_cannot_be_saved_does_not_move_and_is_not_tried_again(spec: RunSpec) -> None:
    peers = workers("a", "b", "c")
    swarm = training(spec, peers, num_keepers=0)
    peers[1].block_s, peers[2].saves = SLOW_S, False
    finish(swarm)
    assert not moves(swarm)
    assert len({message.step for _, message in swarm.said(SaveStage)}) == 1
    assert committed(swarm) == list(range(NUM_STEPS))
    assert reason(Kind.MOVE_IMPOSSIBLE) in swarm.reasons()


def test_a_peer_that_would_leave_meanwhile_is_let_go_first(spec: RunSpec) -> None:
    swarm, peers = saving(spec)
    swarm.would_leave(peers[0])
    assert swarm.run().moving is None
    swarm.settle_until(lambda: swarm.may_go(peers[0]))
    swarm.leave(peers[0])
    finish(swarm)
    assert committed(swarm) == list(range(NUM_STEPS))


def test_a_run_that_is_paused_meanwhile_stays(spec: RunSpec) -> None:
    swarm, _ = saving(spec)
    swarm.handle(RunPaused(RUN))
    swarm.settle()
    assert swarm.run().moving is None
    assert swarm.run().step is None
    swarm.handle(RunResumed(RUN))
    finish(swarm)
    assert committed(swarm) == list(range(NUM_STEPS))


def test_a_run_for_which_another_one_waits_makes_room_and_does_not_move(
    make_spec: MakeSpec,
) -> None:
    peers = workers("a", "b", "c", "d")
    swarm = training(long_spec(make_spec), peers)
    steps = swarm.run().committed_steps
    swarm.submit(make_spec(), SECOND, owner="bob")
    swarm.settle_until(lambda: swarm.run(SECOND).committed_steps)
    assert swarm.run().committed_steps >= steps
    assert not moves(swarm)
    assert [len(swarm.run(run).stages) for run in (RUN, SECOND)] == [2, 2]
    rollbacks = [effect for effect in swarm.effects if isinstance(effect, RollbackRecord)]
    assert len(rollbacks) == 1, "its job asked for no snapshots, and peers keep one for it"


def test_a_run_moves_beside_others_and_takes_nobody_from_them(make_spec: MakeSpec) -> None:
    peers = workers("a", "b", "c")
    swarm = training(long_spec(make_spec), peers)
    swarm.submit(make_spec(num_steps=100), SECOND, owner="bob")
    swarm.join(Worker("d", layers="0-4"))
    swarm.submit(make_spec(num_blocks=5, block_bytes=1 << 45), RunId("run-3"), owner="eve")
    swarm.settle_until(lambda: swarm.run(SECOND).committed_steps)
    assert swarm.run(RunId("run-3")).phase is RunPhase.WAITING, "nobody has so much room"
    peers[1].block_s = SLOW_S
    until_moved(swarm)
    assert swarm.run(SECOND).phase is RunPhase.TRAINING
    assert cut(swarm) == ["a: 0-4", "b: 4-5", "c: 5-9"]
    assert cut(swarm, SECOND) == ["d: 0-4"]
    finish(swarm)
    assert committed(swarm) == list(range(NUM_STEPS))


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_happens_each_step_counts_once(make_spec: MakeSpec, seed: int) -> None:
    """Check any events; `Swarm` checks each one against the records before it."""
    random, peers = Random(seed), workers("a", "b", "c", "d")
    swarm = training(long_spec(make_spec, num_steps=80), peers)
    away: list[Worker] = []
    for _ in range(100):
        for _ in range(random.randrange(12)):
            if swarm.pending:
                swarm.step()
        trouble(swarm, peers, away, random)
    swarm.join(*away)
    for _ in range(50):
        swarm.wait(60.0)
        swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert [step.step for step in swarm.history[RUN]] == [StepNumber(s) for s in range(80)]


def trouble(swarm: Swarm, peers: list[Worker], away: list[Worker], random: Random) -> None:
    what, present = random.random(), [peer for peer in peers if peer not in away]
    if what < 0.3:
        random.choice(peers).block_s = random.choice((FAST_S / 4, FAST_S, SLOW_S))
    elif what < 0.35 and len(present) > 2:
        away.append(random.choice(present))
        swarm.lose(away[-1])
    elif what < 0.5 and away:
        swarm.join(away.pop(0))
    elif what < 0.53:
        swarm.restart()
        swarm.join(*present)
    else:
        swarm.wait(random.choice((0.5, 1.0, 2.0)))
