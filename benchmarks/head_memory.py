"""Measure what the loss of a large vocabulary costs, with whole logits and in chunks.

    python -m benchmarks.head_memory

Computes loss and gradients of one microbatch at a stage that is a block and the head of a Qwen3,
by turns with whole logits, as plain autograd does, and in chunks, as the engine does. The block's
output is there before. Reports the most bytes of tensors that were alive beside it and beside
weights and gradients, the processor's time, and how far loss and gradients are apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config

from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.stage.activation_memory import LiveBytes
from swarm_ft.stage.chunked_loss import Chunks
from swarm_ft.stage.module import StageModule
from swarm_ft.stage.weight_products import DeferredLinears

MIB = 1 << 20
Result = tuple[Tensor, Tensor | None]
"""The loss, and the gradient of the hidden states."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a stage, with what it is to compute.

    Attributes:
        stage: has the weights.
        hidden_btc: output of the last block.
        tokens_bt: labels, all of which are learned.
    """

    stage: StageModule
    hidden_btc: Tensor
    tokens_bt: Tensor

    @property
    def num_targets(self) -> int:
        """Count the tokens that are learned."""
        return self.tokens_bt[:, 1:].numel()

    def whole(self) -> Result:
        """Compute the loss and the hidden states' gradient with whole logits."""
        hidden_btc = self.hidden_btc.detach().requires_grad_()
        loss = self.stage.loss_sum(hidden_btc, self.tokens_bt)
        (loss / self.num_targets).backward()
        return loss.detach(), hidden_btc.grad

    def chunked(self) -> Result:
        """Compute the same in chunks."""
        hidden_btc = self.hidden_btc.detach().requires_grad_()
        rows, targets_n = self.stage.select(hidden_btc, self.tokens_bt)
        chunks, linears = (
            Chunks(rows, targets_n, self.stage.num_outputs),
            DeferredLinears(self.stage),
        )

        def complete() -> None:
            for product in linears.take():
                product.accumulate()

        loss, gradient = chunks.loss_and_gradient(self.stage.judge, self.num_targets, complete)
        linears.restore()
        rows.backward(gradient)
        return loss, hidden_btc.grad

    def evaluated_whole(self) -> Result:
        """Compute the loss alone with whole logits."""
        with torch.no_grad():
            loss = self.stage.loss_sum(self.hidden_btc, self.tokens_bt)
        return loss, None

    def evaluated(self) -> Result:
        """Compute the loss alone in chunks."""
        linears = DeferredLinears(self.stage)
        with torch.no_grad():
            selected = self.stage.select(self.hidden_btc, self.tokens_bt)
            chunks = Chunks(*selected, self.stage.num_outputs)
            loss, _ = chunks.evaluate(self.stage.judge, is_counted=False)
        linears.restore()
        return loss, None


Compute = Callable[[], Result]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The memory and the results of one way to compute.

    Attributes:
        peak_bytes: of tensors that were alive at once beside those from before.
        loss: the sum.
        gradients: of the hidden states, and of the head where it trains.
    """

    peak_bytes: int
    loss: float
    gradients: tuple[Tensor, ...]


def main() -> None:
    """Print one row for each of training, a frozen head and evaluation."""
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n")
    for name in options.cases.split(",") if options.cases else CASES:
        sys.stdout.write(f"{_row(name, options)}\n")
        sys.stdout.flush()


COLUMNS = (
    *("what", "whole: MiB", "CPU s", "in chunks: MiB", "CPU s", "of the whole's time"),
    *("loss apart", "gradients apart"),
)
CASES = ("training", "frozen head", "evaluation")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--tokens", type=int, default=4096, help="of one sample; one less is learned"
    )
    parser.add_argument("--words", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bfloat16", action="store_true", help="compute in autocast")
    parser.add_argument("--cases", default="", help="with commas; all, if none is named")
    return parser


def _row(name: str, options: argparse.Namespace) -> str:
    head = _head(options, trains=name != "frozen head")
    is_evaluation = name == "evaluation"
    ways: tuple[Compute, Compute] = (
        (head.evaluated_whole, head.evaluated) if is_evaluation else (head.whole, head.chunked)
    )
    whole, chunked = (_counted(head, way, options) for way in ways)
    rounds = []
    for number in range(options.repeats):
        ordered = ways if number % 2 == 0 else ways[::-1]
        pair = [_timed(head, way, options) for way in ordered]
        rounds.append(pair if number % 2 == 0 else pair[::-1])
    whole_s, chunked_s = map(statistics.median, zip(*rounds, strict=True))
    ratio = statistics.median(chunked_s / whole_s for whole_s, chunked_s in rounds)
    apart = [_apart(*pair) for pair in zip(whole.gradients, chunked.gradients, strict=True)]
    cells = (
        *(name, f"{whole.peak_bytes / MIB:.1f}", f"{whole_s:.1f}"),
        *(f"{chunked.peak_bytes / MIB:.1f}", f"{chunked_s:.1f}", f"{ratio:.3f}"),
        *(f"{abs(chunked.loss / whole.loss - 1):.1e}", f"{max(apart):.1e}"),
    )
    return f"| {' | '.join(cells)} |"


def _head(options: argparse.Namespace, *, trains: bool) -> Head:
    config = Qwen3Config(
        hidden_size=options.hidden,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=options.words,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    stage = StageModule(config, LayerRange(1, 2))
    weights = {name: 0.02 * torch.randn(one.shape) for name, one in stage.named_parameters()}
    stage.materialise(weights, torch.device("cpu"))
    stage.requires_grad_(trains)
    for parameter in stage.parameters():  # as after an earlier microbatch
        parameter.grad = torch.zeros_like(parameter) if trains else None
    stage.eval()
    hidden_btc = torch.randn(1, options.tokens, options.hidden)
    tokens_bt = torch.randint(options.words, (1, options.tokens))
    return Head(stage, hidden_btc, tokens_bt)


def _counted(head: Head, compute: Compute, options: argparse.Namespace) -> Measurement:
    """Count the tensors that are alive, which takes time."""
    live = LiveBytes()
    with live:
        before = [one.view_as(one) for one in _present(head)]  # seen now, not when it is used
        live.begin()
        before_bytes = live.now
        loss, gradient = _computed(head, compute, options)
    del before
    weight = head.stage.head_weight
    gradients = tuple(one.clone() for one in (gradient, weight.grad) if one is not None)
    return Measurement(live.most - before_bytes, loss.item(), gradients)


def _timed(head: Head, compute: Compute, options: argparse.Namespace) -> float:
    """Measure the processor's time in seconds."""
    began_s = time.process_time()
    _computed(head, compute, options)
    return time.process_time() - began_s


def _computed(head: Head, compute: Compute, options: argparse.Namespace) -> Result:
    weight = head.stage.head_weight
    if weight.grad is not None:
        weight.grad.zero_()
    with torch.autocast("cpu", torch.bfloat16, options.bfloat16):
        return compute()


def _present(head: Head) -> list[Tensor]:
    """List what was there before: weights, their gradients, the last block's output."""
    weights = list(head.stage.parameters())
    gradients = [one.grad for one in weights if one.grad is not None]
    return [*(one.detach() for one in weights), *gradients, head.hidden_btc]


def _apart(one: Tensor, other: Tensor) -> float:
    """Norm of the difference, relative."""
    norm = float(one.double().norm())
    return float((one.double() - other.double()).norm()) / norm if norm else 0.0


if __name__ == "__main__":
    main()
