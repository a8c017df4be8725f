"""Enrolment: the coordinator certifies keys of invited members, and renews its own certificate."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from swarm_ft.base.log import get_logger
from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.coordinator.member_names import MemberNames
from swarm_ft.errors import BadOption, JournalError, NotAllowed
from swarm_ft.identity.authority import Authority, utc_now
from swarm_ft.identity.certificates import LIFETIME_S, RENEWED_AT, to_der
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.roles import Role
from swarm_ft.protocol.machines.rate import Rate
from swarm_ft.protocol.messages.enrolment import Enrolled, EnrolRequest
from swarm_ft.protocol.spec.member_name import default_name
from swarm_ft.transport.admission import address_of
from swarm_ft.transport.base import Handler, MessageStream, Method
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.methods import ENROL

logger = get_logger(__name__)

ENROLMENTS_PER_S, ENROLMENT_BURST = 4.0, 128
"""Enrolments of one address; each writes to the disk."""
SEEN_EVERY_S = 10.0
"""Seconds between two updates of when members were last seen."""
MAX_LOGGED_NAMES = 4096
"""Members whose enrolment was logged; remembered so that it is logged once."""
WATCH_EVERY_S = 0.5
"""Seconds between two looks at the registry; calls of a revoked key end within a second, at peers
too.
"""
LOOK_EVERY_S = 0.1
"""Least seconds between two looks for new invitations, so that a flood of handshakes costs
little."""

VOID = "this swarm's authority was replaced, so all memberships ended; ask for a new invitation"


class Enrolment:
    """Certificates, invitations and revocations of one swarm.

    Args:
        authority: Authority of the swarm.
        registry: Invitations and members.
        initial_peers: Addresses of the DHT that members join.
        dht_prefix: Prefix of the swarm's records in the DHT.
        on_revoked: Callback with all revoked names, at the start and after each change.
        on_void: Callback with the reason why all memberships ended, if the authority is replaced.
        on_renewed: Callback with a member's name and the expiry of its new certificate, in Unix
            seconds.
        take_heard: Function that returns the names of members that called since its last call.
        names: Names of members for people, which this keeps up to date.
    """

    def __init__(  # noqa: PLR0913 - what a process has to give
        self,
        authority: Authority,
        registry: Registry,
        initial_peers: tuple[str, ...],
        dht_prefix: str,
        on_revoked: Callable[[frozenset[str]], None] = lambda _: None,
        on_void: Callable[[str], None] = lambda _: None,
        on_renewed: Callable[[str, float], None] = lambda _name, _until: None,
        take_callers: Callable[[], frozenset[str]] = frozenset,
        names: MemberNames | None = None,
    ) -> None:
        self._authority = authority
        self._registry = registry
        self._initial_peers = initial_peers
        self._dht_prefix = dht_prefix
        self._on_revoked = on_revoked
        self._on_void = on_void
        self._on_renewed = on_renewed
        self._take_heard = take_callers
        self._names = names if names is not None else MemberNames()
        self._rate: Rate[str] = Rate(per_s=ENROLMENTS_PER_S, burst=ENROLMENT_BURST)
        key, certificate = authority.coordinator()
        self._version = self._looked_at = registry.version()
        self._invitations = registry.certificates()
        self._one_reads = threading.Lock()
        self._logged_names: set[str] = set()
        self._look_at_s = 0.0
        self.credentials = Credentials(
            key, certificate, authority.certificate, lambda: self._invitations, self._look
        )
        self._apply_revocations(registry.revoked())
        self._names.replace(*registry.chosen_names())

    def handlers(self) -> Mapping[Method[Any, Any], Handler]:
        """Return the handlers for `Transport.serve`."""
        return {ENROL: self._enrol}

    def for_invited(self, handler: Handler) -> Handler:
        """Return the handler for members, and for newcomers with a valid invitation."""

        async def checked(stream: MessageStream[Any, Any]) -> None:
            if stream.caller is not None and stream.caller.role is Role.NEWCOMER:
                self._check_rate(stream.remote)
                await asyncio.to_thread(self._registry.check, stream.caller, utc_now())
            await handler(stream)

        return checked

    async def set_admission(self, endpoint: str, *, to_all: bool) -> Invite | None:
        """Set the address of future invitations, and open or close the swarm to everybody.

        Returns:
            The invitation that makes anybody a replica on probation, if the swarm is open. In a
            closed swarm an earlier one becomes invalid.
        """
        self._registry.set_address(endpoint)
        public = None
        if to_all:
            public = self._registry.open_to_all(self._authority.fingerprint, (endpoint,))
        else:
            self._registry.close_to_all()
        await self.refresh()
        return public

    async def run(self) -> None:
        """Follow changes of the registry and renew the own certificate, until cancelled.

        Raises:
            JournalError: The registry cannot be read.
        """
        renewed_s = LIFETIME_S * RENEWED_AT
        loop = asyncio.get_running_loop()
        due_s, seen_due_s = loop.time() + renewed_s, loop.time() + SEEN_EVERY_S
        while True:
            await self.refresh()
            if loop.time() >= seen_due_s:
                await self.note_seen()
                seen_due_s = loop.time() + SEEN_EVERY_S
            if loop.time() >= due_s:
                self.credentials.rekey(*self._authority.coordinator())
                due_s = loop.time() + renewed_s
            await asyncio.sleep(WATCH_EVERY_S)

    async def note_seen(self) -> None:
        """Store when members were last seen, for `swarm-ft keys list`.

        Raises:
            JournalError: The registry cannot be written.
        """
        names = self._take_heard()
        if names:
            await asyncio.to_thread(self._registry.note_seen, names, utc_now())

    async def refresh(self) -> None:
        """Apply the registry's changes now.

        Raises:
            JournalError: The registry cannot be read.
        """
        version = await asyncio.to_thread(self._registry.version)
        if version != self._version:
            await self._apply_keys()
            await asyncio.to_thread(self._read_invitations)
            self._apply_revocations(await asyncio.to_thread(self._registry.revoked))
            self._names.replace(*await asyncio.to_thread(self._registry.chosen_names))
            self._version = version

    def _look(self) -> None:
        """Read invitations made just now, before their bearers show them."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        with suppress(JournalError):  # `run` reports it
            self._read_invitations()

    def _read_invitations(self) -> None:
        with self._one_reads:
            version = self._registry.version()
            if version != self._looked_at:
                self._invitations = self._registry.certificates()
                self._looked_at = version

    async def _apply_keys(self) -> None:
        """Use the coordinator's key in the folder; if the authority is another one, use none."""
        try:
            found = await asyncio.to_thread(Authority.open, self._authority.folder)
        except BadOption as error:
            logger.warning("%s; this coordinator keeps its present keys", error.message)
            return
        if found.fingerprint == self._authority.fingerprint:
            self.credentials.rekey(*self._authority.coordinator())
            return
        logger.error("%s; restart this coordinator", VOID)
        self.credentials.void(VOID)
        self._on_void(VOID)

    def _apply_revocations(self, revoked: frozenset[str]) -> None:
        self.credentials.revoke(revoked)
        self._on_revoked(revoked)

    async def _enrol(self, stream: MessageStream[Enrolled, EnrolRequest]) -> None:
        request = await stream.receive() or EnrolRequest()
        self._check_rate(stream.remote)
        caller = stream.caller
        if caller is None:
            raise NotAllowed("this coordinator was started without keys, and enrols nobody")
        member = await asyncio.to_thread(self._registry.admit, caller, utc_now(), request.name)
        chosen_name = await asyncio.to_thread(self._registry.chosen_name_of, member.name)
        self._names.add(member.name, chosen_name)
        shown = self._names.shown(member.name)
        certificate = self._authority.issue(member)
        is_new = member.name not in self._logged_names
        if len(self._logged_names) >= MAX_LOGGED_NAMES:
            self._logged_names.clear()
        self._logged_names.add(member.name)
        log = logger.info if is_new else logger.debug  # each command of a client enrols
        log("%s %s (%s) enrolled from %s", member.role, shown, member.name, stream.remote)
        until_unix_s = certificate.not_valid_after_utc.timestamp()
        self.credentials.validity.certified(member.name, until_unix_s)
        if caller.role is not Role.NEWCOMER:
            self._on_renewed(member.name, until_unix_s)
        await stream.send(
            Enrolled(
                certificate=to_der(certificate),
                initial_peers=self._initial_peers,
                dht_prefix=self._dht_prefix,
                name="" if shown == default_name(member.name) else shown,
            )
        )

    def _check_rate(self, remote: str) -> None:
        host, now_s = remote.rpartition(":")[0], asyncio.get_running_loop().time()
        self._rate.check(address_of(host), now_s, f"keys at {host} enrol")
