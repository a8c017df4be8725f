"""Samples with several documents: where each lies, and how blocks keep them apart.

In most families transformers does it: positions that restart mark a document, and its masks
(`masking_utils`) follow them. A few families ignore such positions, or carry state from token to
token; there each document is computed as a sample of its own. No config has a family's kind,
so that a stage tries it on a few tokens, as `stage.kv_cache` does for texts.

Shapes: B samples, T tokens, C channels; D documents of a group, L tokens of its longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from swarm_ft.base.log import get_logger
from swarm_ft.stage.rope import KindOf

_log = get_logger(__name__)

TRIAL_DOCUMENTS: Sequence[tuple[int, ...]] = ((5, 3, 4), (2, 8))
"""Documents of the two samples in a trial; the second sample is padded."""
MASKED_TOKENS = 2048
"""Longest samples for which masks are used; a mask has the square of that as values.

Longer samples are faster document by document, on a CPU from about 1,024 tokens on.
"""
TRIAL_SIZE = len(TRIAL_DOCUMENTS), max(map(sum, TRIAL_DOCUMENTS))
TRIAL_RTOL = 1e-4
"""Largest difference of a token's output, relative to its norm, that rounding accounts for."""

SomeLengths = Sequence[int | tuple[int, ...]]


def _documents(lengths: SomeLengths) -> list[tuple[int, ...]]:
    return [one if isinstance(one, tuple) else (one,) for one in lengths]


def positions_in(lengths: SomeLengths, num_tokens: int) -> Tensor:
    """Return the position of each token in its document, int64 [B, T]; padding is a document too.

    Args:
        lengths: See `Lengths`.
        num_tokens: Number of tokens T.
    """
    rows = []
    for documents in _documents(lengths):
        parts = [*documents, num_tokens - sum(documents)]
        rows.append(torch.cat([torch.arange(part) for part in parts]))
    return torch.stack(rows)


@dataclass(frozen=True, slots=True)
class DocumentGroup:
    """Documents of similar length, computed as samples of one microbatch.

    Attributes:
        places: Index of each token in the flat microbatch [B T], int64 [D, L]; padding has that of
            the document's first token.
        is_token: Mask, bool [D, L], False in padding.
    """

    places: Tensor
    is_token: Tensor

    def gather(self, x: Tensor) -> Tensor:
        """Return the documents [D, L, ...] of a microbatch [B, T, ...]."""
        return x.flatten(0, 1)[self.places.to(x.device)]


def groups_of(
    lengths: SomeLengths, num_tokens: int, kind_of: KindOf = lambda _length: 0
) -> list[DocumentGroup]:
    """Group all documents so that padding is less than half of each group.

    Args:
        lengths: See `Lengths`.
        num_tokens: Number of tokens T.
        kind_of: Returns equal values for lengths that may share a group.
    """
    found = []
    for row, documents in enumerate(_documents(lengths)):
        starts = accumulate(documents, initial=row * num_tokens)
        found += list(zip(documents, starts, strict=False))
    found.sort(key=lambda one: -one[0])
    groups: list[list[tuple[int, int]]] = []
    for length, start in found:
        longest = groups[-1][0][0] if groups else length
        if not groups or 2 * length <= longest or kind_of(length) != kind_of(longest):
            groups.append([])
        groups[-1].append((length, start))
    return [_group(group) for group in groups]


def _group(documents: Sequence[tuple[int, int]]) -> DocumentGroup:
    lengths, starts = (torch.tensor(one)[:, None] for one in zip(*documents, strict=True))
    offsets = torch.arange(int(lengths.max()))[None]
    is_token = offsets < lengths
    return DocumentGroup(starts + offsets * is_token, is_token)


def scatter_outputs(
    groups: Sequence[DocumentGroup], outputs: Sequence[Tensor], size: torch.Size
) -> Tensor:
    """Return the outputs of groups as a microbatch [B, T, ...], with zeros in padding.

    Args:
        groups: Groups of all documents of the microbatch.
        outputs: Output of each group, [D, L, ...] or [D L, ...].
        size: Size [B, T] of the microbatch.
    """
    device = outputs[0].device
    masks = [group.is_token.flatten().to(device) for group in groups]
    places = torch.cat([group.places[group.is_token] for group in groups]).to(device)
    # A router's output has samples and tokens in one dimension.
    channels = outputs[0].shape[-1]
    values = [one.reshape(-1, channels)[mask] for one, mask in zip(outputs, masks, strict=True)]
    flat = values[0].new_zeros(size.numel(), channels)
    return flat.index_copy(0, places, torch.cat(values)).view(*size, channels)


# ---- documents together and apart


Outputs = tuple[Tensor, tuple[Tensor, ...]]
"""Hidden states [B, T, C], and the output of each router, [B T, experts]."""


class Run(Protocol):
    """A stage's blocks, for a microbatch whose samples they take for one document each."""

    def __call__(self, x: Tensor, part: int = 0, **named: Tensor) -> Outputs:
        """Compute the blocks.

        Args:
            x: Tokens [B, T] or hidden states [B, T, C].
            part: Part of the microbatch, for the seeds of dropout.
            named: More arguments of the family's forward.
        """


def compute_packed(run: Run, x: Tensor, lengths: SomeLengths) -> Outputs:
    """Compute samples unchanged; their positions mark the documents for transformers' masks."""
    return run(x, position_ids=positions_in(lengths, x.shape[1]).to(x.device))


def compute_separately(
    run: Run, x: Tensor, lengths: SomeLengths, kind_of: KindOf = lambda _length: 0
) -> Outputs:
    """Compute each document as a sample of its own; see `groups_of`."""
    groups, size = groups_of(lengths, x.shape[1], kind_of), x.shape[:2]
    results = [run(group.gather(x), part) for part, group in enumerate(groups)]
    outputs, logits = zip(*results, strict=True)
    of_routers = (scatter_outputs(groups, one, size) for one in zip(*logits, strict=True))
    return scatter_outputs(groups, outputs, size), tuple(one.flatten(0, 1) for one in of_routers)


def masks_documents(run: Run, x: Tensor) -> bool:
    """Whether a stage computes the same for documents that share a sample as for each alone.

    Args:
        run: Stage in eval mode.
        x: Input, [*TRIED_SIZE] or [*TRIED_SIZE, C].
    """
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            expected, found = (
                way(run, x, TRIAL_DOCUMENTS)[0] for way in (compute_separately, compute_packed)
            )
    except Exception as error:  # noqa: BLE001 - a family's own code may raise anything
        _log.info("documents-not-masked: %s: %s", type(error).__name__, error)
        return False
    is_token = expected.abs().sum(dim=-1) > 0
    distance = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return bool((distance[is_token] <= TRIAL_RTOL).all())
