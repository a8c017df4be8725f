"""Shares of jobs in the peers: the owner's claim, and the priority among the owner's jobs.

The peers of a run need not agree on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Range

DEFAULT_PRIORITY, MAX_PRIORITY = 3, 9
Priority = Annotated[int, Range(1, MAX_PRIORITY)]
"""Order of one owner's runs: the highest comes first."""
DEFAULT_WEIGHT, MAX_WEIGHT = 1, 100
Weight = Annotated[int, Range(1, MAX_WEIGHT)]
"""Weight of an owner's claim to peers among other owners' claims."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An owner's claim to peers, which an invitation grants.

    Attributes:
        name: Name of the invitation, whose keys all share the claim. Empty in a swarm without
            keys: each run then has a claim of its own, with its priority as the weight.
        weight: Weight of this claim among claims.
    """

    name: str = ""
    weight: int = DEFAULT_WEIGHT


NO_CLAIM = Claim()
"""Claim of runs in a swarm without keys."""
