"""A swarm of real processes that outlives its faults: whoever dies is started anew."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from swarm_ft.client.sample import SampleInput
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
from swarm_ft.errors import RunFailed, Unavailable
from swarm_ft.ids import RunId
from swarm_ft.transport.grpc_transport import GrpcTransport
from tests.fault_matrix.job import train_arguments
from tests.fault_matrix.processes import Command

STAGES = ("0-1", "1-2", "2-3")
TWO_OF_EACH: Mapping[str, int] = MappingProxyType(dict.fromkeys(STAGES, 2))
JOIN_POLL_S = 0.1


class Swarm:
    """Two DHT nodes, a coordinator, any number of peers a stage. Use `open` and `close`."""

    def __init__(self, work_dir: Path, sample: SampleInput) -> None:
        work_dir.mkdir(parents=True)
        self._work_dir = work_dir
        self._sample = sample
        self._prefix = f"faults-{secrets.token_hex(4)}"
        self._addresses: list[str] = []
        self._dht_arguments: dict[str, list[str]] = {}
        self._started = 0
        self._directory: DhtDirectory | None = None
        self.dht: dict[str, Command] = {}
        self._coordinator: Command | None = None
        self._clients: list[Command] = []
        self.peers: dict[str, list[Command]] = {part: [] for part in STAGES}

    @property
    def client(self) -> SwarmClient:
        """A client in this process."""
        if self._directory is None:
            raise RunFailed("the swarm is not open")
        return SwarmClient(self._directory, GrpcTransport())

    @property
    def the_coordinator(self) -> Command:
        """The one that runs."""
        if self._coordinator is None:
            raise RunFailed("the swarm is not open")
        return self._coordinator

    @property
    def join_arguments(self) -> list[str]:
        """Options of whoever joins."""
        addresses = [word for a in self._addresses for word in ("--initial-peers", a)]
        return [*addresses, "--dht-prefix", self._prefix]

    @property
    def _host_arguments(self) -> list[str]:
        """Options of those that keep snapshots."""
        return [*self.join_arguments, "--snapshots", str(self._work_dir / "snapshots")]

    async def open(self) -> None:
        """Start everybody but the peers."""
        for name in ("dht-0", "dht-1"):
            await self._start_dht_first(name)
        options = DhtOptions(
            initial_peers=tuple(self._addresses), prefix=self._prefix, client_mode=True
        )
        self._directory = await DhtDirectory.open(options)
        await self.start_coordinator()

    async def close(self) -> None:
        """End everybody."""
        if self._directory is not None:
            await self._directory.close()
        everybody = [*self.dht.values(), *(peer for part in self.peers.values() for peer in part)]
        if self._coordinator is not None:
            everybody.append(self._coordinator)
        everybody += self._clients
        await asyncio.gather(*(command.kill() for command in everybody))

    async def start(self, name: str, arguments: list[str]) -> Command:
        """Start a command, with a log of its own."""
        return await Command.start(name, arguments, self._work_dir)

    # ---- DHT nodes

    async def _start_dht_first(self, name: str) -> None:
        """Start it at an address that it can have again."""
        port, identity = _free_port(), self._work_dir / f"{name}.key"
        join = [word for a in self._addresses for word in ("--initial-peers", a)]
        self._dht_arguments[name] = [
            *("dht", "--json", "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}"),
            *("--identity-path", str(identity), *join),
        ]
        addresses = await self.start_dht(name)
        self._addresses.append(addresses[0])

    async def start_dht(self, name: str) -> list[str]:
        """Start a DHT node, again where it was if it was there; its addresses."""
        arguments = list(self._dht_arguments[name])
        self._started += 1
        self.dht[name] = await self.start(f"{name}-{self._started}", arguments)
        addresses = (await self.dht[name].first_words())["addresses"]
        if not isinstance(addresses, list) or not addresses:
            raise RunFailed(f"{name}: told no addresses")
        return [str(address) for address in addresses]

    # ---- the coordinator

    async def start_coordinator(self) -> None:
        """Start it, or start it again from its journal."""
        self._started += 1
        journal = str(self._work_dir / "coordinator.db")
        arguments = ["coordinator", "--json", "--journal", journal, *self._host_arguments]
        self._coordinator = await self.start(f"coordinator-{self._started}", arguments)
        await self._coordinator.first_words()

    # ---- clients

    async def start_client(self, num_steps: int) -> Command:
        """Start a client with the job."""
        out = self._work_dir / f"out-{self._started}"
        return await self._start_client(
            "train", train_arguments(self._sample, num_steps, out), self.join_arguments
        )

    async def start_attached(self, run_id: RunId) -> Command:
        """Start a client that comes back to a run."""
        out = self._work_dir / f"out-{self._started}"
        arguments = ["--run", run_id, "--out", str(out)]
        return await self._start_client("attach", arguments, self.join_arguments)

    async def _start_client(self, command: str, arguments: list[str], join: list[str]) -> Command:
        self._started += 1
        name = f"client-{self._started}"
        client = await self.start(name, ["client", command, *arguments, *join])
        self._clients.append(client)
        return client

    # ---- peers

    async def add_peer(self, layers: str) -> Command:
        """Start a peer, under a name that none had; it joins when it is up."""
        self._started += 1
        name = f"peer-{layers}-{self._started}"
        arguments = ["serve-stage", "--json", "--layers", layers, "--threads", "1"]
        arguments += ["--peer-id", name, "--buffer-dir", str(self._work_dir / "buffers" / name)]
        arguments += self._host_arguments
        peer = await self.start(name, arguments)
        self.peers[layers].append(peer)
        return peer

    async def refill(self, counts: Mapping[str, int]) -> None:
        """Start peers where some are missing, and end those that are too many; do not wait."""
        for layers, count in counts.items():
            alive = [peer for peer in self.peers[layers] if peer.is_alive]
            for peer in alive[count:]:
                await peer.kill()
            self.peers[layers] = alive[:count]
            for _ in range(count - len(alive)):
                await self.add_peer(layers)

    async def all_joined(self) -> None:
        """Wait until exactly the peers that are alive are members."""
        expected = {peer.name for part in self.peers.values() for peer in part if peer.is_alive}
        while await self._members() != expected:  # noqa: ASYNC110 - others change
            await asyncio.sleep(JOIN_POLL_S)

    async def _members(self) -> set[str]:
        try:
            return {str(member.peer_id) for member in (await self.client.status()).members}
        except Unavailable:  # the coordinator is on its way back
            return set()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
