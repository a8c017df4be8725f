"""`swarm-ft doctor`: whether this machine can join, a line for each thing that could be wrong."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import click

from swarm_ft.api.joining import client_key_file
from swarm_ft.api.peer_home import KEY_FILE, cache_folder, homes
from swarm_ft.build import described_version
from swarm_ft.cli.joining import invite_given
from swarm_ft.cli.options import examples, json_flag, log_option
from swarm_ft.cli.running import run_async
from swarm_ft.errors import BadOption
from swarm_ft.private_files import HAS_MODES
from swarm_ft.systems import sync_data

if TYPE_CHECKING:
    from swarm_ft.identity.invites import Invite
    from swarm_ft.identity.keys import PrivateKey
    from swarm_ft.reach.doctor import Finding
    from swarm_ft.reach.meet import Reach

MIN_MEMORY_BYTES, MIN_DISK_BYTES = 4 << 30, 10 << 30
"""Below these a peer hosts little, and forgets much."""
MIN_DISK_MB_PER_S = 50.0
"""Below it buffers that do not fit into memory hold a fast link up."""
LINK_S, ENOUGH_S = 40.0, 2.0
"""For all of it, and for a transfer that is believed: a shorter one says how TCP begins."""
MAX_TRIED_BYTES, TRIED_S = 64_000_000, 0.5
PACKAGES = ("torch", "transformers", "grpcio", "numba")
MIN_MBPS = 10.0
"""Below it others wait for a peer at each step."""
ON_THE_WAY = ("coordinator", "swarm", "clock", "version")
"""Without these the coordinator is not asked how fast the link is."""
MARKS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}


@click.command(
    short_help="Say whether this machine can join a swarm.",
    epilog=examples("swarm-ft doctor @invitation.txt", "swarm-ft doctor --json"),
)
@click.argument("invite", required=False, callback=invite_given, metavar="[INVITE]")
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
            if not any(
                finding.verdict == "bad" for finding in found if finding.about in ON_THE_WAY
            ):
                tell(await examine_link(invite))

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
    from swarm_ft.transport.grpc_options import SETTING, restarts_after_idle

    yield _packages()
    yield _device()
    yield _disk()
    yield from _keys()
    if restarts_after_idle():
        advice = f"sudo sysctl -w {SETTING}=0"
        yield Finding("tcp", Verdict.NOTE, "links with a delay are slow after pauses", advice)
    else:
        yield Finding("tcp", Verdict.OK, "links are as fast after pauses as before")


def _packages() -> Finding:
    """What a report of a fault has to name."""
    from swarm_ft.reach.doctor import Finding, Verdict

    shown = [f"swarm-ft {described_version()}"]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # of a source tree that was not installed
            shown.append(f"{name} {version(name)}")
    says = f"{', '.join(shown)}, Python {platform.python_version()} on {platform.platform()}"
    return Finding("packages", Verdict.OK, says)


def _device() -> Finding:
    from swarm_ft.reach.doctor import Finding, Verdict
    from swarm_ft.stage.device import describe, free_memory_bytes, has_apple_gpu, pick_device

    device = pick_device("auto")
    try:
        free_bytes = free_memory_bytes(device)
    except BadOption as error:
        return Finding("device", Verdict.NOTE, describe(device), error.message)
    says = f"{describe(device)}, {free_bytes / (1 << 30):.1f} GiB free"
    unused = _nvidia() if device.type == "cpu" else ""
    if unused:
        advice = "install a build of torch with CUDA: pytorch.org/get-started"
        return Finding("device", Verdict.NOTE, f"{says}; torch cannot use {unused}", advice)
    if device.type == "cpu" and has_apple_gpu():
        advice = "--device mps takes it; it was not tried by this project's tests"
        return Finding("device", Verdict.NOTE, f"{says}; there is an Apple GPU", advice)
    if free_bytes < MIN_MEMORY_BYTES:
        advice = "a peer hosts few layers with so little"
        return Finding("device", Verdict.NOTE, says, advice)
    return Finding("device", Verdict.OK, says)


def _nvidia() -> str:
    """The first GPU of NVIDIA, with its driver, as its own tool tells; empty: none is known."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    name, _, driver = told.partition("\n")[0].rpartition(", ")
    return f"{name} (driver {driver})" if name else ""


def _disk() -> Finding:
    from swarm_ft.reach.doctor import Finding, Verdict

    cache = cache_folder()
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_bytes = shutil.disk_usage(place).free
    says = f"{free_bytes / (1 << 30):.1f} GiB free in {place}"
    advice = "--buffer-dir names another place for buffers"
    try:
        mb_per_s = written_mb_per_s(place)
    except OSError as error:
        return Finding("disk", Verdict.BAD, f"{place}: {error.strerror}", advice)
    says = f"{says}, written at {mb_per_s:,.0f} MB/s"
    if free_bytes >= MIN_DISK_BYTES and mb_per_s >= MIN_DISK_MB_PER_S:
        return Finding("disk", Verdict.OK, says)
    return Finding("disk", Verdict.NOTE, says, advice)


