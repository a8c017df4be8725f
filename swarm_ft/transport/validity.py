"""Members whose calls a process serves, and notifications of changes. The module opens no call."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from swarm_ft.errors import NotAllowed, SwarmError, Unavailable
from swarm_ft.identity.roles import Caller, Role

Listener = Callable[[], None]


class Validity:
    """Keys and certificates of callers, as far as a process knows them.

    A call is refused from the moment that its caller's key is revoked, or its newest certificate
    has expired. Connections outlive their first certificate: the newest one that this process knows
    counts.

    Args:
        unix_s: Wall clock in Unix seconds.
    """

    def __init__(self, unix_s: Callable[[], float] = time.time) -> None:
        self.unix_s = unix_s
        self._revoked: frozenset[str] = frozenset()
        self._void = ""
        self._expires_unix_s: dict[str, float] = {}
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after each `revoke` and `void`; return a function that unsubscribes."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def revoke(self, names: Collection[str]) -> None:
        """Refuse exactly these names, although their certificates are valid."""
        self._revoked = frozenset(names)
        for name in self._revoked:
            self._expires_unix_s.pop(name, None)
        self._notify()

    def void(self, reason: str) -> None:
        """Refuse all callers from now on, for this reason."""
        self._void = reason
        self._notify()

    def certified(self, name: str, until_unix_s: float) -> None:
        """Record a member's certificate with its expiry; the latest known expiry counts."""
        known_s = self._expires_unix_s.get(name, until_unix_s)
        self._expires_unix_s[name] = max(known_s, until_unix_s)

    def expires_unix_s(self, name: str) -> float | None:
        """Return the expiry of a member's newest known certificate; None if none is known."""
        return self._expires_unix_s.get(name)

    def refusal(self, caller: Caller) -> SwarmError | None:
        """Return the reason to refuse a caller; None if it is served.

        Newcomers have no certificate of the swarm that could expire; each call checks their
        invitation.
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
        """Refuse a call of an invalid caller.

        Raises:
            NotAllowed: The caller's key was revoked, or the whole membership is void.
            Unavailable: The caller's certificate has expired.
        """
        refusal = self.refusal(caller)
        if refusal is not None:
            raise refusal

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()
