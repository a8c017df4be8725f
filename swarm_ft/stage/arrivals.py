"""Checks of tensors that other processes sent. Knows shapes and bounds, no model and no step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_ft.errors import MalformedMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What a run's tensors may be: at most `seq_length` tokens, `hidden_size` channels."""

    seq_length: int
    vocab_size: int
    hidden_size: int

    def check_tokens(self, tokens: Tensor) -> None:
        """Token ids: int64 [B, T], 2 <= T <= seq_length, each inside the vocabulary.

        A token outside the embeddings' table is an exception on a CPU, but on a GPU it spoils the
        process.

        Raises:
            MalformedMessage: anything else.
        """
        fits = tokens.ndim == 2 and len(tokens) > 0 and 2 <= tokens.shape[1] <= self.seq_length
        if tokens.dtype != torch.int64 or not fits:
            raise MalformedMessage(
                f"tokens: expected int64 [B, T] with T from 2 to {self.seq_length}, "
                f"got {_described(tokens)}"
            )
        low, high = (int(bound) for bound in tokens.aminmax())
        if low < 0 or high >= self.vocab_size:
            raise MalformedMessage(
                f"tokens: expected 0 to {self.vocab_size - 1}, got {low} to {high}"
            )

    def check_hidden(self, hidden: Tensor) -> None:
        """Activations: float32 [B, T, hidden_size], 2 <= T <= seq_length.

        Raises:
            MalformedMessage: anything else.
        """
        fits = hidden.ndim == 3 and len(hidden) > 0 and 2 <= hidden.shape[1] <= self.seq_length
        if hidden.dtype != torch.float32 or not fits or hidden.shape[2] != self.hidden_size:
            raise MalformedMessage(
                f"activation: expected float32 [B, T, {self.hidden_size}] with T from 2 to "
                f"{self.seq_length}, got {_described(hidden)}"
            )


def check_gradient(gradient: Tensor, output: Tensor) -> None:
    """A gradient has its output's shape, in float32.

    Raises:
        MalformedMessage: it has not.
    """
    if gradient.shape != output.shape or gradient.dtype != torch.float32:
        raise MalformedMessage(
            f"gradient: expected float32 {list(output.shape)}, got {_described(gradient)}"
        )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
