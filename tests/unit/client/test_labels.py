"""Classes of a job, in the order of a model that has classes already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, BertConfig, BertForSequenceClassification

from swarm_ft.client.data.progress import Listener
from swarm_ft.client.demo_input import write_demo_input
from swarm_ft.client.job import prepare_job
from swarm_ft.client.options import EvalOptions, JobOptions, ReadOptions
from swarm_ft.errors import BadDataset, BadOption, SwarmError
from swarm_ft.protocol.spec.run_spec import TaskKind, TrainOptions
from swarm_ft.protocol.spec.sample_rows import NO_LABEL, labels_in, rows_in

OWN = ("neutral", "good", "bad")
NAMELESS = ("LABEL_0", "LABEL_1", "LABEL_2")


def classifier(directory: Path, names: tuple[str, ...]) -> str:
    config = BertConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    made = write_demo_input(directory, seed=0, num_layers=2, hidden_size=32, vocab_size=300)
    BertForSequenceClassification(config).save_pretrained(made.model_dir)
    return made.model_dir


def table(path: Path, classes: list[str]) -> str:
    path.write_text("text,label\n" + "".join(f"import x,{one}\n" for one in classes))
    return str(path)


def options(
    directory: Path, model: str, classes: list[str], held_out: str | None = None, **train: Any
) -> JobOptions:
    return JobOptions(
        model=model,
        dataset=table(directory / "in.csv", classes),
        reading=ReadOptions(),
        evaluation=EvalOptions(eval_dataset=held_out),
        train=TrainOptions(task_kind=TaskKind.CLASSIFICATION, seq_length=16, **train),
    )


def read(job: JobOptions) -> tuple[tuple[str, ...], list[str], list[str]]:
    """Return the names of a job's classes, its samples' classes by row, and the lines."""
    lines: list[str] = []
    prepared = prepare_job(job, Listener(on_line=lines.append))
    names = prepared.spec.train.labels
    rows = rows_in(b"".join(prepared.samples), job.train.seq_length)
    labels = labels_in(rows)
    return names, [names[label] for label in labels[labels != NO_LABEL]], lines


@pytest.mark.parametrize(
    ("own", "classes", "label_names", "expected", "meant"),
    [
        (OWN, ["bad", "good", "neutral"], "", OWN, ["bad", "good", "neutral"]),
        (OWN, ["good", "bad"], "", OWN, ["good", "bad"]),
        (OWN, ["2", "0"], "neutral,good,bad", OWN, ["bad", "neutral"]),
        (OWN, ["2", "0"], "bad,good,neutral", OWN, ["neutral", "bad"]),
        (OWN, ["bad", "0"], "bad,good,neutral", OWN, ["bad", "bad"]),
        (("3", "1", "2"), ["1", "2", "3"], "", ("3", "1", "2"), ["1", "2", "3"]),
        (NAMELESS, ["b", "a", "c"], "", ("a", "b", "c"), ["b", "a", "c"]),
        (NAMELESS, ["1", "0"], "", NAMELESS, ["LABEL_1", "LABEL_0"]),
        (NAMELESS, ["0", "1"], "x,y,z", ("x", "y", "z"), ["x", "y"]),
    ],
)
def test_a_models_own_classes_keep_their_order(
    tmp_path: Path,
    own: tuple[str, ...],
    classes: list[str],
    label_names: str,
    expected: tuple[str, ...],
    meant: list[str],
) -> None:
    model = classifier(tmp_path, own)
    names, found, _ = read(options(tmp_path, model, classes, label_names=label_names))
    assert names == expected
    assert found[: len(meant)] == meant


@pytest.mark.parametrize(
    ("own", "classes", "label_names", "error", "why"),
    [
        (OWN, ["good", "poor"], "", BadDataset, "are good, poor, and the model has others"),
        (OWN, ["0", "1"], "", BadDataset, "are numbers, 0, 1, .* --labels neutral,good,bad, or"),
        (OWN, ["2"], "", BadDataset, "expected two classes or more, found '2'"),
        (OWN, ["0", "3"], "", BadDataset, "are 0, 3, and the model has .* neutral, good, bad"),
        (NAMELESS, ["a", "b"], "", BadDataset, "are a, b, and the model has .* LABEL_0"),
        (OWN, ["0", "1"], "bad,good", BadOption, "expected these, got bad, good"),
        (OWN, ["0", "1"], "neutral,good", BadOption, "--labels: the model has classes already"),
        (("1", "2", "3"), ["0", "1"], "", BadDataset, "are 0, 1, and the model has others"),
        (("a", "b, c"), ["0", "1"], "", BadOption, "its classes have commas in their names"),
    ],
)
def test_other_classes_than_the_models_are_refused_in_one_line(
    tmp_path: Path,
    own: tuple[str, ...],
    classes: list[str],
    label_names: str,
    error: type[SwarmError],
    why: str,
) -> None:
    job = options(tmp_path, classifier(tmp_path, own), classes, label_names=label_names)
    with pytest.raises(error, match=why) as refused:
        prepare_job(job)
    assert "\n" not in str(refused.value)


def test_a_model_without_a_head_has_the_classes_of_the_data(tmp_path: Path) -> None:
    made = write_demo_input(tmp_path, seed=0, num_layers=2, hidden_size=32, vocab_size=300)
    names, found, _ = read(options(tmp_path, made.model_dir, ["good", "bad"]))
    assert names == ("bad", "good")
    assert found[:2] == ["good", "bad"]


# ---- held-out data with other classes (CASA-Dialogue-Act-Classifier#10, datasets#6446)


@pytest.mark.parametrize(
    ("classes", "held_out", "expected"),
    [
        (["0", "2"], ["1", "0"], ("0", "1", "2")),
        (["1", "2", "3", "4", "5"], ["0", "1"], ("0", "1", "2", "3", "4", "5")),
        (["10", "20"], ["1"], ("1", "10", "20")),
        (["bad", "good"], ["neutral", "good"], ("bad", "good", "neutral")),
        (["bad", "good", "1"], ["1"], ("1", "bad", "good")),
        (["bad", "good"], ["good"], ("bad", "good")),
        (["bad"], ["good"], ("bad", "good")),
    ],
)
def test_classes_are_those_of_both_files(
    tmp_path: Path, classes: list[str], held_out: list[str], expected: tuple[str, ...]
) -> None:
    made = write_demo_input(tmp_path, seed=0, num_layers=2, hidden_size=32, vocab_size=300)
    other = table(tmp_path / "held-out.csv", held_out)
    names, found, lines = read(options(tmp_path, made.model_dir, classes, other))
    assert names == expected
    assert found == [*classes, *held_out]
    missing = sorted(set(held_out) - set(classes))
    remark = f"the training data lacks these classes: {', '.join(missing)}"
    assert any(remark in line for line in lines) is bool(missing)


@pytest.mark.parametrize(
    ("classes", "held_out", "label_names", "why"),
    [
        (["bad", "good"], ["0", "1"], "", "its classes are 0, 1, and those of .*bad, good; --labe"),
        (["0", "1"], ["bad", "good"], "", "its classes are bad, good, and those of .*0, 1; --labe"),
        (["10", "20"], ["1"], "10,20", "line 2: 'label' is '1', which is none of the classes 10, "),
        (["1", "2"], ["0"], "1,2", "line 2: 'label' is '0', which is none of the classes 1, 2"),
        (["0", "1"], ["2"], "bad,good", "line 2: 'label' is '2', which is none of the classes bad"),
    ],
)
def test_numbers_of_held_out_data_that_mean_nothing_are_refused(
    tmp_path: Path, classes: list[str], held_out: list[str], label_names: str, why: str
) -> None:
    made = write_demo_input(tmp_path, seed=0, num_layers=2, hidden_size=32, vocab_size=300)
    other = table(tmp_path / "held-out.csv", held_out)
    with pytest.raises(BadDataset, match=why):
        prepare_job(options(tmp_path, made.model_dir, classes, other, label_names=label_names))


def test_labels_say_what_numbers_of_both_files_count(tmp_path: Path) -> None:
    made = write_demo_input(tmp_path, seed=0, num_layers=2, hidden_size=32, vocab_size=300)
    other = table(tmp_path / "held-out.csv", ["bad", "good"])
    job = options(tmp_path, made.model_dir, ["0", "1"], other, label_names="good,bad")
    names, found, _ = read(job)
    assert names == ("good", "bad")
    assert found == ["good", "bad", "bad", "good"]


def test_a_job_goes_on_with_the_models_own_head(tmp_path: Path) -> None:
    model = classifier(tmp_path, OWN)
    job = prepare_job(options(tmp_path, model, ["good", "bad"] * 4), Listener())
    out = tmp_path / "out"
    out.mkdir()
    job.checkpoint.save_config(out, tie_word_embeddings=False)
    config = AutoConfig.from_pretrained(out)
    assert config.id2label == dict(enumerate(OWN))
    assert config.label2id == {name: number for number, name in enumerate(OWN)}


def test_classes_are_those_of_all_datasets(tmp_path: Path) -> None:
    made = write_demo_input(tmp_path, seed=0, num_layers=2, hidden_size=32, vocab_size=300)
    job = options(tmp_path, made.model_dir, ["bad", "good"])
    other = table(tmp_path / "other.csv", ["neutral", "good"])
    names, found, _ = read(replace(job, dataset=(*job.datasets, other)))
    assert names == ("bad", "good", "neutral")
    assert sorted(found[:4]) == ["bad", "good", "good", "neutral"]
    numbers = table(tmp_path / "numbers.csv", ["0", "1"])
    with pytest.raises(
        BadDataset, match=r"numbers\.csv': its classes are 0, 1, and those of --dat"
    ):
        prepare_job(replace(job, dataset=(*job.datasets, numbers)))
