"""A peer's process from its first to its last word. Knows no options of the command line."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from swarm_ft.cli.options import Listening
from swarm_ft.cli.running import on_stop_signal
from swarm_ft.errors import BadOption
from swarm_ft.log import get_logger
from swarm_ft.private_files import make_private, open_private, private_folder

if TYPE_CHECKING:
    from swarm_ft.discovery import Directory
    from swarm_ft.peer.node import PeerNode, PeerOptions
    from swarm_ft.peer.state.stage_state import EngineMaker

# ---- where a peer keeps what is to outlive it on this machine: its name and its buffers

MAX_NAMELESS_PEERS = 64
"""Of one user on one machine."""


@dataclass(frozen=True, slots=True)
class PeerHome:
    """A directory that belongs to this process as long as it lives.

    Attributes:
        lock: keeps others out while it is open.
    """

    path: Path
    lock: IO[bytes]

    def close(self) -> None:
        """Leave it to others."""
        self.lock.close()

    def name(self, drawn: str) -> str:
        """The name that an earlier start drew and left here; without one, `drawn`, left here."""
        file = self.path / "peer-id"
        if file.exists():
            make_private(file)
            return file.read_text(encoding="utf-8").strip()
        with open_private(file, "wb") as new:
            new.write(f"{drawn}\n".encode())
        return drawn


def claim_home(name: str | None, directory: Path | None) -> PeerHome:
    """A home for a peer: the named directory, one by its name, or the first that is free.

    A peer without a name that is started again so finds what it left.

    Raises:
        BadOption: others use it, or it cannot be made.
    """
    path = directory or _homes()
    try:
        for candidate in _candidates(name, directory):
            lock = _locked(candidate)
            if lock is not None:
                return PeerHome(candidate, lock)
    except OSError as error:
        raise BadOption(
            f"--buffer-dir {path}: {error.strerror}; name a directory that can be written to, or "
            "keep no buffers on disk, with --buffer-disk 0"
        ) from error
    raise BadOption(f"--buffer-dir {path}: another peer uses it; each needs one of its own")


def _candidates(name: str | None, directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        yield directory
    elif name is not None:
        yield _homes() / name
    else:
        yield from (_homes() / str(number) for number in range(MAX_NAMELESS_PEERS))


def _homes() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "swarm-ft" / "peers"


def _locked(path: Path) -> IO[bytes] | None:
    """The directory's lock; None if another process has it."""
    private_folder(path)
    lock = open_private(path / "lock", "ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


async def serve_peer(
    offer: PeerOptions,
    swarm: tuple[tuple[str, ...], str],
    listening: Listening,
    make_engine: EngineMaker,
    *,
    as_json: bool,
) -> None:
    """Be a peer until a stop signal; says where it listens once it does.

    Args:
        offer: what the volunteer decided.
        swarm: nodes of its DHT, and the prefix of its records.
        listening: where others reach this peer.
        make_engine: what computes.
        as_json: speak in JSON.

    Raises:
        DirectoryUnreachable: none of the nodes answers.
        PortInUse: the port is taken.
    """
    from swarm_ft.discovery.dht import DhtDirectory, DhtOptions

    initial_peers, prefix = swarm
    options = DhtOptions(initial_peers=initial_peers, prefix=prefix, client_mode=True)
    directory = await DhtDirectory.open(options)
    try:
        await _serve(directory, listening, offer, make_engine, as_json=as_json)
    finally:
        await directory.close()


async def _serve(
    directory: Directory,
    listening: Listening,
    offer: PeerOptions,
    make_engine: EngineMaker,
    *,
    as_json: bool,
) -> None:
    from swarm_ft.clock import SystemClock
    from swarm_ft.discovery import Role
    from swarm_ft.peer.node import PeerNode
    from swarm_ft.transport.grpc_options import (
        ADVICE,
        WARM_IDLE_S,
        GrpcOptions,
        restarts_after_idle,
    )
    from swarm_ft.transport.grpc_transport import GrpcTransport

    if restarts_after_idle():
        get_logger(__name__).info("tcp-idle-restart %s", ADVICE)
    transport = GrpcTransport(GrpcOptions(warm_idle_s=WARM_IDLE_S))
    node = PeerNode(
        offer,
        directory=directory,
        transport=transport,
        clock=SystemClock(),
        make_engine=make_engine,
    )
    server = await transport.serve(listening.host, listening.port, node.handlers())
    endpoint = listening.endpoint(int(server.endpoint.rpartition(":")[2]))
    on_stop_signal(_politely_first(node))
    try:
        await directory.announce(Role.PEER, offer.peer_id, endpoint)
        _show(offer, endpoint, as_json=as_json)
        await node.run(endpoint)
    finally:
        await server.stop()
        await directory.withdraw(Role.PEER, offer.peer_id)


def _politely_first(node: PeerNode) -> Callable[[], object]:
    """Say goodbye at the first stop signal; at the next one, let go of whatever is here."""
    task = asyncio.current_task()
    if task is None:
        return node.leave
    steps = iter((node.leave,))
    return lambda: next(steps, task.cancel)()


def _show(offer: PeerOptions, endpoint: str, *, as_json: bool) -> None:
    layers = str(offer.layers or "auto")
    if as_json:
        click.echo(json.dumps({"peer": offer.peer_id, "layers": layers, "endpoint": endpoint}))
    else:
        click.echo(f"peer {offer.peer_id} at {endpoint} offers layers {layers}; Ctrl-C leaves")
