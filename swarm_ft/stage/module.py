"""The blocks of one stage as a torch module, named as Hugging Face does. Knows no optimizer.

Shape suffixes: b samples, t tokens, c channels, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from swarm_ft.ids import MicrobatchIndex, StepNumber
from swarm_ft.protocol.spec.digest import digest_of
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.stage.architecture import (
    EMBED_PART,
    HEAD,
    ROTARY,
    ModelConfig,
    architecture_of,
    block_part,
    build_skeleton,
)

# ---- dropout that draws the same numbers in every replay


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


class StageModule(nn.Module):
    """Blocks `layers`, with the embeddings at the model's start and norm and head at its end.

    Built without memory; `materialise` gives it its weights. Parameters have the names of the
    causal model's state dict, so any stage's weights are a shard of a Hugging Face checkpoint.
    """

    def __init__(self, config: ModelConfig, layers: LayerRange) -> None:
        super().__init__()
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_hidden_layers
        self._architecture = architecture_of(config.model_type)
        skeleton = build_skeleton(config)
        whole = skeleton.get_submodule(self._architecture.base)
        self.add_module(self._architecture.base, self._own_part(whole, config))
        if self.is_last:
            self.add_module(HEAD, skeleton.get_submodule(HEAD))

    def _own_part(self, whole: nn.Module, config: ModelConfig) -> nn.Module:
        names = self._architecture
        own = nn.Module()
        for name in names.embeddings if self.is_first else ():
            own.add_module(name, whole.get_submodule(name))
        blocks = nn.ModuleDict()
        for index in range(self.layers.start, self.layers.stop):
            blocks[str(index)] = whole.get_submodule(f"{names.blocks}.{index}")
        own.add_module(names.blocks, blocks)
        if self.is_last:
            own.add_module(names.final_norm, whole.get_submodule(names.final_norm))
        if names.has_rotary:
            # Its frequencies are in no checkpoint: built again, off the meta device.
            own.add_module(ROTARY, type(whole.get_submodule(ROTARY))(config))
        return own

    def materialise(
        self, tensors: dict[str, Tensor], device: torch.device, *, tie: bool = False
    ) -> None:
        """Take these float32 tensors as weights, without a copy on the CPU, and move to `device`.

        Args:
            tensors: exactly this stage's, as `Checkpoint.load` gives them.
            device: where the stage computes.
            tie: one parameter for embeddings and head; only where one stage has both.
        """
        self.load_state_dict(tensors, strict=True, assign=True)
        self.to(device)
        if tie:
            self.get_submodule(HEAD).weight = self.embedding_weight

    @property
    def embedding_weight(self) -> nn.Parameter:
        """Token embeddings [V, C]; first stage only."""
        return self.get_parameter(self._architecture.embedding_weight)

    @property
    def head_weight(self) -> nn.Parameter:
        """The head [V, C]; last stage only."""
        return self.get_parameter(f"{HEAD}.weight")

    def forward(self, x: Tensor, dropout: DropoutSeeds | None = None) -> Tensor:
        """From tokens [B, T] (first stage) or hidden [B, T, C] to hidden [B, T, C].

        Args:
            x: int64 tokens or float32 hidden, on the stage's device.
            dropout: seeds; None where the module is in eval mode, which draws nothing.
        """
        base = self.get_submodule(self._architecture.base)

        def drawing_at(place: str) -> AbstractContextManager[None]:
            return nullcontext() if dropout is None else dropout.drawing_at(place, x.device)

        hidden_btc = x
        if self.is_first:
            with drawing_at(EMBED_PART):
                hidden_btc = self._architecture.embed(base, x)
        arguments = self._architecture.block_arguments(base, hidden_btc)
        for index, block in self._blocks(base):
            with drawing_at(block_part(index)):
                result = block(hidden_btc, **arguments)
            # Older transformers give a tuple.
            hidden_btc = result[0] if isinstance(result, tuple) else result
        return hidden_btc

    def loss_sum(self, hidden_btc: Tensor, tokens_bt: Tensor) -> Tensor:
        """Sum of the cross-entropies of all next tokens, B x (T - 1) of them, in float32.

        Args:
            hidden_btc: the last block's output.
            tokens_bt: int64; position t predicts token t + 1.
        """
        norm = self.get_submodule(f"{self._architecture.base}.{self._architecture.final_norm}")
        logits_btv: Tensor = self.get_submodule(HEAD)(norm(hidden_btc[:, :-1]))
        targets_bt = tokens_bt[:, 1:]
        return cross_entropy(
            logits_btv.float().flatten(0, 1), targets_bt.flatten(), reduction="sum"
        )

    def _blocks(self, base: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        blocks = base.get_submodule(self._architecture.blocks)
        return ((int(name), block) for name, block in blocks.named_children())
