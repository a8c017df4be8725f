"""`swarm-ft serve-stage`: lend this machine to a swarm."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarm_ft.cli.options import (
    announced_endpoint,
    check_announce,
    dht_prefix_option,
    initial_peers_option,
    json_flag,
    listen_options,
    log_option,
)
from swarm_ft.cli.running import on_stop_signal, run_async

if TYPE_CHECKING:
    from swarm_ft.peer.host import EngineMaker


@click.command()
@click.option(
    "--layers",
    default="auto",
    show_default=True,
    metavar="START-STOP|auto",
    help="Blocks to host: 12-24 means blocks 12 to 23; auto lets the coordinator choose.",
)
@initial_peers_option
@dht_prefix_option
@listen_options
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16"]),
    help="What to compute in; weights stay float32.",
)
@click.option(
    "--model",
    metavar="DIR|HUB_ID",
    help="Where this machine has the run's model, if not where the run says. "
    "Its weights must be the same; digests are checked.",
)
@click.option(
    "--memory",
    "memory_gib",
    type=click.FloatRange(min=0, min_open=True),
    help="GiB lent at most, for --layers auto.  [default: 80 % of what is free]",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads to compute with.")
@click.option("--peer-id", help="Name of this peer; a random one by default.")
@json_flag
@log_option
def serve_stage(
    layers: str,
    initial_peers: tuple[str, ...],
    dht_prefix: str,
    host: str,
    port: int,
    announce: str | None,
    device: str,
    dtype: str,
    model: str | None,
    memory_gib: float | None,
    threads: int | None,
    peer_id: str | None,
    as_json: bool,
) -> None:
    r"""Host one stage of whatever run the swarm trains, until Ctrl-C.

    \b
    Examples:
      swarm-ft serve-stage --layers 12-24 --initial-peers /ip4/203.0.113.7/tcp/31337/p2p/...
      swarm-ft serve-stage --layers auto --device cuda:0 --initial-peers @swarm.txt
    """
    from swarm_ft.errors import BadOption
    from swarm_ft.ids import PeerId
    from swarm_ft.protocol.checks import MAX_ID_CHARS
    from swarm_ft.protocol.layers import parse_layers

    layer_range = parse_layers(layers)
    check_announce(host, announce)
    if not initial_peers:
        raise BadOption("--initial-peers is missing: the address that 'swarm-ft dht' printed")
    name = PeerId(peer_id or f"peer-{secrets.token_hex(4)}")
    if not name.isprintable() or len(name) > MAX_ID_CHARS:
        raise BadOption(f"--peer-id: expected at most {MAX_ID_CHARS} printable characters")
    make_engine = _engine_maker(device, dtype, model, threads)
    memory_bytes = _memory_bytes(memory_gib, device)
    shard_dir = Path(tempfile.mkdtemp(prefix="swarm-ft-"))

    async def work() -> None:
        from swarm_ft.clock import SystemClock
        from swarm_ft.discovery import Role, expand_initial_peers
        from swarm_ft.discovery.dht import DhtDirectory, DhtOptions
        from swarm_ft.peer.node import PeerNode, PeerOptions
        from swarm_ft.transport.grpc_transport import GrpcTransport

        options = DhtOptions(
            initial_peers=expand_initial_peers(initial_peers), prefix=dht_prefix, client_mode=True
        )
        directory = await DhtDirectory.open(options)
        try:
            transport = GrpcTransport()
            node = PeerNode(
                PeerOptions(
                    peer_id=name,
                    layers=layer_range,
                    memory_bytes=memory_bytes,
                    shard_dir=shard_dir,
                ),
                directory=directory,
                transport=transport,
                clock=SystemClock(),
                make_engine=make_engine,
            )
            server = await transport.serve(host, port, node.handlers())
            bound_port = int(server.endpoint.rpartition(":")[2])
            endpoint = announced_endpoint(host, bound_port, announce)
            on_stop_signal(node.leave)
            try:
                await directory.announce(Role.PEER, name, endpoint)
                shown = {"peer": name, "layers": layers, "endpoint": endpoint}
                click.echo(
                    json.dumps(shown)
                    if as_json
                    else f"peer {name} at {endpoint} offers layers {layers}; Ctrl-C leaves"
                )
                await node.run()
            finally:
                await server.stop()
                await directory.withdraw(Role.PEER, name)
        finally:
            await directory.close()

    try:
        run_async(work)
    finally:
        shutil.rmtree(shard_dir, ignore_errors=True)


def _engine_maker(device: str, dtype: str, model: str | None, threads: int | None) -> EngineMaker:
    import torch

    from swarm_ft.protocol.layers import LayerRange
    from swarm_ft.protocol.run_spec import RunSpec
    from swarm_ft.stage.checkpoint import open_checkpoint
    from swarm_ft.stage.device import pick_device, pick_dtype
    from swarm_ft.stage.engine import StageEngine

    torch_device, torch_dtype = pick_device(device), pick_dtype(dtype)
    if threads:
        torch.set_num_threads(threads)
    if model:
        open_checkpoint(model)  # a wrong --model is told now, not when a run comes

    def make_engine(spec: RunSpec, layers: LayerRange) -> StageEngine:
        checkpoint = open_checkpoint(model or spec.model.reference)
        return StageEngine(checkpoint, spec, layers, device=torch_device, dtype=torch_dtype)

    return make_engine


def _memory_bytes(memory_gib: float | None, device: str) -> int:
    from swarm_ft.stage.device import free_memory_bytes, pick_device

    if memory_gib is not None:
        return int(memory_gib * (1 << 30))
    return int(0.8 * free_memory_bytes(pick_device(device)))
