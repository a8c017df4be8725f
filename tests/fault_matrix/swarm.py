"""A swarm of real processes that outlives its faults: whoever dies is started anew."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import MappingProxyType

from swarm_ft.api.connections import DHT_PREFIX, SwarmAddress, connect
from swarm_ft.api.peer_home import KEY_FILE
from swarm_ft.api.swarm_keys import first_invitations, with_address
from swarm_ft.base.private_files import private_folder
from swarm_ft.client.swarm import SwarmClient
from swarm_ft.errors import RunFailed, Unavailable
from swarm_ft.identity.invites import Invite
from swarm_ft.identity.keys import key_pem, name_of, new_key, write_private
from swarm_ft.identity.roles import Role
from swarm_ft.ids import RunId
from tests.fault_matrix.job import Material, train_arguments
from tests.fault_matrix.processes import Command

STAGES = ("0-1", "1-2", "2-3")
TWO_OF_EACH: Mapping[str, int] = MappingProxyType(dict.fromkeys(STAGES, 2))
JOIN_POLL_S = 0.1
USES = 10_000
"""Of an invitation: every peer that is started comes with a key of its own."""


class Swarm:
    """Two DHT nodes, a coordinator, any number of peers a stage. Use `open` and `close`."""

    def __init__(self, work_dir: Path, material: Material) -> None:
        work_dir.mkdir(parents=True)
        self._work_dir = work_dir
        self._material = material
        self._journal = str(work_dir / "coordinator.db")
        self._addresses: list[str] = []
        self._dht_arguments: dict[str, list[str]] = {}
        self._started = 0
        self._invited: dict[Role, Invite] = {}
        self._endpoint = ""
        self._stack = AsyncExitStack()
        self._client: SwarmClient | None = None
        self.dht: dict[str, Command] = {}
        self._coordinator: Command | None = None
        self._clients: list[Command] = []
        self.peers: dict[str, list[Command]] = {part: [] for part in STAGES}

    @property
    def client(self) -> SwarmClient:
        """A client in this process."""
        if self._client is None:
            raise RunFailed("the swarm is not open")
        return self._client

    @property
    def the_coordinator(self) -> Command:
        """The one that runs."""
        if self._coordinator is None:
            raise RunFailed("the swarm is not open")
        return self._coordinator

    @property
    def _dht_options(self) -> list[str]:
        return [word for a in self._addresses for word in ("--initial-peers", a)]

    @property
    def _snapshots(self) -> list[str]:
        """Options of those that keep snapshots."""
        return ["--snapshots", str(self._work_dir / "snapshots")]

    async def open(self) -> None:
        """Start everybody but the peers."""
        for name in ("dht-0", "dht-1"):
            await self._start_dht_first(name)
        self._invited = first_invitations(self._journal, {Role.PEER: USES, Role.CLIENT: USES})
        await self.start_coordinator()
        nodes, invite = tuple(self._addresses), self._invitation(Role.CLIENT)
        way = SwarmAddress(invite=invite, initial_peers=nodes, dht_prefix=DHT_PREFIX)
        # Whoever submits a run may watch it: clients of other processes have the same key.
        key = self._work_dir / "swarm-ft" / "client.pem"
        self._client = await self._stack.enter_async_context(connect(way, key))

    async def close(self) -> None:
        """End everybody."""
        await self._stack.aclose()
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
        self._dht_arguments[name] = [
            *("dht", "--json", "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}"),
            *("--identity-path", str(identity), *self._dht_options),
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
        arguments = ["coordinator", "--json", "--journal", self._journal, *self._dht_options]
        name = f"coordinator-{self._started}"
        self._coordinator = await self.start(name, [*arguments, *self._snapshots])
        self._endpoint = str((await self._coordinator.first_words())["endpoint"])

    def _invitation(self, role: Role) -> Invite:
        return with_address(self._endpoint, self._invited[role])

    # ---- clients

    async def start_client(self, num_steps: int) -> Command:
        """Start a client with the job."""
        out = self._work_dir / f"out-{self._started}"
        return await self._start_client("train", train_arguments(self._material, num_steps, out))

    async def start_attached(self, run_id: RunId) -> Command:
        """Start a client that comes back to a run."""
        out = self._work_dir / f"out-{self._started}"
        return await self._start_client("attach", ["--run", run_id, "--out", str(out)])

    async def _start_client(self, command: str, arguments: list[str]) -> Command:
        self._started += 1
        way = ("--invite", str(self._invitation(Role.CLIENT)), *self._dht_options)
        client = await self.start(f"client-{self._started}", ["client", command, *arguments, *way])
        self._clients.append(client)
        return client

    # ---- peers

    async def add_peer(self, layers: str) -> Command:
        """Start a peer, with a key that none had; it joins when it is up."""
        key = new_key()
        name = name_of(key.public_key())
        home = private_folder(self._work_dir / "peers" / name)
        write_private(home / KEY_FILE, key_pem(key))
        way = (str(self._invitation(Role.PEER)), *self._dht_options)
        models = ("--models", self._material.sample.model_dir)
        offer = ("--layers", layers, "--threads", "1", "--buffer-dir", str(home), *models)
        peer = await self.start(name, ["serve-stage", "--json", *way, *offer, *self._snapshots])
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
