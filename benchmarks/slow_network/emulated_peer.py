"""A peer of a swarm whose compute is emulated: `swarm-ft serve-stage` with another engine.

python -m benchmarks.slow_network.emulated_peer --layers 0-1 --invite INVITE ...
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.slow_network.emulated_engine import EmulatedEngine
from benchmarks.slow_network.way import add_way, way_of
from benchmarks.slow_network.work import Work
from swarm_ft.api.connections import SwarmConnection, join
from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.api.peer_process import start_peer
from swarm_ft.base.log import configure
from swarm_ft.buffers import BufferLimits
from swarm_ft.cli.running import on_stop_signal, run_async
from swarm_ft.ids import PeerId
from swarm_ft.peer.buffer_storage import BufferStorage
from swarm_ft.peer.node import PeerNode, PeerOptions
from swarm_ft.protocol.spec.layers import LayerRange, parse_layers
from swarm_ft.protocol.spec.run_spec import RunSpec


def main() -> None:
    """Serve until killed."""
    options = _parser().parse_args()
    configure("WARNING")
    work = Work(**json.loads(options.work))

    def make_engine(spec: RunSpec, layers: LayerRange) -> EmulatedEngine:
        return EmulatedEngine(work, spec, layers)

    with tempfile.TemporaryDirectory(prefix="emulated-peer-") as shard_dir:
        listening = ListenOptions(options.host, 0, None)

        async def serve() -> None:
            async with join(way_of(options)) as swarm:
                offer = _offer(options, swarm, work, Path(shard_dir))
                up = start_peer(swarm, listening, offer, make_engine, on_made=_leaves_at_once)
                async with up as peer:
                    greeting = {"peer": peer.name, "endpoint": peer.endpoint}
                    sys.stdout.write(json.dumps(greeting) + "\n")
                    sys.stdout.flush()
                    await peer.run()

        run_async(serve)


def _leaves_at_once(node: PeerNode) -> None:
    on_stop_signal(partial(node.leave, 0.0))


def _offer(
    options: argparse.Namespace, swarm: SwarmConnection, work: Work, shard_dir: Path
) -> PeerOptions:
    return PeerOptions(
        peer_id=PeerId(swarm.name or options.peer_id),
        layers=parse_layers(options.layers),
        memory_bytes=work.memory_bytes,
        shard_dir=shard_dir,
        buffers=BufferStorage(limits=BufferLimits(memory_bytes=options.buffer_memory)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", required=True)
    add_way(parser)
    parser.add_argument("--host", required=True)
    parser.add_argument("--peer-id", required=True, help="its name, if it has no key's")
    parser.add_argument("--work", required=True, help="a Work as JSON")
    parser.add_argument("--buffer-memory", type=int, default=4 << 30, help="bytes")
    return parser


if __name__ == "__main__":
    main()
