"""Allowances delay a caller that sends too much, by its own account alone."""

import pytest

from swarm_ft.identity.roles import Caller, Role
from swarm_ft.transport import methods
from swarm_ft.transport.allowance import (
    CALLERS_PER_ADDRESS,
    METERED,
    RATES,
    REPLIES_METERED,
    Account,
    Allowances,
    Delay,
    Rates,
    account_of,
)
from swarm_ft.transport.base import Method
from tests.members import make_swarm

MEMBER = Account("member", is_address=False)
OTHER = Account("other", is_address=False)
HOUSE = Account("192.0.2.1", is_address=True)


def passed_after(allowances: Allowances, account: Account, seconds: float) -> int:
    """Return the one-byte messages of one call that pass in a time, sent back to back."""
    now_s, count = 0.0, 0
    while now_s <= seconds:
        now_s += allowances.received(account, 1, now_s, is_first=count == 0).wait_s
        count += 1
    return count - 1


@pytest.mark.parametrize(("account", "share"), [(MEMBER, 1), (HOUSE, CALLERS_PER_ADDRESS)])
def test_a_flood_passes_at_its_rate(account: Account, share: int) -> None:
    rates = RATES.times(share)
    passed = passed_after(Allowances(), account, 10.0)
    assert passed == pytest.approx(rates.messages_burst + 10 * rates.messages_per_s, abs=1)


def test_calls_have_a_rate_of_their_own() -> None:
    allowances = Allowances()
    first = [allowances.received(MEMBER, 1, 0.0, is_first=True) for _ in range(70)]
    assert [delay.is_flood for delay in first].index(True) == RATES.calls_burst
    assert first[-1].wait_s == pytest.approx((70 - RATES.calls_burst) / RATES.calls_per_s)
    assert allowances.received(MEMBER, 1, 0.0, is_first=False) == Delay(0.0, is_flood=False)


def test_accounts_do_not_share() -> None:
    allowances = Allowances(Rates(messages_per_s=1.0, messages_burst=10))
    for _ in range(1_000):
        allowances.received(MEMBER, 1, 0.0, is_first=False)
    assert allowances.received(MEMBER, 1, 0.0, is_first=False).wait_s > 900
    assert allowances.received(OTHER, 1, 0.0, is_first=True).wait_s == 0.0


def test_bytes_wait_as_long_as_their_rate_says() -> None:
    allowances = Allowances()
    assert allowances.received(MEMBER, RATES.bytes_burst, 0.0, is_first=True).wait_s == 0.0
    delay = allowances.received(MEMBER, int(RATES.bytes_per_s), 0.0, is_first=False)
    assert delay.wait_s == pytest.approx(1.0)
    assert not delay.is_flood


def test_replies_are_counted_apart() -> None:
    allowances = Allowances()
    waits = [allowances.replied(MEMBER, 0.0) for _ in range(RATES.replies_burst + 1)]
    assert waits[-2] == 0.0
    assert waits[-1] == pytest.approx(1 / RATES.replies_per_s)
    assert allowances.replied(OTHER, 0.0, count=RATES.replies_burst + 10) == pytest.approx(
        10 / RATES.replies_per_s
    )
    assert allowances.received(MEMBER, 1, 0.0, is_first=True).wait_s == 0.0


def test_the_account_that_was_used_longest_ago_is_forgotten() -> None:
    rates = Rates(calls_per_s=1e-9, calls_burst=1)
    allowances = Allowances(rates, max_accounts=2)
    for account in (MEMBER, OTHER, MEMBER, HOUSE):
        allowances.received(account, 0, 0.0, is_first=True)
    assert allowances.received(MEMBER, 0, 0.0, is_first=True).wait_s > 1.0
    assert allowances.received(OTHER, 0, 0.0, is_first=True).wait_s == 0.0


def test_members_count_by_key_and_all_others_by_address() -> None:
    key = make_swarm().key.public_key()
    peer = Caller(role=Role.PEER, name="its key", key=key)
    newcomer = Caller(role=Role.NEWCOMER, name="an invitation of many", key=key)
    assert account_of(peer, "192.0.2.1:5") == account_of(peer, "192.0.2.9:7")
    assert account_of(newcomer, "192.0.2.1:5") == HOUSE
    assert account_of(None, "192.0.2.1:9") == HOUSE
    assert account_of(None, "[2001:db8::1]:9") == account_of(None, "[2001:db8::2]:9")


def test_training_traffic_between_peers_is_not_metered() -> None:
    between = {methods.LINK, methods.GENERATE, methods.LIST_CHUNKS, methods.FETCH_CHUNKS}
    own = {value for value in vars(methods).values() if isinstance(value, Method)}
    unmetered = {method for method in own if method.path not in METERED}
    assert unmetered == between | {methods.MEASURE_LINK}
    assert REPLIES_METERED < METERED


def test_honest_needs_fit() -> None:
    """The largest need of a member, for the reasons in `Rates`."""
    allowances, waits = Allowances(), []
    for tenth in range(600):  # a minute of four runs with twelve steps a second
        now_s = tenth / 10
        messages = 2 * 4 * 12 // 10 + (4 if tenth % 20 == 0 else 0)
        waits += [
            allowances.received(MEMBER, 400, now_s, is_first=False).wait_s for _ in range(messages)
        ]
        # A job arrives beside them, 64 MiB a second in parts of 256 KiB.
        waits += [
            allowances.received(MEMBER, 256 << 10, now_s, is_first=False).wait_s for _ in range(25)
        ]
    assert max(waits) == 0.0
