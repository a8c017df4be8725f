"""Columns of a row: mapping, templates, removal, and columns that change a row's meaning."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import NamedTuple

from swarm_ft.client.data.rows import TEXT_COLUMN, Row, describe_type
from swarm_ft.client.options import ReadOptions
from swarm_ft.errors import BadDataset, BadOption

LABEL_COLUMNS = ("label", "labels")
ROLES = (
    TEXT_COLUMN,
    "prompt",
    "completion",
    "messages",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "tools",
    "chat_template_kwargs",
)
"""Roles that `--column` can map a column to."""

_PREFERENCE = "holds preference data, and a swarm trains on single answers"
_MEDIA = "holds media, and a swarm trains on text only"
_MASK = "holds tokens or their mask, and a swarm reads text, not tokens"
_CHAT = "belongs to chats, and these rows have no chat"
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REASONS: Mapping[str, str] = {
    **dict.fromkeys((*LABEL_COLUMNS, "kto_tag"), "marks good and bad answers, or classes"),
    **dict.fromkeys(("chosen", "rejected", "chosen_response", "rejected_response"), _PREFERENCE),
    **dict.fromkeys(("chosen_messages", "rejected_messages"), _PREFERENCE),
    **dict.fromkeys(MEDIA, _MEDIA),
    **dict.fromkeys(("input_ids", "completion_mask", "assistant_masks", "loss_mask"), _MASK),
    **dict.fromkeys(("mask", "train_mask", "train_detail", "training_detail"), _MASK),
    **dict.fromkeys(("system", "history", "tools", "functions", "chat_template_kwargs"), _CHAT),
}
"""Columns that change the meaning of a row, with the reason why a row is refused if its shape does
not read them."""
ROW_FLAGS = ("weight", "sample_weight", "loss_weight", "train", "trainable")
"""Columns that switch learning of a row: weights of OpenAI's and other formats, axolotl's `train`.
"""
_FLAG_WORDS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


class Format(NamedTuple):
    """A text with columns in braces, such as `Q: {question}`.

    Attributes:
        text: The whole text.
        parts: Pairs of literal text and the column after it; None after the last text.
    """

    text: str
    parts: tuple[tuple[str, str | None], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the text reads."""
        return tuple(column for _, column in self.parts if column is not None)


def parse_format(text: str, flag: str) -> Format:
    r"""Parse a text in which `{NAME}` is a column, `{{` a brace, and `\n` and `\t` are escapes.

    Raises:
        BadOption: Braces do not match, or contain more than the name of a column.
    """
    escapes = {r"\n": "\n", r"\t": "\t", "\\\\": "\\"}
    plain = re.sub(r"\\[nt\\]", lambda found: escapes[found[0]], text)
    try:
        parts = tuple(Formatter().parse(plain))
    except ValueError as exc:
        raise BadOption(f"{flag}: {exc}, in {text!r:.80}") from exc
    columns = [column for _, column, _, _ in parts if column is not None]
    if not all(columns) or not columns or any(spec or how for _, _, spec, how in parts):
        raise BadOption(
            f"{flag}: expected columns in braces, as {{answer}}, and {{{{ for a brace, in "
            f"{text!r:.80}"
        )
    return Format(plain, tuple((literal, column) for literal, column, _, _ in parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnMap:
    """Mapping from the roles of a row to columns or formats of columns.

    Attributes:
        sources: Name of a column, or a format, by role; other roles read the column of their name.
        removed: Columns that are not read; `messages.KEY` is a key of each message.
    """

    sources: Mapping[str, str | Format]
    removed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, options: ReadOptions) -> ColumnMap:
        """Return the mapping of `--column`, `--template`, `--text-column` and `--remove-columns`.

        Raises:
            BadOption: An option is malformed, or two of them fill the same role.
        """
        removed = {name.strip() for name in (options.remove_columns or "").split(",")} - {""}
        sources = [_mapping(one) for one in options.column]
        if options.template is not None:
            sources.append((TEXT_COLUMN, parse_format(options.template, "--template")))
        if options.text_column is not None:
            sources.append((TEXT_COLUMN, options.text_column))
            removed.update(LABEL_COLUMNS)  # the option selects the text alone
        roles = [role for role, _ in sources]
        twice = next((role for role in roles if roles.count(role) > 1), None)
        if twice is not None:
            raise BadOption(
                f"--column: '{twice}' is given twice; --template and --text-column fill 'text' too"
            )
        return cls(sources=dict(sources), removed=frozenset(removed))

    def with_defaults(self, names: Mapping[str, str]) -> ColumnMap:
        """Return the mapping with default columns for roles that have no source."""
        return ColumnMap(sources={**names, **self.sources}, removed=self.removed)

    def columns_of(self, role: str) -> tuple[str, ...]:
        """Return the columns that fill a role."""
        source = self.sources.get(role, role)
        return source.columns if isinstance(source, Format) else (source,)

    def has(self, role: str, columns: Iterable[str]) -> bool:
        """Whether all columns that fill a role are among `columns`, and none is removed."""
        return set(self.columns_of(role)) <= set(columns) - self.removed

    def describe(self, role: str) -> str:
        """Return the source of a role, for people."""
        source = self.sources.get(role, role)
        return f"the template {source.text!r}" if isinstance(source, Format) else f"'{source}'"


class Fields(NamedTuple):
    """A row with access by role.

    Attributes:
        row: The row.
        columns: Mapping from roles to columns.
    """

    row: Row
    columns: ColumnMap

    @property
    def place(self) -> str:
        """Location of the row, for errors."""
        return self.row.place

    def get(self, role: str) -> object:
        """Return the value of a role; None without one, or if its column is removed."""
        source = self.columns.sources.get(role, role)
        if isinstance(source, Format):
            return "".join(
                literal + ("" if column is None else self._formatted(column))
                for literal, column in source.parts
            )
        return None if source in self.columns.removed else self.row.values.get(source)

    def text(self, role: str) -> str:
        """Return the text of a role.

        Raises:
            BadDataset: The value is missing or not text.
        """
        value = self.get(role)
        if isinstance(value, str):
            return value
        raise BadDataset(
            f"{self.place}: expected {self.columns.describe(role)} to be text, "
            f"got {describe_type(value)}"
        )

    def optional_text(self, role: str) -> str:
        """Return the text of a role; empty without one.

        Raises:
            BadDataset: The value is not text.
        """
        return "" if self.get(role) is None else self.text(role)

    def _formatted(self, column: str) -> str:
        value = self.row.values.get(column)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, str) or is_number:
            return str(value)
        raise BadDataset(
            f"{self.place}: expected '{column}' to be text or a number, got {describe_type(value)}"
        )


