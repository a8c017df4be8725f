"""How much one caller may send to a server, and have sent back. Pure: time is passed in.

A caller has one allowance for all its calls, connections and messages. A server reads a caller
that is over its allowance more slowly; handlers do not know of it.
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
"""Paths of methods that count: all of the coordinator's but MeasureLink, which a pause would
falsify and which has limits of its own (`coordinator/capacity.py`). Calls between peers carry the
training's own traffic; links and their number are limited by assignments (`peer/links.py`)."""

REPLIES_METERED = frozenset({methods.WATCH.path, methods.EVENTS.path})
"""Paths of methods whose replies count too: one small request asks for 10,000 events or more."""
REPLY_BYTES = {methods.EVENTS.path: 100}
"""By path: a reply counts as one for each so many bytes of it. A page of events counts as about as
many as it has; a reply of another method counts as one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of one caller in the long run, and at once after a pause.

    Attributes:
        messages_per_s: messages that it sends, smaller than `LARGE_BYTES`. A peer sends one or two
            for each step and run, one PeerAlive for each run in 2 s, and some at an attempt's
            begin, however many microbatches a step has; 100 are 4 runs at 12 steps a second.
        messages_burst: at once; a peer that joins again reports all runs and shards that it holds.
        calls_per_s: calls that it opens. One costs about thirty times as much as a message on an
            open one, if it comes over a new connection. A peer opens a few when it joins; a client
            three a job.
        calls_burst: at once; a process with 20 jobs opens 60.
        bytes_per_s: bytes that it sends. `Submit` alone sends more than some kilobytes a second:
            a client on loopback sends up to 200 MiB/s, in parts of 256 KiB.
        bytes_burst: at once; so a job of up to 250 MiB of tokens never waits.
        replies_per_s: replies that are sent to it by methods of `REPLIES_METERED`. A follower of
            20 runs with 5 steps a second gets 100.
        replies_burst: at once; the journal keeps 10,000 events, and `swarm-ft events` asks for all.
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
        """The rates of so many callers together."""
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
"""A message of so many bytes counts by its bytes alone."""
CALLERS_PER_ADDRESS = 16
"""An address without a member's key counts as so many callers: a house, or a demo's processes."""


class Account(NamedTuple):
    """The holder of one allowance; its messages count together.

    Attributes:
        name: of a member's key, or an address.
        is_address: whether several callers may share it.
    """

    name: str
    is_address: bool


def account_of(caller: Caller | None, remote: str) -> Account:
    """The account of a call: of its key, or of its address where a key names nobody.

    Newcomers count by address, since all who have one invitation show the same name.

    Args:
        caller: by its certificate; None where links are not encrypted.
        remote: its address, `host:port`.
    """
    if caller is None or caller.role is Role.NEWCOMER:
        return Account(address_of(remote.rpartition(":")[0]), is_address=True)
    return Account(caller.name, is_address=False)


class Delay(NamedTuple):
    """The time from a message's arrival until its handler gets it.

    Attributes:
        wait_s: 0 where it may pass at once.
        is_flood: whether messages or calls are too many. Too many bytes need no other measure:
            gRPC lets a call have some megabytes unread, and its sender waits.
    """

    wait_s: float
    is_flood: bool


class _Allowance:
    """The buckets of one account."""

    def __init__(self, rates: Rates) -> None:
        self.messages = Bucket(per_s=rates.messages_per_s, burst=rates.messages_burst)
        self.calls = Bucket(per_s=rates.calls_per_s, burst=rates.calls_burst)
        self.bytes = Bucket(per_s=rates.bytes_per_s, burst=rates.bytes_burst)
        self.replies = Bucket(per_s=rates.replies_per_s, burst=rates.replies_burst)


class Allowances:
    """The allowances of all callers of a process.

    Args:
        rates: of one caller.
        max_accounts: how many are remembered; of more, the one that was used longest ago is
            forgotten.
    """

    def __init__(self, rates: Rates = RATES, max_accounts: int = MAX_KEYS) -> None:
        self._own, self._shared = rates, rates.times(CALLERS_PER_ADDRESS)
        self._max_accounts = max_accounts
        self._allowances: OrderedDict[Account, _Allowance] = OrderedDict()

    def received(self, account: Account, num_bytes: int, now_s: float, *, is_first: bool) -> Delay:
        """Count a message that the account has sent.

        Args:
            account: whose.
            num_bytes: of the message.
            now_s: monotonic seconds.
            is_first: whether it is the first of its call, which counts as the call.
        """
        allowance = self._of(account)
        many = allowance.calls if is_first else allowance.messages
        flood_s = many.take(1, now_s) if is_first or num_bytes < LARGE_BYTES else 0.0
        wait_s = max(flood_s, allowance.bytes.take(num_bytes, now_s))
        return Delay(wait_s, is_flood=flood_s > 0)

    def replied(self, account: Account, now_s: float, count: int = 1) -> float:
        """Count replies that are sent to the account; returns how long to wait before, in s."""
        return self._of(account).replies.take(count, now_s)

    def _of(self, account: Account) -> _Allowance:
        found = self._allowances.pop(account, None)
        if found is None:
            found = _Allowance(self._shared if account.is_address else self._own)
        self._allowances[account] = found
        if len(self._allowances) > self._max_accounts:
            self._allowances.popitem(last=False)
        return found
