"""Migrations of a journal to the present schema, one step per version. Each changes rows only.

To change the schema: raise `journal.VERSION`, add a step here, and add a file of the version before
to `tests/unit/coordinator/journal/earlier`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass

from swarm_ft.coordinator.journal.reason_text import recorded, text_of
from swarm_ft.coordinator.journal.tokens import TokenFiles
from swarm_ft.errors import JournalError, MalformedMessage, NotFound
from swarm_ft.ids import RunId, SampleId
from swarm_ft.log import get_logger
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.wire import RUN_SPEC
from swarm_ft.protocol.wire.earlier import is_earlier, upgraded_specs

logger = get_logger(__name__)

OLDEST = 8
"""Oldest version that can be migrated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenJournal:
    """A journal during its migration.

    Attributes:
        db: Database, inside a transaction.
        opened, sealed: Functions that decrypt and encrypt a value for its place.
        tokens: Tokens of its runs.
    """

    db: sqlite3.Connection
    opened: Callable[[bytes, str], bytes]
    sealed: Callable[[bytes, str], bytes]
    tokens: TokenFiles


def migrate(journal: OpenJournal, version: int) -> None:
    """Migrate all rows from `version` to the present one, step by step.

    Raises:
        JournalError: The key does not open them.
        sqlite3.Error: The disk cannot be written.
    """
    for step in _STEPS[version - OLDEST :]:
        step(journal)


def _reasons_for_texts(journal: OpenJournal) -> None:
    """Migrate 8 to 9: details, reasons and words are reasons in place of text."""
    columns = (
        ("runs", "run_id", "detail", "detail"),
        ("standings", "peer_id", "reason", "standing"),
        ("events", "serial", "words", "event"),
    )
    for table, name, column, place in columns:
        found = journal.db.execute(f"SELECT {name}, {column} FROM {table}").fetchall()
        rows = [
            (journal.sealed(text_of(recorded(text)).encode(), f"{place} {key}"), key)
            for key, value in found
            for text in [journal.opened(value, f"{place} {key}").decode()]
        ]
        journal.db.executemany(f"UPDATE {table} SET {column}=? WHERE {name}=?", rows)


def _specs_of_version_10(journal: OpenJournal) -> None:
    """Migrate 9 to 10: every RunSpec has all fields, and the digest that its run began with."""
    found = journal.db.execute("SELECT run_id, spec, phase FROM runs").fetchall()
    for run_id, sealed, phase in found:
        data = journal.opened(sealed, f"spec {run_id}")
        try:
            spec = _upgraded(journal.tokens, RunId(run_id), data, RunPhase(phase))
        except (MalformedMessage, JournalError, ValueError) as error:
            # Its row stays: `Journal.load` lists the run as failed.
            logger.warning("run %s cannot be migrated: %s", run_id, error)
            continue
        row = journal.sealed(RUN_SPEC.to_bytes(spec), f"spec {run_id}"), run_id
        journal.db.execute("UPDATE runs SET spec=? WHERE run_id=?", row)


def _upgraded(tokens: TokenFiles, run_id: RunId, data: bytes, phase: RunPhase) -> RunSpec:
    if not is_earlier(data):
        return RUN_SPEC.from_bytes(data)
    specs = list(upgraded_specs(data))
    if phase > RunPhase.FINISHED:
        return specs[0]  # the run is over, and has no tokens
    for spec in specs:
        if _are_of(tokens, run_id, spec):
            return spec
    raise JournalError("its tokens are torn, or of a RunSpec that this swarm-ft does not know")


def _are_of(tokens: TokenFiles, run_id: RunId, spec: RunSpec) -> bool:
    """Whether a run's first sample was written for this spec."""
    try:
        tokens.read(run_id, spec, [SampleId(0)])
    except (JournalError, NotFound):
        return False
    return True


def _tables_alone(_journal: OpenJournal) -> None:
    """Migrate 10 to 11: the schema adds the table `sent_traffic`."""


_STEPS = (_reasons_for_texts, _specs_of_version_10, _tables_alone)
"""Steps from `OLDEST` on."""
