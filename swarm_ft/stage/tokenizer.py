"""The tokenizer of a checkpoint, and the token with which a classifier pads texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from swarm_ft.errors import BadModel
from swarm_ft.stage.skeleton import ModelConfig, has_token_types, is_bidirectional
from swarm_ft.stage.source import Source, one_line

SENTENCEPIECE_FILES = (
    "tokenizer.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "sentencepiece.model",
)
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", *SENTENCEPIECE_FILES)
"""Files that hold the vocabulary of nearly all tokenizers."""
_LFS_POINTER = b"version https://git-lfs"
_PROBE = "a"
_TYPES = "token_type_ids"


def tokenizer_in(source: Source) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a checkpoint with `AutoTokenizer`.

    Raises:
        BadModel: There is none, it cannot be read, or a package for it is missing.
    """
    try:
        with _quiet():
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                source.reference, revision=source.revision or "main", trust_remote_code=False
            )
    except (OSError, ValueError, LookupError, TypeError, ImportError) as exc:
        raise _unreadable(source, exc) from exc
    # Without a vocabulary transformers returns a tokenizer of special tokens alone.
    if not found.get_vocab().values() - found.added_tokens_decoder.keys():
        raise _unreadable(source, None)
    found.init_kwargs.pop("auto_map", None)  # it names code that a result does not have
    return found


def _unreadable(source: Source, exc: Exception | None) -> BadModel:
    """Return the error for an unreadable tokenizer, by the files that exist."""
    paths = {name: source.find(name) for name in TOKENIZER_FILES}
    files = {name: path for name, path in paths.items() if path is not None}
    if not files and not isinstance(exc, ImportError):
        return source.error(
            f"expected a tokenizer beside the weights ({', '.join(TOKENIZER_FILES)}), found none"
        )
    for name, path in files.items():
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return source.error(f"{name} is a pointer of Git LFS; fetch it (git lfs pull)")
    pieces = [name for name in files if name in SENTENCEPIECE_FILES]
    if pieces and "tokenizer.json" not in files and find_spec("sentencepiece") is None:
        return source.error(
            f"its tokenizer {pieces[0]} is a SentencePiece model; install what reads it "
            f"(pip install sentencepiece protobuf)"
        )
    why = "its vocabulary is not where its class expects it" if exc is None else one_line(exc)
    return source.error(f"its tokenizer cannot be read from {', '.join(files)} ({why})")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of transformers; the error's own line contains them."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


# ---- classifiers


def prepare_for_classes(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Prepare a tokenizer for the batches that transformers' classifiers expect.

    transformers reads the class of a text at its last token that is not `config.pad_token_id`; an
    encoder reads it at the first token. So texts are padded on the right, by that token if there is
    one. GPT-2 and others would add embeddings of token types, which training does not use.

    Args:
        tokenizer: Tokenizer, changed in place; its pad token stays None if no token can be one.
        config: Config of the model.
    """
    tokenizer.padding_side = "right"
    pad = _pad_token_id(tokenizer, config)
    tokenizer.pad_token = None if pad is None else tokenizer.convert_ids_to_tokens(pad)
    if _TYPES in tokenizer.model_input_names and not has_token_types(config):
        names = [name for name in tokenizer.model_input_names if name != _TYPES]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names


def _pad_token_id(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> int | None:
    """Return the id of a token for padding; None if the tokenizer has no special token.

    The config's id comes first, because the model uses it. A token that the tokenizer appends to
    texts comes last, because transformers would skip it.
    """
    special = set(tokenizer.all_special_ids)
    others = (
        tokenizer.eos_token_id,
        tokenizer.bos_token_id,
        tokenizer.unk_token_id,
        tokenizer.sep_token_id,
        tokenizer.cls_token_id,
        tokenizer.mask_token_id,
    )
    ending = tokenizer(_PROBE, verbose=False)["input_ids"][-1:]
    ordered = chain(
        (config.pad_token_id, tokenizer.pad_token_id),
        (one for one in others if one not in ending),
        others,
    )
    known = (one for one in ordered if isinstance(one, int) and one in special)
    return next((one for one in known if 0 <= one < config.vocab_size), None)


def exported_pad_token_id(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> int | None:
    """Return the `config.pad_token_id` of a classifier with this tokenizer.

    Encoders count positions by theirs and read the first token, so that theirs stays.
    """
    own: int | None = config.pad_token_id
    return own if is_bidirectional(config) and own is not None else tokenizer.pad_token_id
