"""A peer of a swarm on this machine, in plaintext, that knows its coordinator: no DHT, no keys.

    python -m benchmarks.gpu.member --coordinator HOST:PORT --announce HOST:PORT --layers 0-6 ...

All else is what `swarm-ft serve-stage` runs. Prints where it listens as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

from swarm_ft.api.connections import SwarmConnection
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.api.peer_process import start_peer
from swarm_ft.base.log import configure
from swarm_ft.buffers import BufferLimits
from swarm_ft.cli.running import run_async
from swarm_ft.codec.kernels import coding_device
from swarm_ft.discovery.directory import KnownCoordinator, checked_record
from swarm_ft.identity.roles import Role
from swarm_ft.ids import PeerId
from swarm_ft.peer.buffer_storage import BufferStorage
from swarm_ft.peer.node import PeerOptions
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.device import DTYPES, free_memory_bytes
from swarm_ft.stage.engine import StageEngine

SHARED = 0.95
"""Of a GPU's memory, or of a machine's that is free: all peers share it."""
BUFFER_BYTES = 8 << 30


class StaticDirectory(KnownCoordinator):
    """See `KnownCoordinator`: others learn of a peer through the coordinator's assignment."""

    async def announce(self, role: Role, name: str, endpoint: str) -> None:
        """Check the record, and keep it to itself."""
        checked_record(name, endpoint)


def lent_bytes(device: torch.device, peers: int) -> int:
    """Return the bytes that each peer offers, so that a stage has room for microbatches."""
    if device.type == "cuda":
        whole_bytes = torch.cuda.get_device_properties(device).total_memory
    else:
        whole_bytes = free_memory_bytes(device)
    return int(SHARED * whole_bytes / peers)


def main() -> None:
    """Serve until killed."""
    options = _parser().parse_args()
    configure("WARNING")
    torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), DTYPES[options.dtype]

    def make_engine(spec: RunSpec, layers: LayerRange) -> StageEngine:
        checkpoint = open_checkpoint(spec.model.reference, spec.train)
        return StageEngine(checkpoint, spec, layers, device=device, dtype=dtype)

    with tempfile.TemporaryDirectory(prefix="gpu-peer-") as folder:
        offer = PeerOptions(
            peer_id=PeerId(options.peer_id),
            layers=parse_layers(options.layers),
            memory_bytes=lent_bytes(device, options.peers),
            shard_dir=Path(folder),
            buffers=BufferStorage(limits=BufferLimits(memory_bytes=BUFFER_BYTES)),
            codec_device=coding_device(device),
        )
        swarm = SwarmConnection(directory=StaticDirectory(options.coordinator))
        listening = ListenOptions("127.0.0.1", options.port, options.announce)

        async def serve() -> None:
            async with start_peer(swarm, listening, offer, make_engine) as peer:
                sys.stdout.write(json.dumps({"peer": peer.name}) + "\n")
                sys.stdout.flush()
                await peer.run()

        run_async(serve)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--coordinator", required=True, help="HOST:PORT")
    parser.add_argument("--port", type=int, required=True, help="to listen on")
    parser.add_argument("--announce", required=True, help="HOST:PORT that others use")
    parser.add_argument("--layers", required=True)
    parser.add_argument("--peer-id", required=True)
    parser.add_argument("--peers", type=int, default=1, help="that share the device's memory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
