"""The commands `swarm-ft peer`, which pause, resume or drain this machine's peer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.groups import CommandGroup
from swarm_ft.cli.options import examples, json_flag
from swarm_ft.errors import BadOption, NotFound

if TYPE_CHECKING:
    from swarm_ft.cli.peer_control import PeerState


@click.group(
    cls=CommandGroup,
    short_help="Pause, resume or drain this machine's peer.",
    epilog=examples(
        "swarm-ft peer pause      hand the work over, and pause",
        "swarm-ft peer resume     work again",
        "swarm-ft peer drain      hand the work over, and leave",
        "swarm-ft peer status     show the state and the contribution",
    ),
)
def peer() -> None:
    """Control the peer that runs on this machine as the same user (`swarm-ft serve-stage`)."""


def _verb(name: str, words: str) -> None:
    """Add one command; all of them take the same options."""

    @peer.command(name, help=words)
    @click.option(
        "--buffer-dir",
        "home",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="The --buffer-dir of the peer.  [default: that of the only running peer]",
    )
    @json_flag
    def command(home: Path | None, as_json: bool) -> None:
        from swarm_ft.cli.running import run_async

        place = _home(home)
        run_async(lambda: _ask(place, name, as_json=as_json))


_verb("pause", "Hand the peer's work over, and pause it. Ctrl-C stops watching.")
_verb("resume", "Let the peer work again, if --hours and --pause-when allow it.")
_verb("drain", "Hand the peer's work over, and stop it. Ctrl-C stops watching.")
_verb("status", "Show the peer's state and its contribution.")


async def _ask(home: Path, verb: str, *, as_json: bool) -> None:
    from swarm_ft.cli.peer_control import DRAIN, send_request

    async for state in send_request(home, verb):
        click.echo(json.dumps(asdict(state)) if as_json else in_words(state))
    if verb == DRAIN and not as_json:
        click.echo("the peer has left")


def in_words(state: PeerState) -> str:
    """Describe a peer's state in one line."""
    seconds = f" (about {state.seconds:.0f} s)" if state.seconds >= 1 else ""
    why = f": {state.words}{seconds}" if state.words else ""
    gave = f"; it gave {state.gave}" if state.gave else ""
    return f"peer {state.name or state.peer} is {state.state}{why}{gave}"


def _home(chosen: Path | None) -> Path:
    """Return the home of the chosen peer, or of the only running one.

    Raises:
        NotFound: No peer of this user is running.
        BadOption: Several peers are running, and none is chosen.
    """
    from swarm_ft.api.peer_home import homes
    from swarm_ft.cli.peer_control import running_homes

    if chosen is not None:
        return chosen
    found = running_homes(homes())
    if not found:
        raise NotFound(
            f"no peer of this user is running in {homes()}; add --buffer-dir DIR if it was started "
            "with that option"
        )
    if len(found) > 1:
        listed = ", ".join(str(home) for home in found)
        raise BadOption(f"--buffer-dir: expected one of the running peers: {listed}")
    return found[0]
