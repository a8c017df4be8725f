"""A newcomer's first ten minutes: the README's commands, and the output that the docs show.

Commands are read from the README, and what they print from the docs' own examples: of these
numbers, names, addresses and times may be others.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from swarm_ft.client.demo_input import DemoInput
from tests.cli.conftest import Shell, Spawned, error_lines, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("swarm")]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WATCHING, VOLUNTEERING = (
    (ROOT / "docs/how-to" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("watch", "lend-a-machine")
)
SECTION = "## Train with friends"
TRAIN_S = 300.0
NOTES_CHARS = 12_000
RESOURCE_LINES = (
    "This machine lends at most 5 GiB of memory for stages and 2 GiB for buffers, 2 cores, "
    "126 GiB of disk, no cap on the link (--memory, --buffer-memory, --threads, --buffer-disk, "
    "--keep-disk, --model-disk, --upload-mbps, --download-mbps)",
    "This machine is calm-otter-41 at 192.168.1.20:46843; the coordinator "
    "chooses its layers. Ctrl-C leaves.",
    "This machine sees activations, gradients and its layers' weights of the runs that it serves; "
    "with the first or the last stage it also sees text.",
    "Files of a run lie unencrypted (see --encrypt-at-rest) in /home/ada/.cache/swarm-ft/peers/0 "
    "until the run ends.",
    "Others reach this machine directly",
)
THANKS = (
    "calm-otter-41 gave 684 samples in 171 steps, 19 s, 6.1 MB sent for training, 6.4 MB in all; "
    "thank you"
)
STATUS = (
    "cpu, 7.2 GiB lent, swarm-ft 0.1.0",
    "  gave 722 samples in 91 steps, 36 s, 9.2 MB sent for training, 9.9 MB in all",
)
LOSSES = (
    "step      0  evaluation loss 6.3779",
    "step      0  loss 6.3725   lr 5e-05      grad norm 5         1.66 s",
)


def commands_of(section: str) -> Iterator[list[str]]:
    """The words of each command of a section's first block of code."""
    block = README.partition(f"{section}\n")[2].split("```")[1]
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "swarm-ft", line
            yield words[1:]


@dataclass(frozen=True)
class Place:
    """A folder, and the home of whoever types there."""

    shell: Shell

    def types(self, words: Iterable[object]) -> Spawned:
        return self.shell.spawn(*words)

    def runs(self, *words: object, timeout_s: float = 60.0) -> list[str]:
        """Run a command that must succeed and return the lines that it prints."""
        typed = self.types(words)
        assert typed.ends(timeout_s) == 0, (words, typed.out, typed.err)
        return typed.out

    def saves(self, name: str, lines: list[str]) -> None:
        """Write the one line that a command printed into a file."""
        (line,) = lines
        (self.shell.cwd / name).write_text(f"{line}\n", encoding="utf-8")

    def is_refused(self, *words: object) -> str:
        """The one line of a command that cannot be meant so."""
        typed = self.types(words)
        assert typed.ends() == 2, (words, typed.out, typed.err)
        assert not typed.out
        (line,) = error_lines("\n".join(typed.err))
        return line


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Place, Place]]:
    """The owner's and the volunteer's."""
    shells = []
    for name in ("owner", "volunteer"):
        (tmp_path / name).mkdir()
        shell = Shell(tmp_path / name)
        homes = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME")
        shell.env |= {home: str(tmp_path / f"{name}-{home}") for home in homes}
        shells.append(shell)
    yield Place(shells[0]), Place(shells[1])
    for shell in shells:
        shell.close()


# ---- examples in the docs

KINDS = (
    r"run-[0-9a-f]{8}",
    r"\b[a-z2-7]{32}\b",
    r"\b[a-z]+-[a-z]+-\d\d\b",
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d",
    r"\d+(?:\.\d+){3}:\d+",
    r"token=\S+",
    r"/\S+/peers/\d+",
    r"[\d,.]+ (?:bytes|kB|MB|GB|[KMGT]iB)\b",
    r"(?:\d+ h )?\d+ (?:s|min)\b",
    r"\d+ cores?\b",
    r"\b\d[\d,.]*(?:e-\d+)?\b",
)
"""Of what varies; the first that fits says what may stand in its place."""


def like(doc: str, example: str) -> re.Pattern[str]:
    """Lines of which a document has an example; spaces are as many as there are."""
    assert example in doc, f"the docs tell no more {example!r}"
    pattern, end = "", 0
    for found in re.finditer("|".join(KINDS), example):
        kind = next(kind for kind in KINDS if re.fullmatch(kind, found[0]))
        pattern += _plain(example[end : found.start()]) + kind
        end = found.end()
    return re.compile(pattern + _plain(example[end:]))


def _plain(text: str) -> str:
    return r"\s+".join(map(re.escape, re.split(r"\s+", text)))


def assert_printed(lines: Iterable[str], doc: str, *examples: str) -> None:
    printed = list(lines)
    for example in examples:
        pattern = like(doc, example)
        assert any(pattern.search(line) for line in printed), (example, pattern.pattern, printed)


