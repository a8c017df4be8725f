"""`swarm-ft doctor`: whether this machine can join, a line for each thing that could be wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.joining import client_key_file, parsed_invite
from swarm_ft.cli.options import examples, json_flag, log_option
from swarm_ft.cli.running import run_async

if TYPE_CHECKING:
    from swarm_ft.identity.invites import Invite
    from swarm_ft.reach.doctor import Finding

MIN_MEMORY_BYTES, MIN_DISK_BYTES = 4 << 30, 10 << 30
"""Below these a peer hosts little, and forgets much."""
MARKS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}


@click.command(
    short_help="Say whether this machine can join a swarm.",
    epilog=examples("swarm-ft doctor swarm1QXL4a1e...", "swarm-ft doctor --json"),
)
@click.argument("invite", required=False, callback=parsed_invite, metavar="[INVITE]")
@json_flag
@log_option
def doctor(invite: Invite | None, as_json: bool) -> int:
    """Look for whatever keeps this machine from joining, and say what to do about it.

    INVITE is not used up. Without it only the machine itself is looked at. Exits with 1 if it
    cannot join.
    """
    found: list[Finding] = []

    def tell(finding: Finding) -> None:
        found.append(finding)
        if not as_json:
            _show(finding)

    async def work() -> None:
        from swarm_ft.reach.doctor import examine_way

        for finding in _machine():
            tell(finding)
        if invite is not None:
            async for finding in examine_way(invite):
                tell(finding)

    run_async(work)
    is_fit = all(finding.verdict != "bad" for finding in found)
    if as_json:
        click.echo(json.dumps({"can_join": is_fit, "findings": [asdict(f) for f in found]}))
    return 0 if is_fit else 1


def _show(finding: Finding) -> None:
    mark, colour = MARKS[finding.verdict.value]
    click.echo(f"{click.style(mark, fg=colour)}  {finding.about:<12} {finding.says}")
    if finding.advice:
        click.echo(f"{'':<19}{finding.advice}")


def _machine() -> Iterator[Finding]:
    """What this machine has for a peer."""
    from swarm_ft.reach.doctor import Finding, Verdict
    from swarm_ft.stage.device import free_memory_bytes, pick_device
    from swarm_ft.transport.grpc_options import SETTING, restarts_after_idle

    device = pick_device("auto")
    free_bytes = free_memory_bytes(device)
    little = "" if free_bytes >= MIN_MEMORY_BYTES else "a peer hosts few layers with so little"
    says = f"{device}, {free_bytes / (1 << 30):.1f} GiB free"
    yield Finding("device", Verdict.NOTE if little else Verdict.OK, says, little)
    yield _disk()
    yield from _keys()
    if restarts_after_idle():
        advice = f"sudo sysctl -w {SETTING}=0"
        yield Finding("tcp", Verdict.NOTE, "links with a delay are slow after pauses", advice)


def _disk() -> Finding:
    from swarm_ft.reach.doctor import Finding, Verdict

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_bytes = shutil.disk_usage(place).free
    says = f"{free_bytes / (1 << 30):.1f} GiB free in {place}"
    if free_bytes >= MIN_DISK_BYTES:
        return Finding("disk", Verdict.OK, says)
    return Finding("disk", Verdict.NOTE, says, "--buffer-dir names another place for buffers")


def _keys() -> Iterator[Finding]:
    """A key that others read is theirs, too."""
    from swarm_ft.reach.doctor import Finding, Verdict

    path = client_key_file()
    if path.exists() and path.stat().st_mode & 0o077:
        yield Finding("key", Verdict.BAD, f"others may read {path}", f"chmod 600 {path}")
