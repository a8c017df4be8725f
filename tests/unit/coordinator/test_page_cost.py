"""Cost of one viewer of the page for a coordinator of 200 peers."""

import pytest

from swarm_ft.api.coordinator_process import DOCUMENTS
from swarm_ft.coordinator.watching import overview
from swarm_ft.page.live import message_of
from swarm_ft.protocol.messages.capacity import LinkSpeed
from swarm_ft.protocol.messages.control import MAX_MEASURED_LINKS, PeerAlive
from tests.unit.coordinator.conftest import FakePeer, MakeSpec, Swarm
from tests.work import calls_of

NUM_PEERS, NUM_STAGES, NUM_BLOCKS = 200, 8, 40
MAX_CALLS = 250
"""Function calls per peer."""
MAX_BYTES = 2500
"""Bytes per second and peer that a browser receives."""


@pytest.mark.thorough
def test_two_hundred_peers_cost_little(swarm: Swarm, make_spec: MakeSpec) -> None:
    spec = make_spec(num_blocks=NUM_BLOCKS, num_steps=4, batch_size=200, num_samples=400)
    swarm.submit(spec)
    size = NUM_BLOCKS // NUM_STAGES
    cuts = [f"{first}-{first + size}" for first in range(0, NUM_BLOCKS, size)]
    peers = [FakePeer(f"peer-{i:029d}", cuts[i % NUM_STAGES]) for i in range(NUM_PEERS)]
    swarm.join(*peers)
    swarm.settle_until(lambda: swarm.run().committed_steps == 2)
    assert len(swarm.run().peers) == NUM_PEERS
    for index, peer in enumerate(peers):
        behind = [other.peer_id for other in peers[(index + 1) % NUM_STAGES :: NUM_STAGES]]
        speed = LinkSpeed(
            bytes_per_s=1234567.0 + index,
            peak_bytes_per_s=2345678.0 + index,
            round_trip_s=0.123456,
            least_round_trip_s=0.023456,
        )
        swarm.say(peer, PeerAlive(links=dict.fromkeys(behind[:MAX_MEASURED_LINKS], speed)))

    def made() -> bytes:
        return message_of(DOCUMENTS.status(overview(swarm.state)), 1)

    assert len(made()) < MAX_BYTES * NUM_PEERS
    assert calls_of(made) < MAX_CALLS * NUM_PEERS
