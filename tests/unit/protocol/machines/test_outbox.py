"""Outbox of unacknowledged messages: a window in flight, and all again on a new stream."""

from __future__ import annotations

from swarm_ft.protocol.machines.outbox import Outbox


def filled(messages: str = "abc") -> Outbox[str, str]:
    outbox: Outbox[str, str] = Outbox()
    for message in messages:
        assert outbox.put(message, message.upper()) == []
    return outbox


def test_nothing_goes_out_before_a_stream_is_up_and_then_the_oldest_go_first() -> None:
    outbox = filled()
    assert outbox.connected(2) == ["A", "B"]
    assert len(outbox) == 3


def test_an_acknowledgement_makes_room_for_the_next() -> None:
    outbox = filled()
    outbox.connected(2)
    assert outbox.put("d", "D") == []
    assert outbox.acknowledge("b") == ["C"]
    assert outbox.acknowledge("a") == ["D"]
    assert outbox.acknowledge("c") == outbox.acknowledge("d") == []
    assert len(outbox) == 0
    assert outbox.put("e", "E") == ["E"]


def test_only_what_is_not_acknowledged_goes_out_again() -> None:
    outbox = filled()
    outbox.connected(2)
    assert outbox.acknowledge("b") == ["C"]
    outbox.disconnected()
    assert outbox.put("d", "D") == []
    assert outbox.connected(2) == ["A", "C"]
    assert outbox.acknowledge("a") == ["D"]


def test_each_stream_has_a_window_of_its_own() -> None:
    outbox = filled()
    outbox.connected(1)
    outbox.disconnected()
    assert outbox.connected(3) == ["A", "B", "C"]


def test_an_acknowledgement_that_comes_without_a_stream_counts() -> None:
    outbox = filled()
    assert outbox.acknowledge("a") == []
    assert outbox.connected(3) == ["B", "C"]


def test_acknowledging_twice_or_what_was_never_sent_changes_nothing() -> None:
    outbox = filled()
    outbox.connected(2)
    assert outbox.acknowledge("z") == []
    assert outbox.acknowledge("a") == ["C"]
    assert outbox.acknowledge("a") == []
    assert len(outbox) == 2


def test_what_is_withdrawn_goes_out_only_if_it_is_put_again() -> None:
    outbox = filled()
    outbox.connected(2)
    outbox.withdraw("a")
    assert outbox.find("a") is None
    assert len(outbox) == 2
    outbox.disconnected()
    assert outbox.connected(3) == ["B", "C"]
    assert outbox.put("a", "A2") == ["A2"]
    assert outbox.find("a") == "A2"


def test_what_is_put_again_while_it_waits_goes_out_once() -> None:
    outbox = filled("a")
    outbox.put("a", "A2")
    assert outbox.connected(3) == ["A2"]


def test_what_is_cleared_never_goes_out() -> None:
    outbox = filled()
    outbox.connected(2)
    outbox.clear()
    assert len(outbox) == 0
    assert outbox.put("d", "D") == ["D"]
    outbox.disconnected()
    assert outbox.connected(2) == ["D"]
