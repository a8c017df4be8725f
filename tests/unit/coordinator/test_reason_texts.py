"""Reasons as text: every kind has a sentence, redacted for each reader."""

import pytest

from swarm_ft.coordinator.facts.messages import Idle, Progress, Release
from swarm_ft.coordinator.facts.reasons import Reason
from swarm_ft.coordinator.facts.reasons import ReasonKind as Kind
from swarm_ft.coordinator.facts.state import Run, SwarmState
from swarm_ft.coordinator.reason_texts import as_text, event_in_words
from swarm_ft.coordinator.watching import (
    event_of,
    message_to_peer,
    overview,
    redacted,
    status_of,
    words_for,
)
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.ids import PeerId, RunId, StepNumber
from swarm_ft.protocol.messages.control import LeaveProgress, ReleaseStage, StayIdle
from swarm_ft.protocol.messages.events import EventKind, Rollback
from swarm_ft.protocol.spec.bounds import MAX_TEXT_BYTES
from tests.reasons import behind, may_return, missing, ranges_of, reason
from tests.unit.coordinator.conftest import RUN, FakePeer, MakeSpec, Swarm

SECRET = "/home/alice/customers"
OTHER = RunId("run-2")


def full(kind: Kind) -> Reason:
    """Return a reason with all fields set, two of each, with secrets at two depths."""
    part = Reason(
        kind=Kind.PEER_ERROR,
        peers=(PeerId("z"),),
        code="internal",
        text=SECRET,
        value=1234.5,
    )
    return Reason(
        kind=kind,
        run_id=RUN,
        runs=(OTHER,),
        peers=(PeerId("a"),),
        others=(PeerId("c"),),
        layers=ranges_of("0-2, 2-4"),
        step=7,
        amount=8.0,
        limit=9.0,
        num_more=2,
        code="internal",
        text=SECRET,
        text_before=SECRET,
        value=1234.5,
        value_before=1234.5,
        parts=(part, part),
    )


