"""Samples that several documents share: where each document lies, and how blocks keep them apart.

Most families let transformers do it: positions that begin anew mark a document, and its masks
(`masking_utils`) follow them. A few ignore such positions, or carry a state from token to token;
of these each document is computed as a sample of its own. No config says which way a family goes,
so a stage tries it on a few tokens, as `stage.kept` does for texts.

Shapes: B samples, T tokens, C channels; D documents of a group, L tokens of its longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from swarm_ft.log import get_logger
from swarm_ft.stage.rope import KindOf

_log = get_logger(__name__)

TRIED: Sequence[tuple[int, ...]] = ((5, 3, 4), (2, 8))
"""Documents of two samples, by which a stage is tried; the second sample is padded."""
MASKED_TOKENS = 2048
"""Longest samples that masks keep apart: a mask has as many values as the square of that.

Longer ones are computed faster document by document, on a CPU from about 1,024 tokens on.
"""
TRIED_SIZE = len(TRIED), max(map(sum, TRIED))
TRIED_RTOL = 1e-4
"""Largest distance of a token's output, relative to its norm, that rounding accounts for."""

SomeLengths = Sequence[int | tuple[int, ...]]


def _documents(lengths: SomeLengths) -> list[tuple[int, ...]]:
    return [one if isinstance(one, tuple) else (one,) for one in lengths]


def positions_in(lengths: SomeLengths, num_tokens: int) -> Tensor:
    """Position of each token in its document, int64 [B, T]; padding is a document of its own.

    Args:
        lengths: see `Lengths`.
        num_tokens: T.
    """
    rows = []
    for documents in _documents(lengths):
        parts = [*documents, num_tokens - sum(documents)]
        rows.append(torch.cat([torch.arange(part) for part in parts]))
    return torch.stack(rows)


@dataclass(frozen=True, slots=True)
class Group:
    """Documents of similar length, which are computed as samples of one microbatch.

    Attributes:
        places: index of each token in the flat microbatch [B T], int64 [D, L]; in padding that of
            the document's first token.
        is_token: bool [D, L], false in padding.
    """

    places: Tensor
    is_token: Tensor

    def taken_from(self, x: Tensor) -> Tensor:
        """The documents [D, L, ...] in a microbatch [B, T, ...]."""
        return x.flatten(0, 1)[self.places.to(x.device)]


def groups_of(
    lengths: SomeLengths, num_tokens: int, kind_of: KindOf = lambda _length: 0
) -> list[Group]:
    """Group all documents so that padding is less than half of each group.

    Args:
        lengths: see `Lengths`.
        num_tokens: T.
        kind_of: equal for lengths of documents that may be in one group.
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


def _group(documents: Sequence[tuple[int, int]]) -> Group:
    lengths, starts = (torch.tensor(one)[:, None] for one in zip(*documents, strict=True))
    offsets = torch.arange(int(lengths.max()))[None]
    is_token = offsets < lengths
    return Group(starts + offsets * is_token, is_token)


def put_back(groups: Sequence[Group], outputs: Sequence[Tensor], size: torch.Size) -> Tensor:
    """Lay the outputs of groups out as a microbatch [B, T, ...], with zeros in padding.

    Args:
        groups: of all documents of the microbatch.
        outputs: of each group, [D, L, ...] or [D L, ...].
        size: [B, T].
    """
    device = outputs[0].device
    masks = [group.is_token.flatten().to(device) for group in groups]
    places = torch.cat([group.places[group.is_token] for group in groups]).to(device)
    # A router's output has samples and tokens in one dimension.
    channels = outputs[0].shape[-1]
    values = [one.reshape(-1, channels)[mask] for one, mask in zip(outputs, masks, strict=True)]
    flat = values[0].new_zeros(size.numel(), channels)
    return flat.index_copy(0, places, torch.cat(values)).view(*size, channels)


# ---- both ways


Outputs = tuple[Tensor, tuple[Tensor, ...]]
"""Hidden states [B, T, C], and what each router gives, [B T, experts]."""


class Run(Protocol):
    """A stage's blocks, in a microbatch of one document a sample as far as they know."""

    def __call__(self, x: Tensor, part: int = 0, **named: Tensor) -> Outputs:
        """Compute them.

        Args:
            x: tokens [B, T] or hidden states [B, T, C].
            part: of the microbatch, for the seeds of dropout.
            named: more arguments of the family's forward.
        """


def together(run: Run, x: Tensor, lengths: SomeLengths) -> Outputs:
    """Compute samples as they are: their positions tell transformers' masks the documents."""
    return run(x, position_ids=positions_in(lengths, x.shape[1]).to(x.device))


def apart(
    run: Run, x: Tensor, lengths: SomeLengths, kind_of: KindOf = lambda _length: 0
) -> Outputs:
    """Compute each document as a sample of its own; see `groups_of`."""
    groups, size = groups_of(lengths, x.shape[1], kind_of), x.shape[:2]
    results = [run(group.taken_from(x), part) for part, group in enumerate(groups)]
    outputs, logits = zip(*results, strict=True)
    of_routers = (put_back(groups, one, size) for one in zip(*logits, strict=True))
    return put_back(groups, outputs, size), tuple(one.flatten(0, 1) for one in of_routers)


def masks_documents(run: Run, x: Tensor) -> bool:
    """Whether a stage gives for documents that share a sample the same as for each alone.

    Args:
        run: the stage, in eval mode.
        x: its input, [*TRIED_SIZE] or [*TRIED_SIZE, C].
    """
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            expected, found = (way(run, x, TRIED)[0] for way in (apart, together))
    except Exception as error:  # noqa: BLE001 - of some family's own code, for any reason
        _log.info("documents-not-masked: %s: %s", type(error).__name__, error)
        return False
    is_token = expected.abs().sum(dim=-1) > 0
    distance = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return bool((distance[is_token] <= TRIED_RTOL).all())
