"""A stage's state passes from its replicas to a newcomer: saved and offered, fetched and loaded.

What the donors offer is named by its digest; the coordinator passes on which, so that a donor
that lies is found out. Knows files and downloads; no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from swarm_ft.ids import PeerId
from swarm_ft.peer.context import PeerContext
from swarm_ft.peer.donor import OfferedShard, offer
from swarm_ft.peer.download import Downloader
from swarm_ft.protocol.shard import ShardName
from swarm_ft.snapshots.shard import ShardContents, read_shard, write_shard


class Handover:
    """This peer's part, as donor or as newcomer; one shard at a time.

    Args:
        folder: for files that lie there only meanwhile.
    """

    def __init__(self, context: PeerContext, folder: Path, spec_digest: bytes) -> None:
        self._downloader = Downloader(context.directory, context.transport)
        self._folder = folder
        self._spec_digest = spec_digest
        self._offered: tuple[ShardName, OfferedShard] | None = None

    def find(self, name: ShardName) -> OfferedShard | None:
        """The shard of that name, if it is offered."""
        if self._offered is None or self._offered[0] != name:
            return None
        return self._offered[1]

    async def offer(self, name: ShardName, state: Mapping[str, Tensor]) -> OfferedShard:
        """Save a state, and give it to whoever asks, until `close` or the next offer.

        Raises:
            Unavailable: the disk does not take it (now).
        """
        found = self.find(name)
        if found is None:
            self.close()
            contents = ShardContents(state=state)
            path = await asyncio.to_thread(
                write_shard, self._folder, name, self._spec_digest, contents
            )
            found = await asyncio.to_thread(offer, path)
            self._offered = name, found
        return found

    async def fetch(
        self, name: ShardName, digest: bytes, donors: Sequence[PeerId]
    ) -> Mapping[str, Tensor]:
        """The state of that name from all donors at once.

        Args:
            name: of the shard.
            digest: as the coordinator knows it.
            donors: who offer it.

        Raises:
            Unavailable: no donor, or not enough of them, gave what has the digest.
            BadSnapshot: it has the digest and is no such shard.
        """
        path = self._folder / f"handed-{name.run_id}-{name.layers}.safetensors"
        try:
            chunks = await self._downloader.list_chunks(name, digest, donors)
            await self._downloader.download(name, chunks, donors, path)
            contents = await asyncio.to_thread(read_shard, path, name, self._spec_digest)
            return contents.state
        finally:
            path.unlink(missing_ok=True)  # what was read stays mapped until it is let go of

    def close(self) -> None:
        """Offer nothing any more."""
        if self._offered is not None:
            self._offered[1].path.unlink(missing_ok=True)
            self._offered = None
