"""Contributions of volunteers in the swarm's ledger, with the same numbers wherever shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Range
from swarm_ft.protocol.spec.sizes import format_traffic

MAX_GIVEN_BYTES = 1 << 62
MAX_SECONDS = 1e12
_SentBytes = Annotated[int, Range(0, MAX_GIVEN_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contribution:
    """Sums over all committed steps of a member; a rollback subtracts nothing.

    Attributes:
        samples: Samples that passed the member.
        steps: Committed steps.
        seconds: Seconds of these steps.
        compute_s: Seconds of computing in these steps.
        sent_bytes: Bytes of activations and gradients that it sent in these steps.
        all_bytes: Bytes that it sent to other members in all, by its own count.
    """

    samples: int = 0
    steps: int = 0
    seconds: Annotated[float, Range(0.0, MAX_SECONDS)] = 0.0
    compute_s: Annotated[float, Range(0.0, MAX_SECONDS)] = 0.0
    sent_bytes: int = 0
    all_bytes: int = 0

    def __add__(self, other: Contribution) -> Contribution:
        return Contribution(
            samples=self.samples + other.samples,
            steps=self.steps + other.steps,
            seconds=self.seconds + other.seconds,
            compute_s=self.compute_s + other.compute_s,
            sent_bytes=min(self.sent_bytes + other.sent_bytes, MAX_GIVEN_BYTES),
            all_bytes=min(self.all_bytes + other.all_bytes, MAX_GIVEN_BYTES),
        )

    def __str__(self) -> str:
        """Return a text such as `640 samples in 80 steps, 12 min, 50.3 MB sent for training`."""
        samples, steps = _count(self.samples, "sample"), _count(self.steps, "step")
        words = f"{samples} in {steps}, {_time(self.seconds)}"
        sent = f"{words}, {format_traffic(self.sent_bytes)} sent for training"
        has_all = self.all_bytes >= self.sent_bytes and self.all_bytes > 0
        return f"{sent}, {format_traffic(self.all_bytes)} in all" if has_all else sent


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _time(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContributionRequest:
    """Peer to coordinator: a request for its entry of the ledger.

    Attributes:
        sent_bytes: Bytes that it sent to other members, see `PeerAlive`.
    """

    sent_bytes: _SentBytes = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ContributionReport:
    """Coordinator to peer: its entry of the ledger."""

    given: Contribution
