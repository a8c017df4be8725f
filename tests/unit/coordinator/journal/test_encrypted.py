"""A journal with a key: its runs come back with it, and the disk reveals no data of theirs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.coordinator.facts.events import ReputationRecord, RunRecord
from swarm_ft.coordinator.facts.reasons import Reason, ReasonKind
from swarm_ft.coordinator.facts.reputation import Reputation
from swarm_ft.coordinator.facts.state import Run
from swarm_ft.coordinator.journal.journal import Journal
from swarm_ft.errors import JournalError
from swarm_ft.ids import PeerId, RunId, SampleId
from swarm_ft.protocol.messages.client import RunPhase
from swarm_ft.protocol.spec.run_spec import RunSpec
from tests.unit.coordinator.conftest import MakeSpec

RUN = RunId("run-1")
KEY, STORAGE_KEY, DATA_DIGEST = b"k" * 32, b"s" * 32, b"digest of tokens"
WORDS = "the model of somebody"
Open = Callable[[bytes | None], Journal]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """A function such that `opened(key)` is the journal, in place of the one opened before."""
    books: list[Journal] = []

    def open_one(key: bytes | None) -> Journal:
        for book in books:
            book.close()
        books.append(Journal(str(tmp_path / "journal.db"), key))
        return books[-1]

    yield open_one
    for book in books:
        book.close()


REASON = Reason(kind=ReasonKind.PEER_ERROR, text=WORDS)


@pytest.fixture
def run(make_spec: MakeSpec) -> Run:
    return Run(run_id=RUN, spec=make_spec(), detail=REASON, storage_key=STORAGE_KEY)


def sample_of(spec: RunSpec, sample: int) -> bytes:
    return bytes([sample]) + b"TOKEN" * spec.train.sample_bytes


def filled(journal: Journal, run: Run) -> None:
    size = run.spec.train.sample_bytes
    file = journal.tokens.begin(RUN, run.spec)
    for sample in range(run.spec.train.num_samples):
        file.append(sample_of(run.spec, sample)[:size])
    file.keep()
    journal.write_run(run, DATA_DIGEST)
    standing = Reputation(times_aside=1, aside_until_s=9.0, reason=REASON)
    journal.write([ReputationRecord(PeerId("peer"), standing, 9.0)])


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def secrets_of(run: Run) -> list[bytes]:
    model = run.spec.model.reference.encode()
    return [WORDS.encode(), STORAGE_KEY, DATA_DIGEST, b"TOKENTOKEN", model]


@pytest.mark.parametrize("key", [KEY, None], ids=["encrypted", "plain"])
def test_a_run_and_its_tokens_come_back(opened: Open, run: Run, key: bytes | None) -> None:
    filled(opened(key), run)
    journal = opened(key)
    (loaded,) = journal.load(0.0)
    assert (loaded.spec, loaded.storage_key, loaded.detail) == (run.spec, STORAGE_KEY, REASON)
    assert journal.data_digest(RUN) == DATA_DIGEST
    assert journal.standings(0.0)[PeerId("peer")].reason == REASON
    size = run.spec.train.sample_bytes
    assert (
        journal.tokens.read(RUN, run.spec, [SampleId(1)])[SampleId(1)]
        == (sample_of(run.spec, 1)[:size])
    )


@pytest.mark.parametrize("key", [KEY, None], ids=["encrypted", "plain"])
def test_the_disk_tells_nothing_of_the_data(
    opened: Open, run: Run, tmp_path: Path, key: bytes | None
) -> None:
    filled(opened(key), run)
    data = on_disk(tmp_path)
    assert [secret in data for secret in secrets_of(run)] == [key is None] * 5


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (KEY, None, "created encrypted, and stays so; start with the same --encrypt-at-rest"),
        (None, KEY, "created not encrypted, and stays so; start with no --encrypt-at-rest"),
        (KEY, b"o" * 32, "name the key file that it was created with"),
    ],
)
def test_another_key_is_told_and_nothing_is_touched(
    opened: Open, run: Run, before: bytes | None, after: bytes | None, words: str
) -> None:
    filled(opened(before), run)
    with pytest.raises(JournalError, match=words):
        opened(after)
    assert [one.run_id for one in opened(before).load(0.0)] == [RUN]


def test_tokens_of_another_place_are_none(opened: Open, run: Run, tmp_path: Path) -> None:
    journal = opened(KEY)
    filled(journal, run)
    (path,) = (tmp_path / "journal.db.tokens").iterdir()
    data = path.read_bytes()
    half = len(data) // run.spec.train.num_samples
    path.write_bytes(data[half:] + data[:half])
    with pytest.raises(JournalError, match="torn or altered"):
        journal.tokens.read(RUN, run.spec, [SampleId(0)])


def test_a_runs_storage_key_goes_with_it(opened: Open, run: Run, tmp_path: Path) -> None:
    journal = opened(None)
    filled(journal, run)
    over = replace(run, phase=RunPhase.COLLECTED, storage_key=b"")
    journal.write([RunRecord(over)])
    journal.close()  # what the write-ahead log still held goes with it
    assert STORAGE_KEY not in on_disk(tmp_path)
    (loaded,) = opened(None).load(0.0)
    assert loaded.storage_key == b""
