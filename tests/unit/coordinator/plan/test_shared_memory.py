"""Memory of peers on one machine: fair parts, and what members, status and peers learn of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_ft.coordinator.plan.shared_memory import fair_shares
from swarm_ft.coordinator.watching import overview
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.messages.control import MemoryShare
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm

HOME, ELSEWHERE = "192.0.2.1", "198.51.100.7"


def on_machine(
    name: str, offered_bytes: int, *, key: str = "key", total: int = 1200, address: str = HOME
) -> FakePeer:
    peer = FakePeer(name, "auto", offered_bytes)
    peer.machine_key, peer.machine_memory_bytes, peer.address = key, total, address
    return peer


def counted(swarm: Swarm) -> dict[str, int]:
    return {peer: one.hello.memory_bytes for peer, one in swarm.state.members.items()}


def notified(swarm: Swarm) -> list[tuple[str, int, int]]:
    said = swarm.said(MemoryShare)
    return [(peer, share.memory_bytes, share.num_peers) for peer, share in said]


@given(st.lists(st.integers(0, 1 << 44), max_size=20), st.integers(0, 1 << 44))
def test_shares_are_bounded_and_fair(offers: list[int], total: int) -> None:
    shares = fair_shares(offers, total)
    assert len(shares) == len(offers)
    assert sum(shares) <= total
    assert all(0 <= share <= offer for share, offer in zip(shares, offers, strict=True))
    cut = [share for share, offer in zip(shares, offers, strict=True) if share < offer]
    if cut:
        assert total - sum(shares) < len(offers), "only what cannot be divided is left"
        assert max(shares) - min(cut) < len(offers), "who is cut has no less than anybody else"


def test_peers_of_one_machine_count_for_no_more_than_it_has(swarm: Swarm) -> None:
    swarm.join(on_machine("a", 1000))
    assert counted(swarm) == {"a": 1000}
    assert notified(swarm) == []
    swarm.join(on_machine("b", 1000), on_machine("small", 100))
    assert counted(swarm) == {"a": 550, "b": 550, "small": 100}
    assert notified(swarm) == [("a", 600, 2), ("b", 600, 2), ("a", 550, 3), ("b", 550, 3)]
    status = {str(one.peer_id): one for one in overview(swarm.state).members}
    assert (status["a"].memory_bytes, status["a"].offered_bytes) == (550, 1000)
    assert (status["small"].memory_bytes, status["small"].offered_bytes) == (100, 100)


def test_who_stays_gets_back_what_another_one_leaves(swarm: Swarm) -> None:
    a, b = on_machine("a", 1000), on_machine("b", 1000)
    swarm.join(a, b)
    swarm.lose(b)
    assert counted(swarm) == {"a": 1000}
    assert notified(swarm)[-1] == ("a", 1000, 1)
    swarm.join(b)
    assert counted(swarm) == {"a": 600, "b": 600}
    b.machine_key = "another machine"
    swarm.join(b)
    assert counted(swarm) == {"a": 1000, "b": 1000}, "it came back on another machine"


@pytest.mark.parametrize(
    "stranger",
    [
        on_machine("stranger", 1000, address=ELSEWHERE),
        on_machine("stranger", 1000, key="another key"),
        on_machine("stranger", 1000, key=""),
        on_machine("stranger", 1000, total=0),
    ],
    ids=["another address", "another key", "no key", "no total"],
)
def test_a_stranger_takes_nothing_of_a_machine(swarm: Swarm, stranger: FakePeer) -> None:
    swarm.join(on_machine("a", 1000), stranger)
    assert counted(swarm) == {"a": 1000, "stranger": 1000}
    assert notified(swarm) == []


def test_a_small_total_of_one_peer_shrinks_no_other(swarm: Swarm) -> None:
    swarm.join(on_machine("a", 500), on_machine("liar", 500, total=1))
    assert counted(swarm) == {"a": 500, "liar": 500}


def test_a_run_waits_for_memory_that_a_machine_does_not_have_twice(
    swarm: Swarm, make_spec: MakeSpec
) -> None:
    """Check a run that fits into both offers together, and not into their one machine."""
    spec = make_spec()
    needed_bytes = int(spec.memory_bytes(spec.model.layers))
    half = on_machine("a", needed_bytes * 3 // 4, total=needed_bytes * 3 // 4)
    swarm.submit(spec)
    swarm.join(half, on_machine("b", half.memory_bytes, total=half.memory_bytes))
    swarm.wait(5)
    assert swarm.run().phase is RunPhase.WAITING
    swarm.join(on_machine("c", needed_bytes, key="another key", total=needed_bytes))
    swarm.wait(5)
    swarm.settle()
    assert swarm.run().phase is RunPhase.FINISHED
