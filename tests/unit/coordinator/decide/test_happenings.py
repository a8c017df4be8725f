"""Events for people: the fact, its cause, and the remedy."""

from dataclasses import replace

import pytest

from swarm_ft.coordinator.decide import contributions
from swarm_ft.coordinator.facts.connectivity import Connectivity, pair_of
from swarm_ft.coordinator.facts.events import EmitEvent, Publish, RunCancelled, Tick
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.watching import overview
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.client import MemberActivity, MemberLink, RunPhase
from swarm_ft.protocol.messages.control import PeerAlive
from swarm_ft.protocol.messages.events import Actor, EventKind
from swarm_ft.protocol.messages.meeting import Way
from tests.reasons import kinds_in, part_of, reason
from tests.unit.coordinator.conftest import RUN, FakePeer, MakeSpec, Swarm

Kind = EventKind


def emitted(swarm: Swarm) -> list[EmitEvent]:
    return [effect for effect in swarm.effects if isinstance(effect, EmitEvent)]


def kinds(swarm: Swarm) -> list[EventKind]:
    return [one.kind for one in emitted(swarm)]


def of_kind(swarm: Swarm, kind: EventKind) -> EmitEvent:
    return next(one for one in emitted(swarm) if one.kind is kind)


def went_back(swarm: Swarm) -> list[Reason]:
    published = (effect.event for effect in swarm.effects if isinstance(effect, Publish))
    return [event for event in published if isinstance(event, Reason)]


def after_steps(swarm: Swarm, count: int) -> None:
    swarm.settle_until(lambda: swarm.run().committed_steps == count)


def test_a_quiet_run_is_told_from_its_submission_to_its_result(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(num_steps=3))
    swarm.join(a, b)
    swarm.settle()
    assert kinds(swarm) == [
        Kind.RUN_SUBMITTED,
        Kind.RUN_WAITING,
        Kind.PEER_JOINED,
        Kind.RUN_WAITING,
        Kind.PEER_JOINED,
        Kind.RUN_LOADING,
        Kind.RUN_TRAINING,
        Kind.RUN_EXPORTING,
        Kind.RUN_FINISHED,
    ]
    joined = reason(ReasonKind.PEER_JOINED, "a", layers="0-2")
    assert of_kind(swarm, Kind.PEER_JOINED).reason == joined
    assert of_kind(swarm, Kind.RUN_FINISHED).to_step == 3


def test_time_alone_tells_nothing_twice(swarm: Swarm, make_spec: MakeSpec, a: FakePeer) -> None:
    swarm.submit(make_spec())
    swarm.join(a)
    before = len(emitted(swarm))
    for _ in range(20):
        swarm.handle(Tick())
    assert len(emitted(swarm)) == before


