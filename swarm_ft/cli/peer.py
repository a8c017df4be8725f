"""`swarm-ft peer`: tell the peer that runs on this machine to pause, go on, or leave."""

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
    short_help="Pause, resume or drain the peer that runs here.",
    epilog=examples(
        "swarm-ft peer pause      hand over what it has, and rest",
        "swarm-ft peer resume     work again",
        "swarm-ft peer drain      hand over, and leave",
        "swarm-ft peer status     what it is at, and what it gave",
    ),
)
def peer() -> None:
    """Speak to the peer that `swarm-ft serve-stage` runs on this machine, as the same user."""


def _verb(name: str, words: str) -> None:
    """One command; all of them take the same options."""

    @peer.command(name, help=words)
    @click.option(
        "--buffer-dir",
        "home",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="The --buffer-dir that the peer was started with.  [default: the one peer that runs "
        "here]",
    )
    @json_flag
    def command(home: Path | None, as_json: bool) -> None:
        from swarm_ft.cli.running import run_async

        place = _home(home)
        run_async(lambda: _ask(place, name, as_json=as_json))


_verb("pause", "Hand the work over, and rest until resumed. Ctrl-C stops watching.")
_verb("resume", "Work again, as far as its hours and the machine's use allow.")
_verb("drain", "Hand the work over, and leave. Ctrl-C stops watching.")
_verb("status", "Show the peer's state and its contributions, in the swarm's count.")


async def _ask(home: Path, verb: str, *, as_json: bool) -> None:
    from swarm_ft.cli.peer_control import DRAIN, ask_peer

    async for state in ask_peer(home, verb):
        click.echo(json.dumps(asdict(state)) if as_json else in_words(state))
    if verb == DRAIN and not as_json:
        click.echo("it is gone")


def in_words(state: PeerState) -> str:
    """What a peer is at, in a line."""
    seconds = f" (about {state.seconds:.0f} s)" if state.seconds >= 1 else ""
    why = f": {state.words}{seconds}" if state.words else ""
    gave = f"; it gave {state.gave}" if state.gave else ""
    return f"peer {state.name or state.peer} is {state.state}{why}{gave}"


def _home(given: Path | None) -> Path:
    """Where the peer keeps what is its own.

    Raises:
        NotFound: no peer runs here.
        BadOption: several do.
    """
    from swarm_ft.api.peer_home import homes
    from swarm_ft.cli.peer_control import running_homes

    if given is not None:
        return given
    found = running_homes(homes())
    if not found:
        raise NotFound(
            f"no peer of this user runs here, in {homes()}; "
            "name its --buffer-dir if it was started with one"
        )
    if len(found) > 1:
        listed = ", ".join(str(home) for home in found)
        raise BadOption(f"--buffer-dir: several peers run here, name one of {listed}")
    return found[0]
