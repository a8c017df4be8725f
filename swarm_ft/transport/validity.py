"""Which members' calls a process serves, as of now, and when that changes. It opens no call."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from swarm_ft.errors import NotAllowed, SwarmError, Unavailable
from swarm_ft.identity.roles import Caller, Role

Listener = Callable[[], None]


class Validity:
    """The keys and certificates of callers, as far as a process knows them.

    A call is refused from the moment that its caller's key is revoked, or its newest certificate
    has expired. Connections outlive the certificate that they began with: what counts is the
    newest one that this process has seen or heard of.

    Args:
        unix_s: the wall clock.
    """

    def __init__(self, unix_s: Callable[[], float] = time.time) -> None:
        self.unix_s = unix_s
        self._revoked: frozenset[str] = frozenset()
        self._void = ""
        self._expires_unix_s: dict[str, float] = {}
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after each `revoke` and `void`; returns what ends the subscription."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def revoke(self, names: Collection[str]) -> None:
        """Refuse these names, and no others, although their certificates are good."""
        self._revoked = frozenset(names)
        for name in self._revoked:
            self._expires_unix_s.pop(name, None)
        self._notify()

    def void(self, reason: str) -> None:
        """Refuse everybody from now on, for this reason."""
        self._void = reason
        self._notify()

    def certified(self, name: str, until_unix_s: float) -> None:
        """Note that a member has a certificate until then; the latest known end counts."""
        known_s = self._expires_unix_s.get(name, until_unix_s)
        self._expires_unix_s[name] = max(known_s, until_unix_s)

    def expires_unix_s(self, name: str) -> float | None:
        """Return the expiry of a member's newest known certificate; None if none is known."""
        return self._expires_unix_s.get(name)

    def refusal(self, caller: Caller) -> SwarmError | None:
        """Why this caller is not served; None if it is.

        Newcomers have no certificate of the swarm's that could expire; their invitations are
        checked at each call.
        """
        if self._void:
            return NotAllowed(self._void)
        if caller.name in self._revoked:
            return NotAllowed(f"{caller}: its key was revoked")
        until_s = self._expires_unix_s.get(caller.name)
        if caller.role is not Role.NEWCOMER and until_s is not None and until_s < self.unix_s():
            return Unavailable(f"{caller}: its certificate has expired; connect with the next one")
        return None

    def check(self, caller: Caller) -> None:
        """Refuse a call.

        Raises:
            NotAllowed: the caller's key was revoked, or nobody is a member any more.
            Unavailable: its certificate has expired.
        """
        refusal = self.refusal(caller)
        if refusal is not None:
            raise refusal

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()
