"""Connected peers that are never ready: the others wait a limited time, then go on without them.

`test_bad_luck` checks the limits of loading.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_ft.coordinator.decide.blame import RETRY_S
from swarm_ft.coordinator.facts.messages import Release
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.reputation import FIRST_REST_S, MAX_FAILURES
from swarm_ft.coordinator.plan.lateness import FACTOR, LOAD_S, STEP_S, hand_over_limit_s
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.machines.pipeline import PARTS
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerAlive
from swarm_ft.protocol.spec.run_spec import Optim, RunSpec
from tests.draws import draws
from tests.reasons import kinds_in, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN = RunId("run-1")
ALIVE_S = 2.0


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec(num_steps=4)


@pytest.fixture
def other(make_peer: type[FakePeer]) -> FakePeer:
    """Another peer of the second stage."""
    return make_peer("other", "2-4")


def commit(swarm: Swarm, num_steps: int) -> None:
    """Train until so many steps are committed and the next one is planned."""
    swarm.settle_until(lambda: len(swarm.history[RUN]) == num_steps and swarm.run().step)


def begun(swarm: Swarm, spec: RunSpec, *peers: FakePeer) -> None:
    """A run with one commit, and its second step under way."""
    swarm.submit(spec)
    swarm.join(*peers)
    commit(swarm, 1)


def send_heartbeat(
    swarm: Swarm, peer: FakePeer, waits_for: Collection[FakePeer] = (), parts_begun: int = 0
) -> None:
    run = swarm.run()
    alive = PeerAlive(
        run_id=run.run_id,
        attempt=run.attempt.number,
        step=StepNumber(run.committed_steps),
        parts_begun=parts_begun,
        waits_for=tuple(missed.peer_id for missed in waits_for),
    )
    swarm.say(peer, alive)


def stand_by(swarm: Swarm, seconds: float, waiting: dict[FakePeer, Sequence[FakePeer]]) -> None:
    """Let time pass in which these peers report whom they wait for, and are not ready."""
    end_s, attempt = swarm.now_s + seconds, swarm.run().attempt.number
    while swarm.now_s < end_s and swarm.run().attempt.number == attempt:
        for peer, missed in waiting.items():
            swarm.forget_said(peer.peer_id)
            send_heartbeat(swarm, peer, missed)
        swarm.wait(min(ALIVE_S, end_s - swarm.now_s))


def hold_up(swarm: Swarm, peer: FakePeer, seconds: float, waiting: Collection[FakePeer]) -> None:
    """Let the peer do no part of its step, while the others wait for it."""
    swarm.forget_said(peer.peer_id)
    stand_by(swarm, seconds, {peer: ()} | {one: [peer] for one in waiting})


def finished_without(swarm: Swarm, *peers: FakePeer) -> bool:
    swarm.settle()
    is_without = not {peer.peer_id for peer in peers}.intersection(swarm.run().peers)
    return swarm.run().phase is RunPhase.FINISHED and is_without


# ---- a step


def test_a_replica_that_stops_in_a_step_is_done_without(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    hold_up(swarm, other, LOAD_S - 3, [a, b])
    assert not swarm.idlers(), "nothing is known yet of how long a microbatch takes"
    hold_up(swarm, other, 6, [a, b])
    (idle,) = swarm.idlers().values()
    assert kinds_in(idle) == [Kind.PEER_SUSPENDED, Kind.LATE_STEP]
    assert 60 <= (idle.parts[0].amount or 0) < 70
    assert idle.parts[0].step == 1
    assert finished_without(swarm, other)
    assert swarm.num_rollbacks == 0


def test_what_a_microbatch_took_at_most_is_what_it_may_take_some_times(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    for peer in (b, other):
        peer.compute_s = 100.0
    begun(swarm, make_spec(num_steps=4, batch_size=4, micro_batch_size=1), a, b, other)
    took_s = max(s for p in (b, other) for s in swarm.run().measured.seconds[p.peer_id])
    hold_up(swarm, other, STEP_S + FACTOR * took_s - 3, [a, b])
    assert not swarm.idlers()
    hold_up(swarm, other, 6, [a, b])
    assert swarm.idlers().keys() == {"other"}


def test_who_gets_on_with_it_is_not_late_and_nobody_gets_on_for_ever(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    swarm.pending.clear()
    step = swarm.run().step
    assert step is not None
    share = step.share(1, 1)
    for parts_begun in range(1, PARTS * share + 1):
        send_heartbeat(swarm, other, parts_begun=parts_begun)
        hold_up_but(swarm, LOAD_S - 3, [a, b], other)
        assert not swarm.idlers()
    for parts_begun in range(1000, 1030):
        if not swarm.idlers():
            send_heartbeat(swarm, other, parts_begun=parts_begun)
            hold_up_but(swarm, 3, [a, b], other)
    assert swarm.idlers().keys() == {"other"}, "there are no more parts than those of its share"


def hold_up_but(
    swarm: Swarm, seconds: float, waiting: Collection[FakePeer], missed: FakePeer
) -> None:
    """Let time pass in which these wait for a peer that reports nothing."""
    stand_by(swarm, seconds, {one: [missed] for one in waiting})


def test_if_all_wait_the_one_that_most_miss_is_out(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    stand_by(swarm, 2 * LOAD_S, {a: [b], b: [a], other: [b]})
    assert swarm.idlers().keys() == {"b"}
    assert finished_without(swarm, b)


def test_nobody_hides_behind_the_only_host_for_whom_all_wait(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]
) -> None:
    a, b, c, d = (make_peer(*one) for one in zip("abcd", ["0-1", "1-2", "2-4", "2-4"], strict=True))
    begun(swarm, make_spec(num_steps=4), a, b, c, d)
    stand_by(swarm, 2 * LOAD_S, {a: [b], b: [c], c: [b], d: [b]})
    assert swarm.idlers().keys() == {"c"}
    assert finished_without(swarm, c)


def test_who_says_too_soon_that_it_is_ready_is_out_if_others_miss_it(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    swarm.pending.clear()
    swarm.say(other, other.step_ready(1))
    stand_by(swarm, 2 * LOAD_S, {a: [other], b: [other]})
    assert swarm.idlers().keys() == {"other"}


def test_one_that_still_waits_when_all_others_are_ready_blames_nobody(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    swarm.pending.clear()
    for peer in (a, other):
        swarm.say(peer, peer.step_ready(1))
    stand_by(swarm, 2 * LOAD_S, {b: [other]})
    assert swarm.idlers().keys() == {"b"}


def test_the_only_host_of_a_stage_is_waited_for_and_named(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    ready = list(swarm.pending)
    attempt = swarm.run().attempt.number
    stand_by(swarm, 3 * LOAD_S, {a: (), b: [a], other: [a]})
    assert swarm.run().attempt.number == attempt
    awaited = reason(Kind.PEER_AWAITED, "a", layers="0-2")
    assert swarm.run().reason == awaited
    swarm.pending.extend(ready)
    assert finished_without(swarm)
    assert swarm.run().reason != awaited


def test_a_step_in_which_the_coordinator_stood_still_makes_nobody_late(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    attempt = swarm.run().attempt.number
    hold_up(swarm, other, 10, [a, b])
    swarm.stand_still(100 * LOAD_S)
    hold_up(swarm, other, 10, [a, b])
    assert swarm.run().attempt.number == attempt
    assert not swarm.idlers()


HONEST, LIAR = ["a", "b"], "other"


@settings(deadline=None, max_examples=draws(100), suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from([*HONEST, LIAR])), st.integers(0, 1 << 31)),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_a_peer_says_while_it_does_nothing_it_is_the_one_to_go(
    make_swarm: type[Swarm],
    make_peer: type[FakePeer],
    spec: RunSpec,
    lies: list[tuple[set[str], int]],
) -> None:
    swarm = make_swarm()
    peers = [make_peer(name, "0-2" if name == "a" else "2-4") for name in (*HONEST, LIAR)]
    begun(swarm, spec, *peers)
    *honest, liar = peers
    end_s = swarm.now_s + 20 * LOAD_S
    for names, parts_begun in itertools.cycle(lies):
        if swarm.idlers() or swarm.now_s > end_s:
            break
        swarm.forget_said(liar.peer_id)
        send_heartbeat(swarm, liar, [peer for peer in peers if peer.peer_id in names], parts_begun)
        stand_by(swarm, ALIVE_S, {peer: [liar] for peer in honest})
    assert swarm.idlers().keys() == {LIAR}
    assert finished_without(swarm, liar)


# ---- results


def test_a_replica_that_never_writes_its_stage_down_is_done_without(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b, other)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.EXPORTING)
    swarm.forget_said(other.peer_id)
    swarm.settle()
    swarm.wait(LOAD_S - 2)
    assert swarm.run().phase is RunPhase.EXPORTING
    swarm.wait(4)
    (idle,) = swarm.idlers().values()
    assert kinds_in(idle) == [Kind.PEER_SUSPENDED, Kind.LATE_EXPORT]
    assert 60 <= (idle.parts[0].amount or 0) < 70
    assert finished_without(swarm, other)
    assert b.exported


def test_the_only_host_of_a_result_may_take_long(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.EXPORTING)
    messages = [one for one in swarm.pending if one[0] == b.peer_id]
    swarm.forget_said(b.peer_id)
    swarm.settle()
    swarm.wait(20 * LOAD_S)
    assert swarm.run().phase is RunPhase.EXPORTING
    swarm.pending.extend(messages)
    assert finished_without(swarm)


# ---- newcomers


@pytest.fixture
def joined(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> Swarm:
    """A swarm in which the newcomer listens, and does not get its stage's state."""
    newcomer.is_slow_to_take = True
    swarm.submit(make_spec(num_steps=1000))
    swarm.join(a, b)
    commit(swarm, 1)
    swarm.join(newcomer)
    swarm.settle_until(lambda: swarm.run().listeners and swarm.run().phase is RunPhase.TRAINING)
    return swarm