def caller(name: str) -> Caller:
    return Caller(name=name, role=Role.CLIENT, key=new_key().public_key())


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_a_sentence_and_hides_what_is_private(kind: Kind) -> None:
    filled = full(kind)
    words = as_text(filled)
    assert words
    assert "None" not in words
    hidden = as_text(redacted(filled, lambda _: False))
    assert SECRET not in hidden
    assert "1234" not in hidden.replace(",", "")
    assert "None" not in hidden
    assert bool(hidden) == (kind is not Kind.RECORDED_TEXT), "its text is all that it has"
    assert redacted(filled, lambda run_id: run_id == RUN) == filled


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (missing("2-4"), "waiting for layers 2-4"),
        (
            missing("0-4", reason(Kind.NOT_ALONE, "r"), reason(Kind.NO_TOKENS, "s"), num_more=2),
            "waiting for layers 0-4: peer r may not host a stage alone, peer s may not see "
            "tokens, and 2 more peers may not host them",
        ),
        (behind("run-1", position=1), "place 2, after run-1"),
        (
            may_return("2-4", 30),
            "waiting for layers 2-4: their peer may come back (30 s)",
        ),
        (
            reason(Kind.PEER_SILENT, "b", layers="2-4", amount=8.0),
            "peer b (layers 2-4) sent no message for 8 s",
        ),
        (
            reason(
                Kind.PEER_LOST,
                "b",
                layers="2-4",
                parts=(
                    reason(Kind.PEER_SILENT, amount=8.0),
                    reason(Kind.TAKEN_OVER, others=(PeerId("c"), PeerId("d"))),
                ),
            ),
            "peer b (layers 2-4) sent no message for 8 s; its part goes to c and d",
        ),
        (
            reason(
                Kind.PEER_SUSPENDED,
                "b",
                amount=30.0,
                parts=(
                    reason(
                        Kind.FAILED_TOO_OFTEN,
                        amount=3,
                        parts=(reason(Kind.PEER_ERROR, code="internal", text="disk full"),),
                    ),
                ),
            ),
            "peer b is suspended for 30 s: failed 3 times, last it reported the error "
            "'internal': disk full",
        ),
        (reason(Kind.PAUSED, step=3), "paused after step 3; nothing is lost"),
        (
            reason(Kind.RATE_CHANGED, step=4, value=0.25, value_before=0.5),
            "learning rate 0.25 from step 4 on, 0.5 before",
        ),
        (
            reason(Kind.LOADING_BEST, step=3, text="loss", value=3.0),
            "peers load the best weights (step 3, loss 3)",
        ),
        (
            reason(Kind.OUTSIDE_MODEL, layers="4-6, 0-4", run_id=RUN),
            "layers 4-6: outside the model of run-1, which has layers 0-4",
        ),
        (
            reason(Kind.SUCCESSOR_COPIES, layers="2-4", others=(PeerId("heir"),), run_id=RUN),
            "run-1, layers 2-4: peer heir copies the state",
        ),
        (
            reason(Kind.GRANT_LAYERS, "wide", layers="0-2, 0-4"),
            "peer wide may host layers 0-2 only, and offers layers 0-4",
        ),
        (
            reason(Kind.REMEDY_SAVE_STEPS, layers="2-4", amount=2),
            "another peer for layers 2-4, or more frequent snapshots (--save-steps 2 now)",
        ),
        (
            reason(Kind.NO_KEEPER, layers="2-4", amount=2),
            "no peer that stays has room for layers 2-4 (--keep-disk)",
        ),
        (
            reason(Kind.SAVES_BEFORE_LEAVE, "b", layers="2-4", step=3),
            "waiting for a snapshot before peer b (layers 2-4) leaves",
        ),
        (
            reason(
                Kind.STEPS_AT_RISK,
                layers="2-4",
                amount=9,
                limit=4.2,
                run_id=RUN,
                parts=(reason(Kind.NO_SNAPSHOTS),),
            ),
            "run-1, layers 2-4: no peer can take over, and no snapshots are kept: 9 steps (4 s) "
            "would be lost",
        ),
        (reason(Kind.RESULTS_KEPT, amount=1), "1 peer keeps a result until a client fetches it"),
    ],
)
def test_sentences(cause: Reason, words: str) -> None:
    assert as_text(cause) == words


def test_nothing_has_no_words_and_an_event_has_those_of_its_kind() -> None:
    assert as_text(None) == ""
    assert event_in_words(EventKind.RUN_SUBMITTED, None) == "a client submitted the run"
    assert event_in_words(EventKind.PEER_JOINED, reason(Kind.LOADING)) == "peers load their stages"


@pytest.mark.parametrize("text", ["x" * 5000, "ü" * 1000, "\u5b57" * 1000, "a\nb\x00" * 900])
def test_words_fit_into_a_message(text: str) -> None:
    words = as_text(reason(Kind.PEER_ERROR, "b", text=text))
    assert len(words.encode()) <= MAX_TEXT_BYTES
    assert words.isprintable()


# ---- what each reader sees


def test_texts_of_a_run_are_for_its_readers_whatever_reason_holds_them(
    make_spec: MakeSpec,
) -> None:
    mine, other = (
        Run(run_id=name, spec=make_spec(), owner=owner)
        for name, owner in ((RUN, "me"), (OTHER, "other"))
    )
    state = SwarmState(runs={RUN: mine, OTHER: other})
    failed = reason(Kind.PEER_ERROR, code="internal", text=SECRET, run_id=OTHER)
    waits = reason(Kind.AWAITS_SUSPENDED, "b", text="mine", parts=(failed,))
    assert SECRET not in words_for(state, caller("me"), waits, RUN)
    assert "reported the error 'internal'" in words_for(state, caller("me"), waits, RUN)
    assert SECRET in words_for(state, caller("other"), waits, RUN)
    assert SECRET in words_for(state, None, waits, RUN), "the operator may see all"


