"""Peers with room host stages of several runs, where a run could not begin otherwise."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide.blame import RETRY_S
from swarm_ft.coordinator.facts.events import ResultCollected, RunCancelled, RunSubmitted
from swarm_ft.coordinator.facts.messages import Message, Release
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.members import Roll
from swarm_ft.coordinator.plan.lateness import LOAD_S, STEP_S, overdue_peers
from swarm_ft.coordinator.plan.placement import SETTLE_S
from swarm_ft.ids import PeerId, RunId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import FromPeer, PeerHello
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.reasons import behind, part_of, ranges_of, reason
from tests.unit.coordinator.conftest import STORAGE_KEY, FakePeer, MakeSpec, Swarm

RUN, SECOND, THIRD = RunId("run-1"), RunId("run-2"), RunId("run-3")
STEPS = [0, 1, 2]


class Roomy(FakePeer):
    """A peer of several runs, with one fake peer for each of them."""

    def __init__(
        self, name: str, layers: str, memory_bytes: int = 1 << 40, max_beside: int = 3
    ) -> None:
        self.parts: dict[RunId, FakePeer] = {}
        super().__init__(name, layers, memory_bytes)
        self.max_beside = max_beside
        self._offer = (name, layers, memory_bytes)

    def forget(self) -> None:
        super().forget()
        self.parts.clear()

    def part(self, run_id: RunId) -> FakePeer:
        return self.parts[run_id]

    def hello(self) -> PeerHello:
        stages = tuple(one for part in self.parts.values() for one in part.hello().held)
        return replace(super().hello(), held=stages, max_beside=self.max_beside)

    def hear(self, message: Message) -> list[FromPeer]:
        run_id = getattr(message, "run_id", None)
        if run_id is None:
            return []
        if isinstance(message, Release):
            self.parts.pop(run_id, None)
            return []
        part = self.parts.setdefault(run_id, FakePeer(*self._offer))
        assert len(self.parts) <= 1 + self.max_beside
        part.compute_s = self.compute_s
        return part.hear(message)


@pytest.fixture
def pair() -> tuple[Roomy, Roomy]:
    """Two peers that a run needs both."""
    return Roomy("a", "0-2"), Roomy("b", "2-4")


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec()


def both_train(swarm: Swarm, runs: Iterable[RunId] = (RUN, SECOND)) -> None:
    swarm.settle_until(lambda: all(swarm.run(run).committed_steps for run in runs))
    assert all(swarm.run(run).phase is RunPhase.TRAINING for run in runs)


def test_a_second_run_trains_on_the_same_peers_at_the_same_time(
    swarm: Swarm, spec: RunSpec, pair: tuple[Roomy, Roomy]
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(*pair)
    both_train(swarm)
    assert swarm.run().peers == swarm.run(SECOND).peers == ("a", "b")
    status = Roll(swarm.state, {}, None).status(swarm.state.members[PeerId("a")], "")
    assert [work.run_id for work in status.works] == [RUN, SECOND]
    swarm.settle()
    for run in (RUN, SECOND):
        assert swarm.run(run).phase is RunPhase.FINISHED
        assert [step.step for step in swarm.history[run]] == STEPS
    assert swarm.num_rollbacks == 0


def test_with_one_stage_a_peer_a_run_waits(swarm: Swarm, spec: RunSpec) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(Roomy("a", "0-2"), Roomy("b", "2-4", max_beside=0))
    swarm.settle()
    assert swarm.run(SECOND).committed_steps == 0


def test_who_lends_no_memory_for_it_hosts_no_second_stage(
    swarm: Swarm, make_spec: MakeSpec
) -> None:
    spec = make_spec(num_steps=9)
    held_bytes = int(spec.memory_bytes(spec.model.layers))
    swarm.submit(spec)
    swarm.join(Roomy("a", "auto", memory_bytes=held_bytes * 2 - 1))
    swarm.wait(SETTLE_S)
    swarm.submit(spec, SECOND)
    swarm.settle_until(lambda: swarm.run().committed_steps == 1)
    assert swarm.run(SECOND).phase is RunPhase.QUEUED
    assert swarm.run(SECOND).detail == behind("run-1")


def test_what_others_leave_of_the_memory_is_all_that_a_run_gets(
    swarm: Swarm, make_spec: MakeSpec
) -> None:
    """Check that the second run has half of its layers where little memory is left."""
    spec = make_spec(num_steps=9)
    block_bytes = int(spec.memory_bytes(spec.model.layers)) // 4
    swarm.submit(spec)
    small, large = (
        Roomy(name, "auto", memory_bytes=n * block_bytes) for name, n in (("s", 4), ("l", 5))
    )
    swarm.join(small, large)
    swarm.wait(SETTLE_S)
    swarm.submit(spec, SECOND)
    both_train(swarm)
    assert {str(stage.layers) for stage in swarm.run().stages} == {"0-2", "2-4"}
    assert {str(stage.layers) for stage in swarm.run(SECOND).stages} == {"0-2", "2-4"}


def test_peers_are_given_whole_first(swarm: Swarm, make_spec: MakeSpec) -> None:
    spec = make_spec(num_steps=9)
    swarm.submit(spec)
    swarm.join(Roomy("a", "0-2"), Roomy("b", "2-4"))
    swarm.settle_until(lambda: swarm.run().committed_steps == 1)
    swarm.join(Roomy("whole", "0-4"))
    swarm.submit(spec, SECOND)
    both_train(swarm)
    assert swarm.run(SECOND).peers == ("whole",)


def test_four_runs_are_as_many_as_a_peer_hosts(swarm: Swarm, make_spec: MakeSpec) -> None:
    spec = make_spec(num_steps=9)
    runs = [RunId(f"run-{i}") for i in range(1, 6)]
    for run in runs:
        swarm.submit(spec, run)
    swarm.join(Roomy("a", "0-4"))
    both_train(swarm, runs[:4])
    assert swarm.run(runs[4]).phase is RunPhase.QUEUED
    swarm.handle(RunCancelled(RUN))
    swarm.settle_until(lambda: swarm.run(runs[4]).committed_steps)


def test_who_keeps_a_result_trains_another_run_meanwhile(
    swarm: Swarm, spec: RunSpec, pair: tuple[Roomy, Roomy]
) -> None:
    swarm.submit(spec)
    swarm.join(*pair)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
    swarm.submit(spec, SECOND)
    swarm.settle()
    assert swarm.run(SECOND).phase is RunPhase.FINISHED
    for run in (RUN, SECOND):
        swarm.handle(ResultCollected(run))
    assert all(not peer.parts for peer in pair)


def test_a_peer_that_is_gone_is_gone_from_all_its_runs_and_they_go_on_when_it_is_back(
    swarm: Swarm, spec: RunSpec, pair: tuple[Roomy, Roomy]
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(*pair)
    both_train(swarm)
    swarm.lose(pair[0])
    for run in (RUN, SECOND):
        assert swarm.run(run).phase is RunPhase.WAITING
        assert part_of(swarm.run(run).detail, Kind.PEER_MAY_RETURN).layers[0] == ranges_of("0-2")[0]
    swarm.join(pair[0])
    swarm.settle()
    for run in (RUN, SECOND):
        assert [step.step for step in swarm.history[run]] == STEPS
    assert swarm.num_rollbacks == 0


def test_a_peer_that_lost_everything_sets_back_all_its_runs(
    swarm: Swarm, spec: RunSpec, pair: tuple[Roomy, Roomy]
) -> None:
    swarm.submit(spec)
    swarm.submit(spec, SECOND)
    swarm.join(*pair)
    both_train(swarm)
    swarm.leave(pair[0])
    swarm.join(Roomy("new", "0-2"))
    swarm.wait(RETRY_S)
    swarm.settle()
    assert swarm.num_rollbacks == 2
    for run in (RUN, SECOND):
        assert swarm.run(run).phase is RunPhase.FINISHED
        assert swarm.run(run).peers == ("new", "b")


def test_one_runs_fault_is_nothing_to_the_other(
    swarm: Swarm, make_spec: MakeSpec, pair: tuple[Roomy, Roomy]
) -> None:
    swarm.submit(make_spec(num_steps=9))
    swarm.submit(make_spec(num_steps=9), SECOND)
    swarm.join(*pair)
    both_train(swarm)
    attempt = swarm.run().attempt.number
    swarm.say(pair[0], pair[0].parts[SECOND].failed("unavailable"))
    assert swarm.run(SECOND).phase is RunPhase.WAITING
    assert swarm.run().phase is RunPhase.TRAINING
    swarm.wait(RETRY_S)
    swarm.settle()
    assert swarm.run().attempt.number == attempt
    assert swarm.run().phase is swarm.run(SECOND).phase is RunPhase.FINISHED


def test_who_would_leave_is_waited_for_in_all_its_runs(
    swarm: Swarm, make_spec: MakeSpec, pair: tuple[Roomy, Roomy]
) -> None:
    swarm.submit(make_spec(num_steps=40))
    swarm.submit(make_spec(num_steps=40), SECOND)
    swarm.join(*pair)
    both_train(swarm)
    swarm.would_leave(pair[0])
    assert not swarm.may_go(pair[0])
    swarm.join(Roomy("one", "0-2"))
    swarm.settle_until(lambda: swarm.run().peers == ("one", "b"))
    assert not swarm.may_go(pair[0]), "the other run has nobody to take over"
    swarm.join(Roomy("two", "0-2"), Roomy("other", "0-2"))
    swarm.settle_until(lambda: swarm.may_go(pair[0]))
    assert swarm.run(SECOND).peers == ("other", "b")
    assert swarm.num_rollbacks == 0


def test_a_peer_that_shares_its_time_is_given_twice_the_time(
    swarm: Swarm, make_spec: MakeSpec, pair: tuple[Roomy, Roomy]
) -> None:
    def is_overdue_after(seconds: float) -> bool:
        run = swarm.run()
        began_s = run.step.began_s if run.step else swarm.now_s
        return PeerId("a") in overdue_peers(swarm.state, run, began_s + seconds)

    for peer in pair:
        peer.compute_s = 0.001
    swarm.submit(make_spec(num_steps=9))
    swarm.join(*pair)
    swarm.settle_until(lambda: swarm.run().committed_steps == 2)
    swarm.pending.clear()
    assert is_overdue_after(STEP_S + 1)
    swarm.submit(make_spec(num_steps=9), SECOND)
    assert not is_overdue_after(2 * STEP_S + 1), "the other loads, which nothing interrupts"
    assert is_overdue_after(2 * STEP_S + LOAD_S + 1)
    swarm.settle_until(lambda: swarm.run(SECOND).committed_steps == 1)
    assert not is_overdue_after(2 * STEP_S - 1)
    assert is_overdue_after(2 * STEP_S + 1)


# ---- who fails in the runs of two owners


def begin(swarm: Swarm, spec: RunSpec, pair: tuple[Roomy, Roomy], *owners: str) -> list[RunId]:
    """Start a run of each owner on the same two peers, each with a commit at least."""
    runs = [RunId(f"run-{number}") for number, _ in enumerate(owners)]
    for run_id, owner in zip(runs, owners, strict=True):
        swarm.handle(RunSubmitted(run_id, spec, owner, STORAGE_KEY))
    swarm.join(*pair)
    both_train(swarm, runs)
    return runs


def fail_in(swarm: Swarm, peer: Roomy, run_id: RunId, code: str = "unavailable") -> None:
    """Fail so often that this run suspends the peer."""
    while not swarm.run(run_id).has_suspended(peer.peer_id, swarm.now_s):
        if swarm.run(run_id).phase.is_working:
            swarm.say(peer, peer.part(run_id).failed(code))
        swarm.wait(1.0)
        swarm.step()


@pytest.mark.parametrize(
    ("owners", "is_aside"),
    [(("alice", "bob"), True), (("alice", "alice"), False), (("", ""), True)],
)
def test_who_fails_in_the_runs_of_two_owners_is_set_aside_from_all(
    swarm: Swarm,
    make_spec: MakeSpec,
    pair: tuple[Roomy, Roomy],
    owners: tuple[str, str],
    is_aside: bool,
) -> None:
    runs = begin(swarm, make_spec(num_steps=99), pair, *owners)
    for run_id in runs:
        assert not swarm.state.is_suspended(PeerId("b"), swarm.now_s)
        fail_in(swarm, pair[1], run_id)
    assert swarm.state.is_suspended(PeerId("b"), swarm.now_s) == is_aside


def test_who_serves_a_third_owner_well_is_not_set_aside_for_two_others(
    swarm: Swarm, make_spec: MakeSpec, pair: tuple[Roomy, Roomy]
) -> None:
    runs = begin(swarm, make_spec(num_steps=99), pair, "alice", "bob", "carol")
    for run_id in runs[:2]:
        fail_in(swarm, pair[1], run_id)
    assert not swarm.state.is_suspended(PeerId("b"), swarm.now_s)
    assert swarm.run(runs[2]).phase is RunPhase.TRAINING


def test_errors_that_nobody_expected_end_a_run_if_the_peer_serves_another_owner_well(
    swarm: Swarm, make_spec: MakeSpec, pair: tuple[Roomy, Roomy]
) -> None:
    bad, good = begin(swarm, make_spec(num_steps=999), pair, "alice", "bob")
    step = swarm.run(bad).committed_steps
    began_s = swarm.now_s
    while swarm.run(bad).phase is not RunPhase.FAILED:
        assert swarm.now_s - began_s < 300.0
        if swarm.run(bad).phase.is_working:
            swarm.say(pair[1], pair[1].part(bad).failed("internal", "a bug"))
        swarm.wait(1.0)
        swarm.step()
    assert swarm.run(bad).detail == reason(
        Kind.REPEATED_ERROR, "b", code="internal", text="a bug", step=step, amount=6
    )
    assert swarm.run(good).phase is RunPhase.TRAINING
    assert not swarm.state.standings
