"""Enrolment: an invitation becomes a link between members, over real gRPC and TLS."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from swarm_ft.api.connections import client_key_file
from swarm_ft.base.clock import SystemClock
from swarm_ft.cli.doctor import examine_link
from swarm_ft.coordinator.capacity import Capacity
from swarm_ft.coordinator.enrolment import LOOK_EVERY_S, Enrolment
from swarm_ft.coordinator.facts.state import SwarmState
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.coordinator.service import CoordinatorService
from swarm_ft.errors import (
    BadInvite,
    BadOption,
    JournalError,
    MalformedMessage,
    NotAllowed,
    SwarmError,
    Unavailable,
)
from swarm_ft.identity.authority import Authority
from swarm_ft.identity.certificates import Certificate
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import PrivateKey, key_at, name_of, new_key
from swarm_ft.identity.pinning import authority_at
from swarm_ft.identity.roles import COORDINATOR_NAME, Caller, Role
from swarm_ft.net.enrol import Membership, enrol, keep_enrolled
from swarm_ft.protocol.messages.client import StatusRequest, SwarmStatus
from swarm_ft.protocol.spec.member_name import default_name
from swarm_ft.reach.doctor import Verdict
from swarm_ft.transport.base import MessageStream, call
from swarm_ft.transport.credentials import Credentials
from swarm_ft.transport.grpc_options import GrpcOptions
from swarm_ft.transport.grpc_transport import GrpcTransport
from swarm_ft.transport.methods import MEASURE_LINK, STATUS

DEADLINE_S = 30.0


@dataclass
class Office:
    """A coordinator that only enrols."""

    authority: Authority
    registry: Registry
    enrolment: Enrolment
    endpoint: str

    async def invite(self, role: Role = Role.PEER, uses: int = 1, note: str = "") -> Invite:
        expires = datetime.now(UTC) + timedelta(days=1)
        fingerprint = self.authority.fingerprint
        place = fingerprint, (self.endpoint,)
        invite = self.registry.invite(*place, role, uses, expires, note=note)
        await self.enrolment.refresh()
        return invite


@asynccontextmanager
async def office_in(folder: Path) -> AsyncIterator[Office]:
    """The one with keys in this folder, which are made if they are not there."""
    try:
        authority = Authority.open(folder)
    except BadOption:
        authority = Authority.make(folder)
    registry = Registry(folder)
    enrolment = Enrolment(authority, registry, ("/ip4/203.0.113.7/tcp/1/p2p/x",), "a-swarm")
    transport = GrpcTransport(GrpcOptions(credentials=enrolment.credentials))
    measured = enrolment.for_invited(Capacity(SystemClock(), SwarmState).measure)
    handlers = {**enrolment.handlers(), STATUS: status, MEASURE_LINK: measured}
    server = await transport.serve("127.0.0.1", 0, handlers)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield Office(authority, registry, enrolment, server.endpoint)
    finally:
        await server.stop()
        registry.close()


async def status(stream: MessageStream[SwarmStatus, StatusRequest]) -> None:
    await stream.receive()
    await stream.send(SwarmStatus(members=(), runs=()))


async def exchange_once(membership: Membership) -> None:
    transport = GrpcTransport(GrpcOptions(credentials=membership.credentials))
    channel = transport.connect(membership.coordinator, COORDINATOR_NAME)
    try:
        await call(channel, STATUS, StatusRequest(), timeout_s=5.0)
    finally:
        await channel.close()


async def test_one_word_makes_a_member(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        key = new_key()
        membership = await enrol(await office.invite(), key)
        assert membership.name == name_of(key.public_key())
        assert membership.initial_peers == ("/ip4/203.0.113.7/tcp/1/p2p/x",)
        assert membership.dht_prefix == "a-swarm"
        await exchange_once(membership)


async def test_an_invitation_is_good_as_soon_as_it_is_made(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        owners = Registry(tmp_path / "keys")  # as `swarm-ft invite` has it, in a process of its own
        expires = datetime.now(UTC) + timedelta(days=1)
        place = office.authority.fingerprint, (office.endpoint,)
        invite = owners.invite(*place, Role.PEER, 1, expires)
        owners.close()
        await exchange_once(await enrol(invite, new_key()))  # nobody called refresh()


async def test_a_flood_of_strangers_does_not_have_the_registry_read_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, version = 0, Registry.version

    def counted(registry: Registry) -> tuple[int, int]:
        nonlocal looks
        looks += 1
        return version(registry)

    async with office_in(tmp_path / "keys") as office:
        host, _, port = office.endpoint.rpartition(":")
        fingerprint = office.authority.fingerprint
        monkeypatch.setattr(Registry, "version", counted)
        began_s = time.monotonic()
        for _ in range(40):
            await asyncio.to_thread(authority_at, host, int(port), fingerprint)
        took_s = time.monotonic() - began_s
    assert 1 <= looks <= 1 + took_s / LOOK_EVERY_S


async def test_members_reach_each_other(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        invite = await office.invite(uses=2)
        one = await enrol(invite, new_key())
        other = await enrol(invite, new_key())
        callers = []

        async def noted(stream: MessageStream[SwarmStatus, StatusRequest]) -> None:
            callers.append(stream.caller)
            await status(stream)

        transport = GrpcTransport(GrpcOptions(credentials=one.credentials))
        server = await transport.serve("127.0.0.1", 0, {STATUS: noted})
        channel = GrpcTransport(GrpcOptions(credentials=other.credentials)).connect(
            server.endpoint, one.name
        )
        await call(channel, STATUS, StatusRequest(), timeout_s=5.0)
        await channel.close()
        await server.stop()
        assert [caller and (caller.role, caller.name) for caller in callers] == [
            (Role.PEER, other.name)
        ]


async def refusal(invite: Invite, key: PrivateKey) -> SwarmError:
    with pytest.raises(SwarmError) as caught:
        await enrol(invite, key)
    return caught.value


async def test_an_invitation_that_is_used_up_says_so(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        invite = await office.invite()
        await enrol(invite, new_key())
        error = await refusal(invite, new_key())
        assert isinstance(error, BadInvite)
        assert "used up" in error.message


async def test_the_doctor_says_that_an_invitation_lets_this_machine_in_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    async with office_in(tmp_path / "keys") as office:
        invite = await office.invite(Role.CLIENT)
        assert (await examine_link(invite)).about == "link"
        own = key_at(client_key_file())
        await enrol(invite, own)
        assert (await examine_link(invite)).about == "link", "it lets this machine in again"
        client_key_file().unlink()
        found = await examine_link(invite)
        assert (found.about, found.verdict) == ("invitation", Verdict.BAD)
        assert found.text == f"{invite.name} is used up or revoked; ask for another one"


async def test_another_secret_is_no_invitation(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        invite = await office.invite()
        wrong = replace(invite, secret=bytes(10))
        assert isinstance(await refusal(wrong, new_key()), Unavailable)
        assert not office.registry.members()


async def test_another_swarms_coordinator_is_not_joined(tmp_path: Path) -> None:
    async with office_in(tmp_path / "one") as one, office_in(tmp_path / "other") as other:
        invite = replace(await one.invite(), addresses=(other.endpoint,))
        error = await refusal(invite, new_key())
        assert isinstance(error, BadInvite)
        assert "not the coordinator" in error.message
        assert not other.registry.members()


async def test_a_machine_in_the_middle_with_the_authoritys_certificate_is_refused(
    tmp_path: Path,
) -> None:
    """A server with the right authority's certificate but not its key is refused."""
    async with office_in(tmp_path / "one") as one, office_in(tmp_path / "other") as other:
        other.enrolment.credentials.authority = one.authority.certificate
        other.enrolment.credentials.renew(other.authority.coordinator()[1])  # or it shows as before
        invite = replace(await one.invite(), addresses=(other.endpoint,))
        assert isinstance(await refusal(invite, new_key()), Unavailable)
        assert not other.registry.members()


