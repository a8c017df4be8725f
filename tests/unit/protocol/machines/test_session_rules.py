"""Each rule of a boundary's session on its own; the simulation has all of them together."""

from __future__ import annotations

from typing import Any

import pytest

from swarm_ft.codec.spec import Axis, CodecName, CodecSpec, Direction
from swarm_ft.codec.tensor import EncodedTensor
from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import Attempt, BlockIndex, MicrobatchIndex, PeerId, RunId, SampleId, StepNumber
from swarm_ft.protocol.machines.session import (
    WINDOW_FRAMES,
    BoundarySession,
    Deliver,
    Reencode,
    Transmit,
)
from swarm_ft.protocol.messages.boundary import (
    Ack,
    BoundaryHello,
    Frame,
    FrameKey,
    FrameKind,
    KeyFrameRequest,
)

TENSOR = EncodedTensor(CodecSpec(CodecName.AQ, 400, Axis.CHANNEL), 1, 1, b"")


def frame(
    sample: int,
    *,
    step: int = 0,
    attempt: int = 1,
    direction: Direction = Direction.FORWARD,
    kind: FrameKind = FrameKind.DELTA,
) -> Frame:
    key = FrameKey(
        Attempt(attempt), StepNumber(step), MicrobatchIndex(0), SampleId(sample), direction
    )
    return Frame(key, kind, TENSOR)


def back(sample: int, **changes: Any) -> Frame:
    return frame(sample, direction=Direction.BACKWARD, **changes)


def hello(*received: Frame, window_frames: int = 8) -> BoundaryHello:
    return BoundaryHello(
        run_id=RunId("run"),
        spec_digest=b"d" * 16,
        boundary=BlockIndex(1),
        peer_id=PeerId("peer"),
        attempt=Attempt(1),
        window_frames=window_frames,
        received=frozenset(f.key for f in received),
    )


@pytest.fixture
def upstream() -> BoundarySession:
    """A session that sends FORWARD, in step 0 on a stream with a window of 8."""
    session = BoundarySession(attempt=Attempt(1), sends=Direction.FORWARD)
    session.begin(StepNumber(0))
    session.connected(hello())
    return session


# ---- sending


def test_frames_wait_for_a_stream_and_then_go_out_in_order() -> None:
    session = BoundarySession(attempt=Attempt(1), sends=Direction.FORWARD)
    session.begin(StepNumber(0))
    assert [session.send(frame(i)) for i in range(3)] == [[], [], []]
    assert session.connected(hello()) == [Transmit(frame(i)) for i in range(3)]


def test_an_ack_opens_the_window_by_one_frame() -> None:
    session = BoundarySession(attempt=Attempt(1), sends=Direction.FORWARD)
    session.begin(StepNumber(0))
    session.connected(hello(window_frames=2))
    sent = [session.send(frame(i)) for i in range(4)]
    assert sent == [[Transmit(frame(0))], [Transmit(frame(1))], [], []]
    assert session.receive(Ack(frame(1).key)) == [Transmit(frame(2))]
    assert session.receive(Ack(frame(1).key)) == []


def test_is_settled_once_everything_is_acknowledged(upstream: BoundarySession) -> None:
    settled = [upstream.is_settled]
    upstream.send(frame(0))
    settled.append(upstream.is_settled)
    upstream.receive(Ack(frame(0).key))
    settled.append(upstream.is_settled)
    assert settled == [True, False, True]


def test_a_hello_settles_what_it_says_was_received(upstream: BoundarySession) -> None:
    upstream.send(frame(0))
    upstream.disconnected()
    assert upstream.connected(hello(frame(0))) == []
    assert upstream.is_settled


def test_nothing_goes_out_while_the_stream_is_down(upstream: BoundarySession) -> None:
    upstream.disconnected()
    assert upstream.send(frame(0)) == []
    assert upstream.connected(hello()) == [Transmit(frame(0))]


def test_a_frame_acknowledged_on_the_last_stream_is_not_sent_on_the_next(
    upstream: BoundarySession,
) -> None:
    upstream.send(frame(0))
    upstream.send(frame(1))
    upstream.receive(Ack(frame(0).key))
    upstream.disconnected()
    assert upstream.connected(hello()) == [Transmit(frame(1))]


