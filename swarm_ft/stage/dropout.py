"""Dropout that draws the same numbers in every replay. Knows torch's generators, no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.digest import digest_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutSeeds:
    """Seeds of one microbatch in one step, one for each block and one for the embeddings.

    Each place has its own seed and no place reads the generator's state of another, so the order
    in which blocks, stages or microbatches are computed, or computed again, changes nothing.
    Torch's CPU generator is one for the whole process: only one thread of it may draw.
    """

    seed: int
    step: StepNumber
    microbatch: MicrobatchIndex

    @contextmanager
    def drawing_at(self, place: str, device: torch.device) -> Iterator[None]:
        """Seed torch's generators for what runs inside; they are put back afterwards.

        Args:
            place: a part's name, see `architecture.block_part`.
            device: where the part computes.
        """
        text = f"{self.seed}/{self.step}/{self.microbatch}/{place}"
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            # 63 bits: what every torch generator takes.
            torch.manual_seed(int.from_bytes(digest_of(text.encode())[:8], "little") >> 1)
            yield
