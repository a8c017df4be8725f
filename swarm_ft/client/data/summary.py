"""Counts of samples and their summary for people. Pure."""

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
        source: Name of the dataset.
        unused: Columns, and keys of messages, without effect.
        num_documents: Documents read, without blank ones.
        num_blank: Blank documents, which are left out.
        num_with_leading_tokens: Documents whose text already begins with such tokens.
        long_documents: Counts of documents longer than a sample; with splitting, of all that
            continue
            in another sample.
        truncation: Treatment of long documents.
        num_samples: Samples to train on or to evaluate.
        num_left_out: Samples without a target.
        seq_length: Maximum number of tokens of a sample.
        is_stream: Whether the data is one text, cut into samples of equal length.
        num_tokens: Tokens of all samples.
        num_starts: First tokens, one for each sample and each further document packed into it.
        num_targets: Learned tokens.
        class_counts: Targets by class; empty for language modelling.
        parts: Summaries of mixed datasets.
        mixed: Share of each mixed dataset, for people.
    """

    source: str
    unused: tuple[str, ...] = ()
    num_documents: int
    num_blank: int = 0
    num_with_leading_tokens: int = 0
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
        """Share of learned tokens; first tokens do not count, because they cannot be learned."""
        return self.num_targets / max(1, self.num_tokens - self.num_starts)

    @property
    def line(self) -> str:
        """Counts as one line, or one line for each mixed dataset and one for all, for people."""
        if self.parts:
            return "\n".join([*(part.line for part in self.parts), self.mixed])
        length = f"{'' if self.is_stream else 'up to '}{self.seq_length} tokens"
        words = [
            f"{self.source}: {count_phrase(self.num_documents, 'document')}, "
            f"{count_phrase(self.num_samples, 'sample')} of {length}",
            *self.losses(),
        ]
        if self.class_counts:
            words.append(_shares(self.class_counts))
        elif self.target_share < 1.0:
            words.append(f"{self.target_share:.0%} of all tokens are learned, the others only read")
        return "; ".join(words)

    def losses(self) -> list[str]:
        """Return what is not learned (documents, tokens, samples) with the reasons, for people."""
        words = []
        if self.num_blank:
            words.append(f"{count_phrase(self.num_blank, 'document')} without text left out")
        if self.long_documents.num_documents and not self.is_stream:
            words.append(self._long_words())
        if self.num_with_leading_tokens:
            begun = count_phrase(self.num_with_leading_tokens, "document")
            words.append(
                f"{begun} already with the tokenizer's leading tokens, which are not added again"
            )
        if self.num_left_out:
            left_out = count_phrase(self.num_left_out, "sample")
            words.append(f"{left_out} without learned tokens left out")
        return words

    def _long_words(self) -> str:
        long = self.long_documents
        documents = count_phrase(long.num_documents, "document")
        if self.truncation is not Truncation.SPLIT:
            documents += f" of more than {self.seq_length} tokens"
        lost = f"{long.num_tokens_lost:,} of {long.num_tokens:,} tokens"
        how = {
            Truncation.CUT: f"truncated, losing {lost}",
            Truncation.DROP: f"dropped, {count_phrase(long.num_tokens, 'token')} in all",
            Truncation.SPLIT: f"split, with {lost} in samples without the document's beginning",
        }[self.truncation]
        options = "--seq-length" if self.class_counts else "--truncation, --seq-length"
        return f"{documents} {how} ({options})"

    def fields(self) -> dict[str, Any]:
        """Return the counts for JSON."""
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
    """Return the summary of mixed datasets.

    Args:
        parts: Summary of each dataset.
        counts: Counts of the mixture's samples.
        source: Name of the mixture.
        mixed: Share of each dataset, for people.
    """
    names = tuple(parts[0].class_counts)
    return Summary(
        source=source,
        unused=tuple(dict.fromkeys(name for part in parts for name in part.unused)),
        num_documents=sum(part.num_documents for part in parts),
        num_blank=sum(part.num_blank for part in parts),
        num_with_leading_tokens=sum(part.num_with_leading_tokens for part in parts),
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
    """Counts of sample rows.

    Attributes:
        num_samples: Number of rows.
        num_tokens: Number of tokens.
        num_starts: Number of first tokens of documents.
        num_targets: Number of learned tokens.
        by_class: Targets by number of class; empty for language modelling.
    """

    num_samples: int = 0
    num_tokens: int = 0
    num_starts: int = 0
    num_targets: int = 0
    by_class: tuple[int, ...] = ()

    def plus(self, other: TokenCounts) -> TokenCounts:
        """Return the sum of both counts."""
        classes = zip_longest(self.by_class, other.by_class, fillvalue=0)
        return TokenCounts(
            self.num_samples + other.num_samples,
            self.num_tokens + other.num_tokens,
            self.num_starts + other.num_starts,
            self.num_targets + other.num_targets,
            tuple(mine + theirs for mine, theirs in classes),
        )


def count_phrase(number: int, what: str) -> str:
    """Return a number with its noun: `1 sample`, `2,000 samples`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def _shares(counts: Mapping[str, int]) -> str:
    """Return the shares of the first few classes, for people."""
    whole = max(1, sum(counts.values()))
    pairs = list(counts.items())
    shares = [f"{name} {count / whole:.1%}" for name, count in pairs[:MOST_CLASSES_SHOWN]]
    more = [f"and {len(pairs) - len(shares)} more"] if len(pairs) > len(shares) else []
    return f"classes {', '.join([*shares, *more])}"


def by_class(names: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """Return counts by name of class; missing counts are 0."""
    return dict(zip(names, [*counts, *(0 for _ in names)], strict=False))
