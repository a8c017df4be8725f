"""Preparation of a job: messages about its data, their order, and interruption."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.client.data.progress import Listener, ReadProgress
from swarm_ft.client.demo_input import DemoInput
from swarm_ft.client.job import ConcatenatedSamples, open_held_out, prepare_job
from swarm_ft.client.options import EvalOptions, JobOptions, ReadOptions
from swarm_ft.client.train import read_in_thread
from swarm_ft.errors import BadDataset, BadOption
from swarm_ft.protocol.spec.run_spec import EvalStrategy, TrainOptions
from swarm_ft.stage.checkpoint import open_checkpoint


@pytest.fixture
def options(sample: DemoInput, tmp_path: Path) -> JobOptions:
    """Return options for a directory with two splits."""
    for split, number in (("train", 40), ("test", 20)):
        rows = [{"text": f"{split} {'word ' * 20}{n}"} for n in range(number)]
        write(tmp_path / f"{split}.jsonl", rows)
    return JobOptions(
        model=sample.model_dir,
        dataset=str(tmp_path),
        evaluation=EvalOptions(eval_split="test"),
        train=TrainOptions(seq_length=16),
    )


def write(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_what_was_found_is_told_first_of_the_held_out_data_then_of_the_others(
    options: JobOptions,
) -> None:
    lines: list[str] = []
    job = prepare_job(options, Listener(on_line=lines.append))
    assert [line.partition("; ")[0] for line in lines] == [
        f"{options.dataset}: JSON lines, split 'test'",
        lines[1],
        lines[2].partition("; ")[0],
        f"{options.dataset}: JSON lines, split 'train'",
        lines[4],
        lines[5].partition("; ")[0],
    ]
    assert "first document: 'test word" in lines[1]
    assert "20 documents" in lines[2]
    assert "first document: 'train word" in lines[4]
    assert f"40 documents, {job.spec.train.num_samples:,} samples of up to 16 tokens" in lines[5]
    assert job.spec.train.num_eval_samples == len(job.samples) - job.spec.train.num_samples > 0


def test_nothing_is_told_of_data_that_is_refused(options: JobOptions) -> None:
    write(Path(options.datasets[0], "train.jsonl"), [{"text": "word"}, {"text": 5}])
    lines: list[str] = []
    with pytest.raises(BadDataset, match="line 2"):
        prepare_job(options, Listener(on_line=lines.append))
    assert not lines


def test_what_no_data_could_make_good_is_refused_before_it_is_read(options: JobOptions) -> None:
    reports: list[ReadProgress] = []
    train = replace(options.train, sync_tied_embeddings=True)
    with pytest.raises(BadOption, match="--tied-embeddings"):
        prepare_job(replace(options, train=train), Listener(on_progress=reports.append))
    assert not reports


def test_as_many_samples_are_read_as_are_asked_for(options: JobOptions) -> None:
    evaluation = replace(options.evaluation, max_eval_samples=2)
    job = prepare_job(replace(options, max_samples=5, evaluation=evaluation))
    train, everything = job.spec.train, prepare_job(options)
    assert (train.num_samples, train.num_eval_samples, len(job.samples)) == (5, 2, 7)
    first = everything.spec.train.num_samples
    assert list(job.samples[:5]) == list(everything.samples[:5])
    assert list(job.samples[5:]) == list(everything.samples[first : first + 2])


def test_without_held_out_data_the_first_samples_are_evaluated(options: JobOptions) -> None:
    job = prepare_job(replace(options, evaluation=EvalOptions(max_eval_samples=3)))
    assert job.spec.train.num_eval_samples == 3
    assert list(job.samples[-3:]) == list(job.samples[:3])


def test_nothing_is_held_out_where_nothing_is_evaluated(options: JobOptions) -> None:
    train = replace(options.train, eval_strategy=EvalStrategy.NO)
    job = prepare_job(replace(options, train=train))
    assert (job.spec.train.num_eval_samples, len(job.samples)) == (0, job.spec.train.num_samples)


@pytest.mark.parametrize(("size", "count"), [(0.1, 4), (6, 6)])
def test_a_part_of_the_data_is_held_out(options: JobOptions, size: float, count: int) -> None:
    rows = [{"text": f"{number} apples"} for number in range(40)]
    write(Path(options.datasets[0], "train.jsonl"), rows)
    reading = replace(options.reading, packing=False)
    changed = replace(options, evaluation=EvalOptions(eval_size=size), reading=reading)
    lines: list[str] = []
    job = prepare_job(changed, Listener(on_line=lines.append))
    cut = job.spec.train.num_samples
    train, held_out = set(job.samples[:cut]), set(job.samples[cut:])
    assert (len(train), len(held_out), len(train | held_out)) == (40 - count, count, 40)
    assert f"{count} documents, {count} samples" in lines[2]
    assert f"{40 - count} documents, {40 - count} samples" in lines[5]
    whole = prepare_job(replace(changed, evaluation=EvalOptions(max_eval_samples=1)))
    assert train | held_out == set(whole.samples)
    assert list(prepare_job(changed).samples) == list(job.samples)
    other = replace(changed, train=replace(options.train, seed=7))
    assert set(prepare_job(other).samples[cut:]) != held_out


def test_a_part_that_would_leave_nothing_is_refused(options: JobOptions) -> None:
    changed = replace(options, evaluation=EvalOptions(eval_size=40))
    with pytest.raises(BadDataset, match=r"more than 40 rows \(--eval-size\), got 40"):
        prepare_job(changed)
    text = Path(options.datasets[0], "notes.txt")
    text.write_text("one\ntwo\n" * 40)
    with pytest.raises(BadOption, match="--eval-size: plain text is one document"):
        prepare_job(replace(changed, dataset=str(text)))
    share = replace(changed, dataset=str(text), evaluation=EvalOptions(eval_size=0.25))
    train = prepare_job(share).spec.train
    assert abs(train.num_eval_samples * 3 - train.num_samples) <= 3


def test_each_job_has_digests_of_its_own(options: JobOptions) -> None:
    first, second = prepare_job(options).owned_by("ada"), prepare_job(options)
    assert first.spec.model.owner == "ada"
    assert not set(first.spec.model.block_digests) & set(second.spec.model.block_digests)
    assert second.is_of(first.spec)
    assert first.is_of(second.spec)
    other = replace(options, train=replace(options.train, seed=options.train.seed + 1))
    assert not prepare_job(other).is_of(first.spec)


def test_samples_in_a_row_are_one_sequence() -> None:
    both = ConcatenatedSamples([b"a", b"b"], [b"c"])
    assert list(both) == [b"a", b"b", b"c"]
    assert (both[-1], both[1:], both[::2]) == (b"c", [b"b", b"c"], [b"a", b"c"])
    with pytest.raises(IndexError):
        both[3]


def test_a_split_to_evaluate_on_is_of_something(options: JobOptions) -> None:
    checkpoint = open_checkpoint(options.model)
    with pytest.raises(BadOption, match="--eval-split: expected --eval-dataset"):
        open_held_out(options.evaluation, ReadOptions(), checkpoint, None)
    assert open_held_out(EvalOptions(), ReadOptions(), checkpoint, options.datasets[0]) is None


async def test_reading_ends_at_its_next_batch_once_it_is_cancelled() -> None:
    begun, is_cancelled, ended = threading.Event(), threading.Event(), threading.Event()

    def work(listener: Listener) -> None:
        begun.set()
        is_cancelled.wait(60)
        try:
            listener.on_progress(ReadProgress(source="data"))
        except asyncio.CancelledError:
            ended.set()

    task = asyncio.ensure_future(read_in_thread(work, Listener()))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await asyncio.wait([task])
    is_cancelled.set()
    assert await asyncio.to_thread(ended.wait, 60)


# ---- several datasets


def test_several_datasets_are_mixed_by_the_seed(options: JobOptions, tmp_path: Path) -> None:
    paths = (str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl"))
    several = replace(options, dataset=paths, evaluation=EvalOptions(), probabilities="0.25,0.75")
    lines: list[str] = []
    job, again = prepare_job(several, Listener(on_line=lines.append)), prepare_job(several)
    assert list(job.samples) == list(again.samples)
    other_seed = replace(several, train=replace(several.train, seed=several.train.seed + 1))
    assert list(prepare_job(other_seed).samples) != list(job.samples)
    (mixed,) = (line for line in lines if line.startswith("mixed: "))
    assert f"mixed: {job.spec.train.num_samples:,} samples; {paths[0]}" in mixed
    assert f"{paths[1]} 20 of its 20" in mixed
    assert sum("the first document" in line for line in lines) == 2


def test_a_split_of_several_datasets_cannot_be_held_out(
    options: JobOptions, tmp_path: Path
) -> None:
    paths = (str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl"))
    with pytest.raises(BadOption, match="--eval-split: expected --eval-dataset beside it"):
        prepare_job(replace(options, dataset=paths))


def test_a_share_of_each_dataset_is_held_out(options: JobOptions, tmp_path: Path) -> None:
    paths = (str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl"))
    several = replace(options, dataset=paths, evaluation=EvalOptions(eval_size=0.25))
    spec = prepare_job(several).spec.train
    assert (spec.num_samples, spec.num_eval_samples) == (45, 15)
