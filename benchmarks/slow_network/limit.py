"""The least time that a step can take, whatever the software. Pure.

A step's work passes stages and links, each of which does one thing at a time. So it takes at least
as long as one microbatch on its whole way there and back, and then once more for each other
microbatch what the slowest stage or link needs for it; or, if that is more, as long as the last
stage waits for its first input and then computes. Peers' links are full duplex. Where one uplink
serves both directions, a stage waits for its first input, sends all it has to, and its last
gradient goes on to the first stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from benchmarks.slow_network.work import Measured, Network, Topology, Work

TCP_SHARE = 1448 / 1514
"""Of a link's bits, what is payload: the rest is headers of Ethernet, IP, and TCP with its time
stamps. A token bucket counts them all."""


class Order(Enum):
    """The order of passes, which bounds how much can overlap."""

    SPLIT = "split backward"
    """Gradients of weights wait until there is nothing that others wait for (arXiv 2401.10241)."""
    ONE_F_ONE_B = "1F1B"
    """Forward and backward passes take turns."""
    GPIPE = "GPipe"
    """All forward passes, then all backward passes."""


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Seconds that links are busy.

    Attributes:
        forward_s: with a microbatch's activation, in the mean.
        fill_s: with that of the first, if it is less.
        backward_s: with its gradient.
        drain_s: with that of the last, if it is less.
        delay_s: of a packet on its way.
        gradient_s: with a peer's part of the sum over replicas, all else being done.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    delay_s: float = 0.0
    gradient_s: float = 0.0
    fill_s: float | None = None
    drain_s: float | None = None

    @classmethod
    def of(cls, network: Network, measured: Measured) -> Transfers:
        """Compute the transfers with the bytes that were counted on the streams."""
        forward_mbps, backward_mbps = _rates(network)
        fill_bytes, drain_bytes = measured.fill_bytes, measured.drain_bytes
        return cls(
            forward_s=_seconds(measured.forward_bytes, forward_mbps),
            backward_s=_seconds(measured.backward_bytes, backward_mbps),
            delay_s=network.delay_ms / 1e3,
            gradient_s=_seconds(measured.gradient_bytes, forward_mbps),
            fill_s=None if fill_bytes is None else _seconds(fill_bytes, forward_mbps),
            drain_s=None if drain_bytes is None else _seconds(drain_bytes, backward_mbps),
        )

    @property
    def first_s(self) -> float:
        """Over one boundary, with the activation that all wait for."""
        return self.delay_s + (self.forward_s if self.fill_s is None else self.fill_s)

    @property
    def last_s(self) -> float:
        """Over one boundary, with the gradient that all wait for; without what it is delayed."""
        return self.backward_s if self.drain_s is None else self.drain_s

    @property
    def there_and_back_s(self) -> float:
        """One boundary, both ways."""
        return self.first_s + self.last_s + self.delay_s


def step_limit_s(work: Work, network: Network, transfers: Transfers, order: Order) -> float:
    """Seconds that a step takes at least."""
    if order is Order.GPIPE:
        return _phase_s(work, work.forward_s, transfers.forward_s, transfers.delay_s) + _phase_s(
            work, work.backward_s, transfers.backward_s, transfers.delay_s
        )
    is_split = order is Order.SPLIT
    waited_for_s = work.input_backward_s if is_split else work.backward_s
    turn_s = work.forward_s + waited_for_s
    alone_s = work.stages * turn_s + (work.stages - 1) * transfers.there_and_back_s
    alone_s += work.backward_s - waited_for_s
    slowest_s = max(turn_s, transfers.forward_s, transfers.backward_s)
    limits = [alone_s + (work.num_microbatches - 1) * slowest_s, _last_stage_s(work, transfers)]
    if network.topology is Topology.HOME:
        middle = range(1, work.stages - 1)
        limits += [_uplink_s(work, transfers, stage, waited_for_s) for stage in middle]
    return max(limits) + transfers.gradient_s


def _last_stage_s(work: Work, transfers: Transfers) -> float:
    hop_s = work.forward_s + transfers.first_s
    turn_s = work.forward_s + work.backward_s
    return (work.stages - 1) * hop_s + work.num_microbatches * turn_s


def _uplink_s(work: Work, transfers: Transfers, stage: int, waited_for_s: float) -> float:
    """Return the least seconds of a middle stage's uplink, which carries both directions."""
    before_s = stage * (work.forward_s + transfers.first_s) + work.forward_s
    sending_s = work.num_microbatches * (transfers.forward_s + transfers.backward_s)
    passed_on_s = (stage - 1) * (waited_for_s + transfers.last_s)
    return before_s + sending_s + passed_on_s + stage * transfers.delay_s + work.backward_s


def _phase_s(work: Work, compute_s: float, transfer_s: float, delay_s: float) -> float:
    way_s = work.stages * compute_s + (work.stages - 1) * (transfer_s + delay_s)
    return way_s + (work.num_microbatches - 1) * max(compute_s, transfer_s)


def _rates(network: Network) -> tuple[float | None, float | None]:
    up, down = network.up_mbps, network.down_mbps
    if network.topology is Topology.PAIR:
        return up, down
    narrowest = min((mbps for mbps in (up, down) if mbps is not None), default=None)
    return narrowest, narrowest


def _seconds(num_bytes: float, mbps: float | None) -> float:
    return 0.0 if mbps is None else num_bytes * 8 / (mbps * 1e6 * TCP_SHARE)
