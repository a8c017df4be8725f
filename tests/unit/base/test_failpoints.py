"""A process runs the ordered fault at the named point, once."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarm_ft.base.failpoints import VARIABLE, Failpoints, reached_file


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    return tmp_path / "orders"


def child(orders: Path, *lines: str) -> subprocess.Popen[str]:
    """Start a process that runs only these lines after an import."""
    script = "\n".join(
        ("from swarm_ft.base import failpoints", *lines, "print('alive', flush=True)")
    )
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, VARIABLE: str(orders)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_process_dies_at_the_point_and_says_when(orders: Path) -> None:
    orders.write_text("kill here 2")
    before_s = time.monotonic()
    process = child(orders, "failpoints.reached('here')", "failpoints.reached('here')")
    assert process.communicate()[0] == ""
    assert process.returncode == -signal.SIGKILL
    assert before_s < float(reached_file(orders).read_text()) < time.monotonic()
    assert not orders.exists()


def test_other_points_and_fewer_times_do_no_harm(orders: Path) -> None:
    orders.write_text("kill here 2")
    process = child(orders, "failpoints.reached('there')", "failpoints.reached('here')")
    assert process.communicate()[0] == "alive\n"
    assert process.returncode == 0
    assert orders.exists()


def test_a_process_freezes_until_it_is_told_to_go_on(orders: Path) -> None:
    orders.write_text("stop here 1")
    process = child(orders, "failpoints.reached('here')")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    assert process.communicate()[0] == "alive\n"


def test_a_task_at_work_is_met_as_soon_as_it_waits(orders: Path) -> None:
    orders.write_text("kill here 1")
    process = child(
        orders,
        "import asyncio",
        "async def work():",
        "    failpoints.reached_meanwhile('here')",
        "    print('at work', flush=True)",
        "    await asyncio.sleep(60)",
        "asyncio.run(work())",
    )
    assert process.communicate()[0] == "at work\n"
    assert process.returncode == -signal.SIGKILL


def test_connections_are_dropped_and_a_listening_socket_stays(orders: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        orders.write_text("drop here 1")
        Failpoints(orders).reached("here")
        assert (ours.recv(1), theirs.recv(1)) == (b"", b"")
        again = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        again.sendall(b"x")
        assert accepted.recv(1) == b"x"
        for connection in (ours, theirs, again, accepted):
            connection.close()


def test_a_process_waits_until_it_is_released(orders: Path) -> None:
    orders.write_text("hold here 1")
    process = child(orders, "failpoints.reached('here')")
    while not reached_file(orders).exists():
        assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.2)
    reached_file(orders).unlink()
    assert process.communicate()[0] == "alive\n"


def test_a_new_order_is_counted_from_its_beginning(orders: Path) -> None:
    failpoints = Failpoints(orders)
    for point in ("here", "there"):
        orders.write_text(f"drop {point} 2")
        failpoints.reached(point)
    assert not reached_file(orders).exists()
    failpoints.reached("there")
    assert reached_file(orders).exists()
