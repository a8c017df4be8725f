"""How many peers a job gets: by its owner's claim, and by its priority among the owner's own jobs.

No part of what the peers of a run agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from swarm_ft.protocol.spec.bounds import Range

DEFAULT_PRIORITY, MAX_PRIORITY = 3, 9
Priority = Annotated[int, Range(1, MAX_PRIORITY)]
"""Orders the runs of one owner: the one with the highest comes first."""
DEFAULT_WEIGHT, MAX_WEIGHT = 1, 100
Weight = Annotated[int, Range(1, MAX_WEIGHT)]
"""Of an owner's claim to peers, to the claims of other owners."""


@dataclass(frozen=True, slots=True)
class Claim:
    """An owner's claim to peers, which an invitation grants.

    Attributes:
        name: of the invitation; all keys that came with it share the claim. Empty where clients
            have no keys: each run has a claim of its own then, and its priority is the weight.
        weight: of this claim, to the claims of others.
    """

    name: str = ""
    weight: int = DEFAULT_WEIGHT


NO_CLAIM = Claim()
"""Of runs of clients without keys."""
