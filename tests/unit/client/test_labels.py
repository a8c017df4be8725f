"""Classes of a job: what the data has, in the order of a model that tells them already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, BertConfig, BertForSequenceClassification

from swarm_ft.client.data.progress import Listener
from swarm_ft.client.job import prepare_job, with_labels
from swarm_ft.client.options import JobOptions, ReadOptions
from swarm_ft.client.sample import write_sample
from swarm_ft.errors import BadDataset, BadOption, SwarmError
from swarm_ft.protocol.spec.run_spec import TaskKind, TrainOptions

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
    made = write_sample(directory, seed=0, num_layers=2, hidden_size=32, vocab_size=300)
    BertForSequenceClassification(config).save_pretrained(made.model_dir)
    return made.model_dir


def options(directory: Path, model: str, classes: list[str], **train: Any) -> JobOptions:
    path = directory / "in.csv"
    path.write_text("text,label\n" + "".join(f"import x,{one}\n" for one in classes))
    return JobOptions(
        model=model,
        dataset=str(path),
        reading=ReadOptions(),
        train=TrainOptions(task_kind=TaskKind.CLASSIFICATION, seq_length=16, **train),
    )


@pytest.mark.parametrize(
    ("own", "classes", "given", "expected"),
    [
        (OWN, ["bad", "good", "neutral"], "", OWN),
        (OWN, ["good", "bad"], "", OWN),
        (OWN, ["0", "2", "1"], "", OWN),
        (OWN, ["2", "0"], "", OWN),
        (OWN, ["2", "0"], "neutral,good,bad", OWN),
        (("3", "1", "2"), ["1", "2", "3"], "", ("3", "1", "2")),
        (NAMELESS, ["b", "a", "c"], "", ("a", "b", "c")),
        (NAMELESS, ["1", "0"], "", NAMELESS),
        (NAMELESS, ["0", "1"], "x,y,z", ("x", "y", "z")),
    ],
)
def test_a_models_own_classes_keep_their_order(
    tmp_path: Path, own: tuple[str, ...], classes: list[str], given: str, expected: tuple[str, ...]
) -> None:
    model = classifier(tmp_path, own)
    assert with_labels(options(tmp_path, model, classes, label_names=given)).labels == expected


@pytest.mark.parametrize(
    ("own", "classes", "given", "error", "why"),
    [
        (OWN, ["good", "poor"], "", BadDataset, "are good, poor, and the model tells others"),
        (OWN, ["0", "3"], "", BadDataset, "are 0, 3, and the model tells .* neutral, good, bad"),
        (NAMELESS, ["a", "b"], "", BadDataset, "are a, b, and the model tells .* LABEL_0"),
        (OWN, ["0", "1"], "bad,good,neutral", BadOption, "expected these in this order, got bad,"),
        (OWN, ["0", "1"], "neutral,good", BadOption, "--labels: the model tells classes already"),
        (("a", "b, c"), ["0", "1"], "", BadOption, "its classes have commas in their names"),
    ],
)
def test_other_classes_than_the_models_are_refused_in_one_line(
    tmp_path: Path,
    own: tuple[str, ...],
    classes: list[str],
    given: str,
    error: type[SwarmError],
    why: str,
) -> None:
    asked = options(tmp_path, classifier(tmp_path, own), classes, label_names=given)
    with pytest.raises(error, match=why) as refused:
        with_labels(asked)
    assert "\n" not in str(refused.value)


def test_a_model_without_a_head_has_the_classes_of_the_data(tmp_path: Path) -> None:
    made = write_sample(tmp_path, seed=0, num_layers=2, hidden_size=32, vocab_size=300)
    found = with_labels(options(tmp_path, made.model_dir, ["good", "bad"]))
    assert found.labels == ("bad", "good")


def test_a_job_goes_on_with_the_models_own_head(tmp_path: Path) -> None:
    model = classifier(tmp_path, OWN)
    job = prepare_job(options(tmp_path, model, ["good", "bad"] * 4), Listener())
    out = tmp_path / "out"
    out.mkdir()
    job.checkpoint.save_config(out, tie_word_embeddings=False)
    config = AutoConfig.from_pretrained(out)
    assert config.id2label == dict(enumerate(OWN))
    assert config.label2id == {name: number for number, name in enumerate(OWN)}
