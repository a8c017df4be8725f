"""Tables of the journal."""

from __future__ import annotations

VERSION = 12
"""Version of the tables and of the values in them; see `migrations`."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    position INTEGER PRIMARY KEY, run_id TEXT UNIQUE NOT NULL, spec BLOB NOT NULL,
    data_digest BLOB NOT NULL, owner TEXT NOT NULL, storage_key BLOB NOT NULL,
    phase INTEGER NOT NULL, detail BLOB NOT NULL, attempt INTEGER NOT NULL,
    committed_steps INTEGER NOT NULL, trained_steps INTEGER, stages TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS run_values (
    run_id TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL,
    PRIMARY KEY (run_id, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS plans (
    run_id TEXT PRIMARY KEY, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
    microbatches TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS commits (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL,
    loss REAL NOT NULL, learning_rate REAL NOT NULL, clip_factor REAL NOT NULL,
    grad_norm REAL NOT NULL, num_samples INTEGER NOT NULL,
    seconds REAL NOT NULL, traffic TEXT NOT NULL, gradients TEXT NOT NULL,
    state_bytes INTEGER NOT NULL, sent TEXT NOT NULL, all_traffic TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evaluations (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    eval_loss REAL, compressed_eval_loss REAL, counts TEXT NOT NULL, judged TEXT NOT NULL,
    traffic TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, stages TEXT NOT NULL, judged TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledgers (
    run_id TEXT PRIMARY KEY, boundaries TEXT NOT NULL, peers TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger_chunks (
    run_id TEXT NOT NULL, chunk INTEGER NOT NULL, holders BLOB NOT NULL,
    PRIMARY KEY (run_id, chunk)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS standings (
    peer_id TEXT PRIMARY KEY, times_aside INTEGER NOT NULL, until_unix_s REAL NOT NULL,
    reason BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contributions (
    peer_id TEXT PRIMARY KEY, samples INTEGER NOT NULL, steps INTEGER NOT NULL,
    seconds REAL NOT NULL, compute_s REAL NOT NULL, sent_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sent_traffic (
    peer_id TEXT PRIMARY KEY, session INTEGER NOT NULL, session_bytes INTEGER NOT NULL,
    all_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    serial INTEGER PRIMARY KEY, unix_s REAL NOT NULL, kind INTEGER NOT NULL, run_id TEXT,
    peer_id TEXT, from_step INTEGER, to_step INTEGER, words BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sealing (proof BLOB NOT NULL);
"""
TABLES_OF_RUNS = (
    "runs",
    "run_values",
    "plans",
    "commits",
    "evaluations",
    "snapshots",
)
"""Tables with rows of runs, except those of ledgers."""
