"""How fast this peer's link is, measured against the coordinator, for forecasts alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from random import Random

from swarm_ft.errors import Busy, SwarmError, Unavailable
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.capacity import SAMPLE_BYTES, LinkEcho, LinkSample, Machine
from swarm_ft.transport.base import Channel, MessageStream
from swarm_ft.transport.methods import MEASURE_LINK

logger = get_logger(__name__)

FIRST_BYTES = 256 << 10
MOST_BYTES = 16 << 20
ENOUGH_S = 1.0
"""A transfer that took so long says how fast the link is; a shorter one how TCP begins."""
MAX_TRIES = 12
"""While the coordinator measures another peer's."""
TIMEOUT_S = 60.0

Samples = MessageStream[LinkSample, LinkEcho]


async def measure_link(channel: Channel, machine: Machine, rng: Random) -> Machine:
    """The machine, with its link; as it was if the coordinator cannot be asked.

    Args:
        channel: to the coordinator.
        machine: what is known of it.
        rng: so that peers that came together do not ask together again.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await measured_link(channel, machine, rng)
    except (SwarmError, TimeoutError) as error:
        logger.info("link: not measured: %s", error or f"more than {TIMEOUT_S:g} s")
        return machine


async def measured_link(
    channel: Channel, machine: Machine, rng: Random, *, enough_s: float = ENOUGH_S
) -> Machine:
    """As `measure_link`, but whoever asks is told why it was not measured.

    Args:
        channel: to the coordinator.
        machine: what is known of it.
        rng: see `measure_link`.
        enough_s: a transfer that took so long is believed.

    Raises:
        SwarmError: the coordinator cannot be asked, or measures others' for long.
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
    """Seconds of a round trip, and of so many bytes there and back."""
    stream = channel.open(MEASURE_LINK)
    try:
        began_s = time.perf_counter()
        await _exchange(stream)
        met_s = time.perf_counter()
        await _exchange(stream)
        asked_s = time.perf_counter()
        for _ in range(num_bytes // SAMPLE_BYTES):
            await stream.send(LinkSample(data=bytes(SAMPLE_BYTES)))
        await stream.finish()
        await _heard(stream)
        sent_s = time.perf_counter()
        for _ in range(num_bytes // SAMPLE_BYTES):
            await _heard(stream)
        back_s = time.perf_counter()
    finally:
        await stream.cancel()
    round_trip_s = min(met_s - began_s, asked_s - met_s)
    up_s = max(sent_s - asked_s - round_trip_s, 1e-6)
    return round_trip_s, up_s, max(back_s - sent_s, 1e-6)


async def _exchange(stream: Samples) -> None:
    await stream.send(LinkSample())
    await _heard(stream)


async def _heard(stream: Samples) -> None:
    if await stream.receive() is None:
        raise Unavailable("the coordinator ended the measurement")
