"""The comparison on CoLA reads its files and scores its predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cola.finetune import CLASSES, Sentence, matthews, read
from benchmarks.cola.pretrain import LAST, Recipe, sentences_of, train_tokenizer
from swarm_ft.protocol.spec.run_spec import TaskKind
from swarm_ft.protocol.spec.tasks import Classification

WIKITEXT = """ = Heading =

 It is n't a well @-@ known <unk> . He said : " the lobster 's claw is blue " . Yes .
"""


def test_sentences_are_written_as_people_write_them() -> None:
    first, second = sentences_of(WIKITEXT)
    assert first == "It isn't a well-known [UNK] ."
    assert second == 'He said : " the lobster\'s claw is blue " .'


def test_a_sentence_has_its_ends_and_unknown_words_are_one_token() -> None:
    tokenizer = train_tokenizer(sentences_of(WIKITEXT) * 3, Recipe(vocabulary=80))
    ids = tokenizer("a well-known [UNK] .")["input_ids"]
    assert ids[-1] == LAST
    assert ids.count(tokenizer.unk_token_id) == 1


def test_rows_of_cola_are_read(tmp_path: Path) -> None:
    path = tmp_path / "cola-dev.tsv"
    path.write_text('gj04\t1\t\tHe left.\ngj04\t0\t*\t"Left he.\n')
    assert read(path) == [Sentence("He left.", 1), Sentence('"Left he.', 0)]


@pytest.mark.parametrize(
    "predictions", [[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 1, 1]]
)
def test_it_judges_as_the_swarm_does(predictions: list[int]) -> None:
    labels = [1, 1, 0, 1, 0, 1]
    classes = range(2)
    right = [sum(a == b == k for a, b in zip(predictions, labels, strict=True)) for k in classes]
    counts = [*right, *(predictions.count(k) for k in classes), *(labels.count(k) for k in classes)]
    found = Classification(TaskKind.CLASSIFICATION, CLASSES).metrics(counts)
    assert matthews(predictions, labels) == pytest.approx(found["matthews_correlation"])
