"""Options of commands that connect to a swarm."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.api.connections import MAX_FILE_CHARS, SwarmAddress, read_invite
from swarm_ft.api.shared_options import AddressOptions
from swarm_ft.cli.options import coordinator_option, declared_options, stack
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from swarm_ft.identity.invites import Invite


def way_in(
    *, by_argument: bool = False, by_address: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a `WayIn` to a command, which gets it as `way`.

    Args:
        by_argument: Whether the invitation is the command's first argument, not `--invite`.
        by_address: Whether the coordinator's address is sufficient, for commands that connect to
            nobody else.
    """
    meaning = (
        click.argument("invite", required=False, metavar="[INVITE]")
        if by_argument
        else click.option(
            "--invite",
            metavar="INVITE",
            help="Invitation from `swarm-ft invite`; @FILE reads it from a file.",
        )
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_way(
            *,
            invite: str | None,
            insecure: bool,
            initial_peers: tuple[str, ...],
            dht_prefix: str,
            coordinator: str | None = None,
            **values: Any,
        ) -> Any:
            from swarm_ft.discovery import expand_initial_peers

            initial_peers = expand_initial_peers(initial_peers)
            invitation = None if invite is None else read_invite(invite)
            if not (invitation or insecure or initial_peers or coordinator):
                invitation = prompt_invite(reads_pipe=by_argument)
            _check_security(
                invitation, (*initial_peers, *filter(None, [coordinator])), insecure=insecure
            )
            way = SwarmAddress(
                invite=invitation,
                invite_file=invite[1:] if invite and invite.startswith("@") else "FILE",
                initial_peers=initial_peers,
                dht_prefix=dht_prefix,
                coordinator=coordinator,
            )
            return command(way=way, **values)

        address = (coordinator_option,) if by_address else ()
        options = stack(meaning, *address, declared_options(AddressOptions))
        decorated: Callable[..., Any] = options(with_way)
        return decorated

    return decorate


def _check_security(
    invite: Invite | None, initial_peers: tuple[str, ...], *, insecure: bool
) -> None:
    if invite is not None and insecure:
        raise BadOption("--insecure: expected it without an invitation, whose links are encrypted")
    if invite is None and not initial_peers:
        raise BadOption(
            "expected an invitation, got none; give a file as @FILE ('swarm-ft invite' prints an "
            "invitation). A swarm without keys on this machine takes --insecure --initial-peers"
        )
    if invite is None and not insecure:
        raise BadOption(
            "--initial-peers: expected an invitation ('swarm-ft invite' prints one) or --insecure "
            "beside it, for plaintext on this machine"
        )


def prompt_invite(*, reads_pipe: bool) -> Invite | None:
    """Read an invitation from the terminal or a pipe, so that no command line contains it.

    Args:
        reads_pipe: Whether a pipe's first line is the invitation. Otherwise standard input
            serves another purpose.

    Returns:
        The invitation, or None if the input is empty.
    """
    if sys.stdin.isatty():
        text = click.prompt("invitation", hide_input=True, err=True)
    else:
        text = sys.stdin.readline(MAX_FILE_CHARS) if reads_pipe else ""
    return read_invite(text.strip()) if text.strip() else None


def parse_invite_argument(_context: object, _option: object, text: str | None) -> Invite | None:
    """Parse an optional argument: an invitation, or `@` and a file that holds one."""
    return None if text is None else read_invite(text)
