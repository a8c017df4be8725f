"""The command `swarm-ft doctor`, which checks whether this machine can join a swarm."""

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

from swarm_ft.api.connections import client_key_file
from swarm_ft.api.peer_home import KEY_FILE, cache_folder, homes
from swarm_ft.base.systems import sync_data
from swarm_ft.build import described_version
from swarm_ft.cli.options import examples, json_flag, log_option
from swarm_ft.cli.running import run_async
from swarm_ft.cli.swarm_options import parse_invite_argument
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.sizes import format_size

if TYPE_CHECKING:
    from swarm_ft.identity.invites import Invite
    from swarm_ft.identity.keys import PrivateKey
    from swarm_ft.reach.doctor import Finding
    from swarm_ft.reach.meet import Reach

MIN_MEMORY_BYTES, MIN_DISK_BYTES = 4 << 30, 10 << 30
"""Free memory and disk below which a peer hosts few layers and evicts many buffers."""
MIN_DISK_MB_PER_S = 50.0
"""Disk speed below which buffers on disk slow a fast link down."""
LINK_S, ENOUGH_S = 40.0, 2.0
"""Seconds of the whole link test, and of one transfer; shorter ones measure TCP's slow start."""
MAX_TRIED_BYTES, TRIED_S = 64_000_000, 0.5
PACKAGES = ("torch", "transformers", "grpcio", "numba")
MIN_MBPS = 10.0
"""Link speed below which the other peers wait for this one at each step."""
ON_THE_WAY = ("coordinator", "swarm", "clock", "version")
"""Findings that must be good before the link to the coordinator can be measured."""
MARKS = {"ok": ("ok  ", "green"), "note": ("note", "yellow"), "bad": ("BAD ", "red")}


@click.command(
    short_help="Check whether this machine can join a swarm.",
    epilog=examples("swarm-ft doctor @invitation.txt", "swarm-ft doctor --json"),
)
@click.argument("invite", required=False, callback=parse_invite_argument, metavar="[INVITE]")
@json_flag
@log_option
def doctor(invite: Invite | None, as_json: bool) -> int:
    """Check whether this machine can join a swarm, and suggest a remedy for each problem.

    With INVITE the command also checks the way to the coordinator; this does not use the
    invitation up. The exit code is 1 if the machine cannot join.
    """
    found: list[Finding] = []

    def report(finding: Finding) -> None:
        found.append(finding)
        if not as_json:
            _show(finding)

    async def work() -> None:
        from swarm_ft.reach.doctor import examine_way

        for finding in _machine():
            report(finding)
        if invite is not None:
            async for finding in examine_way(invite):
                report(finding)
            if not any(
                finding.verdict == "bad" for finding in found if finding.about in ON_THE_WAY
            ):
                report(await examine_link(invite))

    run_async(work)
    is_fit = all(finding.verdict != "bad" for finding in found)
    if as_json:
        click.echo(json.dumps({"can_join": is_fit, "findings": [asdict(f) for f in found]}))
    return 0 if is_fit else 1


def _show(finding: Finding) -> None:
    mark, colour = MARKS[finding.verdict.value]
    click.echo(f"{click.style(mark, fg=colour)}  {finding.about:<12} {finding.text}")
    if finding.advice:
        click.echo(f"{'':<19}{finding.advice}")


def _machine() -> Iterator[Finding]:
    """Examine the machine itself: packages, device, disk, keys and TCP settings."""
    from swarm_ft.reach.doctor import Finding, Verdict
    from swarm_ft.transport.grpc_options import SETTING, restarts_after_idle

    yield _packages()
    yield _device()
    yield _disk()
    yield from _keys()
    if restarts_after_idle():
        advice = f"sudo sysctl -w {SETTING}=0"
        yield Finding("tcp", Verdict.NOTE, "long links are slow after a pause", advice)
    else:
        yield Finding("tcp", Verdict.OK, "links keep their speed after a pause")


def _packages() -> Finding:
    """List the versions that a bug report has to name."""
    from swarm_ft.reach.doctor import Finding, Verdict

    shown = [f"swarm-ft {described_version()}"]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # A source tree need not be installed.
            shown.append(f"{name} {version(name)}")
    system = f"Python {platform.python_version()} on {platform.platform()}"
    return Finding("packages", Verdict.OK, f"{', '.join(shown)}, {system}")


def _device() -> Finding:
    from swarm_ft.reach.doctor import Finding, Verdict
    from swarm_ft.stage.device import describe, free_memory_bytes, has_apple_gpu, pick_device

    device = pick_device("auto")
    try:
        free_bytes = free_memory_bytes(device)
    except BadOption as error:
        return Finding("device", Verdict.NOTE, describe(device), error.message)
    text = f"{describe(device)}, {format_size(free_bytes)} free"
    unused = _nvidia() if device.type == "cpu" else ""
    if unused:
        advice = "install a build of torch with CUDA: pytorch.org/get-started"
        return Finding("device", Verdict.NOTE, f"{text}; torch cannot use {unused}", advice)
    if device.type == "cpu" and has_apple_gpu():
        advice = "--device mps uses it; this project's tests do not cover it"
        return Finding("device", Verdict.NOTE, f"{text}; there is an Apple GPU", advice)
    if free_bytes < MIN_MEMORY_BYTES:
        advice = "a peer hosts few layers in so little memory; close other programs"
        return Finding("device", Verdict.NOTE, text, advice)
    return Finding("device", Verdict.OK, text)


