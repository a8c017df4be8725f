"""The commands `swarm-ft init`, `invite` and `keys`, which manage a swarm's keys and members.

They work on the folder beside the coordinator's journal. Write access to it is the authorization.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import click

from swarm_ft.api.documents import grant_fields
from swarm_ft.api.swarm_keys import JOURNAL, keys_folder, open_keys
from swarm_ft.cli.groups import CommandGroup
from swarm_ft.cli.options import examples, json_flag, log_option
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from swarm_ft.coordinator.journal.registry import Registry
    from swarm_ft.coordinator.member_names import MemberNames
    from swarm_ft.identity.roles import Role
    from swarm_ft.protocol.spec.grant import Grant

REPLICA_ONLY = "replica-only"

journal_option = click.option(
    "--journal",
    default=JOURNAL,
    show_default=True,
    metavar="FILE",
    help="Journal of the coordinator; the swarm's keys lie beside it in FILE.keys.",
)


class Duration(click.ParamType):  # type: ignore[type-arg] # not generic in click 8.1
    """The type of an option that is a duration: `7d`, `12h` or `30m`."""

    name = "TIME"
    _seconds: ClassVar = {"m": 60, "h": 3600, "d": 86400}
    _pattern = re.compile(r"(?P<number>\d{1,6})(?P<unit>[mhd])")

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """Return the duration."""
        if isinstance(value, timedelta):
            return value
        match = self._pattern.fullmatch(value.strip().lower())
        if match is None or not int(match["number"]):
            self.fail(f"expected a time such as 7d, 12h or 30m, got {value!r}", param, ctx)
        return timedelta(seconds=int(match["number"]) * self._seconds[match["unit"]])


@click.command(
    short_help="Create a swarm's keys.",
    epilog=examples("swarm-ft init", "swarm-ft init --journal /srv/swarm/runs.db"),
)
@journal_option
@json_flag
@log_option
def init(journal: str, as_json: bool) -> None:
    """Create the keys of a new swarm, beside its coordinator's journal.

    These keys decide who may join. Keep a copy where nobody else can read it.
    """
    from swarm_ft.identity.authority import Authority

    authority = Authority.make(keys_folder(journal))
    folder, fingerprint = str(authority.folder), authority.fingerprint.hex()
    if as_json:
        click.echo(json.dumps({"keys": folder, "fingerprint": fingerprint}))
        return
    click.echo(f"created the swarm's keys in {folder}; only you can read them. Keep a copy.")
    click.echo("next: 'swarm-ft coordinator', then 'swarm-ft invite' for each member")


@click.command(
    short_help="Create an invitation.",
    epilog=examples(
        "swarm-ft invite --note Anna",
        "swarm-ft invite --role client --expires 1h",
        "swarm-ft invite --role client --weight 3",
        "swarm-ft invite --uses 20 --address swarm.example.org:7000",
        "swarm-ft invite --role replica-only --sees-tokens no --layers 4-20",
    ),
)
@click.option(
    "--role",
    type=click.Choice(["peer", "client", "relay", REPLICA_ONLY]),
    default="peer",
    show_default=True,
    help="Role of the new member: a peer lends a machine, a client submits jobs, a relay forwards "
    "links. A replica-only peer hosts only stages that another peer hosts too.",
)
@click.option(
    "--sees-tokens",
    type=click.Choice(["yes", "no"]),
    default="yes",
    show_default=True,
    help="Permission to host the first and the last stage, which see text and labels.",
)
@click.option(
    "--layers",
    metavar="START-STOP",
    help="Layers that the peer may host, such as 12-24.  [default: all]",
)
@click.option(
    "--weight",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Weight of the client's jobs when peers are shared out among clients. All clients of one "
    "invitation share its weight.",
)
@click.option(
    "--uses",
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    help="Number of members that may join; returning members are not counted again.",
)
@click.option(
    "--note",
    metavar="NAME",
    default="",
    help="The name by which people know its bearer, such as Anna, unless a peer chooses one "
    "(serve-stage --name).  [default: two words and a number from its key]",
)
@click.option(
    "--expires",
    type=Duration(),
    default="7d",
    show_default=True,
    help="Lifetime of the invitation: 7d, 12h, 30m. Members stay after it.",
)
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="HOST:PORT",
    help="Address of the coordinator in the invitation. May be repeated.  [default: its last one]",
)
@click.option(
    "--open",
    "is_public",
    is_flag=True,
    help="Print the public invitation of a coordinator that was started with --open.",
)
@journal_option
@json_flag
@log_option
def invite(
    role: str,
    sees_tokens: str,
    layers: str | None,
    weight: int,
    uses: int,
    expires: timedelta,
    addresses: tuple[str, ...],
    note: str,
    is_public: bool,
    journal: str,
    as_json: bool,
) -> None:
    """Create an invitation and print it; its bearer may join this swarm.

    The command shows it once. Send it only to the person whom you invite.
    """
    from swarm_ft.identity.roles import Role

    if is_public:
        _show_public(journal, as_json=as_json)
        return
    grant = _granted(role, sees_tokens, layers, weight)
    becomes = Role.PEER if role == REPLICA_ONLY else Role(role)
    with open_keys(journal) as (authority, registry):
        known = registry.address()
        addresses = addresses or ((known,) if known else ())
        if not addresses:
            raise BadOption("--address: expected HOST:PORT, or a coordinator that has run before")
        until = datetime.now(UTC) + expires
        made = registry.invite(authority.fingerprint, addresses, becomes, uses, until, grant, note)
    if as_json:
        document = {"invite": str(made), "name": made.name, "role": becomes.value, "uses": uses}
        document["note"] = note
        expires_at = until.isoformat(timespec="seconds")
        click.echo(json.dumps({**document, **grant_fields(grant), "expires": expires_at}))
        return
    click.echo(str(made))
    click.echo(
        f"{made.name}: for {_bearers(note, uses, becomes)}{_limits(grant)}, until "
        f"{until.astimezone():%Y-%m-%d %H:%M}. To join, save it to a FILE (command lines are "
        "visible to other users) and run:",
        err=True,
    )
    command = {Role.PEER: "serve-stage", Role.RELAY: "relay"}.get(
        becomes, "client train ... --invite"
    )
    click.echo(f"  swarm-ft {command} @FILE", err=True)


def _granted(role: str, sees_tokens: str, layers: str | None, weight: int) -> Grant:
    """Return the grant that the options describe."""
    from swarm_ft.protocol.spec.grant import Grant
    from swarm_ft.protocol.spec.layers import parse_layers

    grant = Grant(
        replica_only=role == REPLICA_ONLY,
        sees_tokens=sees_tokens == "yes",
        layers=parse_layers(layers) if layers else None,
        weight=weight,
    )
    if role != "client" and weight != Grant().weight:
        raise BadOption(f"--weight: expected --role client beside it, got --role {role}")
    if role in {"client", "relay"} and grant != Grant(weight=weight):
        raise BadOption(f"--sees-tokens, --layers: a {role} hosts no layers; leave them out")
    return grant


def _show_public(journal: str, *, as_json: bool) -> None:
    with open_keys(journal) as (_, registry):
        public = registry.open_invitation()
    if public is None:
        raise BadOption("--open: expected a coordinator that was started with --open")
    document = {"invite": str(public), "name": public.name}
    click.echo(json.dumps(document) if as_json else str(public))


def _bearers(note: str, uses: int, role: Role) -> str:
    """Return who joins with an invitation: `Anna, 1 peer`."""
    return f"{f'{note}, ' if note else ''}{uses} {role}{'s' if uses > 1 else ''}"


def _limits(grant: Grant) -> str:
    return f" ({grant})" if str(grant) else ""


@click.group(
    cls=CommandGroup,
    short_help="List and revoke members and invitations.",
    epilog=examples("swarm-ft keys list", "swarm-ft keys revoke calm-otter-41"),
)
def keys() -> None:
    """List and revoke the members and invitations of a swarm."""


@keys.command(name="list", short_help="List members and invitations.")
@journal_option
@json_flag
@log_option
def list_keys(journal: str, as_json: bool) -> None:
    """List members and invitations, with the time of each member's last message.

    Times are local; with --json they are in UTC.
    """
    with open_keys(journal) as (_, registry):
        members, invitations = registry.members(), registry.invitations()
        names = _names(registry)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "members": [
                        {
                            "id": m.name,
                            "name": names.shown(m.name),
                            "role": m.role.value,
                            "invitation": m.invitation,
                            "joined": utc_time(m.joined_unix_s),
                            "seen": utc_time(m.seen_unix_s),
                            **grant_fields(m.grant),
                            "revoked": m.is_revoked,
                        }
                        for m in members
                    ],
                    "invitations": [
                        {
                            "name": i.name,
                            "note": i.note,
                            "role": i.role.value,
                            "uses_left": i.uses_left,
                            "expires": i.expires_unix_s and utc_time(i.expires_unix_s),
                            **grant_fields(i.grant),
                        }
                        for i in invitations
                    ],
                }
            )
        )
        return
    width = max((len(names.shown(m.name)) for m in members), default=0)
    for m in members:
        end = "  revoked" if m.is_revoked else ""
        joined = f"joined {local_time(m.joined_unix_s)}, seen {local_time(m.seen_unix_s)}"
        who = f"{m.role:<6} {names.shown(m.name):<{width}}  {m.name}"
        click.echo(f"{who}  by {m.invitation}  {joined}{_limits(m.grant)}{end}")
    for i in invitations:
        left = "any number" if i.uses_left is None else f"{i.uses_left} left"
        until = f", until {local_time(i.expires_unix_s)}" if i.expires_unix_s else ""
        note = f"  {i.note}" if i.note else ""
        click.echo(f"{i.name}{note}  for {i.role}s{_limits(i.grant)}  {left}{until}")
    if not members and not invitations:
        click.echo("no members and no invitations yet; create one with 'swarm-ft invite'")


@keys.command(
    short_help="Revoke a member or an invitation.",
    epilog=examples("swarm-ft keys revoke calm-otter-41", "swarm-ft keys revoke invite-00010203"),
)
@click.argument("name")
@journal_option
@log_option
def revoke(name: str, journal: str) -> None:
    """Revoke a member's key or an invitation.

    NAME is a member's name, the first letters of its id, or an invitation. Within a second the
    coordinator applies it and notifies all members.
    """
    with open_keys(journal) as (_, registry):
        names = _names(registry)
        matches = names.found(name) or (name,)
        if len(matches) > 1:
            ids = ", ".join(matches)
            raise BadOption(f"{name}: expected one member, got {len(matches)}; give an id: {ids}")
        registry.revoke(matches[0])
        shown = names.shown(matches[0])
    click.echo(f"revoked {shown}" if shown == matches[0] else f"revoked {shown} ({matches[0]})")


def _names(registry: Registry) -> MemberNames:
    from swarm_ft.coordinator.member_names import MemberNames

    names = MemberNames()
    names.replace(*registry.chosen_names())
    return names


@keys.command(
    short_help="Give the coordinator a new key.",
    epilog=examples("swarm-ft keys rotate", "swarm-ft keys rotate --authority"),
)
@click.option(
    "--authority",
    "is_authority",
    is_flag=True,
    help="Replace the authority's key too, for example after a leak. All members and invitations "
    "become void.",
)
@journal_option
@json_flag
@log_option
def rotate(is_authority: bool, journal: str, as_json: bool) -> None:
    """Give the coordinator a new key, which it uses within a second; members stay connected.

    With --authority you must restart the coordinator and invite all members again. Members keep
    their own keys, and so their names, runs and buffers.
    """
    from swarm_ft.identity.authority import Authority

    members = invitations = 0
    with open_keys(journal) as (authority, registry):
        if is_authority:
            authority = Authority.make(authority.folder, replaces=True)
            members, invitations = registry.void_all()
        authority.rotate_coordinator()
        registry.note_rotation()
    if as_json:
        document = {"fingerprint": authority.fingerprint.hex(), "authority": is_authority}
        click.echo(json.dumps({**document, "members": members, "invitations": invitations}))
        return
    click.echo("the coordinator has a new key")
    if is_authority:
        click.echo(
            f"the authority has a new key too: {members} members and {invitations} open "
            "invitations are void; restart the coordinator and invite all members again"
        )


def local_time(unix_s: int) -> str:
    """Format a time for people, in this machine's time zone."""
    return f"{datetime.fromtimestamp(unix_s):%Y-%m-%d %H:%M:%S}"


def utc_time(unix_s: int) -> str:
    """Format a time for programs, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