@pytest.mark.parametrize(
    "wrong", [frame(0, step=1), frame(0, attempt=2), back(0)], ids=["step", "attempt", "direction"]
)
def test_refuses_to_send_a_frame_that_is_not_of_now(
    upstream: BoundarySession, wrong: Frame
) -> None:
    with pytest.raises(OutOfTurn, match="cannot send"):
        upstream.send(wrong)


def test_acknowledgements_of_unknown_frames_change_nothing(upstream: BoundarySession) -> None:
    upstream.send(frame(0))
    for unknown in (frame(1), frame(0, step=7), frame(0, attempt=2), back(0)):
        assert upstream.receive(Ack(unknown.key)) == []
    assert not upstream.is_settled


# ---- receiving


def test_a_frame_is_delivered_once_and_acknowledged_as_often_as_it_comes(
    upstream: BoundarySession,
) -> None:
    assert upstream.receive(back(0)) == [Deliver(back(0))]
    assert upstream.receive(back(0)) == []
    assert upstream.accepted(back(0).key) == [Transmit(Ack(back(0).key))]
    assert upstream.receive(back(0)) == [Transmit(Ack(back(0).key))]
    assert upstream.received == {back(0).key}


def test_frames_of_older_steps_and_other_attempts_change_nothing(upstream: BoundarySession) -> None:
    upstream.begin(StepNumber(1))
    for void in (back(0, step=0), back(0, step=1, attempt=0), back(0, step=1, attempt=2)):
        assert upstream.receive(void) == []
        assert upstream.accepted(void.key) == upstream.refused(void.key, "") == []
    assert upstream.received == frozenset()


def test_a_new_step_forgets_the_last_one(upstream: BoundarySession) -> None:
    upstream.send(frame(0))
    upstream.receive(back(0))
    upstream.begin(StepNumber(1))
    assert upstream.is_settled
    assert upstream.accepted(back(0).key) == []
    assert upstream.connected(hello()) == []


def test_a_frame_of_the_other_direction_is_out_of_turn(upstream: BoundarySession) -> None:
    with pytest.raises(OutOfTurn, match="FORWARD"):
        upstream.receive(frame(0))


def test_a_broken_frame_is_delivered_again_when_it_comes_again(upstream: BoundarySession) -> None:
    upstream.receive(back(0))
    upstream.discarded(back(0).key)
    assert upstream.receive(back(0)) == [Deliver(back(0))]


# ---- early frames


def test_frames_of_the_next_step_wait_until_it_begins(upstream: BoundarySession) -> None:
    assert upstream.receive(back(0, step=1)) == upstream.receive(back(1, step=1)) == []
    assert upstream.receive(back(0, step=1)) == []
    assert upstream.begin(StepNumber(1)) == [Deliver(back(0, step=1)), Deliver(back(1, step=1))]


def test_before_its_first_step_an_end_takes_up_any_step() -> None:
    session = BoundarySession(attempt=Attempt(1), sends=Direction.FORWARD)
    session.receive(back(0, step=7))
    session.receive(back(0, step=9))
    assert session.begin(StepNumber(7)) == [Deliver(back(0, step=7))]


def test_a_frame_two_steps_ahead_is_out_of_turn(upstream: BoundarySession) -> None:
    with pytest.raises(OutOfTurn, match="step 2 during step 0"):
        upstream.receive(back(0, step=2))


def test_early_frames_are_bounded(upstream: BoundarySession) -> None:
    for sample in range(WINDOW_FRAMES):
        upstream.receive(back(sample, step=1))
    assert upstream.receive(back(0, step=1)) == []
    with pytest.raises(OutOfTurn, match="before their step began"):
        upstream.receive(back(WINDOW_FRAMES, step=1))


# ---- key frames on request


