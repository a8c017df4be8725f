"""Where a peer keeps its buffers, and how much it lends for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from swarm_ft.buffers import BufferLimits, BufferStore
from swarm_ft.errors import BadOption
from swarm_ft.ids import RunId
from swarm_ft.log import get_logger
from swarm_ft.protocol.run_spec import RunSpec
from swarm_ft.protocol.training_plan import VisitOrder

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlace:
    """See the module's docstring.

    Attributes:
        limits: of memory and disk.
        directory: of this peer alone; None keeps nothing on disk.
    """

    limits: BufferLimits = field(default_factory=BufferLimits)
    directory: Path | None = None

    def open(self, run_id: RunId, spec: RunSpec) -> BufferStore:
        """A run's buffers, with what is left of them from an earlier start. Blocks.

        Where the directory cannot be used they are in memory only: that costs key frames at most.
        """
        try:
            return self._opened(run_id, spec, self.directory)
        except BadOption as error:
            logger.warning("%s; buffers are kept in memory only", error.message)
            return self._opened(run_id, spec, None)

    def _opened(self, run_id: RunId, spec: RunSpec, directory: Path | None) -> BufferStore:
        return BufferStore(
            self.limits,
            directory=directory,
            run_id=run_id,
            identity=spec.digest(),
            visits=VisitOrder(spec.train),
        )
