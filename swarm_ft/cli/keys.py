"""`swarm-ft init`, `invite` and `keys`: a swarm's own keys, and who may take part.

They work on the folder beside the coordinator's journal: whoever may write there is the owner.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import click

from swarm_ft.api.documents import grant_fields
from swarm_ft.api.swarm_keys import JOURNAL, keys_folder, opened
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
    help="The coordinator's; the swarm's keys are beside it, in FILE.keys.",
)


class Duration(click.ParamType):  # type: ignore[type-arg] # not generic in click 8.1
    """`7d`, `12h`, `30m`."""

    name = "TIME"
    _seconds: ClassVar = {"m": 60, "h": 3600, "d": 86400}
    _pattern = re.compile(r"(?P<number>\d{1,6})(?P<unit>[mhd])")

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """A time to come."""
        if isinstance(value, timedelta):
            return value
        match = self._pattern.fullmatch(value.strip().lower())
        if match is None or not int(match["number"]):
            self.fail(f"expected a time such as 7d, 12h or 30m, got {value!r}", param, ctx)
        return timedelta(seconds=int(match["number"]) * self._seconds[match["unit"]])


@click.command(
    short_help="Make a swarm's keys.",
    epilog=examples("swarm-ft init", "swarm-ft init --journal /srv/swarm/runs.db"),
)
@journal_option
@json_flag
@log_option
def init(journal: str, as_json: bool) -> None:
    """Make the keys of a new swarm, beside its coordinator's journal.

    Whoever has them decides who takes part: keep a copy where nobody else can read it.
    """
    from swarm_ft.identity.authority import Authority

    authority = Authority.make(keys_folder(journal))
    folder, fingerprint = str(authority.folder), authority.fingerprint.hex()
    if as_json:
        click.echo(json.dumps({"keys": folder, "fingerprint": fingerprint}))
        return
    click.echo(f"this swarm's keys are in {folder}, for you alone to read; keep a copy")
    click.echo("next: 'swarm-ft coordinator', then 'swarm-ft invite' for everybody else")


@click.command(
    short_help="Let somebody join.",
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
    help="What it makes of its bearer: a peer lends a machine, a client submits jobs, a relay "
    "joins members that do not reach each other; a replica-only peer hosts nothing that no other "
    "peer hosts too.",
)
@click.option(
    "--sees-tokens",
    type=click.Choice(["yes", "no"]),
    default="yes",
    show_default=True,
    help="Whether a peer may host the first and the last stage, which see text and labels.",
)
@click.option(
    "--layers",
    metavar="START-STOP",
    help="The only layers that a peer may host, such as 12-24.  [default: any]",
)
@click.option(
    "--weight",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Share of the peers that a client's jobs get, to that of other invitations; all clients "
    "that join with this invitation share it.",
)
@click.option(
    "--uses",
    type=click.IntRange(1, 10_000),
    default=1,
    show_default=True,
    help="How many members may join; returning members are not counted again.",
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
    help="How long it lets anybody in: 7d, 12h, 30m; members stay.",
)
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="HOST:PORT",
    help="Of the coordinator, for the bearer.  [default: where it last was]",
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
    """Print an invitation: one word with which somebody joins this swarm.

    Give it only to whom it is for; it is shown once.
    """
    from swarm_ft.identity.roles import Role

    if is_public:
        _show_public(journal, as_json=as_json)
        return
    grant = _granted(role, sees_tokens, layers, weight)
    becomes = Role.PEER if role == REPLICA_ONLY else Role(role)
    with opened(journal) as (authority, registry):
        known = registry.address()
        addresses = addresses or ((known,) if known else ())
        if not addresses:
            raise BadOption("--address: start the coordinator first, or say where it will be")
        until = datetime.now(UTC) + expires
        made = registry.invite(authority.fingerprint, addresses, becomes, uses, until, grant, note)
    if as_json:
        told = {"invite": str(made), "name": made.name, "role": becomes.value, "uses": uses}
        told["note"] = note
        expires_at = until.isoformat(timespec="seconds")
        click.echo(json.dumps({**told, **grant_fields(grant), "expires": expires_at}))
        return
    click.echo(str(made))
    click.echo(
        f"{made.name}: for {_bearers(note, uses, becomes)}{_limits(grant)}, until "
        f"{until.astimezone():%Y-%m-%d %H:%M}; joins with it in a file, so that no 'ps' shows it:",
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
    with opened(journal) as (_, registry):
        public = registry.open_invitation()
    if public is None:
        raise BadOption("--open: not all are let in here; 'swarm-ft coordinator --open' does that")
    told = {"invite": str(public), "name": public.name}
    click.echo(json.dumps(told) if as_json else str(public))


def _bearers(note: str, uses: int, role: Role) -> str:
    """Return who joins with an invitation: `Anna, 1 peer`."""
    return f"{f'{note}, ' if note else ''}{uses} {role}{'s' if uses > 1 else ''}"


def _limits(grant: Grant) -> str:
    return f" ({grant})" if str(grant) else ""


@click.group(
    cls=CommandGroup,
    short_help="See and take back who may take part.",
    epilog=examples("swarm-ft keys list", "swarm-ft keys revoke calm-otter-41"),
)
def keys() -> None:
    """See who may take part in a swarm, and take it back."""


@keys.command(name="list")
@journal_option
@json_flag
@log_option
def list_keys(journal: str, as_json: bool) -> None:
    """Show members and invitations. A member was seen when the coordinator last heard it.

    Times are this machine's; with --json they are UTC.
    """
    with opened(journal) as (_, registry):
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
        click.echo("nobody was invited yet; 'swarm-ft invite' does")


@keys.command(
    epilog=examples("swarm-ft keys revoke calm-otter-41", "swarm-ft keys revoke invite-00010203")
)
@click.argument("name")
@journal_option
@log_option
def revoke(name: str, journal: str) -> None:
    """Take back a member's key, or an invitation.

    NAME is a member's name, the first letters of its id, or an invitation. The coordinator heeds it
    within a second, and tells all members.
    """
    with opened(journal) as (_, registry):
        names = _names(registry)
        meant = names.found(name) or (name,)
        if len(meant) > 1:
            listed = ", ".join(meant)
            raise BadOption(f"{name}: expected one member, got {len(meant)}; give an id: {listed}")
        registry.revoke(meant[0])
        shown = names.shown(meant[0])
    click.echo(f"{shown} is revoked" if shown == meant[0] else f"{shown}, {meant[0]}, is revoked")


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
    help="The authority's key too, as when it may be known to others: all members and invitations "
    "are void.",
)
@journal_option
@json_flag
@log_option
def rotate(is_authority: bool, journal: str, as_json: bool) -> None:
    """Give the coordinator a new key; it shows it within a second, and members go on.

    With --authority the swarm begins anew: its coordinator is to be started again, and everybody
    invited again. Names stay, since they are of members' own keys, and with them runs and buffers.
    """
    from swarm_ft.identity.authority import Authority

    members = invitations = 0
    with opened(journal) as (authority, registry):
        if is_authority:
            authority = Authority.make(authority.folder, replaces=True)
            members, invitations = registry.void_all()
        authority.rotate_coordinator()
        registry.tell_rotated()
    if as_json:
        told = {"fingerprint": authority.fingerprint.hex(), "authority": is_authority}
        click.echo(json.dumps({**told, "members": members, "invitations": invitations}))
        return
    click.echo("the coordinator has a new key")
    if is_authority:
        click.echo(
            f"the authority is new too: {members} members and {invitations} open invitations are "
            "void; start the coordinator again, and invite everybody anew"
        )


def local_time(unix_s: int) -> str:
    """A time for people, by this machine's clock."""
    return f"{datetime.fromtimestamp(unix_s):%Y-%m-%d %H:%M:%S}"


def utc_time(unix_s: int) -> str:
    """A time for programs."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
