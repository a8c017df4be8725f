"""Measurement of this peer's link to the coordinator, for forecasts alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from random import Random

from swarm_ft.base.log import get_logger
from swarm_ft.errors import Busy, SwarmError, Unavailable
from swarm_ft.protocol.messages.capacity import SAMPLE_BYTES, LinkEcho, LinkSample, Machine
from swarm_ft.transport.base import Channel, MessageStream
from swarm_ft.transport.methods import MEASURE_LINK

logger = get_logger(__name__)

FIRST_BYTES = 256 << 10
MOST_BYTES = 16 << 20
ENOUGH_S = 1.0
"""Seconds of a transfer that is long enough: shorter ones measure TCP's slow start."""
MAX_TRIES = 12
"""Tries while the coordinator measures the link of another peer."""
TIMEOUT_S = 60.0

Samples = MessageStream[LinkSample, LinkEcho]


async def measure_link(channel: Channel, machine: Machine, rng: Random) -> Machine:
    """Return the machine with its measured link; unchanged if the measurement failed.

    Args:
        channel: Channel to the coordinator.
        machine: Description of the machine so far.
        rng: Source of the waits between tries, so that peers that joined together do not collide.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await measure_link_or_raise(channel, machine, rng)
    except (SwarmError, TimeoutError) as error:
        logger.info("link: not measured: %s", error or f"more than {TIMEOUT_S:g} s")
        return machine


async def measure_link_or_raise(
    channel: Channel, machine: Machine, rng: Random, *, enough_s: float = ENOUGH_S
) -> Machine:
    """Return the machine with its measured link.

    Args:
        channel: Channel to the coordinator.
        machine: Description of the machine so far.
        rng: Source of the waits between tries.
        enough_s: Seconds of a transfer that is long enough to be a measurement.

    Raises:
        SwarmError: The coordinator cannot be reached, or is busy with other measurements.
    """
    num_bytes, tries = FIRST_BYTES, 0
    while True:
        try:
            round_trip_s, up_s, down_s = await _transfer(channel, num_bytes)
        except Busy:
            tries += 1
            if tries == MAX_TRIES:
                raise
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            continue
        if max(up_s, down_s) >= enough_s or num_bytes >= MOST_BYTES:
            return replace(
                machine,
                up_bytes_per_s=num_bytes / up_s,
                down_bytes_per_s=num_bytes / down_s,
                round_trip_s=round_trip_s,
            )
        num_bytes *= 4


async def _transfer(channel: Channel, num_bytes: int) -> tuple[float, float, float]:
    """Return seconds of a round trip, of `num_bytes` to the coordinator, and of as many back."""
    stream = channel.open(MEASURE_LINK)
    try:
        began_s = time.perf_counter()
        await _exchange(stream)
        first_s = time.perf_counter()
        await _exchange(stream)
        second_s = time.perf_counter()
        for _ in range(num_bytes // SAMPLE_BYTES):
            await stream.send(LinkSample(data=bytes(SAMPLE_BYTES)))
        await stream.finish()
        await _receive(stream)
        sent_s = time.perf_counter()
        for _ in range(num_bytes // SAMPLE_BYTES):
            await _receive(stream)
        received_s = time.perf_counter()
    finally:
        await stream.cancel()
    round_trip_s = min(first_s - began_s, second_s - first_s)
    up_s = max(sent_s - second_s - round_trip_s, 1e-6)
    return round_trip_s, up_s, max(received_s - sent_s, 1e-6)


async def _exchange(stream: Samples) -> None:
    await stream.send(LinkSample())
    await _receive(stream)


async def _receive(stream: Samples) -> None:
    if await stream.receive() is None:
        raise Unavailable("the coordinator ended the measurement")