def test_why_a_peer_cannot_host_a_run_is_for_the_readers_of_that_run_alone(
    swarm: Swarm, make_spec: MakeSpec, a: FakePeer, b: FakePeer
) -> None:
    swarm.submit(make_spec(), RUN, owner="alice")
    swarm.join(a, b)
    swarm.say(b, b.failed("bad-model", f"model '{SECRET}': its block 2 has digest 9a3f"))
    swarm.submit(make_spec(num_blocks=64), OTHER, owner="bob")
    assert swarm.idlers()[b.peer_id].text, "b cannot host Alice's run"
    seen = {
        name: {m.peer_id: m.idle for m in overview(swarm.state, caller=caller(name)).members}
        for name in ("alice", "bob")
    }
    assert SECRET in seen["alice"][b.peer_id]
    assert SECRET not in seen["bob"][b.peer_id]
    assert "9a3f" not in seen["bob"][b.peer_id]
    assert seen["bob"][b.peer_id] == "this peer cannot host run-1"


def test_a_run_that_waits_tells_others_no_text_and_no_metric(make_spec: MakeSpec) -> None:
    loads = reason(Kind.LOADING_BEST, step=3, text="loss", value=3.25)
    run = Run(run_id=RUN, spec=make_spec(), owner="alice", detail=loads)
    state = SwarmState(runs={RUN: run})
    assert status_of(run).detail == "peers load the best weights (step 3, loss 3.25)"
    (own,) = overview(state, caller=caller("alice")).runs
    (seen,) = overview(state, caller=caller("bob")).runs
    assert own.detail == status_of(run).detail
    assert seen.detail == "peers load the best weights (step 3)"


def test_watchers_of_a_run_see_no_text_of_another(make_spec: MakeSpec) -> None:
    failed = reason(Kind.PEER_ERROR, "b", text=SECRET, run_id=OTHER)
    own = reason(Kind.PEER_ERROR, "b", text="own text")
    both = reason(Kind.SEVERAL, parts=(failed, own))
    run = Run(run_id=RUN, spec=make_spec(), detail=both)
    assert status_of(run) == event_of(RUN, run)
    assert SECRET not in status_of(run).detail
    assert "own text" in status_of(run).detail


def test_a_run_that_went_back_is_told_with_its_remedy() -> None:
    why = reason(Kind.WEIGHTS_LOST, layers="2-4", parts=(reason(Kind.PEER_LEFT, "b"),))
    remedy = reason(Kind.REMEDY_SAVE_STEPS, layers="2-4", amount=2)
    rollback = reason(Kind.WENT_BACK, step=4, amount=5, parts=(why, remedy))
    assert event_of(RUN, rollback) == Rollback(
        from_step=StepNumber(5),
        to_step=StepNumber(4),
        why="no peer has the weights of layers 2-4 any more: peer b left",
        remedy="another peer for layers 2-4, or more frequent snapshots (--save-steps 2 now)",
    )
    assert as_text(rollback).startswith("went back from step 5 to step 4 because no peer has")


def test_peers_get_sentences_without_texts() -> None:
    error = reason(Kind.NO_PEER_CAN_HOST, parts=(reason(Kind.PEER_MISFIT, "b", text=SECRET),))
    released = message_to_peer(Release(run_id=RUN, reason=error, is_over=True))
    words = "no peer can host it: peer b cannot host it"
    assert released == ReleaseStage(run_id=RUN, reason=words, is_over=True)
    idle = message_to_peer(Idle(reason=reason(Kind.PEER_MISFIT, text=SECRET, run_id=RUN)))
    assert idle == StayIdle(reason="this peer cannot host run-1")
    going = reason(Kind.GOES_AFTER_STEP, layers="2-4", run_id=RUN)
    message = message_to_peer(Progress(may_go=False, reason=going, seconds=2.0))
    assert isinstance(message, LeaveProgress)
    assert (message.may_go, message.seconds) == (False, 2.0)
    assert message.words.startswith("run-1, layers 2-4: nothing is lost")
    assert message_to_peer(Progress(may_go=True)) == LeaveProgress(may_go=True, words="")