def check_unread_columns(
    row: Row, used: Iterable[str], removed: frozenset[str], names: Iterable[str] = REASONS
) -> None:
    """Refuse a row with a column that changes its meaning and that its shape does not read.

    Args:
        row: Row to check.
        used: Columns that the shape reads.
        removed: Columns that the user removed.
        names: Columns that change the meaning, some of `REASONS`.

    Raises:
        BadDataset: The row has such a column; the message names the option that removes it.
    """
    for name in row.values.keys() & set(names) - removed - set(used):
        if not is_empty(row.values[name]):
            raise BadDataset(
                f"{row.place}: '{name}' {REASONS[name]}; --remove-columns {name} trains without it"
            )


def is_row_learned(row: Row, used: Iterable[str], removed: frozenset[str]) -> bool:
    """Whether the weights of a row let it be learned.

    Raises:
        BadDataset: A weight is neither 0 nor 1.
    """
    names = [name for name in ROW_FLAGS if name in row.values.keys() - removed - set(used)]
    flags = [flag_of(row.values[name], name, row.place) for name in names]
    return all(flags)


def flag_of(value: object, name: str, place: str, prefix: str = "") -> bool:
    """Whether a weight is 1 (true) or 0 (false); a missing weight is 1.

    Args:
        value: Value of the weight.
        name: Name of its column or key.
        place: Location of the row, for errors.
        prefix: Prefix of `name` in `--remove-columns`.

    Raises:
        BadDataset: The value is neither.
    """
    if is_empty(value):
        return True
    flag = _FLAG_WORDS.get(str(value).strip().lower())
    if flag is None or isinstance(value, list | Mapping):
        found = value if isinstance(value, int | float) else describe_type(value)
        raise BadDataset(
            f"{place}: expected '{name}' to be 0 or 1 (whether it is learned), got {found}; "
            f"--remove-columns {prefix}{name} trains without it"
        )
    return flag


def is_empty(value: object) -> bool:
    """Whether a value is null, an empty text, an empty list or an empty object."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def _mapping(option: str) -> tuple[str, str | Format]:
    """Parse `prompt=question` or `prompt=Q: {question}` into a role and its source."""
    role, equals, source = option.partition("=")
    if not equals or not source or role not in ROLES:
        raise BadOption(
            f"--column: expected NAME=COLUMN with a NAME of {', '.join(ROLES)}; got {option!a:.80}"
        )
    is_format = "{" in source
    return role, parse_format(source, "--column") if is_format else source
