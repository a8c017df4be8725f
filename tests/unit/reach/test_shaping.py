"""A volunteer's caps hold within 5 % over any 10 s, for any traffic."""

import asyncio
import socket
import threading
import time
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.protocol.machines.rate import Bucket
from swarm_ft.reach.shaping import BURST_S, MAX_CHUNK_BYTES, Gate, Shape
from swarm_ft.reach.sockets import Joint

WINDOW_S = 10.0
TOLERANCE = 0.05


class FakeTime:
    """A clock that only sleeping and pauses move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def most_in_a_window(passed: list[tuple[float, int]]) -> int:
    """Return the bytes that passed in the fullest 10 s."""
    sums = [0, *accumulate(count for _, count in passed)]
    most, first = 0, 0
    for last, (at_s, _) in enumerate(passed):
        while at_s - passed[first][0] > WINDOW_S:
            first += 1
        most = max(most, sums[last + 1] - sums[first])
    return most


@given(
    mbps=st.floats(0.5, 1000.0),
    pauses=st.lists(st.floats(0.0, 30.0), max_size=20),
    busy_s=st.floats(0.1, 15.0),
)
def test_no_ten_seconds_have_more_and_busy_ones_not_much_less(
    mbps: float, pauses: list[float], busy_s: float
) -> None:
    clock, rate = FakeTime(), mbps * 125_000
    gate = Gate(rate, now_s=clock.now, sleep=clock.sleep)
    chunk = max(gate.chunk_bytes, int(rate * 0.02))  # as many as that: fewer take long to count
    passed: list[tuple[float, int]] = []
    for pause_s in (*pauses[:3], 0.0):
        clock.sleep(pause_s)
        began_s, before = clock.now_s, gate.passed_bytes
        while clock.now_s < began_s + busy_s:
            gate.wait(chunk)
            passed.append((clock.now_s, chunk))
        took_s = clock.now_s - began_s
        assert gate.passed_bytes - before >= (1 - TOLERANCE) * rate * took_s
    assert most_in_a_window(passed) <= (1 + TOLERANCE) * rate * WINDOW_S


@given(counts=st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50))
def test_those_who_come_at_once_wait_one_behind_the_other(counts: list[int]) -> None:
    bucket = Bucket(per_s=1e5, burst=1e4)
    waits = [bucket.take(count, 5.0) for count in counts]
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(max(0.0, (sum(counts) - 1e4) / 1e5))


def test_without_a_cap_nothing_waits_and_all_is_counted() -> None:
    shape = Shape()
    shape.up.wait(10**12)
    assert shape.up.chunk_bytes == MAX_CHUNK_BYTES
    assert shape.passed_bytes == 10**12
    assert shape.receive_buffer_bytes is None


@pytest.mark.parametrize("is_up", [True, False], ids=["up", "down"])
async def test_a_joint_of_real_sockets_keeps_to_it(is_up: bool) -> None:
    """The two streams share the gate, so 2 MB at 8 Mbps take 2 s in all."""
    rate, total = 1e6, 2_000_000
    shape = Shape(up=Gate(rate)) if is_up else Shape(down=Gate(rate))
    ends = []
    for _ in range(2):
        link, far = socket.socketpair()
        local, near = socket.socketpair()
        joint = Joint(link, local, shape=shape)
        ends.append((joint, *((near, far) if is_up else (far, near))))
    began_s = time.monotonic()
    feeding = [
        threading.Thread(target=source.sendall, args=(bytes(total // 2),)) for _, source, _ in ends
    ]
    for thread in feeding:
        thread.start()
    await asyncio.gather(*(asyncio.to_thread(_drained, sink, total // 2) for _, _, sink in ends))
    took_s = time.monotonic() - began_s
    for thread in feeding:
        thread.join()
    for joint, source, sink in ends:
        joint.close()
        source.close()
        sink.close()
    gate = shape.up if is_up else shape.down
    assert gate.passed_bytes == total
    assert took_s >= (total / rate - BURST_S) * (1 - TOLERANCE)
    assert took_s < 20 * total / rate, "a busy machine takes longer"


def _drained(sock: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(sock.recv(1 << 16))