async def test_the_next_address_is_tried(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        invite = replace(await office.invite(), addresses=("127.0.0.1:1", office.endpoint))
        assert (await enrol(invite, new_key())).coordinator == office.endpoint
        dead = replace(invite, addresses=("127.0.0.1:1",))
        error = await refusal(dead, new_key())
        assert isinstance(error, Unavailable)
        assert "127.0.0.1:1" in error.message


async def test_who_does_not_speak_tls_is_no_coordinator() -> None:
    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    invite = Invite(
        fingerprint=bytes(16), number=bytes(4), secret=bytes(10), addresses=(f"{host}:{port}",)
    )
    error = await refusal(invite, new_key())
    assert isinstance(error, Unavailable)
    assert "expected a swarm's coordinator" in error.message
    server.close()


async def test_a_member_whose_key_is_revoked_gets_through_no_more(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        membership = await enrol(await office.invite(), new_key())
        await exchange_once(membership)
        office.registry.revoke(membership.name)
        await office.enrolment.refresh()
        with pytest.raises(NotAllowed, match="revoked"):
            await exchange_once(membership)


async def test_a_certificate_is_renewed_before_it_ends(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        key = new_key()
        membership = await enrol(await office.invite(), key)
        holder = Caller(role=Role.PEER, name=membership.name, key=key.public_key())
        half_over = datetime.now(UTC) - timedelta(hours=13)
        old = Authority.open(tmp_path / "keys", lambda: half_over).issue(holder)
        credentials = Noting(key, old, office.authority.certificate)

        async def find() -> str:
            return office.endpoint

        renewing = asyncio.create_task(keep_enrolled(credentials, key, find))
        await credentials.renewed.wait()
        renewing.cancel()
        assert credentials.certificate.not_valid_after_utc > old.not_valid_after_utc
        await exchange_once(replace(membership, credentials=credentials))


async def test_the_coordinator_heeds_its_owner_and_its_own_certificate(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        running = asyncio.create_task(office.enrolment.run())
        membership = await enrol(await office.invite(), new_key())
        await exchange_once(membership)
        office.registry.close()
        with pytest.raises(JournalError):
            await running


async def test_the_coordinators_key_is_rotated_while_it_runs(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        membership = await enrol(await office.invite(), new_key())
        before = office.enrolment.credentials.certificate
        office.authority.rotate_coordinator()
        office.registry.note_rotation()
        await office.enrolment.refresh()
        assert office.enrolment.credentials.certificate.public_key() != before.public_key()
        await exchange_once(membership)
        await exchange_once(await enrol(await office.invite(), new_key()))


async def test_with_another_authority_nobody_is_a_member_until_invited_again(
    tmp_path: Path,
) -> None:
    key, revoked = new_key(), new_key()
    async with office_in(tmp_path / "keys") as office:
        unused = await office.invite()
        membership = await enrol(await office.invite(), key)
        office.registry.revoke((await enrol(await office.invite(), revoked)).name)
        Authority.make(tmp_path / "keys", replaces=True)
        assert office.registry.void_all() == (1, 1)
        await office.enrolment.refresh()
        with pytest.raises(NotAllowed, match=r"authority was replaced.* ask for a new invitation"):
            await exchange_once(membership)
    async with office_in(tmp_path / "keys") as office:
        with pytest.raises(Unavailable):
            await exchange_once(replace(membership, coordinator=office.endpoint))
        with pytest.raises(BadInvite, match="replaced; ask for a new invitation"):
            await enrol(replace(unused, addresses=(office.endpoint,)), new_key())
        again = await enrol(await office.invite(), key)
        assert again.name == membership.name, "runs and buffers are its own as before"
        await exchange_once(again)
        assert isinstance(await refusal(await office.invite(), revoked), NotAllowed)


async def test_keys_that_cannot_be_read_just_now_stay_as_they_are(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        membership = await enrol(await office.invite(), new_key())
        (tmp_path / "keys" / "authority.pem").rename(tmp_path / "elsewhere")
        office.registry.note_rotation()
        await office.enrolment.refresh()
        await exchange_once(membership)


class Noting(Credentials):
    """Certificates that report their renewal."""

    def __init__(self, key: PrivateKey, certificate: Certificate, authority: Certificate) -> None:
        super().__init__(key, certificate, authority)
        self.renewed = asyncio.Event()

    def renew(self, certificate: Certificate) -> None:
        super().renew(certificate)
        self.renewed.set()


async def test_a_member_was_seen_when_it_was_last_heard(tmp_path: Path) -> None:
    """Third round of user tests: a peer that worked for hours was 'seen' when it enrolled."""
    authority, registry = Authority.make(tmp_path / "keys"), Registry(tmp_path / "keys")
    service = CoordinatorService(Journal(":memory:"), SystemClock())
    enrolment = Enrolment(authority, registry, (), "a-swarm", take_callers=service.take_callers)
    transport = GrpcTransport(GrpcOptions(credentials=enrolment.credentials))
    handlers = {**enrolment.handlers(), **service.handlers()}
    server = await transport.serve("127.0.0.1", 0, handlers)
    try:
        office = Office(authority, registry, enrolment, server.endpoint)
        enrolled = [await enrol(await office.invite(Role.CLIENT), new_key()) for _ in range(2)]
        long_ago = datetime(2026, 1, 1, tzinfo=UTC)
        registry.note_seen([one.name for one in enrolled], long_ago)
        await exchange_once(enrolled[0])
        await enrolment.note_seen()
        seen = {member.name: member.seen_unix_s for member in registry.members()}
    finally:
        await server.stop()
        registry.close()
    assert seen[enrolled[0].name] >= int(time.time()) - 60
    assert seen[enrolled[1].name] == int(long_ago.timestamp())


# ---- names


async def test_a_member_is_told_the_name_by_which_people_know_it(tmp_path: Path) -> None:
    async with office_in(tmp_path / "keys") as office:
        key, other = new_key(), new_key()
        drawn = await enrol(await office.invite(), key)
        assert drawn.shown_name == default_name(drawn.name)
        chosen = await enrol(await office.invite(), key, "ada-3090")
        assert (chosen.name, chosen.shown_name) == (drawn.name, "ada-3090")
        assert (await enrol(await office.invite(), key)).shown_name == "ada-3090"
        noted = await enrol(await office.invite(Role.CLIENT, note="Anna"), new_key())
        assert noted.shown_name == "Anna"
        second = await enrol(await office.invite(), other, "Ada-3O90")
        assert second.shown_name == f"Ada-3O90 ({second.name[:8]})"
        assert (
            await enrol(await office.invite(), key)
        ).shown_name == f"ada-3090 ({chosen.name[:8]})"


@pytest.mark.parametrize(
    "name", ["\x1b[2Jada", "a b", "x" * 25, "a\nb", "\u202eada", "coordinator"]
)
async def test_a_hostile_name_lets_nobody_in(tmp_path: Path, name: str) -> None:
    async with office_in(tmp_path / "keys") as office:
        invite = await office.invite()
        with pytest.raises(MalformedMessage, match="expected a name of 1 to 24 letters") as refused:
            await enrol(invite, new_key(), name)
        assert refused.value.message.isprintable()
        assert office.registry.members() == []
        assert office.registry.invitations()[0].uses_left == 1
        await enrol(invite, new_key(), "ada")  # the office goes on
