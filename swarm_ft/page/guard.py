"""Access to the page: its one-time address yields a session token, which admits requests.

The token travels in a header, which the page's own script sets. Another page in the same browser
cannot set it, and no browser sends it by itself to another port of this host. A foreign name that
leads to this machine (DNS rebinding) is refused by `Host`.

Where strangers can reach the page, an address has a few tries a minute at its one-time token. No
number of tries would find 256 bits; the limit keeps them from costing time.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Collection
from hashlib import sha256

from swarm_ft.errors import Busy
from swarm_ft.protocol.machines.rate import Rate

MAX_SESSIONS = 32
"""Sessions at a time; a new one ends the least recently used."""
SESSION_S = 24 * 3600.0
"""Seconds without use after which a session ends."""
HEADER = "X-Swarm-FT"
"""Header with the session's token."""
TRIES, TRIES_PER_S = 5, 5 / 60
"""Tries of one address at one-time tokens: at once, and per second in the long run."""

_LOCAL_NAME = re.compile("[a-z0-9_-]+")


class Guard:
    """Guard of the page; see the module's docstring.

    Args:
        hosts: Names by which requests may address this server, each with its port.
    """

    def __init__(self, hosts: frozenset[str]) -> None:
        self._hosts = hosts
        self._token = secrets.token_urlsafe()
        self._used_s: dict[bytes, float] = {}
        self._tries: Rate[str] = Rate(per_s=TRIES_PER_S, burst=TRIES)

    @property
    def token(self) -> str:
        """Token that opens the page once; each use replaces it."""
        return self._token

    def is_called_right(self, host: str) -> bool:
        """Whether a request addresses this server by one of its names."""
        return host.lower() in self._hosts

    def redeem(self, token: str, address: str, now_s: float) -> str | None:
        """Return a new session's token for the one-time token, which becomes void.

        Args:
            token: Token of the request.
            address: Address whose tries count together.
            now_s: Monotonic seconds.

        Returns:
            None for a wrong one-time token.

        Raises:
            Busy: This address tried too often; right tokens are refused too.
        """
        wait_s = self._tries.wait_s(address, now_s)
        if wait_s > 0:
            raise Busy(f"one machine has {TRIES} tries a minute; try again in {wait_s:.0f} s")
        if not secrets.compare_digest(_digest(token), _digest(self._token)):
            return None
        self._token, session = secrets.token_urlsafe(), secrets.token_urlsafe()
        while len(self._used_s) >= MAX_SESSIONS:
            del self._used_s[min(self._used_s, key=lambda digest: self._used_s[digest])]
        self._used_s[_digest(session)] = now_s
        return session

    def knows(self, session: str, now_s: float) -> bool:
        """Whether a session's token is valid, which counts as a use."""
        digest = _digest(session)
        used_s = self._used_s.pop(digest, None)
        if used_s is None or now_s - used_s >= SESSION_S:
            return False
        self._used_s[digest] = now_s
        return True


def is_own_name(host: str, names: Collection[str]) -> bool:
    """Whether a `Host` is safe from foreign names that lead to this machine.

    An address is safe, and so is a name without a dot: no public name is that short.

    Args:
        host: Value of the header, perhaps with a port.
        names: Known names of this machine.
    """
    name = host.lower()
    if not name.endswith("]"):
        name = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
    name = name.strip("[]")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names or _LOCAL_NAME.fullmatch(name) is not None
    return True


def _digest(token: str) -> bytes:
    """Return a token's digest: comparing digests reveals nothing of a token by its time."""
    return sha256(token.encode(errors="surrogatepass")).digest()
