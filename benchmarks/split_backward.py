"""The cost of a backward pass in two parts, and the memory that a microbatch holds meanwhile.

    python -m benchmarks.split_backward --layers 4 --hidden 256 --seq-length 128

Computes some microbatches in flight with two copies of a stage in the middle of a GPT-2, one with
plain autograd and one whose weights' gradients come after all backwards, by turns, and prints the
medians of the processor's time. Then a third one holds them, after their forwards and after their
backwards, and the process's resident memory is set beside what the stage counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config

from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.stage.activation_memory import MicrobatchMemory, Storages
from swarm_ft.stage.module import StageModule
from swarm_ft.stage.weight_products import DeferredLinears, WeightProduct

WARM_UP = 3


def main() -> None:
    """Run the command."""
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    # First of all: later there is memory that the process has had, and uses again.
    for row in (_memory(options), _times(options)):
        sys.stdout.write(f"{json.dumps(row)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="blocks of the stage")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4, help="of a microbatch")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--in-flight", type=int, default=8, help="microbatches at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bfloat16", action="store_true")
    return parser


def _times(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a microbatch of each part, and what the parts take more than the whole."""
    plain, split = _stage(options), _stage(options)
    linears = DeferredLinears(split)
    rounds = []
    for _ in range(WARM_UP + options.repeats):
        whole_s = _backwards_s(plain, options, lambda: None)
        b_s, w_s = _parts_s(split, linears, options)
        rounds.append((whole_s, b_s, w_s, b_s + w_s))
    columns = list(zip(*rounds[WARM_UP:], strict=True))
    medians = [1e3 * statistics.median(column) / options.in_flight for column in columns]
    row = dict(zip(("plain_ms", "B_ms", "W_ms", "both_ms"), medians, strict=True))
    ratio = statistics.median(both / whole for whole, _, _, both in rounds[WARM_UP:])
    row["overhead_percent"] = 100 * (ratio - 1)
    return {name: round(value, 2) for name, value in row.items()}


def _memory(options: argparse.Namespace) -> dict[str, float]:
    """MiB that a microbatch holds, as counted and as the system sees it."""
    stage, memory, mib = _stage(options), MicrobatchMemory(), 1 << 20
    linears = DeferredLinears(stage)
    _forward(stage, _input(options), options).sum().backward()
    _complete(linears.take())  # there are gradients now
    begin = _resident_bytes()
    outputs = []
    for _ in range(options.in_flight):
        x = _input(options)
        with memory.measuring(x, but=stage) as storages:
            outputs.append(_forward(stage, x, options))
            storages.add(outputs[-1])
    after_forward = (_resident_bytes() - begin) / options.in_flight
    products = []
    while outputs:
        outputs.pop(0).sum().backward()
        products.append(linears.take())
    after_backward = (_resident_bytes() - begin) / options.in_flight
    left = Storages.of(tensor for product in products[0] for tensor in product.tensors)
    figures = {
        "counted_after_forward_mib": memory.most,
        "resident_after_forward_mib": after_forward,
        "counted_after_backward_mib": left.num_bytes,
        "resident_after_backward_mib": after_backward,
    }
    return {name: round(value / mib, 2) for name, value in figures.items()}


def _stage(options: argparse.Namespace) -> StageModule:
    return middle_stage(options.layers, options.hidden, options.seq_length, num_heads=4)


def middle_stage(layers: int, hidden: int, seq_length: int, *, num_heads: int) -> StageModule:
    """Make blocks of a GPT-2 in its middle, with random weights, on the CPU."""
    sizes = {"n_embd": hidden, "n_head": num_heads, "n_positions": seq_length}
    config = GPT2Config(n_layer=layers + 2, vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes)
    stage = StageModule(config, LayerRange(1, 1 + layers))
    shapes = {name: parameter.shape for name, parameter in stage.named_parameters()}
    weights = {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}
    stage.materialise(weights, torch.device("cpu"))
    stage.eval()
    return stage


def _input(options: argparse.Namespace) -> Tensor:
    return torch.randn(options.samples, options.seq_length, options.hidden, requires_grad=True)


def _forward(stage: StageModule, x: Tensor, options: argparse.Namespace) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, options.bfloat16):
        output: Tensor = stage(x)
    return output.float()


def _backwards_s(
    stage: StageModule, options: argparse.Namespace, after_each: Callable[[], None]
) -> float:
    """Seconds that the backwards take of microbatches that all had their forward before."""
    outputs = [_forward(stage, _input(options), options) for _ in range(options.in_flight)]
    gradient = torch.randn(outputs[0].shape)

    def backwards() -> None:
        while outputs:
            torch.autograd.backward(outputs.pop(0), gradient)
            after_each()

    return _timed(backwards)


def _parts_s(
    stage: StageModule, linears: DeferredLinears, options: argparse.Namespace
) -> tuple[float, float]:
    """Seconds of all backwards, and then of all weights' gradients, the oldest first."""
    left: list[list[WeightProduct]] = []
    b_s = _backwards_s(stage, options, lambda: left.append(linears.take()))

    def weights() -> None:
        while left:
            _complete(left.pop(0))

    return b_s, _timed(weights)


def _complete(products: list[WeightProduct]) -> None:
    while products:
        products.pop().accumulate()


def _timed(function: Callable[[], object]) -> float:
    began_s = time.process_time()
    function()
    return time.process_time() - began_s


def _resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
