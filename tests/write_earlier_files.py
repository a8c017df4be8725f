"""Writes an archive of `tests/earlier` with the files of this commit; see `tests.earlier_files`."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import sys
import tarfile
import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from swarm_ft.coordinator.journal.registry import Registry
from swarm_ft.identity.keys import new_key
from swarm_ft.identity.roles import Caller, Role
from swarm_ft.protocol.messages.client import StepCommitted
from swarm_ft.protocol.spec.run_spec import LrSchedule, Optim, RunSpec, TrainSpec
from swarm_ft.stage.checkpoint import open_checkpoint
from tests.earlier_files import BUFFERS, CANCELLED, DONE_STEPS, KEY, LAYERS, NUM_STEPS, RUN
from tests.local_swarm import LocalSwarm


def write(archive: Path, key: bytes | None = None) -> None:
    """Train three steps of a run in a swarm of this commit, and keep what is on the disk then."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        folder = Path("files")
        folder.mkdir()
        _write_model(Path("model"))
        asyncio.run(_train(folder, key))
        _keep_what_is_needed(folder)
        _write_registry(Path("swarm"))
        with tarfile.open(archive, "w:xz") as made:
            for part in ("model", folder, "swarm"):
                made.add(part, filter=_anonymous)


def _keep_what_is_needed(folder: Path) -> None:
    """Remove what no test reads; refuse a run that was ended too early or too late."""
    with closing(sqlite3.connect(folder / "journal.db")) as journal:
        ((num_commits,),) = journal.execute("SELECT count(*) FROM commits").fetchall()
        ((newest,),) = journal.execute("SELECT max(step) FROM snapshots").fetchall()
    if num_commits != DONE_STEPS or (newest or 0) < DONE_STEPS - 1:
        raise SystemExit(f"{num_commits} steps, newest snapshot {newest}: write it again")
    for path in folder.iterdir():
        if path.name.endswith("-kept") or path.name in ("peer-0", "peer-1"):
            shutil.rmtree(path)
    for path in folder.glob("snapshots/*/step-*"):
        if int(path.name.removeprefix("step-")) != newest:
            shutil.rmtree(path)
    (folder / "journal.db.lock").unlink(missing_ok=True)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _write_model(folder: Path) -> None:
    """A GPT-2 whose weights no library draws."""
    off: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        n_layer=2, n_embd=8, n_head=2, vocab_size=32, n_positions=16, n_inner=8, **off
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    weights = load_file(folder / "model.safetensors")
    for number, (name, weight) in enumerate(sorted(weights.items())):
        places = torch.arange(weight.numel(), dtype=torch.float64).reshape(weight.shape)
        is_scale = name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight"))
        weights[name] = (is_scale + 0.1 * torch.cos(places * 1.7 + number)).half().float()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _spec(**changes: Any) -> RunSpec:
    fields: dict[str, Any] = {
        "num_samples": 8,
        "seq_length": 12,
        "batch_size": 4,
        "micro_batch_size": 2,
        "num_steps": NUM_STEPS,
        "learning_rate": 3e-2,
        "lr_schedule": LrSchedule.CONSTANT,
        "seed": 5,
        "forward_codec": "aq4",
        "backward_codec": "q8",
        "key_codec": "fp16",
        "save_steps": 1,
        "optim": Optim.SGD,
    }
    return RunSpec(model=open_checkpoint("model").describe(), train=TrainSpec(**fields | changes))


async def _train(folder: Path, key: bytes | None) -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(1, 32, (8, 3)).repeat(4, axis=1).astype("<u4")
    samples = [row.tobytes() for row in rows]
    async with LocalSwarm(folder, LAYERS, buffer_limits=BUFFERS, journal_key=key) as swarm:
        await swarm.all_joined()
        await swarm.client.submit(_spec(seed=6), samples, run_id=CANCELLED)
        await swarm.client.cancel(CANCELLED)
        await swarm.client.submit(_spec(), samples, run_id=RUN)
        async for event in swarm.client.watch(RUN, lambda _trouble: None):
            if isinstance(event, StepCommitted) and event.step == DONE_STEPS - 1:
                break
        await swarm.kill_coordinator()


def _write_registry(folder: Path) -> None:
    folder.mkdir()
    registry, expires = Registry(folder), datetime(2100, 1, 1, tzinfo=UTC)
    invite = registry.invite(b"f" * 32, ("192.0.2.1:7000",), Role.PEER, 3, expires)
    newcomer = Caller(role=Role.NEWCOMER, name=invite.name, key=new_key().public_key())
    registry.admit(newcomer, datetime(2026, 11, 1, tzinfo=UTC))
    registry.set_address("192.0.2.1:7000")
    registry.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]).resolve(), KEY if sys.argv[2:] == ["sealed"] else None)