def test_a_run_that_goes_back_says_to_where_why_and_what_would_have_kept_it(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    swarm.submit(make_spec(num_steps=9))
    swarm.join(a, b)
    after_steps(swarm, 5)
    swarm.leave(b)
    swarm.join(newcomer)
    swarm.settle()
    (back,) = went_back(swarm)
    left = reason(ReasonKind.PEER_LEFT, "b")
    why = reason(ReasonKind.WEIGHTS_LOST, layers="2-4", parts=(left,))
    remedy = reason(ReasonKind.REMEDY_SNAPSHOTS, layers="2-4")
    assert back == reason(ReasonKind.WENT_BACK, step=0, amount=5, parts=(why, remedy))
    event = of_kind(swarm, Kind.RUN_WENT_BACK)
    assert (event.run_id, event.from_step, event.to_step) == (RUN, 5, 0)
    assert event.reason == back
    happened = of_kind(swarm, Kind.PEER_LEFT)
    expected = replace(left, given=swarm.state.contribution_of(PeerId("b")))
    assert (happened.peer_id, happened.run_id, happened.reason) == ("b", RUN, expected)
    assert swarm.run().phase is RunPhase.FINISHED


def test_it_goes_back_to_its_snapshot_and_says_how_often_these_are(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    swarm.submit(make_spec(num_steps=9, save_steps=2))
    swarm.join(a, b)
    after_steps(swarm, 5)
    swarm.lose(b)
    swarm.join(newcomer)
    swarm.wait(40.0)
    swarm.settle()
    (back,) = went_back(swarm)
    assert (back.amount, back.step) == (5, 4)
    why, remedy = back.parts
    assert reason(ReasonKind.PEER_DISCONNECTED, "b") in why.parts
    assert remedy == reason(ReasonKind.REMEDY_SAVE_STEPS, layers="2-4", amount=2)
    assert [one.to_step for one in emitted(swarm) if one.kind is Kind.SNAPSHOT_WHOLE][:2] == [2, 4]


def test_a_run_that_lost_no_step_did_not_go_back(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    swarm.submit(make_spec(num_steps=3))
    swarm.join(a, b)
    swarm.leave(b)
    swarm.join(newcomer)
    swarm.settle()
    assert not went_back(swarm)


def test_silence_setting_aside_and_an_end_are_told(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(num_steps=50))
    swarm.join(a, b)
    after_steps(swarm, 2)
    swarm.deafen(b)
    swarm.wait(9.0)
    assert kinds_in(of_kind(swarm, Kind.PEER_SILENT).reason) == [ReasonKind.PEER_SILENT]
    events = of_kind(swarm, Kind.PEER_GONE)
    assert (events.peer_id, events.run_id) == ("b", RUN)
    assert part_of(events.reason, ReasonKind.PEER_SILENT).peers == ("b",)
    swarm.handle(RunCancelled(RUN))
    cancelled = reason(ReasonKind.CANCELLED_BY_CLIENT, actor=Actor.CLIENT)
    assert of_kind(swarm, Kind.RUN_CANCELLED).reason == cancelled


# ---- what members gave, and do


def test_what_members_gave_is_counted_by_their_names_and_kept(
    make_swarm: type[Swarm], make_spec: MakeSpec, a: FakePeer, b: FakePeer, newcomer: FakePeer
) -> None:
    swarm = make_swarm(Journal(":memory:"))
    swarm.submit(make_spec(num_steps=9))
    swarm.join(a, b)
    after_steps(swarm, 5)
    swarm.leave(b)
    swarm.join(newcomer)
    swarm.settle()
    contributions = swarm.state.contributions
    assert {peer: one.steps for peer, one in contributions.items()} == {
        "a": 14,
        "b": 5,
        "newcomer": 9,
    }
    assert contributions[PeerId("newcomer")].samples == sum(
        step.num_samples for step in swarm.steps()
    )
    assert contributions[PeerId("a")].seconds > 0.0
    swarm.restart()
    assert swarm.state.contributions == contributions
    assert [one.peer_id for one in overview(swarm.state).contributors] == ["a", "newcomer", "b"]


def test_of_many_names_those_that_gave_least_are_forgotten(
    swarm: Swarm, make_spec: MakeSpec, make_peer: type[FakePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "MAX_CONTRIBUTIONS", 2)
    swarm.submit(make_spec(num_steps=9))
    whole = [make_peer(name, "0-4") for name in ("one", "two", "three")]
    for count, peer in enumerate(whole, 1):
        swarm.join(peer)
        after_steps(swarm, 2 * count)
        swarm.leave(peer)
    assert len(swarm.state.contributions) == 2
    assert "three" in swarm.state.contributions


def test_status_tells_what_members_do_and_how_the_run_goes(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    spec = make_spec(num_steps=9)
    swarm.submit(spec)
    swarm.submit(spec, RunId("run-2"))
    swarm.join(a, b)
    after_steps(swarm, 3)
    alive = PeerAlive(
        run_id=RUN, attempt=swarm.run().attempt.number, step=StepNumber(3), waits_for=(PeerId("b"),)
    )
    swarm.say(a, alive)
    status = overview(swarm.state)
    one, other = status.members
    (work,), (others,) = one.works, other.works
    assert (work.run_id, work.stage, work.num_replicas) == (RUN, 0, 1)
    assert (work.doing, work.waits_for) == (MemberActivity.WAITING, ("b",))
    assert others.doing is MemberActivity.COMPUTING
    assert one.endpoint == "a.example:7001"
    assert work.share > 0
    assert not one.links, "how they reach each other is not known here"
    assert one.given.steps == 3
    going, queued = status.runs
    assert going.last_step == swarm.run().past.last_step
    assert going.last_step is not None
    assert going.last_step.step == 2
    assert going.step_s > 0.0
    assert going.eta_s == pytest.approx(6 * going.step_s)
    assert (going.place, going.behind) == (0, None)
    assert (queued.place, queued.behind, queued.last_step) == (1, RUN, None)


def test_what_peers_measured_of_links_is_told_as_far_as_we_know_whom_to(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(num_steps=9))
    swarm.join(a, b)
    after_steps(swarm, 2)
    speed, other = LinkSpeed(bytes_per_s=4e5, round_trip_s=0.02), LinkSpeed(bytes_per_s=7e5)
    names = ("b", "a", "nobody")
    effects = swarm.say(a, PeerAlive(links={PeerId(name): speed for name in names}))
    assert not effects, "nothing is decided by it, or written down"
    swarm.say(b, PeerAlive(links={PeerId("a"): other}))
    one, two = overview(swarm.state).members
    assert one.links == (MemberLink(peer_id=PeerId("b"), way=None, speed=speed),)
    assert two.links == (MemberLink(peer_id=PeerId("a"), way=None, speed=other),)
    swarm.handle(Tick(Connectivity(met={pair_of("a", "b"): Way.PUNCHED})))
    (link,) = overview(swarm.state).members[0].links
    assert (link.way, link.speed) == (Way.PUNCHED, speed)
    swarm.say(a, PeerAlive())
    assert overview(swarm.state).members[0].links[0].speed == LinkSpeed()
