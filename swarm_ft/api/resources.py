"""What a volunteer lends of this machine: checked against what it has, and told in one line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_ft import systems
from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.sizes import size_words

if TYPE_CHECKING:
    from swarm_ft.api.peer_home import BufferOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class LentResources:
    """Upper limits of what a peer takes of this machine.

    Attributes:
        memory_bytes: for stages and their microbatches, on the device.
        buffer_memory_bytes: for samples' buffers, in this machine's memory.
        cores: CPU threads that compute.
        disk_bytes: for buffers, others' snapshots and models of the hub together.
        up_mbps: to other members; None: no cap.
        down_mbps: from other members; None: no cap.
    """

    memory_bytes: int
    buffer_memory_bytes: int
    cores: int
    disk_bytes: int
    up_mbps: float | None = None
    down_mbps: float | None = None

    def in_words(self) -> str:
        """One line: the limits, then the options that change them."""
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return (
            f"lends at most {size_words(self.memory_bytes)} of memory for stages and "
            f"{size_words(self.buffer_memory_bytes)} for buffers, {cores}, "
            f"{size_words(self.disk_bytes)} of disk, {self._link()} (--memory, --buffer-memory, "
            "--threads, --buffer-disk, --keep-disk, --model-disk, --upload-mbps, --download-mbps)"
        )

    def _link(self) -> str:
        caps = ((self.up_mbps, "up"), (self.down_mbps, "down"))
        told = [f"{mbps:g} Mbps {way}" for mbps, way in caps if mbps is not None]
        return " and ".join(told) or "no cap on the link"

    def fields(self) -> dict[str, Any]:
        """The limits for `--json`."""
        return asdict(self)


def check_cores(threads: int | None) -> None:
    """Refuse more threads than there are cores.

    Raises:
        BadOption: there are fewer.
    """
    cores = systems.core_count()
    if threads is not None and threads > cores:
        raise BadOption(f"--threads: expected at most {cores}, this machine's cores, got {threads}")


def check_memory(option: str, wanted_bytes: int, has_bytes: int | None, where: str) -> None:
    """Refuse more memory than there is; where nobody knows how much there is, believe it.

    Args:
        option: that names the limit.
        wanted_bytes: its value.
        has_bytes: the memory in all, free or not; None: unknown.
        where: what has this memory.

    Raises:
        BadOption: there is less.
    """
    if has_bytes is not None and wanted_bytes > has_bytes:
        raise BadOption(
            f"{option}: expected at most {size_words(has_bytes)}, the memory of {where}, "
            f"got {size_words(wanted_bytes)}"
        )


def check_buffer_memory(buffers: BufferOptions, default_bytes: int) -> None:
    """Refuse buffers in more memory than there is; the default is cut where there is less.

    Raises:
        BadOption: this machine has less.
    """
    if buffers.memory_bytes != default_bytes:
        has_bytes = systems.total_memory_bytes()
        check_memory("--buffer-memory", buffers.memory_bytes, has_bytes, "this machine")


def check_disk(option: str, wanted_bytes: int | None, folder: Path) -> None:
    """Refuse more disk than the folder's file system has in all.

    Raises:
        BadOption: it has less.
    """
    if wanted_bytes is None:
        return
    has_bytes = systems.disk_bytes(folder)
    if wanted_bytes > has_bytes:
        raise BadOption(
            f"{option}: expected at most {size_words(has_bytes)}, the disk of {folder}, "
            f"got {size_words(wanted_bytes)}"
        )
