from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from swarm_ft.client.job import read_text, tokenise, tokens_to_bytes
from swarm_ft.errors import BadDataset


def _words_tokenizer(max_length: int = 4) -> PreTrainedTokenizerFast:
    """One token a word, w0 to w9; like Llama's it puts a special token in front if let."""
    vocab = {f"w{i}": i for i in range(10)} | {"<s>": 10, "?": 11}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 10)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length)


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "any.name"
    file.write_bytes("één\r\ntwo\n".encode())
    assert read_text(str(file)) == "één\r\ntwo\n"


def test_a_directory_is_its_txt_files_in_order_of_name(tmp_path: Path) -> None:
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("c.md", "not this")):
        (tmp_path / name).write_text(text)
    (tmp_path / "d.txt").mkdir()
    assert read_text(str(tmp_path)) == "first\nsecond"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDataset, match="no such file"):
        read_text(str(tmp_path / "absent.txt"))


@pytest.mark.parametrize("content", [b"", b" \n\n"])
def test_data_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(BadDataset, match="empty"):
        read_text(str(tmp_path / "a.txt"))
    with pytest.raises(BadDataset, match="empty"):
        read_text(str(tmp_path))


def test_a_directory_without_txt_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(BadDataset, match=r"expected \.txt files"):
        read_text(str(tmp_path))


def test_text_in_another_encoding_is_refused_with_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("abcdé".encode("latin-1"))
    with pytest.raises(BadDataset, match=r"latin\.txt.*UTF-8.*byte 4 ") as caught:
        read_text(str(tmp_path))
    assert "\n" not in caught.value.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    file.chmod(0)
    with pytest.raises(BadDataset, match="Permission denied"):
        read_text(str(file))


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    with pytest.raises(BadDataset, match="cannot be read"):
        read_text(str(file / "below"))


def test_text_is_cut_into_samples_and_the_tail_dropped() -> None:
    samples = tokenise("w0 w1 w2 w3 w4 w5 w6", _words_tokenizer(), 3)
    assert samples.dtype == np.uint32
    assert samples.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_long_text_gets_no_warning_and_no_special_token(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    samples = tokenise("w7 " * 50, _words_tokenizer(max_length=4), 10)
    assert samples.shape == (5, 10)
    assert set(samples.ravel().tolist()) == {7}
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_text_shorter_than_a_sample_is_refused_with_its_length() -> None:
    with pytest.raises(BadDataset, match="one sample of 8 tokens, got 3 tokens"):
        tokenise("w0 w1 w2", _words_tokenizer(), 8)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_travel_in_four_bytes_the_lowest_first(ids: list[int]) -> None:
    data = tokens_to_bytes(np.array(ids, dtype=np.uint32))
    assert data == b"".join(i.to_bytes(4, "little") for i in ids)
