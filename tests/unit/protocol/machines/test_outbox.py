"""What waits for an acknowledgement: a window of it on the way, all again on a new stream."""

from swarm_ft.protocol.machines.all_reduce import Outbox


def filled(window=2, messages="abc"):
    outbox = Outbox(window)
    for message in messages:
        assert outbox.put(message, message.upper()) == []
    return outbox


def test_nothing_goes_out_before_a_stream_is_up_and_then_the_oldest_go_first():
    outbox = filled()
    assert outbox.connected() == ["A", "B"]
    assert len(outbox) == 3


def test_an_acknowledgement_makes_room_for_the_next():
    outbox = filled()
    outbox.connected()
    assert outbox.put("d", "D") == []
    assert outbox.acknowledge("b") == ["C"]
    assert outbox.acknowledge("a") == ["D"]
    assert outbox.acknowledge("c") == outbox.acknowledge("d") == []
    assert len(outbox) == 0
    assert outbox.put("e", "E") == ["E"]


def test_only_what_is_not_acknowledged_goes_out_again():
    outbox = filled()
    outbox.connected()
    assert outbox.acknowledge("b") == ["C"]
    outbox.disconnected()
    assert outbox.put("d", "D") == []
    assert outbox.connected() == ["A", "C"]
    assert outbox.acknowledge("a") == ["D"]


def test_an_acknowledgement_that_comes_without_a_stream_counts():
    outbox = filled(window=3)
    assert outbox.acknowledge("a") == []
    assert outbox.connected() == ["B", "C"]


def test_acknowledging_twice_or_what_was_never_sent_changes_nothing():
    outbox = filled()
    outbox.connected()
    assert outbox.acknowledge("z") == []
    assert outbox.acknowledge("a") == ["C"]
    assert outbox.acknowledge("a") == []
    assert len(outbox) == 2


def test_what_is_cleared_never_goes_out():
    outbox = filled()
    outbox.connected()
    outbox.clear()
    assert len(outbox) == 0
    assert outbox.put("d", "D") == ["D"]
    outbox.disconnected()
    assert outbox.connected() == ["D"]
