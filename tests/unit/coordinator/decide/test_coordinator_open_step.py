"""Plans of a repeated step: done work stays done, and a slow peer's share is divided again."""

from dataclasses import replace
from typing import Any

import pytest

from swarm_ft.coordinator.facts.events import SendMessage
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.ids import Attempt, MicrobatchIndex, StepNumber
from swarm_ft.protocol.machines.pipeline import PARTS
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerAlive, PlanStep
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

MICROBATCHES = 8
USUAL_S, SLOW_S = 1.0, 6.0


@pytest.fixture
def peers() -> list[FakePeer]:
    """Two replicas of the first stage and two of the second."""
    return [
        FakePeer(f"{name}{i}", layers)
        for layers, name in (("0-2", "a"), ("2-4", "b"))
        for i in (1, 2)
    ]


@pytest.fixture
def training(swarm: Swarm, make_spec: MakeSpec, peers: list[FakePeer]) -> Swarm:
    """A swarm in the middle of the fifth step; no peer is ready yet."""
    spec = make_spec(
        num_samples=4 * MICROBATCHES, batch_size=MICROBATCHES, micro_batch_size=1, num_steps=9
    )
    for peer in peers:
        peer.compute_s = USUAL_S * MICROBATCHES / 2
    swarm.submit(spec)
    swarm.join(*peers)
    swarm.settle_until(lambda: swarm.run().committed_steps == 4)
    for peer in peers:
        swarm.forget_said(peer.peer_id)
    return swarm


def last_plan(peer: FakePeer) -> PlanStep:
    return [message for message in peer.heard if isinstance(message, PlanStep)][-1]


def share(plan: PlanStep, stage: int, replica: int) -> list[MicrobatchIndex]:
    own = [batch for batch in plan.microbatches if batch.replica_at(stage) == replica]
    return [batch.index for batch in own if stage not in batch.done]


def alive(swarm: Swarm, *, parts_begun: int, compute_s: float) -> PeerAlive:
    run = swarm.run()
    return PeerAlive(
        run_id=run.run_id,
        attempt=run.attempt.number,
        step=StepNumber(run.committed_steps),
        parts_begun=parts_begun,
        compute_s=compute_s,
    )


def test_after_a_loss_the_plan_names_what_is_done_and_with_whom(
    training: Swarm, peers: list[FakePeer]
) -> None:
    a1, _, b1, b2 = peers
    before = last_plan(a1)
    a1.done = frozenset(share(before, 0, 0)[:2])
    b1.done = frozenset(share(before, 1, 0))
    training.lose(b2)
    training.settle_until(lambda: last_plan(a1) is not before)
    again = last_plan(a1)
    assert again.step == before.step
    assert [b.samples for b in again.microbatches] == [b.samples for b in before.microbatches]
    assert {b.index for b in again.microbatches if 0 in b.done} == a1.done
    assert {b.index for b in again.microbatches if 1 in b.done} == b1.done
    assert len(share(again, 0, 0)) == len(share(again, 0, 1)) == 3
    assert sorted(share(again, 1, 0)) == sorted(share(before, 1, 1))


def test_tokens_go_only_to_those_who_still_compute_with_them(
    training: Swarm, peers: list[FakePeer]
) -> None:
    *_, b1, b2 = peers
    before = last_plan(b1)
    b1.done = frozenset(share(before, 1, 0))
    training.lose(b2)
    training.settle_until(lambda: last_plan(b1) is not before)
    sends = [e for e in training.effects if isinstance(e, SendMessage) and e.peer_id == "b1"]
    requested = sends[-1].tokens_of
    plan = last_plan(b1)
    assert requested == tuple(plan.microbatches[i].samples[0] for i in share(plan, 1, 0))


def test_what_was_done_of_a_committed_step_says_nothing_of_the_next(
    training: Swarm, peers: list[FakePeer]
) -> None:
    a1, *_, b2 = peers
    a1.done = frozenset(share(last_plan(a1), 0, 0))
    training.lose(b2)
    a1.done = frozenset()
    training.settle_until(lambda: training.run().committed_steps == 6)
    assert not any(batch.done for batch in last_plan(a1).microbatches)


@pytest.mark.parametrize("index", [0, 2])
def test_a_peer_that_gets_slow_is_relieved_in_the_same_step(
    training: Swarm, peers: list[FakePeer], index: int
) -> None:
    slow = peers[index]
    before = last_plan(slow)
    report = alive(training, parts_begun=PARTS, compute_s=SLOW_S)
    training.wait(SLOW_S)
    training.say(slow, report)
    training.settle_until(lambda: last_plan(slow) is not before)
    again, stage = last_plan(slow), index // 2
    assert again.step == before.step
    assert len(share(again, stage, 0)) == 1
    assert len(share(again, stage, 1)) == MICROBATCHES - 1
    relieved = next(one for one in training.reasons() if one.kind is Kind.PEER_RELIEVED)
    assert relieved.peers == (slow.peer_id,)
    assert relieved.amount == pytest.approx(6.0, abs=0.05)
    assert relieved.limit == pytest.approx(1.4, abs=0.05)


