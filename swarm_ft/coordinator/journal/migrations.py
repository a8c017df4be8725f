"""Migrations of a journal to the present schema, one step per version. Each changes rows only.

To change the schema: raise `schema.VERSION`, add a step here, and add files of the version before,
see `tests.earlier_files`.
"""

from __future__ import annotations

import json
import sqlite3
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swarm_ft.base.log import get_logger
from swarm_ft.coordinator.journal.columns import recorded, text_of_reason
from swarm_ft.coordinator.journal.tokens import TokenFiles
from swarm_ft.errors import JournalError, MalformedMessage, NotFound
from swarm_ft.ids import RunId, SampleId
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
            (journal.sealed(text_of_reason(recorded(text)).encode(), f"{place} {key}"), key)
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


def _one_form_of_values(journal: OpenJournal) -> None:
    """Migrate 11 to 12: values have one form, and `run_values` has those of four tables."""
    _rewrite(journal.db, "runs", ("run_id",), _assignments)
    _rewrite(journal.db, "snapshots", ("run_id", "step"), _saved_stages)
    found = journal.db.execute("SELECT name FROM sqlite_master WHERE type='table'")
    tables = {name for (name,) in found.fetchall()}
    for name, (table, columns, form) in _VALUES_OF_VERSION_11.items():
        if table in tables:
            rows = journal.db.execute(f"SELECT run_id, {columns} FROM {table}").fetchall()
            values = [(run_id, name, _text(form, *row)) for run_id, *row in rows]
            journal.db.executemany("INSERT INTO run_values VALUES (?, ?, ?)", values)
            journal.db.execute(f"DROP TABLE {table}")


def _rewrite(
    db: sqlite3.Connection, table: str, key: tuple[str, ...], form: Callable[[Any], Any]
) -> None:
    """Rewrite a table's column `stages`."""
    found = db.execute(f"SELECT stages, {', '.join(key)} FROM {table}").fetchall()
    rows = [(_text(lambda text: form(json.loads(text)), text), *place) for text, *place in found]
    where = " AND ".join(f"{name}=?" for name in key)
    db.executemany(f"UPDATE {table} SET stages=? WHERE {where}", [row for row in rows if row[0]])


def _text(form: Callable[..., Any], *row: Any) -> str:  # noqa: ANN401
    """Return a row in its present form; empty for a damaged one: its run is listed as failed."""
    try:
        return json.dumps(form(*row), separators=(",", ":"))
    except (ValueError, TypeError, LookupError) as error:
        logger.warning("a value cannot be migrated: %r", error)
        return ""


def _assignments(hosts: list[Any]) -> list[Any]:
    return [{"peer_id": peer, "layers": [start, stop]} for peer, start, stop in hosts]


def _saved_stages(stages: list[Any]) -> list[Any]:
    return [
        {
            "layers": [start, stop],
            "digest": b64encode(bytes.fromhex(digest)).decode(),
            "total_bytes": total_bytes,
            "keepers": keepers,
        }
        for start, stop, digest, total_bytes, *keepers in stages
    ]


def _steering(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    codecs, requests = found.get("codecs", ()), found.get("requests", ())
    return found | {
        "rates": [{"first_step": step, "learning_rate": rate} for step, rate in found["rates"]],
        "codecs": [
            {"first_step": step, "codecs": {"forward": forward, "backward": backward}}
            for step, forward, backward in codecs
        ],
        "requests": [
            {"number": number, "kind": kind, "step": step, "reason": json.loads(reason)}
            for number, kind, step, reason in requests
            if reason
        ],
    }


def _moving(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found | {"assignments": _assignments(found.pop("hosts"))}


_VALUES_OF_VERSION_11: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "priority": ("priorities", "priority", lambda priority: priority),
    "claim": ("claims", "name, weight", lambda name, weight: {"name": name, "weight": weight}),
    "steering": ("steerings", "steering", _steering),
    "moving": ("movings", "moving", _moving),
}
"""Tables, columns and the present form of the values that version 11 had in tables of their own."""
_STEPS = (_reasons_for_texts, _specs_of_version_10, _tables_alone, _one_form_of_values)
"""Steps from `OLDEST` on."""
