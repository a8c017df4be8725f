"""How many peers a job gets, to those of others; no part of what the peers of a run agree on."""

from __future__ import annotations

from typing import Annotated

from swarm_ft.protocol.spec.bounds import Range

DEFAULT_PRIORITY, MAX_PRIORITY = 3, 9
Priority = Annotated[int, Range(1, MAX_PRIORITY)]
"""From a third of the usual share to three times as much."""