def train_on(swarm: Swarm, seconds: float, until: Callable[[], object] = lambda: False) -> None:
    """Train a step every few seconds."""
    end_s = swarm.now_s + seconds
    while swarm.now_s < end_s and not until():
        commit(swarm, len(swarm.history[RUN]) + 1)
        swarm.wait(min(5.0, max(end_s - swarm.now_s, 0.0)))


def test_a_listener_that_is_never_ready_is_done_without(
    joined: Swarm, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    attempt = joined.run().attempt.number
    hold_up(joined, newcomer, 2 * LOAD_S, [a, b])
    assert joined.idlers().keys() == {"newcomer"}
    commit(joined, len(joined.history[RUN]) + 5)
    assert joined.run().attempt.number == attempt + 1
    assert set(joined.run().peers) == {"a", "b"}


def test_a_listener_without_which_the_only_host_is_not_done_is_out(
    joined: Swarm, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    joined.pending.clear()
    step = joined.run().committed_steps
    joined.say(a, a.step_ready(step))
    joined.say(newcomer, newcomer.step_ready(step))
    stand_by(joined, 2 * LOAD_S, {b: [newcomer]})
    assert joined.idlers().keys() == {"newcomer"}


def test_a_newcomer_that_has_caught_up_goes_before_the_host_that_misses_it(
    joined: Swarm, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    joined.pending.clear()
    step = joined.run().committed_steps
    joined.say(newcomer, newcomer.caught_up())
    joined.say(a, a.step_ready(step))
    joined.say(newcomer, newcomer.step_ready(step))
    stand_by(joined, 2 * LOAD_S, {b: [newcomer]})
    assert joined.idlers().keys() == {"newcomer"}


def test_a_newcomer_that_never_has_its_state_is_let_go_in_one_attempt(
    joined: Swarm, newcomer: FakePeer
) -> None:
    run = joined.run()
    limit_s = hand_over_limit_s(run.spec, run.stages[1].layers)
    assert run.attempt.learning_since_s.keys() == {"newcomer"}
    train_on(joined, limit_s - 5)
    assert joined.run().listeners == ("newcomer",)
    assert joined.run().attempt.number == run.attempt.number, "it disturbed nobody"
    train_on(joined, 10, until=lambda: not joined.run().listeners)
    (idle,) = joined.idlers().values()
    assert kinds_in(idle) == [Kind.SUSPENDED_FROM_RUN, Kind.LATE_STATE]
    assert 60 <= (idle.parts[0].amount or 0) < 70
    commit(joined, len(joined.history[RUN]) + 3)
    assert not joined.state.standings, "nobody else took the state over"
    assert joined.run().attempt.number == run.attempt.number + 1
    assert joined.run().peers == ("a", "b")
    assert not any(peer == "newcomer" for peer, _ in joined.said(Release))


def test_large_states_may_take_longer(make_spec: MakeSpec) -> None:
    small, large = (make_spec(block_bytes=size) for size in (1 << 20, 1 << 30))
    layers = small.model.layers
    assert hand_over_limit_s(small, layers) < 2 * LOAD_S
    assert hand_over_limit_s(large, layers) > 4 * 3600.0


@pytest.mark.parametrize("optim", [Optim.ADAFACTOR, Optim.SGD])
def test_what_an_optimizer_does_not_keep_takes_no_time(make_spec: MakeSpec, optim: Optim) -> None:
    with_moments, without = (
        make_spec(block_bytes=1 << 30, optim=which) for which in (Optim.ADAMW, optim)
    )
    took_s = [hand_over_limit_s(s, s.model.layers) - LOAD_S for s in (with_moments, without)]
    assert took_s[0] == pytest.approx(3 * took_s[1])


def test_a_hand_over_goes_on_over_attempts_and_its_time_with_it(
    joined: Swarm, b: FakePeer, other: FakePeer
) -> None:
    since_s = joined.run().attempt.learning_since_s[PeerId("newcomer")]
    attempt = joined.run().attempt.number
    train_on(joined, 30)
    joined.join(other)
    commit(joined, len(joined.history[RUN]) + 2)
    assert joined.run().attempt.number > attempt
    assert joined.run().attempt.learning_since_s[PeerId("newcomer")] == since_s


def test_a_hand_over_may_take_the_time_in_which_the_coordinator_stood_still(
    joined: Swarm, newcomer: FakePeer
) -> None:
    joined.stand_still(1000.0)
    train_on(joined, 30)
    assert joined.run().listeners == ("newcomer",)


def test_a_newcomer_for_which_all_wait_has_as_long_for_its_state_and_no_longer(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    plain = make_spec(num_steps=4, block_bytes=1 << 21)
    spec = replace(
        plain,
        model=replace(plain.model, tied_embeddings=True),
        train=replace(plain.train, sync_tied_embeddings=True),
    )
    newcomer.is_slow_to_take = True
    begun(swarm, spec, a, b)
    swarm.join(newcomer)
    swarm.settle()
    assert swarm.run().phase is RunPhase.LOADING
    limit_s = hand_over_limit_s(spec, swarm.run().stages[1].layers)
    assert limit_s > LOAD_S + 40
    swarm.wait(limit_s - 5)
    assert not swarm.idlers()
    swarm.wait(10)
    assert swarm.idlers().keys() == {"newcomer"}
    assert finished_without(swarm, newcomer)


# ---- links that fail: nobody knows which end is broken


def fail_of(swarm: Swarm, peer: FakePeer, about: str) -> None:
    failed = replace(peer.failed("unavailable", "cannot be reached"), about=PeerId(about))
    swarm.say(peer, failed)


def next_attempt(swarm: Swarm) -> None:
    swarm.pending.clear()
    swarm.wait(RETRY_S)
    swarm.settle_until(lambda: swarm.run().phase is RunPhase.TRAINING)
    swarm.pending.clear()


@pytest.mark.parametrize("reporters", ["ab ab", "a b a", "b a a"])
def test_whom_others_do_not_reach_is_set_aside_before_them(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer, reporters: str
) -> None:
    begun(swarm, spec, a, b, other)
    for names in reporters.split():
        for name in names:
            fail_of(swarm, {"a": a, "b": b}[name], "other")
        if not swarm.idlers():
            next_attempt(swarm)
    assert swarm.idlers().keys() == {"other"}
    swarm.wait(RETRY_S)
    assert finished_without(swarm, other)


def test_one_peers_word_about_another_sets_that_one_not_aside(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, make_spec(num_steps=40), a, b, other)
    for _ in range(3):
        for number in range(MAX_FAILURES):
            fail_of(swarm, other, "b")
            is_aside = number == MAX_FAILURES - 1
            assert set(swarm.idlers()) == ({"other"} if is_aside else set())
            if not is_aside:
                next_attempt(swarm)
        swarm.wait(RETRY_S)
        commit(swarm, len(swarm.history[RUN]) + 1)
        rest_s = swarm.state.reputation(other.peer_id).aside_until_s - swarm.now_s
        assert rest_s > 0.0, "the others did it"
        swarm.wait(rest_s)
        commit(swarm, len(swarm.history[RUN]) + 2)
        assert set(swarm.run().peers) == {"a", "b", "other"}


@pytest.mark.parametrize("about", ["nobody", "b"])
def test_a_failure_about_no_other_peer_of_the_run_is_ones_own(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer, about: str
) -> None:
    begun(swarm, spec, a, b, other)
    for number in range(MAX_FAILURES):
        fail_of(swarm, b, about)
        if number < MAX_FAILURES - 1:
            next_attempt(swarm)
    assert swarm.idlers().keys() == {"b"}
    assert PeerId("nobody") not in swarm.state.standings
    assert swarm.run().conduct(b.peer_id).standing.suspension_s == FIRST_REST_S
