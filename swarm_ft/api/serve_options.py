"""The options of a peer, from which `serve-stage`, `swarm_ft.serve` and their reference follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from swarm_ft.api.listen_options import ListenOptions
from swarm_ft.api.peer_home import BufferOptions
from swarm_ft.api.shared_options import Snapshots
from swarm_ft.peer.availability import PauseWhen
from swarm_ft.protocol.spec.bounds import MAX_HOSTED, OneOf, Range
from swarm_ft.protocol.spec.options import NumBytes, Option, Size, check

LEAVE_TIMEOUT_S = 75.0
"""Default seconds that a stopped peer may take to leave; systemd kills a service after 90 s."""
Mbps = Annotated[float, Range(0.1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """A volunteer's options.

    Raises:
        BadOption: A value is out of its bounds.
    """

    layers: Annotated[
        str,
        Option(
            "Blocks to host: 12-24 means blocks 12 to 23; auto lets the coordinator choose.",
            metavar="START-STOP|auto",
        ),
    ] = "auto"
    listening: ListenOptions = field(default_factory=ListenOptions)
    device: Annotated[str, Option("Device to compute on: auto, cpu, cuda, cuda:N or mps.")] = "auto"
    dtype: Annotated[
        str,
        OneOf(("float32", "bfloat16")),
        Option("Data type of computations; weights stay float32."),
    ] = "float32"
    model: Annotated[
        str | None,
        Option(
            "Model to use for every run, in place of the one that a job names. The peer checks "
            "that the weights are the run's.",
            metavar="DIR|HUB_ID",
        ),
    ] = None
    models: Annotated[
        tuple[Path, ...],
        Option(
            "Directory below which jobs may name models. May be repeated. Without it jobs open no "
            "directories of this machine.",
            metavar="DIR",
        ),
    ] = ()
    model_disk_bytes: Annotated[
        NumBytes | None,
        Option(
            "Disk for hub models that jobs name; the peer deletes the least recently used first. "
            "With 0 it downloads none.",
            name="model-disk",
            default="a quarter of the free disk",
        ),
    ] = None
    allow_models: Annotated[
        tuple[str, ...],
        Option(
            "Hub model or organization that jobs may name. May be repeated.",
            metavar="ORG/NAME|ORG/*",
            default="all public models",
        ),
    ] = ()
    stage_memory_bytes: Annotated[
        Annotated[int, Range(1), Size()] | None,
        Option(
            "Memory for stages and their microbatches, such as 5GiB; limits --layers auto. On a "
            "GPU it is the total; on a CPU buffers are extra.",
            name="memory",
            default="80 % of the memory that is free beside buffers",
        ),
    ] = None
    max_stages: Annotated[
        int,
        Range(1, MAX_HOSTED),
        Option(
            "Maximum number of stages at a time, each of another run, as far as --memory has room.",
            metavar="N",
        ),
    ] = MAX_HOSTED
    threads: Annotated[
        Annotated[int, Range(1)] | None,
        Option("Number of CPU threads to compute with.", metavar="N", default="torch's own choice"),
    ] = None
    watts: Annotated[
        Annotated[float, Range(0.0)] | None,
        Option(
            "Power that this machine draws under load, for energy forecasts ('swarm-ft plan').",
            metavar="W",
        ),
    ] = None
    buffers: BufferOptions = field(default_factory=BufferOptions)
    snapshots: Snapshots = None
    keep_disk_bytes: Annotated[
        NumBytes | None,
        Option(
            "Disk for encrypted snapshots of other peers' stages; 0 for none.",
            name="keep-disk",
            default="a tenth of the free disk",
        ),
    ] = None
    name: Annotated[
        str | None,
        Option(
            "The name by which people know this peer, such as ada-3090: up to 24 letters, digits, "
            "'-', '_' and '.'. Everybody in the swarm sees it.",
            metavar="NAME",
            default="the one that it had, or two words and a number from its key",
        ),
    ] = None
    peer_id: Annotated[
        str | None,
        Option(
            "Id and name of this peer, only with --insecure.",
            metavar="NAME",
            default="its last one here, or a random one",
        ),
    ] = None
    hours: Annotated[
        str | None,
        Option(
            "Hours of the day in which the peer works, in local time: 22-7, 22:30-6:45.",
            metavar="START-STOP",
            default="all",
        ),
    ] = None
    pause_when: Annotated[
        tuple[PauseWhen, ...],
        Option(
            "Pause while another program uses the GPU, the machine runs on battery, or somebody "
            "uses it. May be repeated."
        ),
    ] = ()
    upload_mbps: Annotated[
        Mbps | None,
        Option(
            "Maximum rate of sending to others, in Mbps; the coordinator plans with it.",
            metavar="MBPS",
        ),
    ] = None
    download_mbps: Annotated[
        Mbps | None, Option("Maximum rate of receiving from others, in Mbps.", metavar="MBPS")
    ] = None
    monthly_gb: Annotated[
        Annotated[float, Range(0.0, is_open=True)] | None,
        Option(
            "Maximum traffic in GB per calendar month, sent and received. Then the peer pauses "
            "until the next month. The count lies beside the peer's key.",
            metavar="GB",
        ),
    ] = None
    leave_timeout_s: Annotated[
        float,
        Range(0.0),
        Option(
            "Seconds that the peer may take to hand over its state when a service manager or a "
            "script stops it. Ctrl-C at a terminal has no limit; a second Ctrl-C leaves at once.",
            name="leave-timeout",
            metavar="S",
        ),
    ] = LEAVE_TIMEOUT_S
    encrypt_at_rest: Annotated[
        bool,
        Option(
            "Encrypt this peer's files: buffers, snapshots, results. The coordinator has a key for "
            "each run, and deletes it when the run is over.",
            has_no=False,
        ),
    ] = False

    def __post_init__(self) -> None:
        check(self)
