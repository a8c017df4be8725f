"""Who may open the page: whoever was told its one-time address, by the session token got for it.

The token travels in a header, which the page's own script sets. A page of somebody else's, open in
the same browser, cannot set it, and no browser sends it by itself to another port of this host. A
name of somebody else's that leads to this machine (DNS rebinding) is refused by `Host`.

Where strangers reach the page, an address has a few tries a minute at its one-time token. No number
of them would find 256 bits; the limit keeps them from being work.
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
"""Browsers that are let in at a time; the session that was unused for longest ends first."""
SESSION_S = 24 * 3600.0
"""A session that is unused for so long ends."""
HEADER = "X-Swarm-FT"
"""Its value is the session's token."""
TRIES, TRIES_PER_S = 5, 5 / 60
"""Of one address, at one-time tokens: at once, and in the long run."""

_LOCAL_NAME = re.compile("[a-z0-9_-]+")


class Guard:
    """See the module's docstring.

    Args:
        hosts: names by which requests may call this server, each with its port.
    """

    def __init__(self, hosts: frozenset[str]) -> None:
        self._hosts = hosts
        self._token = secrets.token_urlsafe()
        self._used_s: dict[bytes, float] = {}
        self._tries: Rate[str] = Rate(per_s=TRIES_PER_S, burst=TRIES)

    @property
    def token(self) -> str:
        """That opens the page once; the next is another."""
        return self._token

    def is_called_right(self, host: str) -> bool:
        """Whether a request came here by a name of this server's."""
        return host.lower() in self._hosts

    def redeem(self, token: str, address: str, now_s: float) -> str | None:
        """Return a new session's token for a one-time token, which opens nothing any more.

        Args:
            token: as given.
            address: whose tries are counted together.
            now_s: monotonic seconds.

        Returns:
            None for a wrong one-time token.

        Raises:
            Busy: this address tried too often, whatever it says now.
        """
        wait_s = self._tries.wait_s(address, now_s)
        if wait_s > 0:
            raise Busy(
                f"{TRIES} tries a minute are taken from one machine; try again in {wait_s:.0f} s"
            )
        if not secrets.compare_digest(_digest(token), _digest(self._token)):
            return None
        self._token, session = secrets.token_urlsafe(), secrets.token_urlsafe()
        while len(self._used_s) >= MAX_SESSIONS:
            del self._used_s[min(self._used_s, key=lambda digest: self._used_s[digest])]
        self._used_s[_digest(session)] = now_s
        return session

    def knows(self, session: str, now_s: float) -> bool:
        """Whether a session's token was given out, and used of late; it is used now."""
        digest = _digest(session)
        used_s = self._used_s.pop(digest, None)
        if used_s is None or now_s - used_s >= SESSION_S:
            return False
        self._used_s[digest] = now_s
        return True


def is_own_name(host: str, names: Collection[str]) -> bool:
    """Whether a `Host` cannot be a name of somebody else's that leads to this machine.

    An address is none, and neither is a name without a dot: no public name is that short.

    Args:
        host: the header, perhaps with a port.
        names: that are known to be this machine's.
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
    """Compared in its place: how long that takes tells nothing of a token."""
    return sha256(token.encode(errors="surrogatepass")).digest()
