"""The resources that a peer lends, checked against those of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_ft.base import systems
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.sizes import format_size

if TYPE_CHECKING:
    from swarm_ft.api.peer_home import BufferOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerResources:
    """The limits of what a peer uses of this machine.

    Attributes:
        memory_bytes: Memory of the device for stages and their microbatches, in bytes.
        buffer_memory_bytes: Memory of this machine for sample buffers, in bytes.
        cores: Number of CPU threads that compute.
        disk_bytes: Disk for buffers, others' snapshots and hub models together, in bytes.
        up_mbps: Maximum rate to other members in Mbps; None: no limit.
        down_mbps: Maximum rate from other members in Mbps; None: no limit.
    """

    memory_bytes: int
    buffer_memory_bytes: int
    cores: int
    disk_bytes: int
    up_mbps: float | None = None
    down_mbps: float | None = None

    def in_words(self) -> str:
        """Return a line with the limits and the options that change them."""
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return (
            f"This machine lends at most {format_size(self.memory_bytes)} of memory for stages and "
            f"{format_size(self.buffer_memory_bytes)} for buffers, {cores}, "
            f"{format_size(self.disk_bytes)} of disk, {self._link()} (--memory, --buffer-memory, "
            "--threads, --buffer-disk, --keep-disk, --model-disk, --upload-mbps, --download-mbps)"
        )

    def _link(self) -> str:
        rates = ((self.up_mbps, "up"), (self.down_mbps, "down"))
        caps = [f"{mbps:g} Mbps {way}" for mbps, way in rates if mbps is not None]
        return " and ".join(caps) or "no cap on the link"

    def fields(self) -> dict[str, Any]:
        """Return the limits for `--json`."""
        return asdict(self)


def check_cores(threads: int | None) -> None:
    """Refuse more threads than this machine has cores.

    Raises:
        BadOption: This machine has fewer cores.
    """
    cores = systems.core_count()
    if threads is not None and threads > cores:
        raise BadOption(f"--threads: expected at most {cores}, this machine's cores, got {threads}")


def check_memory(option: str, wanted_bytes: int, has_bytes: int | None, where: str) -> None:
    """Refuse more memory than there is; accept any value if the total is unknown.

    Args:
        option: Option that sets the limit, for the message.
        wanted_bytes: Value of the option, in bytes.
        has_bytes: Total memory, free or not, in bytes; None: unknown.
        where: Owner of the memory, for the message.

    Raises:
        BadOption: The total is lower.
    """
    if has_bytes is not None and wanted_bytes > has_bytes:
        raise BadOption(
            f"{option}: expected at most {format_size(has_bytes)}, the memory of {where}, "
            f"got {format_size(wanted_bytes)}"
        )


def check_buffer_memory(buffers: BufferOptions, default_bytes: int) -> None:
    """Refuse a chosen buffer memory above this machine's; a default above it is no error.

    Raises:
        BadOption: This machine has less memory.
    """
    if buffers.memory_bytes != default_bytes:
        has_bytes = systems.total_memory_bytes()
        check_memory("--buffer-memory", buffers.memory_bytes, has_bytes, "this machine")


def check_disk(option: str, wanted_bytes: int | None, folder: Path) -> None:
    """Refuse more disk than the total of the folder's file system.

    Raises:
        BadOption: The file system is smaller.
    """
    if wanted_bytes is None:
        return
    has_bytes = systems.disk_bytes(folder)
    if wanted_bytes > has_bytes:
        raise BadOption(
            f"{option}: expected at most {format_size(has_bytes)}, the disk of {folder}, "
            f"got {format_size(wanted_bytes)}"
        )
