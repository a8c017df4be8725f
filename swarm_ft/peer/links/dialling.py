"""Where another peer is, and how long to wait before it is called again."""

from __future__ import annotations

from random import Random

from swarm_ft.discovery.directory import Directory, Role
from swarm_ft.errors import Unavailable
from swarm_ft.ids import PeerId

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0


async def find_peer(directory: Directory, peer_id: PeerId) -> str:
    """The endpoint of a peer.

    Raises:
        Unavailable: the directory does not know it (yet).
    """
    endpoint = (await directory.find(Role.PEER)).get(peer_id)
    if endpoint is None:
        raise Unavailable(f"peer {peer_id} is not in the DHT")
    return endpoint


class Backoff:
    """Waits between tries: each about twice as long as the last, and no two callers in step.

    A wait is drawn from the upper half of what it may be at most ("equal jitter": M. Brooker,
    Exponential Backoff And Jitter, 2015).
    """

    def __init__(self, rng: Random, *, min_s: float, max_s: float) -> None:
        self._rng = rng
        self._min_s, self._max_s = min_s, max_s
        self._next_s = min_s

    def reset(self) -> None:
        """A try succeeded."""
        self._next_s = self._min_s

    def draw_s(self) -> float:
        """How long to wait before the next try, in seconds."""
        at_most_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return self._rng.uniform(at_most_s / 2, at_most_s)
