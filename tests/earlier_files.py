"""Files of a small swarm that earlier commits wrote, one archive a schema, in `tests/earlier`.

Each holds `model`, a GPT-2 of two blocks; `files`, where a `LocalSwarm` of two peers trained three
steps of the run `going-on` and ended, with a cancelled run before it; and `swarm`, the registry of
an authority. Paths in them are relative: change into the folder first.

Before the journal's schema changes, add an archive of the one that is there:

    python -m tests.write_earlier_files tests/earlier/NAME.tar.xz

With a second word, `sealed`, journal, tokens and recording are encrypted with `KEY`.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from pathlib import Path

from swarm_ft.buffers import BufferLimits
from swarm_ft.ids import RunId

FOLDER = Path(__file__).with_name("earlier")
RUN, CANCELLED = RunId("going-on"), RunId("cancelled")
KEY = bytes(range(32))
NUM_STEPS, DONE_STEPS = 6, 3
LAYERS = ["0-1", "1-2"]
BUFFERS = BufferLimits(memory_bytes=1 << 16, disk_bytes=1 << 24)


@dataclass(frozen=True, slots=True)
class Earlier:
    """An archive.

    Attributes:
        name: of the file, without its ending.
        commit: that wrote it.
        journal, registry, recording: the versions that these files have.
        digest: that the run has there, see `RunSpec.digest`.
        key: of the journal; None: it is not encrypted.
    """

    name: str
    commit: str
    journal: int
    registry: int
    recording: int
    digest: str
    key: bytes | None = None

    def unpack(self, folder: Path) -> None:
        """Put its files into a folder."""
        with tarfile.open(FOLDER / f"{self.name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")


ALL = (
    Earlier("2026-11-25", "57ec5325", 8, 0, 1, "2a291d5a77696bcf1303836fffe09760"),
    Earlier("2026-11-27", "84043f6b", 8, 0, 1, "6905a0afab9cdad8a87878febd82e772"),
    Earlier("2026-11-28-a", "704aa4fb", 9, 0, 2, "c99443f98a6a13b7bc04e149dc830fdb"),
    Earlier("2026-11-28-b", "ecec2a6d", 9, 0, 2, "cb37d1470ce3996e47063fb17f2ccd32"),
    Earlier("2026-11-28-c", "3b2c1148", 10, 1, 3, "0dc6ad5a031d5d45f0d98154a43b543a"),
    Earlier("2026-11-28-d", "39bf40a3", 11, 2, 3, "0dc6ad5a031d5d45f0d98154a43b543a"),
)

SEALED = Earlier(
    "2026-11-27-sealed", "84043f6b", 8, 0, 1, "fc70ce4432d44e48107c577013913d2f", key=KEY
)
