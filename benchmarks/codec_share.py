"""The share of a stage's compute that its codecs take: both codecs, a microbatch, one thread.

    python -m benchmarks.codec_share                       # four blocks of GPT-2 XL's width
    python -m benchmarks.codec_share --forward-codecs aq4,aqk0.5 --backward-codecs q8,q1+z

A stage in the middle reads an activation and a gradient, and writes as many: each codec is counted
once each way. To be run on a quiet machine. What is sent along directions has a sixteenth of the
channels' number of them, as in `swarm-ft bench codec`. Learning a basis is left out: it happens
some five times in a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch

from benchmarks.split_backward import middle_stage
from swarm_ft.cli.codec_speed import SpeedRow, measure
from swarm_ft.codec.spec import Direction, parse_codec_spec

CPU = torch.device("cpu")


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    compute_s = _compute_s(options)
    sys.stdout.write(f"{json.dumps({'layers': options.layers, 'compute_s': compute_s})}\n")
    texts = {Direction.FORWARD: options.forward_codecs, Direction.BACKWARD: options.backward_codecs}
    for way, named in texts.items():
        specs = [parse_codec_spec(text, way) for text in named.split(",")]
        shape = options.seq_length, options.hidden
        for row in measure(specs, [shape], devices=[CPU], repeats=options.repeats):
            row_cells = {"codec": row.codec, "share": _seconds(row) / compute_s}
            row_cells |= {"bits": row.bits_a_value, "encode_and_decode_s": _seconds(row)}
            sys.stdout.write(f"{json.dumps({**row_cells, 'way': way.name.lower()})}\n")


def _seconds(row: SpeedRow) -> float:
    gigabytes = 4e-9 * row.tokens * row.channels
    return gigabytes / row.encode_gb_s + gigabytes / row.decode_gb_s


def _compute_s(options: argparse.Namespace) -> float:
    """Measure a forward and a backward pass of one sample, after one that does not count."""
    stage = middle_stage(options.layers, options.hidden, options.seq_length, num_heads=25)
    seconds = []
    shape = 1, options.seq_length, options.hidden
    for _ in range(1 + options.repeats):
        x = torch.randn(shape, requires_grad=True)
        began_s = time.perf_counter()
        output = stage(x)
        torch.autograd.backward(output, torch.ones_like(output))
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="blocks of the stage")
    parser.add_argument("--hidden", type=int, default=1600)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--forward-codecs", default="aq4,aq3+z,aqk0.4,qk0.3")
    parser.add_argument("--backward-codecs", default="q8,q3+z,q1+z")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


if __name__ == "__main__":
    main()
