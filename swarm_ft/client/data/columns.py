"""Columns of a row: the ones that a job renames, fills in or removes, and what each one means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import NamedTuple

from swarm_ft.client.data.rows import TEXT_COLUMN, Row, kind_of
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
"""What `--column` can map a column to."""

_PREFERENCE = "compares answers (preference data), and a swarm trains on answers alone"
_MEDIA = "holds media, and a swarm trains on text alone"
_MASK = "says which tokens are learned, and a swarm reads text, not tokens"
_CHAT = "is for chats, and these rows have no place for it"
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REASONS: Mapping[str, str] = {
    **dict.fromkeys((*LABEL_COLUMNS, "kto_tag"), "tells good answers from bad ones, or classes"),
    **dict.fromkeys(("chosen", "rejected", "chosen_response", "rejected_response"), _PREFERENCE),
    **dict.fromkeys(("chosen_messages", "rejected_messages"), _PREFERENCE),
    **dict.fromkeys(MEDIA, _MEDIA),
    **dict.fromkeys(("input_ids", "completion_mask", "assistant_masks", "loss_mask"), _MASK),
    **dict.fromkeys(("mask", "train_mask", "train_detail", "training_detail"), _MASK),
    **dict.fromkeys(("system", "history", "tools", "functions", "chat_template_kwargs"), _CHAT),
}
"""Columns that change what a row means, and why a shape that does not read one refuses the row."""
ROW_FLAGS = ("weight", "sample_weight", "loss_weight", "train", "trainable")
"""Columns that say whether a row is learned: OpenAI's and others' weights, axolotl's `train`."""
_FLAG_WORDS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


class Format(NamedTuple):
    """A text with columns in braces, as `Q: {question}`.

    Attributes:
        text: all of it.
        parts: literal text, each with the column behind it; None behind the last one.
    """

    text: str
    parts: tuple[tuple[str, str | None], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return tuple(column for _, column in self.parts if column is not None)


def parse_format(text: str, flag: str) -> Format:
    r"""A text in which `{NAME}` is a column, `{{` a brace, and `\n` and `\t` are line and tab.

    Raises:
        BadOption: braces do not match, or hold more than a column's name.
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
    """Which column, or format of columns, fills each role of a row.

    Attributes:
        sources: a column's name or a format, by role; other roles read the column of their name.
        removed: columns that are not read; `messages.KEY` is a key of each message.
    """

    sources: Mapping[str, str | Format]
    removed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, options: ReadOptions) -> ColumnMap:
        """The map that `--column`, `--template`, `--text-column` and `--remove-columns` ask for.

        Raises:
            BadOption: one is malformed, or two of them fill the same role.
        """
        removed = {name.strip() for name in (options.remove_columns or "").split(",")} - {""}
        given = [_mapping(one) for one in options.column]
        if options.template is not None:
            given.append((TEXT_COLUMN, parse_format(options.template, "--template")))
        if options.text_column is not None:
            given.append((TEXT_COLUMN, options.text_column))
            removed.update(LABEL_COLUMNS)  # the text alone is asked for
        roles = [role for role, _ in given]
        twice = next((role for role in roles if roles.count(role) > 1), None)
        if twice is not None:
            raise BadOption(
                f"--column: '{twice}' is given twice; --template and --text-column fill 'text' too"
            )
        return cls(sources=dict(given), removed=frozenset(removed))

    def with_defaults(self, names: Mapping[str, str]) -> ColumnMap:
        """The same, where roles that are not given read these columns."""
        return ColumnMap(sources={**names, **self.sources}, removed=self.removed)

    def columns_of(self, role: str) -> tuple[str, ...]:
        """The columns that fill a role."""
        source = self.sources.get(role, role)
        return source.columns if isinstance(source, Format) else (source,)

    def has(self, role: str, columns: Iterable[str]) -> bool:
        """Whether all columns that fill a role are among `columns`, and none is removed."""
        return set(self.columns_of(role)) <= set(columns) - self.removed

    def words(self, role: str) -> str:
        """What fills a role, for people."""
        source = self.sources.get(role, role)
        return f"the template {source.text!r}" if isinstance(source, Format) else f"'{source}'"


class Fields(NamedTuple):
    """A row as its shape reads it, role by role.

    Attributes:
        row: as it was read.
        columns: which of its columns fill which role.
    """

    row: Row
    columns: ColumnMap

    @property
    def place(self) -> str:
        """Where the row stands, for errors."""
        return self.row.place

    def get(self, role: str) -> object:
        """A role's value; None if there is none or its column is removed."""
        source = self.columns.sources.get(role, role)
        if isinstance(source, Format):
            return "".join(
                literal + ("" if column is None else self._formatted(column))
                for literal, column in source.parts
            )
        return None if source in self.columns.removed else self.row.values.get(source)

    def text(self, role: str) -> str:
        """A role's text.

        Raises:
            BadDataset: there is none, or it is something else.
        """
        value = self.get(role)
        if isinstance(value, str):
            return value
        raise BadDataset(
            f"{self.place}: expected {self.columns.words(role)} to be text, got {kind_of(value)}"
        )

    def optional_text(self, role: str) -> str:
        """A role's text, empty where there is none.

        Raises:
            BadDataset: it is something else.
        """
        return "" if self.get(role) is None else self.text(role)

    def _formatted(self, column: str) -> str:
        value = self.row.values.get(column)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, str) or is_number:
            return str(value)
        raise BadDataset(
            f"{self.place}: expected '{column}' to be text or a number, got {kind_of(value)}"
        )


