"""Limits on the messages that one caller sends to a server and receives. Pure.

A caller has one allowance for all its calls, connections and messages. A server reads a caller
above its allowance more slowly; handlers do not know of it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from swarm_ft.identity.roles import Caller, Role
from swarm_ft.protocol.machines.rate import MAX_KEYS, Bucket
from swarm_ft.transport import methods
from swarm_ft.transport.admission import address_of

METERED = frozenset(
    method.path
    for method in (
        methods.ENROL,
        methods.JOIN,
        methods.SUBMIT,
        methods.WATCH,
        methods.CANCEL,
        methods.COLLECTED,
        methods.STATUS,
        methods.EVENTS,
        methods.INTRODUCE,
        methods.PLACE,
        methods.RELAY,
    )
)
"""Paths of metered methods: all of the coordinator's but MeasureLink.

A pause would falsify MeasureLink, which has limits of its own (`coordinator/capacity.py`). Calls
between peers carry the training's traffic; assignments limit their links (`peer/links.py`).
"""

REPLIES_METERED = frozenset({methods.WATCH.path, methods.EVENTS.path})
"""Paths of methods with metered replies: one small request may ask for 10,000 events or more."""
REPLY_BYTES = {methods.EVENTS.path: 100}
"""Bytes that count as one reply, by path: a page of events counts as about its events.

A reply of another method counts as one.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Rates of one caller in the long run, and bursts after a pause.

    Attributes:
        messages_per_s: Messages below `LARGE_BYTES` that it sends. A peer sends one or two for
            each step and run, one PeerAlive for each run in 2 s, and some at an attempt's
            begin, however many microbatches a step has; 100 are 4 runs at 12 steps a second.
        messages_burst: Messages at once; a peer that joins again reports all its runs and shards.
        calls_per_s: Calls that it opens. A call over a new connection costs about thirty times as
            much as a message on an open one. A peer opens a few when it joins; a client three a
            job.
        calls_burst: Calls at once; a process with 20 jobs opens 60.
        bytes_per_s: Bytes that it sends. `Submit` alone sends more than some kilobytes a second:
            a client on loopback sends up to 200 MiB/s, in parts of 256 KiB.
        bytes_burst: Bytes at once; a job of up to 250 MiB of tokens never waits.
        replies_per_s: Replies of methods in `REPLIES_METERED`. A follower of 20 runs with 5
            steps a second receives 100.
        replies_burst: Replies at once; the journal has up to 10,000 events, and
            `swarm-ft events` requests all of them.
    """

    messages_per_s: float = 100.0
    messages_burst: int = 400
    calls_per_s: float = 5.0
    calls_burst: int = 64
    bytes_per_s: float = 64 << 20
    bytes_burst: int = 256 << 20
    replies_per_s: float = 1_000.0
    replies_burst: int = 12_000

    def times(self, count: int) -> Rates:
        """Return the rates of `count` callers together."""
        return Rates(
            messages_per_s=self.messages_per_s * count,
            messages_burst=self.messages_burst * count,
            calls_per_s=self.calls_per_s * count,
            calls_burst=self.calls_burst * count,
            bytes_per_s=self.bytes_per_s * count,
            bytes_burst=self.bytes_burst * count,
            replies_per_s=self.replies_per_s * count,
            replies_burst=self.replies_burst * count,
        )


RATES = Rates()
LARGE_BYTES = 64 << 10
"""Bytes from which on a message counts by its bytes alone."""
CALLERS_PER_ADDRESS = 16
"""Callers as which one address without a member's key counts: a house, or a demo's processes."""


class Account(NamedTuple):
    """Holder of one allowance; its messages count together.

    Attributes:
        name: Name of a member's key, or an address.
        is_address: Whether several callers may share it.
    """

    name: str
    is_address: bool


def account_of(caller: Caller | None, remote: str) -> Account:
    """Return the account of a call: its key's name, or its address if no key identifies it.

    Newcomers count by address, since all who have one invitation show the same name.

    Args:
        caller: Caller by its certificate; None if links are not encrypted.
        remote: Address of the caller, `host:port`.
    """
    if caller is None or caller.role is Role.NEWCOMER:
        return Account(address_of(remote.rpartition(":")[0]), is_address=True)
    return Account(caller.name, is_address=False)


class Delay(NamedTuple):
    """Delay between a message's arrival and its handling.

    Attributes:
        wait_s: Seconds to wait; 0 for a message within the allowance.
        is_flood: Whether messages or calls are too many. Too many bytes need no other measure:
            gRPC buffers some megabytes of a call, and its sender waits.
    """

    wait_s: float
    is_flood: bool


class _Allowance:
    """Buckets of one account."""

    def __init__(self, rates: Rates) -> None:
        self.messages = Bucket(per_s=rates.messages_per_s, burst=rates.messages_burst)
        self.calls = Bucket(per_s=rates.calls_per_s, burst=rates.calls_burst)
        self.bytes = Bucket(per_s=rates.bytes_per_s, burst=rates.bytes_burst)
        self.replies = Bucket(per_s=rates.replies_per_s, burst=rates.replies_burst)


class Allowances:
    """Allowances of all callers of a process.

    Args:
        rates: Rates of one caller.
        max_accounts: Accounts in memory at most; a new one replaces the least recently used.
    """

    def __init__(self, rates: Rates = RATES, max_accounts: int = MAX_KEYS) -> None:
        self._own, self._shared = rates, rates.times(CALLERS_PER_ADDRESS)
        self._max_accounts = max_accounts
        self._allowances: OrderedDict[Account, _Allowance] = OrderedDict()

    def received(self, account: Account, num_bytes: int, now_s: float, *, is_first: bool) -> Delay:
        """Count a message of an account, and return its delay.

        Args:
            account: Account of the sender.
            num_bytes: Bytes of the message.
            now_s: Monotonic seconds.
            is_first: Whether it is the first message of its call, which counts as the call.
        """
        allowance = self._of(account)
        many = allowance.calls if is_first else allowance.messages
        flood_s = many.take(1, now_s) if is_first or num_bytes < LARGE_BYTES else 0.0
        wait_s = max(flood_s, allowance.bytes.take(num_bytes, now_s))
        return Delay(wait_s, is_flood=flood_s > 0)

    def replied(self, account: Account, now_s: float, count: int = 1) -> float:
        """Count replies to an account; return the seconds to wait before they are sent."""
        return self._of(account).replies.take(count, now_s)

    def _of(self, account: Account) -> _Allowance:
        found = self._allowances.pop(account, None)
        if found is None:
            found = _Allowance(self._shared if account.is_address else self._own)
        self._allowances[account] = found
        if len(self._allowances) > self._max_accounts:
            self._allowances.popitem(last=False)
        return found