@pytest.mark.parametrize(
    "report",
    [
        {"parts_begun": 0, "compute_s": 0.0},
        {"parts_begun": PARTS, "compute_s": 1.5 * USUAL_S},
        {"parts_begun": 4 * PARTS, "compute_s": 4 * SLOW_S},
        {"parts_begun": 4, "compute_s": 4 / PARTS * USUAL_S},
    ],
    ids=["nothing begun", "a little slower", "all begun", "forwards alone, as fast as ever"],
)
def test_a_peer_that_holds_nobody_up_for_long_goes_on(
    training: Swarm, peers: list[FakePeer], report: dict[str, Any]
) -> None:
    attempt = training.run().attempt.number
    training.wait(report["compute_s"])
    training.say(peers[0], alive(training, **report))
    assert training.run().attempt.number == attempt


def test_who_says_that_it_computed_for_longer_than_the_step_is_old_is_not_believed(
    training: Swarm, peers: list[FakePeer]
) -> None:
    attempt = training.run().attempt.number
    training.say(peers[0], alive(training, parts_begun=PARTS, compute_s=1e200))
    assert training.run().attempt.number == attempt


@pytest.mark.parametrize("reported_s", [0.0, 1e-300])
def test_who_says_that_it_is_fast_gets_at_most_eight_times_the_work(
    training: Swarm, peers: list[FakePeer], reported_s: float
) -> None:
    peers[1].compute_s = reported_s
    for _ in range(3):
        commit_slowly(training, peers)
        assert len(share(last_plan(peers[0]), 0, 0)) >= MICROBATCHES // 9 + 1


def test_who_says_that_it_is_slow_is_thought_as_slow_as_the_step_and_harms_only_itself(
    training: Swarm, peers: list[FakePeer]
) -> None:
    peers[1].compute_s = 1e200
    commit_slowly(training, peers)
    assert training.run().measured.seconds[peers[1].peer_id][-1] <= USUAL_S * MICROBATCHES
    assert len(share(last_plan(peers[0]), 0, 0)) >= MICROBATCHES / 2
    assert len(share(last_plan(peers[0]), 1, 0)) == MICROBATCHES / 2


def test_who_lends_little_of_its_link_gets_as_little_to_do(
    swarm: Swarm, make_spec: MakeSpec, peers: list[FakePeer]
) -> None:
    """Check a link that half of the microbatches occupy for three times their computing time."""
    capped, other = peers[:2]
    capped.max_up_bytes_per_s = 100 / (3 * USUAL_S * MICROBATCHES / 2)
    for peer in peers:
        peer.compute_s = USUAL_S * MICROBATCHES / 2
    swarm.submit(
        make_spec(
            num_samples=4 * MICROBATCHES, batch_size=MICROBATCHES, micro_batch_size=1, num_steps=9
        )
    )
    swarm.join(*peers)
    swarm.settle_until(lambda: swarm.run().step is not None)
    for peer in peers:
        swarm.forget_said(peer.peer_id)
    swarm.wait(2 * USUAL_S * MICROBATCHES)
    commit_slowly(swarm, peers)
    shares = [len(share(last_plan(peer), 0, replica)) for replica, peer in enumerate(peers[:2])]
    assert shares == [MICROBATCHES // 4, MICROBATCHES - MICROBATCHES // 4]
    assert len(share(last_plan(other), 1, 0)) == MICROBATCHES / 2, "the other stage is as it was"


def commit_slowly(swarm: Swarm, peers: list[FakePeer]) -> None:
    """Let all peers report the open step, once it is old enough for honest numbers."""
    step = swarm.run().committed_steps
    swarm.wait(USUAL_S * MICROBATCHES / 2)
    for peer in peers:
        swarm.say(peer, peer.step_ready(step))
    assert swarm.run().committed_steps == step + 1
    swarm.pending.clear()


def test_old_news_and_a_peer_without_replicas_change_nothing(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    for peer in (a, b):
        peer.compute_s = USUAL_S
    swarm.submit(make_spec(num_steps=9))
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().committed_steps == 4)
    attempt = swarm.run().attempt.number
    known = PeerAlive(
        run_id=swarm.run().run_id,
        attempt=attempt,
        step=StepNumber(4),
        parts_begun=PARTS,
        compute_s=99.0,
    )
    old_step, old_attempt = replace(known, step=StepNumber(3)), replace(known, attempt=Attempt(7))
    for news in (old_step, old_attempt, known):
        swarm.say(a, news)
    assert (swarm.run().attempt.number, swarm.run().phase) == (attempt, RunPhase.TRAINING)
