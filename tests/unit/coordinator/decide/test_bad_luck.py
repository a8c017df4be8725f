"""Failures of one peer end neither a run nor a membership; repeated ones suspend the peer."""

from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.blame import MAX_NON_FINITE, RETRY_S
from swarm_ft.coordinator.facts.events import ResultCollected
from swarm_ft.coordinator.facts.messages import Idle
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.reputation import FIRST_REST_S, MAX_FAILURES, MAX_REST_S
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.plan.lateness import CONNECT_S, FACTOR, LOAD_S
from swarm_ft.coordinator.plan.membership import reasons_to_idle
from swarm_ft.coordinator.reason_texts import as_text
from swarm_ft.coordinator.watching import overview
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import PeerAlive
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.reasons import kinds_in, missing, part_of, reason
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

RUN, SECOND = RunId("run-1"), RunId("run-2")
STEPS = [0, 1, 2]


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec()


@pytest.fixture
def other(make_peer: type[FakePeer]) -> FakePeer:
    """Another peer of the second stage."""
    return make_peer("other", "2-4")


def begun(swarm: Swarm, spec: RunSpec, *peers: FakePeer) -> None:
    """A run with one commit."""
    swarm.submit(spec)
    swarm.join(*peers)
    swarm.settle_until(lambda: len(swarm.history[RUN]) == 1)


def fail(swarm: Swarm, peer: FakePeer, code: str, words: str = "oh") -> None:
    swarm.forget_said(peer.peer_id)
    swarm.say(peer, peer.failed(code, words))


def after_failures(code: str, text: str) -> Reason:
    """Return the reason of a peer that is suspended for the first time."""
    last = reason(Kind.PEER_ERROR, code=code, text=text, run_id=RUN)
    failures = reason(Kind.FAILED_TOO_OFTEN, amount=3, parts=(last,))
    return reason(Kind.PEER_SUSPENDED, amount=30.0, parts=(failures,))


def fail_often(swarm: Swarm, peer: FakePeer, code: str = "internal", words: str = "oh") -> None:
    """Fail in successive attempts until the peer is suspended."""
    for _ in range(MAX_FAILURES):
        swarm.settle_until(lambda: peer.assign is not None and swarm.run().phase.is_working)
        swarm.pending.clear()
        fail(swarm, peer, code, words)
        swarm.wait(RETRY_S)


# ---- jobs that do not fit


