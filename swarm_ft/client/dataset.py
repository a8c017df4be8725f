"""Text to samples of token ids. Knows files and a tokenizer's call, no model and no wire."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from swarm_ft.errors import BadDataset, MalformedMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenArray = npt.NDArray[np.uint32]

_TOKEN_BYTES = 4
_LITTLE_ENDIAN = np.dtype("<u4")


def read_text(path: str) -> str:
    """One UTF-8 file, or all `.txt` files of a directory, sorted by name, joined by newlines.

    Raises:
        BadDataset: the path is missing, unreadable, not UTF-8 or without any text, or it is a
            directory without `.txt` files.
    """
    files = _text_files(Path(path))
    text = "\n".join(_read_file(file) for file in files)
    if not text.strip():
        raise BadDataset(f"dataset '{path}': expected text, found none; the data is empty")
    return text


def _text_files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        files = sorted(p for p in path.iterdir() if p.suffix == ".txt" and p.is_file())
    except OSError as exc:
        raise BadDataset(f"dataset '{path}': cannot be read: {_reason(exc)}") from exc
    if not files:
        raise BadDataset(f"dataset '{path}': expected .txt files in this directory, found none")
    return files


def _read_file(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as exc:
        raise BadDataset(
            f"dataset '{path}': no such file; expected a UTF-8 text file or a directory of .txt"
        ) from exc
    except OSError as exc:
        raise BadDataset(f"dataset '{path}': cannot be read: {_reason(exc)}") from exc
    except UnicodeDecodeError as exc:
        raise BadDataset(
            f"dataset '{path}': expected UTF-8 text, got another encoding at byte "
            f"{exc.start} ({exc.reason}); convert the file to UTF-8"
        ) from exc


def _reason(exc: OSError) -> str:
    return exc.strerror or str(exc)


def tokenise(text: str, tokenizer: PreTrainedTokenizerBase, seq_length: int) -> TokenArray:
    """Samples of `seq_length` adjoining tokens; what does not fill the last one is dropped.

    The text is tokenised as one piece, and no special tokens are added. Whether a model knows
    all the ids is not checked here.

    Returns:
        Token ids [samples, seq_length].

    Raises:
        BadDataset: the text has fewer than `seq_length` tokens.
    """
    # verbose=False: a text longer than the model's context is what we want, not a mistake.
    encoded = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.uint32)
    num_samples = len(ids) // seq_length
    if num_samples == 0:
        raise BadDataset(
            f"dataset: expected at least one sample of {seq_length} tokens, got {len(ids)} "
            "tokens in all; give more text or a smaller --seq-length"
        )
    return ids[: num_samples * seq_length].reshape(num_samples, seq_length)


def tokens_to_bytes(row: TokenArray) -> bytes:
    """One sample [seq_length] as it travels: little-endian uint32."""
    return row.astype(_LITTLE_ENDIAN).tobytes()


def tokens_from_bytes(data: bytes) -> TokenArray:
    """The reverse of `tokens_to_bytes`: ids [seq_length], in memory of their own.

    Raises:
        MalformedMessage: the length is no multiple of four bytes.
    """
    if len(data) % _TOKEN_BYTES:
        raise MalformedMessage(
            f"tokens: expected a multiple of {_TOKEN_BYTES} bytes, got {len(data)} bytes"
        )
    return np.frombuffer(data, dtype=_LITTLE_ENDIAN).astype(np.uint32)