def test_a_refused_delta_is_asked_for_and_encoded_again(upstream: BoundarySession) -> None:
    upstream.receive(back(0))
    assert upstream.refused(back(0).key, "why") == [Transmit(KeyFrameRequest(back(0).key, "why"))]
    key_frame = back(0, kind=FrameKind.KEY)
    assert upstream.receive(key_frame) == [Deliver(key_frame)]

    upstream.send(frame(0))
    assert upstream.receive(KeyFrameRequest(frame(0).key, "why")) == [Reencode(frame(0), "why")]
    again = frame(0, kind=FrameKind.KEY)
    assert upstream.send(again) == [Transmit(again)]
    assert not upstream.is_settled


@pytest.mark.parametrize("kind", [FrameKind.KEY, FrameKind.DIRECT])
def test_asking_for_a_key_frame_of_what_builds_on_nothing_is_out_of_turn(
    upstream: BoundarySession, kind: FrameKind
) -> None:
    upstream.send(frame(0, kind=kind))
    with pytest.raises(OutOfTurn, match="has no base"):
        upstream.receive(KeyFrameRequest(frame(0).key, ""))


def test_a_second_request_changes_nothing(upstream: BoundarySession) -> None:
    request = KeyFrameRequest(frame(0).key, "")
    upstream.send(frame(0))
    upstream.receive(request)
    assert upstream.receive(request) == []
    upstream.send(frame(0, kind=FrameKind.KEY))
    assert upstream.receive(request) == []


def test_a_request_for_an_acknowledged_or_unknown_frame_changes_nothing(
    upstream: BoundarySession,
) -> None:
    upstream.send(frame(0))
    upstream.receive(Ack(frame(0).key))
    upstream.connected(hello())
    assert upstream.receive(KeyFrameRequest(frame(0).key, "")) == []
    assert upstream.receive(KeyFrameRequest(frame(1).key, "")) == []


def test_a_refused_delta_is_not_sent_on_the_next_stream(upstream: BoundarySession) -> None:
    """Its key frame is still being encoded when the stream is replaced."""
    upstream.send(frame(0))
    upstream.receive(KeyFrameRequest(frame(0).key, ""))
    upstream.disconnected()
    assert upstream.connected(hello()) == []
    again = frame(0, kind=FrameKind.KEY)
    assert upstream.send(again) == [Transmit(again)]


def test_a_delta_that_was_sent_on_two_streams_is_asked_for_once(upstream: BoundarySession) -> None:
    """The first copy is refused after the second stream came up, and then the second arrives."""
    upstream.receive(back(0))
    upstream.connected(hello())
    assert len(upstream.refused(back(0).key, "")) == 1
    assert upstream.receive(back(0)) == []


def test_a_request_that_was_lost_with_its_stream_is_made_again(upstream: BoundarySession) -> None:
    upstream.receive(back(0))
    upstream.disconnected()
    upstream.refused(back(0).key, "")
    upstream.connected(hello())
    assert upstream.receive(back(0)) == [Deliver(back(0))]


def test_a_delta_that_is_refused_while_it_waits_for_the_window_goes_out_as_a_key_frame_only() -> (
    None
):
    session = BoundarySession(attempt=Attempt(1), sends=Direction.FORWARD)
    session.begin(StepNumber(0))
    session.connected(hello(window_frames=3))
    for sample in range(3):
        session.send(frame(sample))
    session.connected(hello(window_frames=2))
    assert session.receive(KeyFrameRequest(frame(2).key, "")) == [Reencode(frame(2), "")]
    again = frame(2, kind=FrameKind.KEY)
    assert session.send(again) == []
    assert session.receive(Ack(frame(0).key)) == [Transmit(again)]
    assert session.receive(Ack(frame(1).key)) == []
    assert session.receive(Ack(again.key)) == []
    assert session.is_settled


def test_what_is_being_decoded_is_not_lacked_and_what_was_refused_is(
    upstream: BoundarySession,
) -> None:
    keys = [back(1).key, back(2).key]
    assert upstream.has_missing(keys)
    for sample in (1, 2):
        upstream.receive(back(sample))
    assert not upstream.has_missing(keys)
    upstream.accepted(keys[0])
    assert not upstream.has_missing(keys)
    upstream.refused(keys[1], "its base is not here")
    assert upstream.has_missing(keys)
    assert not upstream.has_missing(keys[:1])
