"""The commands of docs/how-to/upgrade.md in their order, with a coordinator that runs and stops."""

import json
import re
from pathlib import Path

import pytest

from swarm_ft.build import described_version
from tests.cli.conftest import PACKAGE_DIR, RunHere, Shell

PAGE = Path(PACKAGE_DIR) / "docs/how-to/upgrade.md"
JOURNAL = "swarm-ft-coordinator.db"
QUIET = ("--host", "127.0.0.1", "--port", "0")


def commands_of(page: Path) -> list[list[str]]:
    """The lines of its blocks that begin with the program's name."""
    found = re.findall(r"^ {4,}swarm-ft (.+)$", page.read_text(), re.MULTILINE)
    return [line.split() for line in found]


@pytest.mark.slow
@pytest.mark.timeout(300)  # eleven processes, one after another
def test_the_page_can_be_walked(shell: Shell) -> None:
    hot, before, version, again, cold, moved, restored = commands_of(PAGE)
    assert shell.spawn("init").ends() == 0
    coordinator = shell.up("coordinator", *QUIET)
    shell.invited()

    for copying in (hot, before):  # while it runs
        made = shell.spawn(*copying, "--json")
        assert made.ends() == 0, made.err
        words = made.first_words()
        assert (words["runs"], words["members"]) == (0, 0)
        assert words["journal"] == f"{copying[-1]}/{JOURNAL}"
    assert coordinator.interrupted() in (0, 130)

    printed = shell.spawn(*version)
    assert printed.ends() == 0
    assert printed.out == [f"swarm-ft, version {described_version()}"]
    assert shell.up(*again, *QUIET).interrupted() in (0, 130)

    made = shell.spawn(*cold)
    assert made.ends() == 0, made.err
    assert made.out[-1] == f"to start from the copy: swarm-ft coordinator --journal {moved[-1]}"
    for starting in (moved, restored):
        assert shell.up(*starting, *QUIET).interrupted() in (0, 130)
        listed = shell.spawn("keys", "list", "--json", "--journal", starting[-1])
        assert listed.ends() == 0
        (invitation,) = json.loads("\n".join(listed.out))["invitations"]
        assert invitation["role"] == "peer"


def test_a_backup_is_whole_and_private_or_not_there(run_here: RunHere, tmp_path: Path) -> None:
    missing = run_here("backup", tmp_path / "copy", "--journal", tmp_path / "none.db")
    assert (missing.code, missing.err.count("\n")) == (2, 1)
    assert "there is no such file" in missing.err
    (tmp_path / "no.db").write_bytes(b"no database at all, but longer than a header" * 100)
    torn = run_here("backup", tmp_path / "copy", "--journal", tmp_path / "no.db")
    assert (torn.code, torn.err.count("\n")) == (1, 1)
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "copy.partial").exists()
    (tmp_path / "there").mkdir()
    taken = run_here("backup", tmp_path / "there", "--journal", tmp_path / "no.db")
    assert (taken.code, taken.err.count("\n")) == (2, 1)
    assert "it exists already; name a new folder" in taken.err
