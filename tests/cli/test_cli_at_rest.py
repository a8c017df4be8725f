"""A swarm of processes that encrypts what it writes down, and leaves nothing behind."""

from pathlib import Path

import pytest

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import Shell

JOURNAL = "swarm-ft-coordinator.db"


def invited(shell: Shell, *options: object) -> str:
    made = shell.spawn("invite", "--json", *options)
    assert made.ends() == 0, made.err
    word: str = made.first_words()["invite"]
    return word


def files_below(folder: Path, pattern: str = "*") -> list[Path]:
    return [path for path in folder.rglob(pattern) if path.is_file()]


@pytest.mark.slow
@pytest.mark.variant
@pytest.mark.timeout(400)
@pytest.mark.xdist_group("swarm")
def test_a_swarm_that_encrypts_what_it_writes_down(shell: Shell, sample: DemoInput) -> None:
    text = shell.cwd / "text.txt"
    text.write_text(Path(sample.train_file).read_text(encoding="utf-8")[:1500], encoding="utf-8")
    job = ("--dataset", text, "--steps", 6, "--batch-size", 4, "--seq-length", 32, "--fw", "aq4")
    shell.env |= {"XDG_STATE_HOME": str(shell.cwd / "state")}
    assert shell.spawn("init").ends() == 0
    key = shell.cwd / "stick" / "key"
    coordinator = shell.up("coordinator", "--encrypt-at-rest", key)
    assert coordinator.first_words()["encrypted_at_rest"]
    assert key.stat().st_mode & 0o077 == 0
    word = invited(shell, "--uses", 2)
    homes = [shell.cwd / "one", shell.cwd / "two"]
    peers = [
        shell.up("serve-stage", word, "--encrypt-at-rest", "--layers", layers, "--buffer-dir", home)
        for layers, home in zip(("0-1", "1-3"), homes, strict=True)
    ]
    assert all(peer.first_words()["encrypted_at_rest"] for peer in peers)
    way = ("--invite", invited(shell, "--role", "client"))
    client = shell.spawn("client", "train", "--model", sample.model_dir, *job, *way)
    assert client.ends(240) == 0, client.err
    assert any("Who sees your text: the coordinator" in line for line in client.err)
    for process in (*peers, coordinator):
        assert process.interrupted(60) == 0, process.err
    for home in homes:
        assert files_below(home, "*.slab") == [], "the run is over"
        assert files_below(home / "work") == []
    assert files_below(shell.cwd / f"{JOURNAL}.tokens") == []
    model = str(sample.model_dir).encode()
    journal = files_below(shell.cwd, f"{JOURNAL}*")
    assert journal
    assert all(model not in path.read_bytes() for path in journal)

    without = shell.spawn("coordinator")
    assert without.ends() == 2
    assert "created encrypted, and stays so" in without.err[-1]
