"""Plain text: one unchanged document, whose samples are those of the first version."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from swarm_ft.client.data.dataset import Dataset
from swarm_ft.client.data.files import DataSelection, find_files
from swarm_ft.client.data.rows import read_text
from swarm_ft.client.data.samples import tokens_to_bytes
from swarm_ft.client.data.text_files import read_file
from swarm_ft.client.demo_input import DemoInput
from swarm_ft.client.job import prepare_job
from swarm_ft.client.options import EvalOptions, JobOptions
from swarm_ft.errors import BadDataset
from swarm_ft.protocol.spec.run_spec import TrainOptions
from tests.unit.client.data.conftest import Words


def text_at(path: Path) -> str:
    return read_text(str(path), find_files(str(path), DataSelection()))


@pytest.mark.parametrize("name", ["a.txt", "a.text", "a.md", "a"])
def test_a_file_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes("\ufeffeén\r\ntwo\n".encode())
    assert text_at(file) == "\ufeffeén\r\ntwo\n"


def test_a_directory_is_its_txt_files_in_order_of_name(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second"), ("test.txt", "third"), ("a.txt", "first"), ("c", "no")):
        (tmp_path / name).write_text(text)
    (tmp_path / "d.txt").mkdir()
    (tmp_path / "d.txt" / "below.txt").write_text("no")
    assert text_at(tmp_path) == "first\nsecond\nthird"


def test_text_in_another_encoding_is_refused_with_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("abcdé".encode("latin-1"))
    with pytest.raises(BadDataset, match=r"latin\.txt.*UTF-8.*byte 4 ") as caught:
        text_at(tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [b"", b" \n\n"])
def test_data_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(BadDataset, match="empty"):
            text_at(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    file.chmod(0)
    with pytest.raises(BadDataset, match="Permission denied"):
        text_at(file)


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    with pytest.raises(BadDataset, match="cannot be read"):
        text_at(file / "below")
    with pytest.raises(BadDataset, match="No such file"):
        read_file(tmp_path / "absent.py")


def test_text_is_cut_into_samples_and_the_tail_dropped(
    tmp_path: Path, opened: Callable[..., Dataset]
) -> None:
    (tmp_path / "a.txt").write_text("w0 w1 w2 w3 w4 w5 w6")
    tokens = opened(tmp_path / "a.txt").samples(3, 20).tokens
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_long_text_gets_no_warning_and_no_special_token(
    tmp_path: Path,
    opened: Callable[..., Dataset],
    words: Words,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.txt").write_text("w7 " * 50)
    tokens = opened(tmp_path / "a.txt", tokenizer=words(max_length=4, eos=None)).samples(10, 20)
    assert tokens.tokens.shape == (5, 10)
    assert set(tokens.tokens.ravel().tolist()) == {7}
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_text_shorter_than_a_sample_is_refused_with_its_length(
    tmp_path: Path, opened: Callable[..., Dataset]
) -> None:
    (tmp_path / "a.txt").write_text("w0 w1 w2")
    with pytest.raises(BadDataset, match="one sample of 8 tokens, got 3 tokens"):
        opened(tmp_path / "a.txt").samples(8, 20)


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("limit", [None, 3])
def test_a_job_of_plain_text_has_the_samples_that_it_always_had(
    sample: DemoInput, tmp_path: Path, held_out: bool, limit: int | None
) -> None:
    """Check that the whole text is cut into little-endian rows of ids."""
    (tmp_path / "texts").mkdir()
    parts = [Path(sample.train_file).read_bytes(), b"\r\n\xef\xbb\xbf  tail \n\n"]
    for number, part in enumerate(parts):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(part)
    job = prepare_job(
        JobOptions(
            model=sample.model_dir,
            dataset=str(tmp_path / "texts"),
            evaluation=EvalOptions(
                eval_dataset=sample.eval_file if held_out else None, max_eval_samples=limit
            ),
            train=TrainOptions(seq_length=32),
        )
    )
    trained, kept_out = (
        cut_as_before(sample, text, 32)
        for text in (b"\n".join(parts).decode(), read_file(Path(sample.eval_file)))
    )
    assert job.spec.train.num_samples == len(trained)
    expected = kept_out[:limit] if held_out else trained[: limit or 256]
    assert list(job.samples) == [tokens_to_bytes(row) for row in (*trained, *expected)]


def cut_as_before(sample: DemoInput, text: str, length: int) -> np.ndarray[tuple[int, int]]:
    tokenizer = AutoTokenizer.from_pretrained(sample.model_dir)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    whole = len(ids) // length
    return np.asarray(ids[: whole * length], dtype=np.uint32).reshape(whole, length)
