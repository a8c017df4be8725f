"""Consistency of a restored journal with the snapshots on disk."""

from __future__ import annotations

from swarm_ft.base.log import get_logger
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.errors import SwarmError
from swarm_ft.snapshots.store import SnapshotStore

logger = get_logger(__name__)


def forget_missing_snapshots(journal: Journal, store: SnapshotStore | None) -> None:
    """Drop snapshots that the store lacks, before a run can start from one. Blocks.

    A copy of a journal names the snapshots of its time, which later ones replaced.

    Raises:
        JournalError: The journal cannot be written.
    """
    if store is None:
        return
    for run in journal.load(0.0):
        named = {snapshot.step for snapshot in run.past.snapshots}
        if run.phase.is_over or not named:
            continue
        try:
            found = store.list_snapshots(run.run_id, run.spec.digest())
        except SwarmError as error:
            logger.warning("run %s: its snapshots cannot be listed: %s", run.run_id, error.message)
            continue
        missing = sorted(named - {manifest.step for manifest in found})
        if missing:
            shown = ", ".join(map(str, missing))
            logger.warning("run %s: snapshots of steps %s are missing", run.run_id, shown)
            journal.forget_snapshots(run.run_id, missing)