def refuse_meaningful(
    row: Row, used: Iterable[str], removed: frozenset[str], names: Iterable[str] = REASONS
) -> None:
    """Refuse a row that has a column which changes its meaning and which nobody reads.

    Args:
        row: to check.
        names: of columns that change it, some of `REASONS`.
        used: columns that its shape reads.
        removed: columns that the user asks to leave out.

    Raises:
        BadDataset: it has one; names the option that leaves it out.
    """
    for name in row.values.keys() & set(names) - removed - set(used):
        if not is_empty(row.values[name]):
            raise BadDataset(
                f"{row.place}: '{name}' {REASONS[name]}; --remove-columns {name} trains without it"
            )


def is_row_learned(row: Row, used: Iterable[str], removed: frozenset[str]) -> bool:
    """Whether a row's own weight lets it be learned.

    Raises:
        BadDataset: a weight is neither 0 nor 1.
    """
    names = [name for name in ROW_FLAGS if name in row.values.keys() - removed - set(used)]
    flags = [flag_of(row.values[name], name, row.place) for name in names]
    return all(flags)


def flag_of(value: object, name: str, place: str, prefix: str = "") -> bool:
    """Whether a weight is 1 (true) or 0 (false); nothing is 1.

    Args:
        value: of the weight.
        name: of its column or key.
        place: where it stands, for errors.
        prefix: in front of `name`, as `--remove-columns` takes it.

    Raises:
        BadDataset: it is something else.
    """
    if is_empty(value):
        return True
    flag = _FLAG_WORDS.get(str(value).strip().lower())
    if flag is None or isinstance(value, list | Mapping):
        told = value if isinstance(value, int | float) else kind_of(value)
        raise BadDataset(
            f"{place}: expected '{name}' to be 0 or 1 (whether it is learned), got {told}; "
            f"--remove-columns {prefix}{name} trains without it"
        )
    return flag


def is_empty(value: object) -> bool:
    """Whether a column says nothing in this row: null, an empty text, or an empty list."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def _mapping(given: str) -> tuple[str, str | Format]:
    """A role and what fills it, of `prompt=question` or `prompt=Q: {question}`."""
    role, equals, source = given.partition("=")
    if not equals or not source or role not in ROLES:
        raise BadOption(
            f"--column: expected NAME=COLUMN with a NAME of {', '.join(ROLES)}; got {given!a:.80}"
        )
    is_format = "{" in source
    return role, parse_format(source, "--column") if is_format else source
