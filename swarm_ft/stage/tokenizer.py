"""The tokenizer beside a checkpoint's weights, and the token that a classifier pads texts with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from swarm_ft.errors import BadModel
from swarm_ft.stage.skeleton import ModelConfig, sees_all, tells_texts
from swarm_ft.stage.source import Source, one_line

SENTENCEPIECE_FILES = (
    "tokenizer.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "sentencepiece.model",
)
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", *SENTENCEPIECE_FILES)
"""The files that hold the vocabulary of nearly all tokenizers."""
_LFS_POINTER = b"version https://git-lfs"
_PROBE = "a"
_TYPES = "token_type_ids"


def tokenizer_in(source: Source) -> PreTrainedTokenizerBase:
    """Read the tokenizer that `AutoTokenizer` finds at a checkpoint.

    Raises:
        BadModel: there is none, it cannot be read, or a package that reads it is not installed.
    """
    try:
        with _quiet():
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                source.reference, revision=source.revision or "main", trust_remote_code=False
            )
    except (OSError, ValueError, LookupError, TypeError, ImportError) as exc:
        raise _unreadable(source, exc) from exc
    # transformers makes up a tokenizer of special tokens alone where it finds no vocabulary.
    if not found.get_vocab().values() - found.added_tokens_decoder.keys():
        raise _unreadable(source, None)
    found.init_kwargs.pop("auto_map", None)  # names code that a result does not have
    return found


def _unreadable(source: Source, exc: Exception | None) -> BadModel:
    """The error for a tokenizer that transformers cannot read, by the files that there are."""
    paths = {name: source.find(name) for name in TOKENIZER_FILES}
    files = {name: path for name, path in paths.items() if path is not None}
    if not files and not isinstance(exc, ImportError):
        return source.refused(
            f"expected a tokenizer beside the weights ({', '.join(TOKENIZER_FILES)}), found none"
        )
    for name, path in files.items():
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return source.refused(f"{name} is a pointer of Git LFS; fetch it (git lfs pull)")
    pieces = [name for name in files if name in SENTENCEPIECE_FILES]
    if pieces and "tokenizer.json" not in files and find_spec("sentencepiece") is None:
        return source.refused(
            f"its tokenizer {pieces[0]} is a SentencePiece model; install what reads it "
            f"(pip install sentencepiece protobuf)"
        )
    why = "its vocabulary is not where its class expects it" if exc is None else one_line(exc)
    return source.refused(f"its tokenizer cannot be read from {', '.join(files)} ({why})")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back warnings of transformers; an error has them in its own line."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


# ---- classifiers


def prepare_for_classes(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Make a classifier's batches as `from_pretrained` of transformers expects them.

    transformers reads the class of a text at its last token that is not `config.pad_token_id`; an
    encoder reads it at the first token. So texts are padded on the right, by that token if there
    is one. GPT-2 and others add embeddings of token types that training does not know.

    Args:
        tokenizer: changed in place; its pad token stays None where nothing can be one.
        config: of the model.
    """
    tokenizer.padding_side = "right"
    pad = _pad_token_id(tokenizer, config)
    tokenizer.pad_token = None if pad is None else tokenizer.convert_ids_to_tokens(pad)
    if _TYPES in tokenizer.model_input_names and not tells_texts(config):
        names = [name for name in tokenizer.model_input_names if name != _TYPES]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names


def _pad_token_id(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> int | None:
    """Return the id of a token to pad with; None if the tokenizer has no special token.

    The config's comes first, since the model reads by it. A token that the tokenizer itself puts
    at the end of a text comes last, since transformers would pass over it.
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
    """Return what a classifier's `config.pad_token_id` has to be beside this tokenizer.

    Encoders count positions by theirs and read the first token, so theirs stays.
    """
    own: int | None = config.pad_token_id
    return own if sees_all(config) and own is not None else tokenizer.pad_token_id