def test_an_example_stands_for_lines_like_it() -> None:
    pattern = like(VOLUNTEERING, THANKS)
    assert pattern.search(
        "witty-yak-10 gave 1,200 samples in 3 steps, 1 min, 0 bytes sent for training, "
        "1.0 kB in all; thank you"
    )
    assert not pattern.search("calm-otter-41 gave 684 samples, 19 s, 6.4 MB in all; thank you")
    with pytest.raises(AssertionError, match="the docs tell no more"):
        like(VOLUNTEERING, "calm-otter-41 took 19 s")


# ---- the ten minutes


def test_a_newcomers_first_ten_minutes(places: tuple[Place, Place], sample: DemoInput) -> None:
    owner, volunteer = places
    notes = Path(sample.train_file).read_text(encoding="utf-8")[:NOTES_CHARS]
    (owner.shell.cwd / "notes.txt").write_text(notes, encoding="utf-8")
    port = free_port()
    examples: dict[str, object] = {
        "0.0.0.0": "127.0.0.1",
        "coordinator.lan": "127.0.0.1",
        "7000": port,
        "gpt2-medium": sample.model_dir,
    }
    init, coordinate, invite, serve, invite_client, plan, train = commands_of(SECTION)
    helped = owner.runs("--help")
    for command in (init, coordinate, invite, serve, plan, train):
        assert any(line.split()[:1] == [command[0]] for line in helped), command

    assert "the swarm's keys in swarm-ft-coordinator.db.keys" in owner.runs(*init)[0]
    coordinator = owner.types(meant(coordinate, examples))
    coordinator.wait_for("out", "Let others in: run swarm-ft invite")
    assert_printed(
        coordinator.out,
        WATCHING,
        "The coordinator is running at 127.0.0.1:34717. Ctrl-C stops it.",
        "Web page (its address opens once, in one browser): http://127.0.0.1:7770/?token=PAsPkJBC...",
    )
    volunteer.saves("peer.txt", owner.runs(*invite))
    owner.saves("client.txt", owner.runs(*invite_client))

    assert "`swarm-ft doctor @invitation.txt`" in README
    assert "ok" in {line.split()[0] for line in volunteer.runs("doctor", "@peer.txt")}
    # The README's model is a public one of the hub; the test's lies in a directory.
    greeting = volunteer.types([*meant(serve, examples), "--models", sample.model_dir])
    greeting.wait_for("out", "Others reach this machine")
    assert_printed(greeting.out, VOLUNTEERING, *RESOURCE_LINES)

    assert owner.runs(*meant(plan, examples))
    missing = meant(train, {**examples, "notes.txt": "notes.text"})
    assert "notes.text" in owner.is_refused(*missing)
    trained = owner.runs(*meant(train, examples), timeout_s=TRAIN_S)
    assert ["result", "tuned"] in [line.split() for line in trained]
    assert (owner.shell.cwd / "tuned" / "model.safetensors").exists()
    assert_printed(greeting.err, VOLUNTEERING, "run run-4f364706: loaded layers 0-1")

    watches(owner, "@client.txt")
    tries_another(owner, meant(train, examples), "@client.txt")

    greeting.signal(signal.SIGINT)
    assert greeting.ends() == 0, greeting.err
    assert_printed(greeting.out[-1:], VOLUNTEERING, THANKS)
    assert coordinator.interrupted() == 0


def watches(owner: Place, word: object) -> None:
    """Check the commands that show members, events and losses."""
    way = ("--invite", word)
    assert_printed(owner.runs("status", "--verbose", *way), WATCHING, *STATUS)
    assert_printed(owner.runs("losses", *way), WATCHING, *LOSSES)
    events = owner.runs("events", *way)
    assert_printed(events, WATCHING, "peer loyal-ibis-95 joined:")
    assert_printed(events[-1:], WATCHING, "2026-11-24 16:28:32")
    assert "a client fetched the result" in events[-1]


def tries_another(owner: Place, train: list[object], word: object) -> None:
    """Check a detached run that generates text once it is finished, and is fetched then."""
    way = ("--invite", word)
    assert '`swarm-ft client generate "Once upon"`' in README
    left = owner.runs(*train, "--detach", timeout_s=TRAIN_S)
    (run,) = set(re.findall(r"run-[0-9a-f]{8}", "".join(left)))
    following = owner.types(["events", "--follow", "--run", run, *way])
    following.wait_for("out", "the result can be fetched", TRAIN_S)
    assert following.interrupted() == 0
    assert any(owner.runs("client", "generate", "Once upon", *way))
    assert owner.runs("client", "attach", "--out", "another", *way)
    assert (owner.shell.cwd / "another" / "model.safetensors").exists()


def meant(words: Iterable[str], examples: Mapping[str, object]) -> list[object]:
    """A command of the README, for the machine that this is."""
    return [examples.get(word, word) for word in words]