def written_mb_per_s(folder: Path) -> float:
    """How fast a disk takes what is written, for half a second and 64 MB at most.

    Raises:
        OSError: it takes nothing.
    """
    chunk, written, began_s = os.urandom(1 << 22), 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < MAX_TRIED_BYTES and time.perf_counter() - began_s < TRIED_S:
            written += file.write(chunk)
            sync_data(file.fileno())
    return written / 1e6 / (time.perf_counter() - began_s)


def _keys() -> Iterator[Finding]:
    """Those that this machine has; one that others read is theirs, too."""
    for path in _key_files():
        yield _key(path)


def _key_files() -> list[Path]:
    files = (client_key_file(), *sorted(homes().glob(f"*/{KEY_FILE}")))
    return [path for path in files if path.exists()]


def _key(path: Path) -> Finding:
    from swarm_ft.identity.keys import key_at, name_of
    from swarm_ft.reach.doctor import Finding, Verdict

    if HAS_MODES and path.stat().st_mode & 0o077:
        return Finding("key", Verdict.BAD, f"others may read {path}", f"chmod 600 {path}")
    try:
        name = name_of(key_at(path).public_key())
    except BadOption as error:
        advice = "move it away, and ask for another invitation: a new key is made then"
        return Finding("key", Verdict.BAD, error.message, advice)
    return Finding("key", Verdict.OK, f"{name}, in {path}")


async def examine_link(invite: Invite) -> Finding:
    """How fast it is to the coordinator, and from there; takes some seconds, 45 MB at most."""
    from swarm_ft.errors import BadInvite, NotAllowed, SwarmError
    from swarm_ft.reach.doctor import Finding, Verdict

    try:
        async with asyncio.timeout(LINK_S):
            up_mbps, down_mbps = await _measured_mbps(invite)
    except (BadInvite, NotAllowed) as error:
        return Finding("invitation", Verdict.BAD, error.message)
    except (SwarmError, TimeoutError) as error:
        says = f"not measured: {error or f'it takes more than {LINK_S:g} s'}"
        return Finding("link", Verdict.NOTE, says, "try again later")
    says = f"{up_mbps:,.1f} Mbps to the coordinator, {down_mbps:,.1f} from there"
    if min(up_mbps, down_mbps) >= MIN_MBPS:
        return Finding("link", Verdict.OK, says)
    advice = "others wait for a slow peer: a cable in place of Wi-Fi, and no other uploads, help"
    return Finding("link", Verdict.NOTE, says, advice)


async def _measured_mbps(invite: Invite) -> tuple[float, float]:
    """With a key of this machine's: an invitation that it used up lets it in again."""
    from swarm_ft.errors import BadInvite, NotAllowed
    from swarm_ft.identity.keys import new_key

    for key in _own_keys():
        with suppress(BadInvite, NotAllowed):
            return await _measured_by(invite, key)
    return await _measured_by(invite, new_key())


def _own_keys() -> Iterator[PrivateKey]:
    from swarm_ft.identity.keys import key_at

    for path in _key_files():
        with suppress(BadOption):  # `_key` told of it
            yield key_at(path)


async def _measured_by(invite: Invite, key: PrivateKey) -> tuple[float, float]:
    from swarm_ft.enrol import as_newcomer
    from swarm_ft.peer.capacity import measured_link
    from swarm_ft.protocol.messages.capacity import Machine

    link = await as_newcomer(
        invite,
        key,
        lambda channel: measured_link(channel, Machine(), Random(), enough_s=ENOUGH_S),
    )
    return 8e-6 * link.up_bytes_per_s, 8e-6 * link.down_bytes_per_s


# ---- in short, beside a peer that begins


async def tell_reached(reach: Reach, coordinator: str, *, as_json: bool) -> None:
    """Say how others reach this member, once that is known, and what is in the way.

    Args:
        reach: its part in introductions, which has begun.
        coordinator: where that is.
        as_json: a line of JSON.
    """
    from swarm_ft.reach.doctor import Verdict, examine_member

    found = [finding async for finding in examine_member(reach, coordinator)]
    if as_json:
        click.echo(json.dumps({"reach": [asdict(finding) for finding in found]}))
        return
    for finding in found:
        is_of_others = finding.about == "others"
        line = f"Others {finding.says}" if is_of_others else f"{finding.about}: {finding.says}"
        if finding.verdict is Verdict.OK:
            click.echo(line)
            continue
        click.secho(f"warning: {line}", fg="yellow", err=True)
        if finding.advice:
            click.echo(f"         {finding.advice}", err=True)
