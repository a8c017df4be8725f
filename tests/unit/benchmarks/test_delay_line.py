"""The order and the times at which frames leave a delayed link."""

from math import inf

from benchmarks.lab.delay_line import DelayLine


def drain(line: DelayLine, now_s: float) -> list[tuple[int, bytes]]:
    return list(line.pop_due(now_s))


def test_a_frame_leaves_once_and_not_before_its_delay_is_over() -> None:
    line = DelayLine(delay_s=0.5)
    assert line.next_s == inf
    assert line.push(7, b"frame", now_s=10.0)
    assert line.next_s == 10.5
    assert drain(line, 10.499) == []
    assert drain(line, 10.5) == [(7, b"frame")]
    assert drain(line, 11.0) == []
    assert line.next_s == inf


def test_frames_keep_their_order_and_the_gaps_between_them() -> None:
    line = DelayLine(delay_s=1.0)
    for number in range(10):
        line.push(1, bytes([number]), now_s=float(number // 2))
    assert drain(line, 2.5) == [(1, bytes([number])) for number in range(4)]
    assert line.next_s == 3.0
    assert drain(line, 100.0) == [(1, bytes([number])) for number in range(4, 10)]


def test_frames_of_all_wires_go_to_their_own_ends() -> None:
    line = DelayLine(delay_s=1.0)
    line.push(1, b"a", now_s=0.0)
    line.push(2, b"b", now_s=0.0)
    assert drain(line, 1.0) == [(1, b"a"), (2, b"b")]


def test_what_does_not_fit_is_dropped_until_something_left() -> None:
    line = DelayLine(delay_s=1.0, max_held_bytes=10)
    assert line.push(1, b"123456", now_s=0.0)
    assert not line.push(1, b"12345", now_s=0.1)
    assert line.push(1, b"1234", now_s=0.2)
    assert drain(line, 1.0) == [(1, b"123456")]
    assert line.push(1, b"12345", now_s=1.0)
    assert drain(line, 2.0) == [(1, b"1234"), (1, b"12345")]