def test_a_job_that_fits_nobody_costs_no_member_and_is_passed_by(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.join(a, b)
    swarm.submit(make_spec(num_blocks=1))
    assert swarm.run().detail == missing("0-1")
    assert swarm.idlers().keys() == {"a", "b"}
    swarm.submit(make_spec(), SECOND)
    swarm.settle()
    assert swarm.run(SECOND).phase is RunPhase.FINISHED
    assert swarm.run().phase is RunPhase.WAITING
    assert set(swarm.state.members) == {"a", "b"}
    assert not swarm.dismissals()


def test_many_jobs_that_fit_nobody_hold_up_no_longer_than_one(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    for number in range(60):
        swarm.submit(make_spec(num_blocks=4096), RunId(f"bogus-{number}"))
    swarm.submit(make_spec())
    swarm.join(a, b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_members_are_told_once_why_they_are_idle_though_several_jobs_fit_nobody(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.join(a, b)
    swarm.submit(make_spec(num_blocks=1))
    swarm.submit(make_spec(num_blocks=1), SECOND)
    swarm.wait(1)
    assert sorted(peer for peer, _ in swarm.said(Idle)) == ["a", "b"]
    assert all(idle.run_id == RUN for idle in swarm.idlers().values())


def test_a_job_that_nobody_takes_expires_and_tells_for_what_it_waited(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer
) -> None:
    swarm.state = replace(swarm.state, queue_s=3600.0)
    swarm.join(a)
    swarm.submit(make_spec())
    swarm.stand_still(3600.0)
    assert swarm.run().phase is RunPhase.WAITING, "that time does not count"
    swarm.wait(3599.0)
    assert swarm.run().phase is RunPhase.WAITING
    swarm.wait(1)
    assert swarm.run().phase is RunPhase.FAILED
    waited = missing("2-4")
    assert swarm.run().detail == reason(Kind.QUEUE_EXPIRED, amount=3600.0, parts=(waited,))


def test_a_job_that_waits_for_its_turn_does_not_expire(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.state = replace(swarm.state, queue_s=60.0)
    swarm.submit(make_spec())
    swarm.submit(make_spec(), SECOND)
    swarm.join(a, b)
    swarm.settle_until(lambda: swarm.run().committed_steps)
    swarm.wait(120)
    assert swarm.run(SECOND).phase is RunPhase.QUEUED
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_who_gathers_is_not_passed_by(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer]
) -> None:
    swarm.submit(make_spec())
    swarm.submit(make_spec(), SECOND)
    swarm.join(make_peer("any", "auto"), make_peer("whole", "0-4"), make_peer("all", "auto"))
    swarm.wait(5)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_a_job_that_no_peer_can_load_fails_with_the_reason(
    swarm: Swarm, spec: RunSpec, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.submit(make_spec(), SECOND)
    swarm.join(a, b)
    failed = a.failed("bad-model", "model /nowhere: expected a directory")
    fail(swarm, b, "bad-model", "model /nowhere: expected a directory")
    assert swarm.run().phase is RunPhase.LOADING, "a has yet to look"
    text = "model /nowhere: expected a directory"
    cause = reason(Kind.CANNOT_HOST, code="bad-model", text=text)
    assert swarm.run().detail == reason(Kind.PEER_LOST, "b", layers="2-4", parts=(cause,))
    swarm.say(a, failed)
    assert swarm.run().phase is RunPhase.FAILED
    assert kinds_in(swarm.run().detail) == [Kind.NO_PEER_CAN_HOST, Kind.PEER_MISFIT]
    assert part_of(swarm.run().detail, Kind.PEER_MISFIT).text == text
    swarm.wait(1)
    swarm.settle()
    assert swarm.run(SECOND).phase is RunPhase.FINISHED
    assert not swarm.dismissals()


def test_a_job_that_some_can_load_waits_for_others_that_can(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    fail(swarm, b, "bad-model", "no such model")
    swarm.settle()  # a has loaded its stage
    assert swarm.run().phase is RunPhase.WAITING
    misfit = reason(Kind.PEER_MISFIT, "b", code="bad-model", text="no such model")
    assert swarm.run().detail == reason(Kind.SEVERAL, parts=(missing("2-4"), misfit))


@pytest.mark.parametrize("misfit_is_first", [True, False])
def test_a_peer_that_waits_for_one_that_cannot_load_has_loaded_itself(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, misfit_is_first: bool
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    assert a.assign is not None
    waits = PeerAlive(run_id=RUN, attempt=a.assign.attempt, waits_for=(b.peer_id,))
    if not misfit_is_first:
        swarm.say(a, waits)
        assert swarm.run().phase is RunPhase.LOADING
    fail(swarm, b, "bad-model", "no such model")
    if misfit_is_first:
        assert swarm.run().phase is RunPhase.LOADING, "a has yet to look"
        swarm.say(a, waits)
    assert swarm.run().phase is RunPhase.WAITING
    misfit = reason(Kind.PEER_MISFIT, "b", code="bad-model", text="no such model")
    assert swarm.run().detail == reason(Kind.SEVERAL, parts=(missing("2-4"), misfit))


def test_who_leaves_before_it_looked_keeps_no_run_waiting_for_its_word(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    fail(swarm, b, "bad-model", "no such model")
    swarm.forget_said(a.peer_id)
    swarm.lose(a)
    assert swarm.run().phase is RunPhase.FAILED, "all who are there said that they cannot"


def test_a_peer_without_the_model_is_idle_and_its_replica_goes_on(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b, other)
    fail(swarm, b, "bad-model", "no such model")
    misfit = reason(Kind.PEER_MISFIT, code="bad-model", text="no such model", run_id=RUN)
    assert swarm.idlers() == {"b": misfit}
    (member,) = (m for m in overview(swarm.state).members if m.idle)
    assert (member.peer_id, member.idle) == ("b", "this peer cannot host run-1: no such model")
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert set(swarm.run().peers) == {"a", "other"}


def test_a_peer_that_comes_back_may_have_the_model_now(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    fail(swarm, b, "bad-model")
    swarm.lose(b)
    b.forget()
    swarm.join(b)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert not swarm.idlers()


def test_a_peer_that_comes_back_may_have_the_models_of_all_jobs_now(
    swarm: Swarm, spec: RunSpec, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.submit(make_spec(num_blocks=8), SECOND)
    swarm.join(a, b)
    swarm.say(b, replace(b.failed("bad-model", "no such model"), run_id=SECOND))
    assert swarm.run(SECOND).misfits == {
        "b": reason(Kind.PEER_MISFIT, code="bad-model", text="no such model")
    }
    swarm.lose(b)
    b.forget()
    swarm.join(b)
    assert not swarm.run(SECOND).misfits
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


# ---- values that are not finite


def test_one_peers_word_is_checked_by_its_replica(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    fail(swarm, b, "non-finite", "the loss is NaN")
    assert swarm.run().phase is RunPhase.WAITING
    swarm.wait(RETRY_S)
    assert set(swarm.run().peers) == {"a", "other"}, "the step is done without b"
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert other.applied == STEPS


def test_after_the_step_that_it_doubted_a_peer_is_welcome_again(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, make_spec(num_steps=6), a, b, other)
    fail(swarm, b, "non-finite")
    swarm.wait(RETRY_S)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert set(swarm.run().peers) == {"a", "b", "other"}


def test_two_who_agree_end_the_run(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    fail(swarm, b, "non-finite", "the loss is NaN")
    swarm.wait(RETRY_S)
    fail(swarm, other, "non-finite", "the loss is NaN")
    assert swarm.run().phase is RunPhase.FAILED
    assert swarm.run().detail == reason(
        Kind.CONFIRMED_ERROR, "b", "other", code="non-finite", text="the loss is NaN", step=1
    )
    words = as_text(swarm.run().detail)
    assert words.startswith("the run diverged: step 1: the loss is NaN. Lower --lr")
    assert words.endswith("Reported by peers b, other")
    assert a.assign is other.assign is None


def test_doubts_of_different_steps_do_not_add_up(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, make_spec(num_steps=6), a, b, other)
    fail(swarm, b, "non-finite")
    swarm.wait(RETRY_S)
    swarm.settle_until(lambda: len(swarm.history[RUN]) == 4 and swarm.run().step)
    fail(swarm, other, "non-finite")
    swarm.wait(RETRY_S)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def report_not_finite(
    swarm: Swarm,
    peer: FakePeer,
    times: int,
    words: str = "the loss is NaN",
    code: str = "non-finite",
) -> None:
    """Report a non-finite step once in each of so many attempts, as soon as the peer works."""
    for _ in range(times):
        swarm.settle_until(lambda: peer.assign is not None and swarm.run().phase.is_working)
        swarm.pending.clear()
        fail(swarm, peer, code, words)
        while swarm.run().phase is RunPhase.WAITING and swarm.now_s < swarm.run().not_before_s:
            swarm.wait(0.5)


def test_a_run_of_a_model_with_a_nan_ends_within_a_minute_and_names_the_tensor(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, a, b)
    began_s, words = swarm.now_s, "the model's block 3: tensor h.3.weight has values that are NaN"
    report_not_finite(swarm, b, MAX_NON_FINITE, words, code="non-finite-weights")
    assert swarm.run().phase is RunPhase.FAILED
    assert swarm.now_s - began_s < 60.0
    repeated = part_of(swarm.run().detail, Kind.REPEATED_ERROR)
    assert (repeated.code, repeated.text) == ("non-finite-weights", words)
    text = as_text(repeated)
    assert text.startswith(f"its model cannot be trained: {words}. Submit the job")
    assert not swarm.idlers(), "its peers serve others"


def test_a_run_that_diverged_with_one_host_a_stage_ends_within_a_minute(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, a, b)
    began_s = swarm.now_s
    text = "step 1: the loss of layers 2-4 is NaN"
    report_not_finite(swarm, b, MAX_NON_FINITE - 1, text)
    assert swarm.run().phase is not RunPhase.FAILED
    report_not_finite(swarm, b, 1, text)
    assert swarm.run().phase is RunPhase.FAILED
    assert swarm.now_s - began_s < 60.0
    assert swarm.run().detail == reason(
        Kind.REPEATED_ERROR, "b", code="non-finite", text=text, step=1, amount=4
    )
    assert not swarm.idlers(), "its peers serve others"
    assert not swarm.state.standings


def test_values_that_were_wrong_less_often_end_no_run_and_are_nobodys_fault(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, a, b)
    report_not_finite(swarm, b, MAX_NON_FINITE - 1)
    swarm.settle_until(lambda: len(swarm.history[RUN]) == 2)
    report_not_finite(swarm, b, MAX_NON_FINITE - 1)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 0
    assert not swarm.state.standings


def test_a_stage_that_never_had_the_memory_for_the_run_ends_it(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    began_s = swarm.now_s
    while swarm.run().phase is not RunPhase.FAILED:
        assert swarm.now_s - began_s < 300.0
        if swarm.run().phase.is_working:
            fail(swarm, b, "out-of-memory", "no room for 9 GiB")
        swarm.wait(1.0)
    repeated = part_of(swarm.run().detail, Kind.REPEATED_ERROR)
    assert (repeated.peers, repeated.step, repeated.code) == (("b",), 0, "out-of-memory")
    assert not swarm.state.standings


def test_memory_that_was_there_before_ends_no_run(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, a, b)
    for _ in range(3):
        fail_often(swarm, b, "out-of-memory")
        swarm.wait(swarm.run().conduct(b.peer_id).standing.aside_until_s - swarm.now_s + 1)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert not swarm.state.standings


def test_a_peer_with_less_memory_than_its_replica_serves_other_runs(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    fail_often(swarm, b, "out-of-memory")
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert not swarm.state.standings


def test_two_stages_that_agree_end_the_run_though_each_has_one_host(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, a, b)
    report_not_finite(swarm, b, 1)
    report_not_finite(swarm, a, 1, "a gradient is NaN")
    assert swarm.run().phase is RunPhase.FAILED
    confirmed = part_of(swarm.run().detail, Kind.CONFIRMED_ERROR)
    assert (confirmed.peers, confirmed.step) == (("b", "a"), 1)
    assert "a gradient is NaN" in confirmed.text


@pytest.fixture
def two(make_peer: type[FakePeer]) -> tuple[FakePeer, FakePeer]:
    """Peers that have one stage each, and of which each can host both."""
    return make_peer("first", "auto"), make_peer("liar", "auto")


def begun_on(swarm: Swarm, spec: RunSpec, *peers: FakePeer) -> None:
    swarm.submit(spec)
    swarm.join(*peers)
    swarm.wait(5)
    swarm.settle_until(lambda: len(swarm.history[RUN]) == 1)
    assert len(swarm.run().stages) == len(peers)


def test_where_others_can_host_the_run_they_do_the_step_before_anybody_is_believed(
    swarm: Swarm, make_spec: MakeSpec, two: tuple[FakePeer, FakePeer]
) -> None:
    liar = two[1]
    begun_on(swarm, make_spec(num_steps=6), *two)
    report_not_finite(swarm, liar, 1, "so I say")
    swarm.settle_until(lambda: swarm.run().committed_steps == 2)
    assert set(swarm.run().peers) == {"first"}
    assert len(swarm.state.reputation(liar.peer_id).failed_in) == 1, "another one did better"
    assert swarm.run().has_suspended(liar.peer_id, swarm.now_s), "the run began anew for it"
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert swarm.num_rollbacks == 1


def test_a_run_that_diverges_again_where_others_host_it_has_failed(
    swarm: Swarm, make_spec: MakeSpec, two: tuple[FakePeer, FakePeer]
) -> None:
    begun_on(swarm, make_spec(num_steps=6), *two)
    report_not_finite(swarm, two[1], 1)
    report_not_finite(swarm, two[0], 1)
    assert swarm.run().phase is RunPhase.FAILED
    assert part_of(swarm.run().detail, Kind.CONFIRMED_ERROR).peers == ("liar", "first")
    assert not swarm.state.standings


def test_a_host_that_never_gets_over_it_is_waited_for_until_the_run_expires(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.state = replace(swarm.state, queue_s=3600.0)
    begun(swarm, spec, a, b)
    end_s = swarm.now_s + 3600.0 + MAX_REST_S
    while swarm.run().phase is not RunPhase.FAILED:
        assert swarm.now_s < end_s
        fail_often(swarm, b, "unavailable", "the disk does not answer")
        rest_s = swarm.run().conduct(b.peer_id).standing.aside_until_s - swarm.now_s
        swarm.wait(rest_s + 1)
    assert kinds_in(swarm.run().detail)[:2] == [Kind.QUEUE_EXPIRED, Kind.AWAITS_SUSPENDED]


# ---- a failure counts against a peer where another one did better


def test_who_has_no_replica_is_set_aside_from_the_run_alone(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    begun(swarm, spec, a, b)
    fail_often(swarm, b)
    assert swarm.run().has_suspended(b.peer_id, swarm.now_s)
    assert not swarm.state.is_suspended(b.peer_id, swarm.now_s)
    assert not swarm.state.reputation(b.peer_id).failed_in


# ---- peers that fail again and again


@pytest.mark.parametrize("code", ["internal", "unavailable", "out-of-turn", "protocol-error"])
def test_who_fails_too_often_is_set_aside_and_a_replica_finishes(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer, code: str
) -> None:
    begun(swarm, spec, a, b, other)
    fail_often(swarm, b, code, "can't start new thread")
    suspended = after_failures(code, "can't start new thread")
    of_run = replace(suspended, kind=Kind.SUSPENDED_FROM_RUN, run_id=RUN)
    assert swarm.idlers() == {"b": of_run}
    assert set(swarm.run().peers) == {"a", "other"}
    assert not swarm.state.is_suspended(b.peer_id, swarm.now_s), "until another one did better"
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    swarm.wait(1)
    assert swarm.idlers() == {"b": suspended}


def test_a_suspension_from_a_run_is_no_reason_for_members_with_the_same_offer(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    fail_often(swarm, b)
    suspended = swarm.state.members[b.peer_id]
    spare = replace(suspended, hello=replace(suspended.hello, peer_id=PeerId("spare")))
    reasons = reasons_to_idle(swarm.state.with_member(spare), swarm.now_s)
    assert {peer for peer, why in reasons.items() if why is not None} == {b.peer_id}


def test_the_end_of_a_run_does_not_hide_who_is_set_aside(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    fail_often(swarm, b)
    swarm.settle()
    swarm.handle(ResultCollected(RUN))
    swarm.wait(1)
    assert swarm.idlers().keys() == {"b"}
    swarm.wait(FIRST_REST_S)
    assert not swarm.idlers()


def test_a_result_that_cannot_be_written_here_is_written_by_a_replica(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b, other)
    for _ in range(MAX_FAILURES):
        swarm.settle_until(lambda: swarm.run().phase is RunPhase.EXPORTING)
        fail(swarm, b, "unavailable", "no space left on the disk")
        swarm.wait(RETRY_S)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert set(swarm.run().peers) == {"a", "other"}
    assert other.exported


def test_each_rest_is_longer_and_a_restart_does_not_end_it(
    make_swarm: type[Swarm], spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    begun(swarm, spec, a, b, other)
    fail_often(swarm, b)
    swarm.settle_until(lambda: len(swarm.history[RUN]) == 2)
    swarm.restart()
    swarm.join(a, b, other)
    assert swarm.idlers() == {"b": after_failures("internal", "oh")}
    swarm.wait(5)
    assert set(swarm.run().peers) == {"a", "other"}
    swarm.now_s += FIRST_REST_S
    swarm.settle()
    assert swarm.state.standings[b.peer_id].times_aside == 1


def test_a_single_failure_is_no_reason_to_do_without_a_peer(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    begun(swarm, spec, a, b, other)
    fail(swarm, b, "internal")
    swarm.wait(RETRY_S)
    assert set(swarm.run().peers) == {"a", "b", "other"}
    assert not swarm.said(Idle)


# ---- peers that keep others from beginning


def hold_back(swarm: Swarm, peer: FakePeer) -> None:
    """Drop the peer's reports of its stage, but not its heartbeats."""
    swarm.forget_said(peer.peer_id)


def wait_for(swarm: Swarm, peer: FakePeer, *missed: FakePeer) -> None:
    """Report that the peer has its stage, and does not reach these peers."""
    number = swarm.run().attempt.number
    names = tuple(other.peer_id for other in missed)
    swarm.forget_said(peer.peer_id)
    swarm.say(peer, PeerAlive(run_id=RUN, attempt=number, waits_for=names))


def test_a_replica_that_is_there_and_mute_is_not_waited_for(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b, other)
    hold_back(swarm, other)
    swarm.settle()
    assert swarm.run().phase is RunPhase.LOADING
    swarm.wait(LOAD_S - 1)
    assert swarm.run().phase is RunPhase.LOADING
    swarm.wait(2)
    (idle,) = swarm.idlers().values()
    assert kinds_in(idle) == [Kind.PEER_SUSPENDED, Kind.LATE_LOADING]
    assert LOAD_S <= (idle.parts[0].amount or 0) <= LOAD_S + 2
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    assert set(swarm.run().peers) == {"a", "b"}


def test_time_in_which_the_coordinator_stood_still_makes_nobody_late(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b, other)
    hold_back(swarm, other)
    swarm.settle()
    attempt = swarm.run().attempt.number
    swarm.stand_still(2 * LOAD_S)
    assert not swarm.idlers()
    assert swarm.run().attempt.number == attempt


def test_the_only_host_of_a_stage_may_take_long(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    ready = [message for message in swarm.pending if message[0] == b.peer_id]
    hold_back(swarm, b)
    swarm.settle()
    swarm.wait(20 * LOAD_S)
    assert swarm.run().attempt.number == 1
    swarm.pending.extend(ready)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_large_stages_may_take_longer_but_not_much_longer_than_a_replica_took(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    swarm.submit(make_spec(block_bytes=1 << 30))
    swarm.join(a, b, other)
    hold_back(swarm, other)
    swarm.wait(100)
    wait_for(swarm, b, other)
    wait_for(swarm, a, other)
    swarm.wait(LOAD_S + FACTOR * 100 - 110)
    assert swarm.run().phase is RunPhase.LOADING
    swarm.wait(15)
    assert swarm.idlers().keys() == {"other"}


def test_whom_the_others_do_not_reach_is_out_and_not_who_says_so(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b, other)
    wait_for(swarm, a, other)
    wait_for(swarm, b, other)
    wait_for(swarm, other, a, b)
    swarm.wait(CONNECT_S - 1)
    assert swarm.run().phase is RunPhase.LOADING
    swarm.wait(2)
    assert swarm.idlers().keys() == {"other"}
    assert set(swarm.run().peers) == {"a", "b"}
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED


def test_who_misses_the_deadline_again_rests_longer(
    swarm: Swarm, spec: RunSpec, a: FakePeer, b: FakePeer, other: FakePeer
) -> None:
    swarm.submit(spec)
    swarm.join(a, b)
    swarm.settle_until(lambda: len(swarm.history[RUN]) == 1)
    rests = []
    for _ in range(2):
        swarm.join(other)
        swarm.settle_until(lambda: swarm.run().phase is RunPhase.LOADING)
        swarm.pending.clear()
        swarm.wait(LOAD_S + 1)
        rests.append(swarm.state.standings[other.peer_id].aside_until_s - swarm.now_s)
        swarm.lose(other)
        other.forget()
        swarm.now_s += rests[-1]
        swarm.stand_still(1)
    assert [round(rest, -1) for rest in rests] == [30, 120]
