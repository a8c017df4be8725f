"""Measurements of a connection, with any transport of its messages."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from typing import Protocol

MESSAGE_BYTES = 800_000
"""A microbatch's frame: 1,024 tokens of 1,600 channels in 4 bits."""
NUM_STREAMED = 30
NUM_SINGLE = 3
SHORT_GAP_S, LONG_GAP_S = 0.5, 2.0


class Sender(Protocol):
    """The sending end of a connection whose other end answers every message with one byte."""

    async def send(self, message: bytes) -> None:
        """Send a message; wait while the connection applies back-pressure."""
        ...

    async def answer(self) -> None:
        """Wait for the next message's answer."""
        ...


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a connection; milliseconds are from sending a message to its answer.

    Attributes:
        first_ms: of the first message, with which the connection is made.
        stream_mbps: of messages sent without a pause, in the second half of them.
        ahead_bytes: that were taken for sending and not answered meanwhile, at most.
        warm_ms: of single messages, each after the one before.
        short_gap_ms: of one after `SHORT_GAP_S` of silence.
        long_gap_ms: of one after `LONG_GAP_S` of silence.
    """

    first_ms: float
    stream_mbps: float
    ahead_bytes: int
    warm_ms: float
    short_gap_ms: float
    long_gap_ms: float


async def measure(sender: Sender) -> Figures:
    """Measure a connection that is new; it takes about ten seconds."""
    message = os.urandom(MESSAGE_BYTES)
    first_ms = await _exchange_ms(sender, message)
    stream_mbps, ahead_bytes = await _stream(sender, message)
    return Figures(
        first_ms=first_ms,
        stream_mbps=stream_mbps,
        ahead_bytes=ahead_bytes,
        warm_ms=await _after_gap_ms(sender, message, 0.0),
        short_gap_ms=await _after_gap_ms(sender, message, SHORT_GAP_S),
        long_gap_ms=await _after_gap_ms(sender, message, LONG_GAP_S),
    )


async def _exchange_ms(sender: Sender, message: bytes) -> float:
    began_s = time.monotonic()
    await sender.send(message)
    await sender.answer()
    return (time.monotonic() - began_s) * 1000


async def _after_gap_ms(sender: Sender, message: bytes, gap_s: float) -> float:
    took_ms = []
    for _ in range(NUM_SINGLE):
        await asyncio.sleep(gap_s)
        took_ms.append(await _exchange_ms(sender, message))
    return statistics.median(took_ms)


async def _stream(sender: Sender, message: bytes) -> tuple[float, int]:
    """Mbps, and the bytes that were ahead at most."""
    answered_s: list[float] = []
    most_ahead = 0

    async def feed() -> None:
        nonlocal most_ahead
        for num_sent in range(1, NUM_STREAMED + 1):
            await sender.send(message)
            most_ahead = max(most_ahead, num_sent - len(answered_s))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(feed())
        for _ in range(NUM_STREAMED):
            await sender.answer()
            answered_s.append(time.monotonic())
    half = NUM_STREAMED // 2
    sent_bits = 8 * MESSAGE_BYTES * (NUM_STREAMED - half)
    mbps = sent_bits / 1e6 / (answered_s[-1] - answered_s[half - 1])
    return mbps, most_ahead * MESSAGE_BYTES
