"""The blocks of one stage as a torch module, with the names of Hugging Face.

Shape suffixes: b samples, t tokens, c channels, v vocabulary; n rows (samples times tokens), i
inputs, o outputs of a linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from swarm_ft.base.log import get_logger
from swarm_ft.digest import seed_of
from swarm_ft.errors import OutOfTurn
from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.sample_rows import SECOND
from swarm_ft.protocol.spec.tasks import CausalLm, Task
from swarm_ft.stage.architecture import (
    EMBED_PART,
    HEAD_PART,
    SHARED_PART,
    anatomy_of,
    block_part,
)
from swarm_ft.stage.base import Lengths, is_packed, tokens_of
from swarm_ft.stage.device import preserve_rng
from swarm_ft.stage.document_packing import (
    MASKED_TOKENS,
    TRIAL_SIZE,
    Outputs,
    compute_packed,
    compute_separately,
    masks_documents,
)
from swarm_ft.stage.heads import head_of
from swarm_ft.stage.rope import LengthDependence
from swarm_ft.stage.skeleton import (
    ROUTER_LOGITS,
    ModelConfig,
    base_of,
    embedded_size,
    fill_buffers,
    has_token_types,
    is_bidirectional,
)

# ---- dropout with the same numbers in every replay


@dataclass(frozen=True, kw_only=True, slots=True)
class DropoutSeeds:
    """Seeds of one microbatch in one step: one for each block and one for the embeddings.

    Each place has a seed of its own, so that the order in which blocks, stages or microbatches are
    computed, or computed again, changes nothing. Torch has one CPU generator in a process, so that
    only one thread may draw.

    Attributes:
        seed: Seed of the run.
        step: Number of the step.
        microbatch: Index of the microbatch.
        part: Part of the microbatch, if its documents are computed in several parts.
    """

    seed: int
    step: StepNumber
    microbatch: MicrobatchIndex
    part: int = 0

    def draw_at(self, place: str) -> None:
        """Seed torch's generators for a place.

        Args:
            place: Name of a part, see `architecture.block_part`.
        """
        part = f"/{self.part}" * (self.part > 0)
        torch.manual_seed(seed_of(f"{self.seed}/{self.step}/{self.microbatch}/{place}{part}"))


# ---- the stage


_CAUSAL_LM = CausalLm()
_log = get_logger(__name__)


class StageModule(nn.Module):
    """Blocks `layers`, with the embeddings at the model's start, and norm and head at its end.

    The module computes by transformers' own forward, in a model that is cut to the stage. It is
    built without memory, and `materialise` sets its weights. Parameters have the names of the whole
    model's state dict, so that a stage's weights are a shard of a Hugging Face checkpoint.

    Attributes:
        layers: Blocks of the stage.
        num_outputs: Number of classes or words that a target may be.
        recomputes: Whether a forward stores only blocks' inputs, and a backward runs each block
            again.

    Raises:
        BadModel: The model cannot be cut into stages.
    """

    def __init__(self, config: ModelConfig, layers: LayerRange, task: Task = _CAUSAL_LM) -> None:
        super().__init__()
        anatomy = anatomy_of(config, task)
        self._head = head_of(task)
        self.num_outputs = task.num_outputs(config.vocab_size)
        self.layers = layers
        self.architecture = anatomy.architecture
        self.is_first = layers.start == 0
        self.is_last = layers.stop == self.architecture.num_blocks
        model = anatomy.cut(layers)
        # The model is no submodule, because its name would precede all others.
        self._unnamed = (model,)
        for name, part in model.named_children():
            self.add_module(name, part)
        self._range = _BlockRange(layers, embedded_size(model, layers))
        self._by_length = LengthDependence(model)
        self.recomputes = False
        self._masks_documents: bool | None = None
        model.get_submodule(self.architecture.blocks).called_by = self._range.proxy

    @property
    def causal_model(self) -> PreTrainedModel:
        """Model with its head, as far as the stage has it."""
        return self._unnamed[0]

    def materialise(
        self, tensors: dict[str, Tensor], device: torch.device, *, tie: bool = False
    ) -> None:
        """Set tensors as weights, without a copy if they lie on `device`.

        Args:
            tensors: Exactly this stage's tensors, from `Checkpoint.load`.
            device: Device of the stage.
            tie: Whether embeddings and head are one parameter, in a stage that has both.

        Raises:
            BadModel: A buffer that no checkpoint has cannot be computed.
        """
        self.load_state_dict(tensors, strict=True, assign=True)
        fill_buffers(self.causal_model)
        if device.type != "cpu":  # the tensors are on the CPU otherwise
            self.to(device)
        if tie:
            self.get_submodule(self.architecture.head).weight = self.embedding_weight

    def train_only(self, layers: LayerRange) -> None:
        """Freeze everything except these blocks.

        The embeddings and shared modules train with the model's first block, norm and head with its
        last.
        """
        whole = self.architecture.num_blocks
        parts = {block_part(index) for index in range(layers.start, layers.stop)}
        parts |= {EMBED_PART, SHARED_PART} if layers.start == 0 else set()
        parts |= {HEAD_PART} if layers.stop == whole else set()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.architecture.part_of(name) in parts)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by name.

        Others have no gradient and no optimizer state.

        Optimizer, gradients, their norm, state and reduction use this list.
        """
        own = self.named_parameters()
        return {name: parameter for name, parameter in own if parameter.requires_grad}

    @property
    def embedding_weight(self) -> nn.Parameter:
        """Token embeddings [V, C]; first stage only."""
        return self.get_parameter(self.architecture.embedding_weight)

    @property
    def head_weight(self) -> nn.Parameter:
        """Head [V, C]; last stage only."""
        return self.get_parameter(self.architecture.head_weight)

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later tokens; see `Ending`."""
        return is_bidirectional(self.causal_model.config)

    def forward(
        self,
        x: Tensor,
        dropout: DropoutSeeds | None = None,
        lengths: Lengths = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Compute hidden states [B, T, C] from tokens [B, T] (first stage) or hidden states.

        Args:
            x: Tokens, int64, see `Samples.token_ids`, or hidden states, float32; on the stage's
                device.
            dropout: Seeds; None if the module is in eval mode, which draws nothing.
            lengths: See `Lengths`.
            cache: Cache of the tokens before, see `stage.kv_cache`, to which these are added.
        """
        base = base_of(self.causal_model)[1]
        if cache is not None:
            return self._run_blocks(partial(base, past_key_values=cache), x, dropout, cache)[0]
        return self._compute(base, x, dropout, lengths)[0]

    def routed(self, x: Tensor, dropout: DropoutSeeds | None, lengths: Lengths) -> Outputs:
        """Compute hidden states, and router logits [B T, experts] of each block with a router."""
        base = partial(base_of(self.causal_model)[1], output_router_logits=True)
        return self._compute(base, x, dropout, lengths)

    def _compute(
        self, base: Callable[..., object], x: Tensor, dropout: DropoutSeeds | None, lengths: Lengths
    ) -> Outputs:
        if lengths is None or not (is_packed(lengths) or self._by_length.parts(tokens_of(lengths))):
            return self._run_blocks(self._masked(base, x, lengths), x, dropout)

        def run(x: Tensor, part: int = 0, **named: Tensor) -> Outputs:
            seeds = None if dropout is None else replace(dropout, part=part)
            return self._run_blocks(partial(base, **named), x, seeds)

        if self._by_length:
            return compute_separately(run, x, lengths, self._by_length.kind_of)
        is_together = x.shape[1] <= MASKED_TOKENS and self.masks_documents
        return (compute_packed if is_together else compute_separately)(run, x, lengths)

    @property
    def masks_documents(self) -> bool:
        """Whether transformers' masks separate the documents of a sample in these blocks."""
        if self._masks_documents is None:
            was_training = self.training
            self.eval()
            self._masks_documents = self._try_masks()
            self.train(was_training)
        return self._masks_documents

    def _try_masks(self) -> bool:
        base, config = base_of(self.causal_model)[1], self.causal_model.config
        x = torch.arange(math.prod(TRIAL_SIZE)).view(TRIAL_SIZE) % config.vocab_size
        if not self.is_first:
            random = torch.Generator().manual_seed(0)
            x = torch.randn(*TRIAL_SIZE, config.hidden_size, generator=random)

        def run(x: Tensor, part: int = 0, **named: Tensor) -> Outputs:
            return self._run_blocks(partial(base, **named), x, None)

        does = masks_documents(run, x.to(next(self.parameters()).device))
        if not does:
            _log.info(
                "documents-apart layers=%s: blocks of '%s' do not keep documents of one sample "
                "apart; each is computed as a sample of its own, which takes longer",
                self.layers,
                config.model_type,
            )
        return does

    def _run_blocks(
        self,
        base: Callable[..., object],
        x: Tensor,
        dropout: DropoutSeeds | None,
        cache: Cache | None = None,
    ) -> Outputs:
        self._range.recomputes = self.recomputes
        self._by_length.forget()
        with nullcontext() if dropout is None else preserve_rng(x.device):
            if self.is_first:
                passed = self._range.through(self._reading(base, x), None, dropout, cache)
            else:
                entered = self._range.without_input(base, x)
                passed = self._range.through(entered, x, dropout, cache)
        result, hidden = passed
        return hidden, tuple(getattr(result, ROUTER_LOGITS, None) or ())

    def _reading(self, base: Callable[..., object], tokens_bt: Tensor) -> Callable[..., object]:
        """Return the base with tokens as its input, and with their text if it distinguishes two."""
        token_ids = tokens_bt % SECOND
        if not has_token_types(self.causal_model.config):
            return partial(base, input_ids=token_ids)
        return partial(base, input_ids=token_ids, token_type_ids=tokens_bt // SECOND)

    def _masked(
        self, base: Callable[..., object], x: Tensor, lengths: Lengths
    ) -> Callable[..., object]:
        """Return the base with a mask of padding, if its tokens see later tokens."""
        if lengths is None or not self.is_bidirectional:
            return base
        return partial(base, attention_mask=token_mask(x, lengths).long())

    def select(self, hidden_btc: Tensor, labels_bt: Tensor) -> tuple[Tensor, Tensor]:
        """Select the rows that predict a target, see `Head.select`.

        Args:
            hidden_btc: Output of the last block.
            labels_bt: Labels, int64, see `Samples`.
        """
        return self._head.select(self, hidden_btc, labels_bt)

    def judge(self, rows: Tensor) -> Tensor:
        """Compute logits [n, K] in float32 of rows from `select`."""
        with preserve_rng(rows.device) if self.training else nullcontext():
            return self._head.judge(self, rows).float()

    def loss_sum(self, hidden_btc: Tensor, labels_bt: Tensor) -> Tensor:
        """Return the sum of the cross-entropies of all targets in float32, with whole logits."""
        rows, targets_n = self.select(hidden_btc, labels_bt)
        return cross_entropy(self.judge(rows), targets_n, reduction="sum")

    def logits(self, hidden_btc: Tensor) -> Tensor:
        """Return the whole model's logits for its last block's output; see `Ending`."""
        logits: Tensor = self._range.beyond(self.causal_model, hidden_btc).logits
        return logits

    def normalise(self, hidden_btc: Tensor) -> Tensor:
        """Return the normalised output of the last block; see `Ending`."""
        _, base = base_of(self.causal_model)
        normed: Tensor = self._range.beyond(base, hidden_btc).last_hidden_state
        return normed

    def scores(self, normed: Tensor) -> Tensor:
        """Apply the head alone; see `Ending`."""
        scores: Tensor = self.get_submodule(self.architecture.head)(normed)
        return scores


def token_mask(x: Tensor, lengths: Sequence[int | tuple[int, ...]]) -> Tensor:
    """Return which positions of [B, T, ...] are tokens, not padding; bool [B, T]."""
    places = torch.arange(x.shape[1], device=x.device)
    return places < torch.tensor(tokens_of(lengths), device=x.device)[:, None]


class _BlockRange:
    """The range of a stage's blocks inside of transformers' forward.

    That forward goes from tokens to logits. Before the stage's blocks it computes only the first
    stage's embeddings and shared modules. The parts behind the blocks that belong to another stage
    run without a graph, and their results are not used.
    """

    def __init__(self, layers: LayerRange, embedded_size: int) -> None:
        self._first, self._last = layers.start, layers.stop - 1
        self._embedded_size = embedded_size
        self.recomputes = False
        self._is_skipped = False
        self._with_graph = True
        self._form: Callable[[Tensor], object] = _form_of(None)
        self._hidden: Tensor | None = None
        self._dropout: DropoutSeeds | None = None

    def through(
        self,
        base: Callable[..., object],
        hidden: Tensor | None,
        dropout: DropoutSeeds | None,
        cache: Cache | None = None,
    ) -> tuple[object, Tensor]:
        """Run the base; return its result, and the output of the last block.

        Args:
            base: Model without its head, with its input.
            hidden: Input of the first block; None for the one that the base computes.
            dropout: Seeds for dropout.
            cache: Cache that the base was given; None if it keeps none.
        """
        self._hidden, self._dropout, self._is_skipped = hidden, dropout, False
        if dropout is not None:
            dropout.draw_at(EMBED_PART)
        return self._run(base, leads_in=True, use_cache=cache is not None)

    def beyond(self, model: Callable[..., Any], hidden: Tensor) -> Any:  # noqa: ANN401
        """Return a causal model's result for the output of its last block."""
        self._hidden, self._is_skipped = hidden, True
        return self._run(self.without_input(model, hidden), leads_in=False)[0]

    def without_input(self, model: Callable[..., object], hidden: Tensor) -> Callable[..., object]:
        """Return a forward pass without an embedding."""
        # The input is not `hidden` itself, because some families scale it in place.
        shape = (*hidden.shape[:-1], self._embedded_size)
        return partial(model, inputs_embeds=hidden.new_zeros(shape))

    def _run(
        self, forward: Callable[..., object], *, leads_in: bool, use_cache: bool = False
    ) -> tuple[object, Tensor]:
        """Run a forward; return its result and the hidden states.

        `leads_in`: modules before the blocks count.
        """
        self._with_graph = torch.is_grad_enabled()
        try:
            with torch.set_grad_enabled(self._with_graph and leads_in):
                result = forward(use_cache=use_cache)
            if self._hidden is None:
                raise OutOfTurn("the model's base did not call its blocks")
            return result, self._hidden
        finally:
            self._hidden = self._dropout = None

    def proxy(self, index: int, block: nn.Module) -> _BlockProxy:
        """Return the object that a base calls in a block's place."""
        return _BlockProxy(self, index, block)

    def cross(
        self, index: int, block: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
    ) -> object:
        """Run a block, which the base has called."""
        if index == self._first:
            torch.set_grad_enabled(self._with_graph)
            inputs, named = self._entered(inputs, named)
        if self._is_skipped and self._hidden is not None:
            return self._form(self._hidden)
        if self._dropout is not None:
            self._dropout.draw_at(block_part(index))
        if self.recomputes and torch.is_grad_enabled():
            # Dropout begins again from the same seed, and the generators are restored.
            draws = self._dropout is not None
            run = partial(block, **named)
            result = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=draws)
        else:
            result = block(*inputs, **named)
        if index == self._last:
            self._form = _form_of(result)
            self._hidden = result[0] if isinstance(result, tuple | list) else result
            torch.set_grad_enabled(False)
        return result

    def _entered(
        self, inputs: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if self._hidden is None:
            return inputs, named
        if inputs:
            return (self._hidden, *inputs[1:]), named
        return inputs, {**named, next(iter(named)): self._hidden}


def _form_of(result: object) -> Callable[[Tensor], object]:
    """Return how a block returns hidden states; in older families a tuple with more values."""
    if not isinstance(result, tuple | list):
        return lambda hidden: hidden
    kind, more = type(result), [None] * (len(result) - 1)
    return lambda hidden: kind([hidden, *more])


@dataclass(frozen=True, slots=True)
class _BlockProxy:
    """A block as its base sees it."""

    passage: _BlockRange
    index: int
    block: nn.Module

    def __call__(self, *inputs: object, **named: object) -> object:
        return self.passage.cross(self.index, self.block, inputs, named)

    def __getattr__(self, name: str) -> object:
        return getattr(self.block, name)
