"""`swarm-ft serve-stage`: lend this machine to a swarm."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.cli.declared import takes
from swarm_ft.cli.options import (
    BufferOptions,
    Listening,
    dht_prefix_option,
    examples,
    json_flag,
    log_option,
    needed_initial_peers_option,
    snapshots_option,
)
from swarm_ft.cli.running import run_async
from swarm_ft.cli.serving import PeerHome, claim_home
from swarm_ft.errors import BadOption

if TYPE_CHECKING:
    from swarm_ft.ids import PeerId
    from swarm_ft.peer.kept_buffers import BufferPlace
    from swarm_ft.peer.state.stage_state import EngineMaker


@click.command(
    short_help="Lend this machine to a swarm.",
    epilog=examples(
        "swarm-ft serve-stage --layers 12-24 --initial-peers /ip4/203.0.113.7/tcp/31337/p2p/...",
        "swarm-ft serve-stage --layers auto --device cuda:0 --initial-peers @swarm.txt",
    ),
)
@click.option(
    "--layers",
    default="auto",
    show_default=True,
    metavar="START-STOP|auto",
    help="Blocks to host: 12-24 means blocks 12 to 23; auto lets the coordinator choose.",
)
@needed_initial_peers_option
@dht_prefix_option
@takes("listening", Listening)
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
    metavar="GIB",
    type=click.FloatRange(min=0, min_open=True),
    help="GiB lent at most, to a stage and the microbatches in flight there; bounds --layers auto. "
    "On a CPU buffers come on top.  [default: 80 % of what is free beside buffers]",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads to compute with.")
@takes("buffers", BufferOptions)
@snapshots_option
@click.option(
    "--peer-id",
    metavar="NAME",
    help="Name of this peer.  [default: the one that it had here before, or a random one]",
)
@json_flag
@log_option
def serve_stage(
    layers: str,
    initial_peers: tuple[str, ...],
    dht_prefix: str,
    listening: Listening,
    buffers: BufferOptions,
    as_json: bool,
    **given: Any,
) -> None:
    """Host one stage of whatever run the swarm trains, until Ctrl-C."""
    from swarm_ft.protocol.spec.layers import parse_layers

    layer_range = parse_layers(layers)
    make_engine = _engine_maker(given["device"], given["dtype"], given["model"], given["threads"])
    memory_bytes = _memory_bytes(given["memory_gib"], given["device"], buffers.memory_bytes)
    home = _home(given["peer_id"], buffers)
    peer_id = _peer_id(given["peer_id"], home)
    shard_dir = Path(tempfile.mkdtemp(prefix="swarm-ft-"))

    async def work() -> None:
        from swarm_ft.cli.serving import serve_peer
        from swarm_ft.peer.node import PeerOptions

        offer = PeerOptions(
            peer_id=peer_id,
            layers=layer_range,
            memory_bytes=memory_bytes,
            shard_dir=shard_dir,
            buffers=_buffer_place(home, buffers),
            snapshots_url=given["snapshots"] or "",
        )
        swarm = initial_peers, dht_prefix
        await serve_peer(offer, swarm, listening, make_engine, as_json=as_json)

    try:
        run_async(work)
    finally:
        shutil.rmtree(shard_dir, ignore_errors=True)
        if home is not None:
            home.close()


def _home(name: str | None, buffers: BufferOptions) -> PeerHome | None:
    """Where on disk this peer keeps buffers; None if it is to keep none there."""
    if not buffers.disk_bytes:
        return None
    if name is not None:
        _checked_name(name)  # it may become a directory's
    return claim_home(name, buffers.directory)


def _buffer_place(home: PeerHome | None, buffers: BufferOptions) -> BufferPlace:
    from swarm_ft.buffers import BufferLimits
    from swarm_ft.peer.kept_buffers import BufferPlace

    limits = BufferLimits(memory_bytes=buffers.memory_bytes, disk_bytes=buffers.disk_bytes)
    return BufferPlace(limits=limits, directory=home.path / "buffers" if home else None)


def _peer_id(given: str | None, home: PeerHome | None) -> PeerId:
    drawn = given or f"peer-{secrets.token_hex(4)}"
    return _checked_name(drawn if given or home is None else home.name(drawn))


def _checked_name(name: str) -> PeerId:
    from swarm_ft.discovery.directory import checked_record
    from swarm_ft.ids import PeerId
    from swarm_ft.protocol.spec.bounds import MAX_ID_CHARS

    checked_record(name, "localhost:1")
    if len(name) > MAX_ID_CHARS:
        raise BadOption(f"--peer-id: expected at most {MAX_ID_CHARS} characters, got {len(name)}")
    return PeerId(name)


def _engine_maker(device: str, dtype: str, model: str | None, threads: int | None) -> EngineMaker:
    import torch

    from swarm_ft.protocol.spec.layers import LayerRange
    from swarm_ft.protocol.spec.run_spec import RunSpec
    from swarm_ft.stage.base import Engine
    from swarm_ft.stage.checkpoint import open_checkpoint
    from swarm_ft.stage.engine import StageEngine
    from swarm_ft.stage.memory import pick_device, pick_dtype

    torch_device, torch_dtype = pick_device(device), pick_dtype(dtype)
    if threads:
        torch.set_num_threads(threads)
    if model:
        open_checkpoint(model)  # a wrong --model is told now, not when a run comes

    def make_engine(spec: RunSpec, layers: LayerRange) -> Engine:
        checkpoint = open_checkpoint(model or spec.model.reference)
        return StageEngine(checkpoint, spec, layers, device=torch_device, dtype=torch_dtype)

    return make_engine


def _memory_bytes(memory_gib: float | None, device: str, buffer_memory_bytes: int) -> int:
    from swarm_ft.stage.memory import free_memory_bytes, pick_device

    if memory_gib is not None:
        return int(memory_gib * (1 << 30))
    torch_device = pick_device(device)
    free_bytes = free_memory_bytes(torch_device)
    if torch_device.type == "cpu":  # buffers lie in the same memory, if there are any
        free_bytes -= min(buffer_memory_bytes, free_bytes // 2)
    return int(0.8 * free_bytes)