def _nvidia() -> str:
    """Return the first NVIDIA GPU with its driver, from nvidia-smi; empty if none is found."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    name, _, driver = done.stdout.partition("\n")[0].rpartition(", ")
    return f"{name} (driver {driver})" if name else ""


def _disk() -> Finding:
    from swarm_ft.reach.doctor import Finding, Verdict

    cache = cache_folder()
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_bytes = shutil.disk_usage(place).free
    text = f"{format_size(free_bytes)} free in {place}"
    advice = "--buffer-dir chooses another place for buffers"
    try:
        mb_per_s = written_mb_per_s(place)
    except OSError as error:
        return Finding("disk", Verdict.BAD, f"{place}: {error.strerror}", advice)
    text = f"{text}, written at {mb_per_s:,.0f} MB/s"
    if free_bytes >= MIN_DISK_BYTES and mb_per_s >= MIN_DISK_MB_PER_S:
        return Finding("disk", Verdict.OK, text)
    return Finding("disk", Verdict.NOTE, text, advice)


def written_mb_per_s(folder: Path) -> float:
    """Measure a disk's write speed in MB/s, over half a second or 64 MB.

    Raises:
        OSError: The folder cannot be written to.
    """
    chunk, written, began_s = os.urandom(1 << 22), 0, time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        while written < MAX_TRIED_BYTES and time.perf_counter() - began_s < TRIED_S:
            written += file.write(chunk)
            sync_data(file.fileno())
    return written / 1e6 / (time.perf_counter() - began_s)


def _keys() -> Iterator[Finding]:
    """Examine this machine's keys; a key that other users can read is not secret."""
    for path in _key_files():
        yield _key(path)


def _key_files() -> list[Path]:
    files = (client_key_file(), *sorted(homes().glob(f"*/{KEY_FILE}")))
    return [path for path in files if path.exists()]


def _key(path: Path) -> Finding:
    from swarm_ft.identity.keys import key_at, name_of
    from swarm_ft.reach.doctor import Finding, Verdict

    if path.stat().st_mode & 0o077:
        return Finding("key", Verdict.BAD, f"other users can read {path}", f"chmod 600 {path}")
    try:
        name = name_of(key_at(path).public_key())
    except BadOption as error:
        advice = "move the file away and request a new invitation; joining creates a new key"
        return Finding("key", Verdict.BAD, error.message, advice)
    return Finding("key", Verdict.OK, f"{name}, in {path}")


async def examine_link(invite: Invite) -> Finding:
    """Measure the speed to and from the coordinator, in some seconds and 45 MB at most."""
    from swarm_ft.errors import BadInvite, NotAllowed, SwarmError
    from swarm_ft.reach.doctor import Finding, Verdict

    try:
        async with asyncio.timeout(LINK_S):
            up_mbps, down_mbps = await _measured_mbps(invite)
    except (BadInvite, NotAllowed) as error:
        return Finding("invitation", Verdict.BAD, error.message)
    except (SwarmError, TimeoutError) as error:
        text = f"not measured: {error or f'it took more than {LINK_S:g} s'}"
        return Finding("link", Verdict.NOTE, text, "try again later")
    text = f"{up_mbps:,.1f} Mbps to the coordinator, {down_mbps:,.1f} from there"
    if min(up_mbps, down_mbps) >= MIN_MBPS:
        return Finding("link", Verdict.OK, text)
    advice = "other peers wait for a slow one; use a cable instead of Wi-Fi, and stop other uploads"
    return Finding("link", Verdict.NOTE, text, advice)


async def _measured_mbps(invite: Invite) -> tuple[float, float]:
    """Measure with a key of this machine, which a used-up invitation still admits."""
    from swarm_ft.errors import BadInvite, NotAllowed
    from swarm_ft.identity.keys import new_key

    for key in _own_keys():
        with suppress(BadInvite, NotAllowed):
            return await _measured_by(invite, key)
    return await _measured_by(invite, new_key())


def _own_keys() -> Iterator[PrivateKey]:
    from swarm_ft.identity.keys import key_at

    for path in _key_files():
        with suppress(BadOption):  # `_key` has reported it.
            yield key_at(path)


async def _measured_by(invite: Invite, key: PrivateKey) -> tuple[float, float]:
    from swarm_ft.net.enrol import call_as_newcomer
    from swarm_ft.peer.capacity import measure_link_or_raise
    from swarm_ft.protocol.messages.capacity import Machine

    link = await call_as_newcomer(
        invite,
        key,
        lambda channel: measure_link_or_raise(channel, Machine(), Random(), enough_s=ENOUGH_S),
    )
    return 8e-6 * link.up_bytes_per_s, 8e-6 * link.down_bytes_per_s


# ---- the short form, for a peer that starts


async def print_reachability(reach: Reach, coordinator: str, *, as_json: bool) -> None:
    """Print how others reach this member, once that is known, with warnings about obstacles.

    Args:
        reach: The member's connection tests, which have started.
        coordinator: Address of the coordinator.
        as_json: Whether to print one line of JSON.
    """
    from swarm_ft.reach.doctor import Verdict, examine_member

    found = [finding async for finding in examine_member(reach, coordinator)]
    if as_json:
        click.echo(json.dumps({"reach": [asdict(finding) for finding in found]}))
        return
    for finding in found:
        is_of_others = finding.about == "others"
        line = f"Others {finding.text}" if is_of_others else f"{finding.about}: {finding.text}"
        if finding.verdict is Verdict.OK:
            click.echo(line)
            continue
        click.secho(f"warning: {line}", fg="yellow", err=True)
        if finding.advice:
            click.echo(f"         {finding.advice}", err=True)
