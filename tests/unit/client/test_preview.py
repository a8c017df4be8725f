"""A preview shows exactly the samples that a job submits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swarm_ft.cli.preview import lines_of
from swarm_ft.client.data.progress import Listener
from swarm_ft.client.demo_input import DemoInput
from swarm_ft.client.job import prepare_job
from swarm_ft.client.options import EvalOptions, JobOptions, ReadOptions
from swarm_ft.client.preview import preview
from swarm_ft.protocol.spec.run_spec import TaskKind, TrainOptions
from swarm_ft.protocol.spec.sample_rows import counts_of, rows_in, token_ids_of


def job_of(sample: DemoInput, path: Path, rows: list[dict[str, object]]) -> JobOptions:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return JobOptions(
        model=sample.model_dir,
        dataset=str(path),
        reading=ReadOptions(packing=False),
        train=TrainOptions(seq_length=32),
    )


@pytest.fixture
def pairs(sample: DemoInput, tmp_path: Path) -> JobOptions:
    rows: list[dict[str, object]] = [
        {"prompt": f"Say {n} in words: ", "completion": f"{n} é" + " and more" * n}
        for n in range(12)
    ]
    return job_of(sample, tmp_path / "pairs.jsonl", [*rows, {"prompt": "", "completion": " "}])


@pytest.mark.parametrize("size", [0, 0.25])
def test_the_samples_are_those_that_are_submitted(pairs: JobOptions, size: float) -> None:
    options = replace(pairs, evaluation=EvalOptions(eval_size=size), warmup_ratio=0.5)
    found, job = preview(options, num_shown=100), prepare_job(options)
    rows = rows_in(job.samples[:], options.train.seq_length)
    assert found.spec == job.spec.train
    cut = job.spec.train.num_samples
    for samples, expected in ((found.samples, rows[:cut]), (found.eval_samples, rows[cut:])):
        for sample, row in zip(samples, expected, strict=bool(size)):
            assert list(sample.input_ids) == token_ids_of(row).tolist()
            assert sum(sample.loss_mask) == counts_of(row[None]).num_targets
    counts = counts_of(rows[:cut])
    assert found.train.num_targets == counts.num_targets
    assert found.train.num_tokens == sum(counts.lengths)
    assert found.train.num_blank + (found.held_out.num_blank if found.held_out else 0) == 1
    assert found.train.long_documents.num_documents > 0


def test_pieces_are_the_whole_text_in_order(pairs: JobOptions) -> None:
    first, second, *_ = preview(pairs, num_shown=2).samples
    assert [piece.is_learned for piece in first.pieces] == [False, True]
    assert first.pieces[0].text == "Say 0 in words: "
    assert first.pieces[1].text.startswith("0 é")
    assert "".join(piece.text for piece in second.pieces).startswith("Say 1 in words: 1 é and more")


def test_a_limit_of_samples_counts_these_alone(pairs: JobOptions) -> None:
    found = preview(replace(pairs, max_samples=2), num_shown=100)
    assert found.train.num_samples == len(found.samples) == 2
    assert found.train.num_tokens == sum(len(one.input_ids) for one in found.samples)
    assert found.train.num_targets == sum(sum(one.loss_mask) for one in found.samples)


def test_packed_documents_begin_anew(pairs: JobOptions) -> None:
    options = replace(
        pairs,
        reading=ReadOptions(packing=True),
        train=replace(pairs.train, seq_length=64, micro_batch_size=1),
    )
    found = preview(options, num_shown=100)
    alone = preview(replace(options, reading=ReadOptions()), num_shown=100)
    assert found.train.num_samples < alone.train.num_samples
    assert found.train.num_targets == alone.train.num_targets
    # Each document of a pack is as it is in a sample of its own.
    documents = [
        list(zip(one.input_ids, one.labels, one.position_ids, strict=True)) for one in alone.samples
    ]
    for sample in found.samples:
        rest = list(zip(sample.input_ids, sample.labels, sample.position_ids, strict=True))
        for _ in range(sample.pieces[-1].document + 1):
            document = next(one for one in documents if rest[: len(one)] == one)
            documents.remove(document)
            del rest[: len(document)]
        assert not rest
    assert not documents
    several = next(one for one in found.samples if one.pieces[-1].document)
    shown = list(lines_of(replace(found, samples=(several,))))
    assert len(shown) - len(list(lines_of(replace(found, samples=())))) == 2 + (
        several.pieces[-1].document
    )


def test_learned_tokens_are_green_on_a_terminal(pairs: JobOptions) -> None:
    found = preview(pairs, num_shown=1)
    plain, coloured = list(lines_of(found)), list(lines_of(found, is_coloured=True))
    assert "['Say 0 in words: '] '0 é" in plain[-1]
    assert "\x1b[2m'Say 0 in words: '\x1b[0m \x1b[32m\x1b[22m'0 é" in coloured[-1]
    assert not any("\x1b" in line for line in plain)


def test_classes_are_shown_where_they_are_learned(sample: DemoInput, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"tokens": ["Ada", "codes"], "ner_tags": ["name", "other"]},
        {"tokens": ["She", "sings"], "ner_tags": ["other", "other"]},
    ]
    options = job_of(sample, tmp_path / "words.jsonl", rows)
    train = replace(options.train, task_kind=TaskKind.TOKEN_CLASSIFICATION)
    options = replace(options, train=train, reading=ReadOptions())
    first, *_ = preview(options).samples
    learned = [(piece.text, piece.class_name) for piece in first.pieces if piece.is_learned]
    assert [name for _, name in learned] == ["name", "other"]
    assert [label for label in first.labels if label != -100] == [0, 1]
    shown = list(lines_of(preview(options)))
    assert any("is of class name" in line for line in shown)


def test_nothing_is_written(pairs: JobOptions, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    preview(pairs)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("is_packed", "is_shuffled", "is_noted"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_packs_in_the_order_of_their_lengths_are_noted(
    pairs: JobOptions, is_packed: bool, is_shuffled: bool, is_noted: bool
) -> None:
    options = replace(
        pairs,
        reading=ReadOptions(packing=is_packed),
        train=TrainOptions(seq_length=64, shuffle=is_shuffled),
    )
    lines: list[str] = []
    prepare_job(options, Listener(on_line=lines.append))
    assert any("--shuffle" in line for line in lines) == is_noted
