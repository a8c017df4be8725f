"""Which records a DHT node stores or reads. It knows their bytes; it imports no DHT."""

from __future__ import annotations

import time
from typing import Protocol

MAX_LIFETIME_S = 3600.0
"""A record that would outlive this by far is refused: it could not be replaced before."""


class Record(Protocol):
    """What hivemind asks about; key and value in its own MessagePack."""

    @property
    def subkey(self) -> bytes:
        """The name."""
        ...

    @property
    def value(self) -> bytes:
        """The endpoint."""
        ...

    @property
    def expiration_time(self) -> float:
        """Seconds since 1970."""
        ...


class RecordRules:
    """A `RecordValidatorBase` of hivemind's, asked about each record that arrives.

    What is no short text never gets near hivemind's decoder, which a crafted value can make
    fail inside a search, so that the search never ends.
    """

    def validate(self, record: Record) -> bool:
        """Whether it is a short text under a short text, and not there to stay for ever."""
        return (
            record.expiration_time <= time.time() + 2 * MAX_LIFETIME_S
            and _is_short_text(record.subkey)
            and _is_short_text(record.value)
        )

    def sign_value(self, record: Record) -> bytes:
        """The value as it is; records are not signed yet."""
        return record.value

    def strip_value(self, record: Record) -> bytes:
        """The value as it is."""
        return record.value


def _is_short_text(packed: bytes) -> bool:
    # MessagePack: a text of up to 31 bytes is 0xA0 + length, one of up to 255 is 0xD9, length.
    if b"\xa0" <= packed[:1] <= b"\xbf":
        length, text = packed[0] - 0xA0, packed[1:]
    elif packed[:1] == b"\xd9" and len(packed) > 1:
        length, text = packed[1], packed[2:]
    else:
        return False
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return len(text) == length
