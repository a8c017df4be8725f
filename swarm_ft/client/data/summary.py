"""Counts of the samples that some data became, and their words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple

from swarm_ft.client.data.layouts import LongDocuments
from swarm_ft.client.options import Truncation

MOST_CLASSES_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Counts of one dataset, or of the part of it that was read.

    Attributes:
        source: the dataset's name.
        unused: columns, and keys of messages, that have no effect.
        num_documents: that were read, without blank ones.
        num_blank: documents without text, which are left out.
        num_begun: documents that have the tokenizer's beginning in their text.
        long_documents: documents that are longer than a sample; if they are split, all that go on
            in another sample.
        truncation: what becomes of these.
        num_samples: that train, or are evaluated.
        num_left_out: samples without a target.
        seq_length: tokens a sample, at most.
        is_stream: whether the data is one text, which is cut into samples of equal length.
        num_tokens: of all samples.
        num_starts: tokens with nothing in front, one a sample and one a document packed into it.
        num_targets: tokens that are learned.
        class_counts: targets by class; empty where text is learned.
        parts: the datasets, where several are mixed.
        mixed: the share of each of these, for people.
    """

    source: str
    unused: tuple[str, ...] = ()
    num_documents: int
    num_blank: int = 0
    num_begun: int = 0
    long_documents: LongDocuments = field(default_factory=LongDocuments)
    truncation: Truncation = Truncation.CUT
    num_samples: int
    num_left_out: int = 0
    seq_length: int
    is_stream: bool = False
    num_tokens: int
    num_starts: int
    num_targets: int
    class_counts: Mapping[str, int] = field(default_factory=dict)
    parts: tuple[Summary, ...] = ()
    mixed: str = ""

    @property
    def target_share(self) -> float:
        """Targets of all tokens that could be: one with nothing in front is always only read."""
        return self.num_targets / max(1, self.num_tokens - self.num_starts)

    @property
    def words(self) -> str:
        """All counts in a line, or in a line for each dataset and one for all, for people."""
        if self.parts:
            return "\n".join([*(part.words for part in self.parts), self.mixed])
        length = f"{'' if self.is_stream else 'up to '}{self.seq_length} tokens"
        words = [
            f"{self.source}: {counted(self.num_documents, 'document')}, "
            f"{counted(self.num_samples, 'sample')} of {length}",
            *self.losses(),
        ]
        if self.class_counts:
            words.append(_shares(self.class_counts))
        elif self.target_share < 1.0:
            words.append(f"{self.target_share:.0%} of all tokens are learned, the others only read")
        return "; ".join(words)

    def losses(self) -> list[str]:
        """The documents, tokens and samples that are not learned, with the reason of each."""
        words = []
        if self.num_blank:
            words.append(f"{counted(self.num_blank, 'document')} without text left out")
        if self.long_documents.num_documents and not self.is_stream:
            words.append(self._long_words())
        if self.num_begun:
            begun = counted(self.num_begun, "document")
            words.append(
                f"{begun} with the tokenizer's beginning in the text: it stands there once"
            )
        if self.num_left_out:
            left_out = counted(self.num_left_out, "sample")
            words.append(f"{left_out} without anything to learn left out")
        return words

    def _long_words(self) -> str:
        long = self.long_documents
        documents = counted(long.num_documents, "document")
        if self.truncation is not Truncation.SPLIT:
            documents += f" of more than {self.seq_length} tokens"
        lost = f"{long.num_tokens_lost:,} of {long.num_tokens:,} tokens"
        how = {
            Truncation.CUT: f"cut, which leaves out {lost} of theirs",
            Truncation.DROP: f"dropped, {counted(long.num_tokens, 'token')} in all",
            Truncation.SPLIT: f"split: {lost} of theirs stand in samples without the beginning",
        }[self.truncation]
        options = "--seq-length" if self.class_counts else "--truncation, --seq-length"
        return f"{documents} {how} ({options})"

    def fields(self) -> dict[str, Any]:
        """The counts for JSON."""
        long = self.long_documents
        return {
            "dataset": self.source,
            "not_used": list(self.unused),
            "documents": self.num_documents,
            "blank_documents": self.num_blank,
            "long_documents": {
                "truncation": self.truncation.name.lower(),
                "documents": long.num_documents,
                "tokens": long.num_tokens,
                "lost_tokens": long.num_tokens_lost,
            },
            "samples": self.num_samples,
            "samples_without_targets": self.num_left_out,
            "seq_length": self.seq_length,
            "tokens": self.num_tokens,
            "learned_tokens": self.num_targets,
            "classes": dict(self.class_counts),
            "parts": [part.fields() for part in self.parts],
        }


def mixed_summary(
    parts: Sequence[Summary], counts: TokenCounts, *, source: str, mixed: str
) -> Summary:
    """The summary of several datasets that are mixed.

    Args:
        parts: of each dataset.
        counts: of the samples that were taken of them.
        source: what all are called.
        mixed: the share of each one, for people.
    """
    names = tuple(parts[0].class_counts)
    return Summary(
        source=source,
        unused=tuple(dict.fromkeys(name for part in parts for name in part.unused)),
        num_documents=sum(part.num_documents for part in parts),
        num_blank=sum(part.num_blank for part in parts),
        num_begun=sum(part.num_begun for part in parts),
        long_documents=reduce(LongDocuments.plus, (part.long_documents for part in parts)),
        truncation=parts[0].truncation,
        num_samples=counts.num_samples,
        num_left_out=sum(part.num_left_out for part in parts),
        seq_length=parts[0].seq_length,
        num_tokens=counts.num_tokens,
        num_starts=counts.num_starts,
        num_targets=counts.num_targets,
        class_counts=by_class(names, counts.by_class),
        parts=tuple(parts),
        mixed=mixed,
    )


class TokenCounts(NamedTuple):
    """Counts of rows of samples.

    Attributes:
        num_samples: rows.
        num_tokens: of all.
        num_starts: tokens with nothing in front.
        num_targets: that are learned.
        by_class: targets, by the numbers of classes; empty where text is learned.
    """

    num_samples: int = 0
    num_tokens: int = 0
    num_starts: int = 0
    num_targets: int = 0
    by_class: tuple[int, ...] = ()

    def plus(self, other: TokenCounts) -> TokenCounts:
        """Return the counts of these rows and of others."""
        classes = zip_longest(self.by_class, other.by_class, fillvalue=0)
        return TokenCounts(
            self.num_samples + other.num_samples,
            self.num_tokens + other.num_tokens,
            self.num_starts + other.num_starts,
            self.num_targets + other.num_targets,
            tuple(mine + theirs for mine, theirs in classes),
        )


def counted(number: int, what: str) -> str:
    """`1 sample`, `2,000 samples`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _shares(counts: Mapping[str, int]) -> str:
    """How much of all there is of each class, of the first few."""
    whole = max(1, sum(counts.values()))
    pairs = list(counts.items())
    shares = [f"{name} {count / whole:.1%}" for name, count in pairs[:MOST_CLASSES_SHOWN]]
    more = [f"and {len(pairs) - len(shares)} more"] if len(pairs) > len(shares) else []
    return f"classes {', '.join([*shares, *more])}"


def by_class(names: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """Counts by the names of classes; the last classes may have no count."""
    return dict(zip(names, [*counts, *(0 for _ in names)], strict=False))
