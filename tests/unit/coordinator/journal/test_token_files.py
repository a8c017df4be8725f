"""Tokens on a real disk: a complete sample or an error, for any damage to their file."""

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from swarm_ft.coordinator.journal import tokens
from swarm_ft.coordinator.journal.tokens import TokenFiles
from swarm_ft.errors import JournalError, JournalFull, NotFound
from swarm_ft.ids import RunId, SampleId
from swarm_ft.protocol.spec.run_spec import RunSpec
from swarm_ft.protocol.spec.sample_rows import pad_rows, words_of
from tests.unit.coordinator.conftest import MakeSpec

RUN = RunId("run-1")
NUM_SAMPLES = 40


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    return make_spec(num_samples=NUM_SAMPLES)


@pytest.fixture
def files(tmp_path: Path) -> TokenFiles:
    return TokenFiles(tmp_path / "tokens")


def tokens_of(spec: RunSpec, sample: int) -> bytes:
    return random.Random(sample).randbytes(4 * spec.train.seq_length)


def write(files: TokenFiles, spec: RunSpec, run_id: RunId = RUN) -> Path:
    """Write a run's file, in which no two samples are alike."""
    new = files.begin(run_id, spec)
    new.append(b"".join(tokens_of(spec, sample) for sample in range(30)))
    for sample in range(30, NUM_SAMPLES):
        new.append(tokens_of(spec, sample))
    before = set(files.folder.glob("*.tokens"))
    new.keep()
    new.discard()  # which what was kept survives
    (path,) = set(files.folder.glob("*.tokens")) - before
    return path


def test_tokens_come_back_as_they_were(files: TokenFiles, spec: RunSpec) -> None:
    write(files, spec)
    wanted = [SampleId(i) for i in (35, 0, 29, 30, 39)]
    assert files.read(RUN, spec, wanted) == {i: tokens_of(spec, i) for i in wanted}


@pytest.mark.parametrize("at_a_time", [1, 3, 64])
def test_what_is_learned_is_counted_in_the_order_that_is_asked_for(
    files: TokenFiles, spec: RunSpec, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr(tokens, "COUNTED_SAMPLES", at_a_time)
    seq_length = spec.train.seq_length
    rows = [
        pad_rows(words_of([1] * (2 + sample % (seq_length - 1))), seq_length)
        for sample in range(NUM_SAMPLES)
    ]
    new = files.begin(RUN, spec)
    new.append(b"".join(row.tobytes() for row in rows))
    new.keep()
    counts = files.count(RUN, spec, [SampleId(i) for i in (5, 0, 39, 3, 2)])
    assert counts.lengths == tuple(2 + i % (seq_length - 1) for i in (5, 0, 39, 3, 2))
    assert counts.num_targets == sum(counts.lengths) - 5


@pytest.mark.parametrize("sample", [NUM_SAMPLES, -1])
def test_an_unknown_sample_is_not_found(files: TokenFiles, spec: RunSpec, sample: int) -> None:
    write(files, spec)
    with pytest.raises(NotFound, match=f"run-1 has no sample {sample}"):
        files.read(RUN, spec, [SampleId(sample)])


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Damage a file: with noise, holes, or pieces lost, moved or swapped."""
    start = rng.randrange(len(data))
    size = rng.choice((1, 4, 36, 200))
    piece = data[start : start + size]
    kind = rng.randrange(6)
    if kind == 0:
        flipped = piece[0] ^ (1 << rng.randrange(8))
        return data[:start] + bytes([flipped]) + data[start + 1 :]
    if kind == 1:
        return data[:start] + rng.randbytes(len(piece)) + data[start + len(piece) :]
    if kind == 2:
        return data[:start] + bytes(len(piece)) + data[start + len(piece) :]
    if kind == 3:
        return data[:start]
    if kind == 4:
        return data[:start] + data[start + size :]
    record = len(data) // NUM_SAMPLES
    records = [data[i : i + record] for i in range(0, len(data), record)]
    a, b = rng.sample(range(NUM_SAMPLES), 2)
    records[a], records[b] = records[b], records[a]
    return b"".join(records)


@pytest.mark.parametrize("seed", range(60))
def test_no_damage_alters_a_token(files: TokenFiles, spec: RunSpec, seed: int) -> None:
    """Every sample is what it was, or an error that names it; three of 60 were altered once."""
    path = write(files, spec)
    whole = path.read_bytes()
    path.write_bytes(damaged(whole, random.Random(seed)))
    refused = []
    for sample in map(SampleId, range(NUM_SAMPLES)):
        try:
            assert files.read(RUN, spec, [sample]) == {sample: tokens_of(spec, sample)}
        except JournalError as error:
            refused.append(f"sample {sample} of run-1 is torn or altered" in error.message)
    assert all(refused)
    assert bool(refused) == (path.read_bytes() != whole)


def test_tokens_of_another_run_or_spec_are_none_of_this_ones(
    files: TokenFiles, spec: RunSpec, make_spec: MakeSpec
) -> None:
    path = write(files, spec)
    other = write(files, spec, RunId("other"))
    with pytest.raises(JournalError, match="torn or altered"):
        files.read(RUN, make_spec(num_samples=NUM_SAMPLES, seed=8), [SampleId(0)])
    path.write_bytes(other.read_bytes())
    with pytest.raises(JournalError, match="torn or altered"):
        files.read(RUN, spec, [SampleId(0)])


def test_a_file_that_is_gone_is_a_journal_error(files: TokenFiles, spec: RunSpec) -> None:
    write(files, spec).unlink()
    with pytest.raises(JournalError, match=r"the tokens of run-1: .*No such file"):
        files.read(RUN, spec, [SampleId(0)])


def test_a_file_that_is_not_kept_is_never_read_and_leaves_nothing(
    files: TokenFiles, spec: RunSpec
) -> None:
    new = files.begin(RUN, spec)
    new.append(tokens_of(spec, 0))
    with pytest.raises(JournalError):
        files.read(RUN, spec, [SampleId(0)])
    new.discard()
    assert not list(files.folder.iterdir())


def test_a_sweep_leaves_what_is_wanted(files: TokenFiles, spec: RunSpec) -> None:
    wanted = write(files, spec)
    write(files, spec, RunId("over"))
    growing = files.begin(RunId("growing"), spec)
    files.sweep([RUN])
    assert list(files.folder.iterdir()) == [wanted]
    growing.discard()
    files.delete(RUN)
    files.delete(RUN)
    assert not list(files.folder.iterdir())


def test_a_disk_without_room_refuses_a_job_before_it_comes(
    files: TokenFiles, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(JournalFull, match="are reserved for current runs"):
        files.begin(RUN, spec)
    assert not list(files.folder.iterdir())


def test_room_that_is_promised_to_one_job_is_not_given_to_another(
    files: TokenFiles, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_bytes = spec.train.sample_bytes + tokens.CHECKSUM_BYTES
    free_bytes = tokens.RESERVE_BYTES + record_bytes * (spec.train.num_samples + 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(free_bytes))
    first = files.begin(RUN, spec)
    with pytest.raises(JournalFull, match="for arriving jobs"):
        files.begin(RunId("other"), spec)
    for sample in range(spec.train.num_samples):
        first.append(tokens_of(spec, sample))
    files.begin(RunId("other"), spec).discard()  # what is written is not free any more anyway
    first.discard()


class Usage(NamedTuple):
    """The relevant fields of a disk's usage."""

    free: int
