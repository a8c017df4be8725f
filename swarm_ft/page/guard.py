"""Who may open the page: whoever was told its one-time address, and keeps the cookie got for it.

A page of somebody else's, open in the same browser, may send requests here too. It does not have
the cookie with it (`SameSite=Strict`), cannot set the header that every command has (`HEADER`), and
reaches nothing by a name of its own that leads to this machine (`Host`).

Where strangers reach the page, an address has a few tries a minute at its token. No number of them
would find 256 bits; it keeps them from being work, and from filling the log.
"""

from __future__ import annotations

import secrets
from hashlib import sha256

from swarm_ft.errors import Busy
from swarm_ft.protocol.machines.rate import Rate

MAX_SESSIONS = 32
"""Browsers that are let in at a time; the one that came first goes first."""
HEADER = "X-Swarm-FT"
TRIES, TRIES_PER_S = 5, 5 / 60
"""Of one address, at tokens: at once, and in the long run."""


class Guard:
    """See the module's docstring.

    Args:
        hosts: names by which requests may call this server, each with its port.
    """

    def __init__(self, hosts: frozenset[str]) -> None:
        self._hosts = hosts
        self._token = secrets.token_urlsafe()
        self._sessions: list[bytes] = []
        self._tries: Rate[str] = Rate(per_s=TRIES_PER_S, burst=TRIES)

    @property
    def token(self) -> str:
        """That opens the page once; the next is another."""
        return self._token

    def is_called_right(self, host: str) -> bool:
        """Whether a request came here by a name of this server's."""
        return host.lower() in self._hosts

    def redeem(self, token: str, address: str, now_s: float) -> str | None:
        """A new session's cookie for the token, which opens nothing any more; None: a wrong one.

        Args:
            token: as given.
            address: whose tries are counted together.
            now_s: monotonic seconds.

        Raises:
            Busy: this address tried too often, whatever it says now.
        """
        wait_s = self._tries.wait_s(address, now_s)
        if wait_s > 0:
            raise Busy(
                f"{TRIES} tries a minute are taken from one machine; try again in {wait_s:.0f} s"
            )
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return None
        self._token, session = secrets.token_urlsafe(), secrets.token_urlsafe()
        self._sessions = [*self._sessions, _kept(session)][-MAX_SESSIONS:]
        return session

    def knows(self, session: str) -> bool:
        """Whether a cookie is one that was given out."""
        return _kept(session) in self._sessions


def _kept(session: str) -> bytes:
    """Compared in its place: how long that takes tells nothing of a session."""
    return sha256(session.encode()).digest()
