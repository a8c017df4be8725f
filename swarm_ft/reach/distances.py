"""Distances from this machine to the swarm's relays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from swarm_ft.errors import SwarmError
from swarm_ft.protocol.messages.meeting import RelayPlace
from swarm_ft.reach.sockets import query_front

QUESTIONS = 2
"""Requests to each relay; the quicker reply counts."""


async def measure_distances(places: Iterable[RelayPlace]) -> dict[str, float]:
    """Return the round trip in seconds by relay endpoint, for relays that answer."""
    endpoints = [place.endpoint for place in places]
    found = await asyncio.gather(*map(_round_trip_s, endpoints))
    return {one: s for one, s in zip(endpoints, found, strict=True) if s is not None}


async def _round_trip_s(endpoint: str) -> float | None:
    try:
        return min([(await query_front(endpoint)).took_s for _ in range(QUESTIONS)])
    except (OSError, TimeoutError, SwarmError):
        return None
