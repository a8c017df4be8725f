"""Measure how much text a stage in the middle can read back from the activations it receives.

    python -m benchmarks.activation_inversion [--samples 4] [--json]

The attack is a greedy search. The attacker knows the public start weights and decodes the frames of
one boundary. For each position it runs every token of the vocabulary behind the prefix found so far
through the blocks below the boundary, and takes the token with the nearest activation. The script
trains a small GPT-2 on drawn sequences, in place of public weights, then fine-tunes a copy on other
sequences, and attacks frames of both: those of a sample's first visit, and those of later steps.
"""

from __future__ import annotations

import argparse
import copy
import json
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from swarm_ft.codec import from_spec
from swarm_ft.codec.spec import Direction, parse_codec_spec

VOCABULARY, TOKENS, BLOCKS, CHANNELS = 1000, 16, 8, 128
BOUNDARIES = (2, 4, 6)
CODECS = ("none", "q4+z", "qk0.5", "q1+z", "q1+d+z")
"""Codecs of first activations; `q4+z` is the default of `--key`."""
PUBLIC_STEPS, TUNED_STEPS, BATCH, PUBLIC_RATE, TUNED_RATE = 400, 60, 16, 1e-3, 5e-4


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The share of tokens that the search finds at one boundary.

    Attributes:
        boundary: the number of blocks below it, of `BLOCKS`.
        codec: the spec of the frames.
        first_visit: of all tokens, with the start weights at both sides.
        after_tuning: of all tokens, once the run trained for `TUNED_STEPS`.
    """

    boundary: int
    codec: str
    first_visit: float
    after_tuning: float


def sequences(seed: int, count: int, length: int = TOKENS) -> Tensor:
    """Draw sequences whose next token follows from the last by one of four successors.

    Returns:
        int64 [count, length].
    """
    draws = torch.Generator().manual_seed(seed)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=draws)
    rows = [torch.randint(VOCABULARY, (count,), generator=draws)]
    for _ in range(length - 1):
        choice = torch.randint(4, (count,), generator=draws)
        rows.append(successors[rows[-1], choice])
    return torch.stack(rows, dim=1)


def new_model(seed: int) -> GPT2LMHeadModel:
    """Build the model of this study with random weights."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=CHANNELS, n_layer=BLOCKS, n_head=4
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def train(model: GPT2LMHeadModel, data_seed: int, steps: int, rate: float) -> None:
    """Train all weights with AdamW on drawn sequences."""
    data, optimizer = (
        sequences(data_seed, steps * BATCH),
        torch.optim.AdamW(model.parameters(), rate),
    )
    for batch in data.split(BATCH):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def activations(model: GPT2LMHeadModel, tokens: Tensor, boundary: int) -> Tensor:
    """Compute what crosses a boundary.

    Returns:
        float32 [samples, tokens, channels].
    """
    states = model.transformer(tokens, output_hidden_states=True, use_cache=False).hidden_states
    return states[boundary]


def recovered(model: GPT2LMHeadModel, frame: Tensor, boundary: int) -> Tensor:
    """Search for the tokens of a frame, one position after the other.

    Args:
        model: with the public start weights.
        frame: decoded, float32 [tokens, channels].
        boundary: the number of blocks below it.

    Returns:
        int64 [tokens].
    """
    prefix = torch.empty(0, dtype=torch.int64)
    for target in frame:
        candidates = torch.arange(VOCABULARY).unsqueeze(1)
        rows = torch.cat([prefix.expand(VOCABULARY, -1), candidates], dim=1)
        seen = activations(model, rows, boundary)[:, -1]
        nearest = (seen - target).square().sum(dim=1).argmin()
        prefix = torch.cat([prefix, nearest.unsqueeze(0)])
    return prefix


def decoded(codec: str, frame: Tensor) -> Tensor:
    """Pass a frame through a codec as a sample's first activation."""
    spec = parse_codec_spec(codec, Direction.FORWARD)
    return from_spec(spec).encode_and_decode(frame)[1]


def share_found(
    public: GPT2LMHeadModel, sender: GPT2LMHeadModel, codec: str, boundary: int, samples: Tensor
) -> float:
    """Attack every sample's frame; the share of all tokens that the search finds."""
    frames = activations(sender, samples, boundary)
    found = [recovered(public, decoded(codec, frame), boundary) for frame in frames]
    return float((torch.stack(found) == samples).float().mean())


def study(num_samples: int) -> list[Recovery]:
    """Attack all boundaries with all codecs, at the first visit and after fine-tuning."""
    public = new_model(0)
    train(public, data_seed=1, steps=PUBLIC_STEPS, rate=PUBLIC_RATE)
    tuned = copy.deepcopy(public)
    train(tuned, data_seed=2, steps=TUNED_STEPS, rate=TUNED_RATE)
    samples = sequences(2, TUNED_STEPS * BATCH)[:num_samples]
    return [
        Recovery(
            boundary=boundary,
            codec=codec,
            first_visit=share_found(public, public, codec, boundary, samples),
            after_tuning=share_found(public, tuned, codec, boundary, samples),
        )
        for codec in CODECS
        for boundary in BOUNDARIES
    ]


def main() -> None:
    """Print the table, or with `--json` a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = study(args.samples)
    if args.json:
        print("\n".join(json.dumps(asdict(row)) for row in rows))  # noqa: T201
        return
    print(f"tokens found of {args.samples} samples of {TOKENS}")  # noqa: T201
    print(f"{'codec':>8}  {'after block':>11}  {'first visit':>11}  {'after tuning':>12}")  # noqa: T201
    for row in rows:
        where = f"{row.boundary} of {BLOCKS}"
        print(f"{row.codec:>8}  {where:>11}  {row.first_visit:>11.0%}  {row.after_tuning:>12.0%}")  # noqa: T201


if __name__ == "__main__":
    main()
