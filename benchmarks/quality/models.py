"""The small model of the study, cut in stages, and its pre-training. Knows no codecs."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.quality.boundary import Cuts
from benchmarks.quality.data import Batch, Dataset
from benchmarks.quality.families import DEFAULT_FAMILY, FAMILIES, Sizes
from benchmarks.quality.replicas import Replicas
from swarm_ft.protocol.spec.quality import measures_at


@dataclass(frozen=True, slots=True)
class Regime:
    """Everything that a run depends on, apart from its config, seed, rate and epochs.

    Attributes:
        cuts: a boundary lies after each of these blocks, counted from 1.
        lora_r: rank of the adapters that the task `lora` trains.
        lora_from: the first block that has them, counted from 0.
        lora_mlp: whether the feed-forward layers have some, too; 0 or 1.
        family: the kind of model, a name of `FAMILIES`.
        in_a_row: how many steps one after the other visit the same batch (lazy sampling). Beyond 1
            nothing is remembered of a sample after them.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    vocabulary: int = 1024
    tokens: int = 128
    cuts: tuple[int, ...] = (1, 3)
    pretrain_epochs: int = 2
    pretrain_rate: float = 2e-3
    train_samples: int = 256
    batch: int = 8
    cola_sentences: int = 2000
    cola_tokens: int = 32
    lora_r: int = 0
    lora_from: int = 0
    lora_mlp: int = 1
    family: str = DEFAULT_FAMILY
    in_a_row: int = 1

    def backbone(self) -> Regime:
        """Return the regime with only the fields that pre-training depends on."""
        plain = self.without_adapters()
        plain = replace(plain, cuts=(), in_a_row=1)
        return replace(plain, train_samples=0, cola_sentences=0, cola_tokens=0)

    def without_adapters(self) -> Regime:
        """Return the regime in which all weights train."""
        return replace(self, **_NO_ADAPTERS)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the model."""
        return Sizes(self.layers, self.width, self.heads, self.vocabulary, self.tokens)

    @property
    def trains(self) -> str:
        """The trained part of the model, as a text."""
        if not self.lora_r:
            return "all"
        layers = "all linear layers" if self.lora_mlp else "attention"
        blocks = f", blocks {self.lora_from}-" if self.lora_from else ""
        return f"LoRA of rank {self.lora_r}, {layers}{blocks}"

    def digest(self) -> str:
        """Return a short name that differs where any field does.

        What is as it was before there was a field leaves that field out: adapters where all
        weights train, the first family, one visit at a time.
        """
        values = asdict(self)
        if not self.lora_r:
            values = {name: value for name, value in values.items() if name not in _NO_ADAPTERS}
        values = {k: v for k, v in values.items() if v != _ADDED_LATER.get(k)}
        return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:8]


_NO_ADAPTERS: dict[str, Any] = {"lora_r": 0, "lora_from": 0, "lora_mlp": 1}
_ADDED_LATER: dict[str, Any] = {"family": DEFAULT_FAMILY, "in_a_row": 1}


def regime_of(settings: list[str]) -> Regime:
    """Apply `field=number` settings to the default regime; `cuts=1,3` takes several."""
    kinds = {field.name: field.type for field in fields(Regime)}
    values: dict[str, object] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in kinds:
            raise SystemExit(f"--set {setting}: expected one of {', '.join(kinds)}")
        if name == "cuts":
            values[name] = tuple(int(part) for part in text.split(","))
        elif name == "family":
            values[name] = _known_family(text)
        else:
            values[name] = float(text) if kinds[name] == "float" else int(text)
    return replace(Regime(), **values)  # type: ignore[arg-type]


def _known_family(name: str) -> str:
    if name not in FAMILIES:
        raise SystemExit(f"--set family={name}: expected one of {', '.join(FAMILIES)}")
    return name


class CutModel(nn.Module):
    """A decoder with boundaries between blocks and a head: next tokens, or two classes."""

    def __init__(self, regime: Regime, classes: int = 0) -> None:
        super().__init__()
        family = FAMILIES[regime.family]
        self.body = family.body(regime.sizes)
        self._blocks = family.blocks
        self.head = nn.Linear(regime.width, classes) if classes else None
        self.cuts: Cuts | None = None  # None while the backbone is pre-trained, uncut
        self.replicas: Replicas | None = None  # None where one peer trains
        self.in_a_row = 1  # as in `Regime`; so a backbone is pre-trained
        self.shadows: list[Shadow] = []
        for index, block in enumerate(regime.cuts):
            self.blocks[block - 1].register_forward_hook(self._hook(index))

    @property
    def blocks(self) -> nn.ModuleList:
        """The stack, first block first."""
        return cast(nn.ModuleList, self.body.get_submodule(self._blocks))

    def loss(self, batch: Batch, mode: str = "off") -> tuple[Tensor, Tensor]:
        """Mean loss over the batch, and the logits: of tokens, or of classes."""
        if self.cuts is not None:
            self.cuts.begin(mode, batch.ids, batch.lengths)
        hidden = self.body(input_ids=batch.tokens).last_hidden_state
        if self.head is not None:
            real = torch.arange(hidden.shape[1]) < batch.lengths[:, None]
            mean = (hidden * real[..., None]).sum(1) / batch.lengths[:, None]
            logits = self.head(mean)
            return functional.cross_entropy(logits, batch.labels), logits
        logits = hidden @ self.body.get_input_embeddings().weight.T
        targets = batch.tokens[:, 1:].flatten()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets), logits

    def _hook(self, index: int) -> Callable[..., object]:
        def cut(_block: nn.Module, _args: object, output: object) -> object:
            if self.cuts is None:
                return output
            if isinstance(output, Tensor):
                return self.cuts.cut(index, output)
            return (self.cuts.cut(index, output[0]), *output[1:])  # type: ignore[index]

        return cut


def steps(
    model: CutModel, dataset: Dataset, batch: int, epochs: int, rate: float, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Train: AdamW, linear decay, norm clipped at 1; yields (epoch, loss) after each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01)
    a_pass = len(dataset) // batch
    total = epochs * a_pass
    visits = _visits(dataset, batch, epochs, seed, model.in_a_row)
    for step, (part, is_new) in enumerate(visits):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / total)
        if is_new and model.in_a_row > 1 and model.cuts:
            model.cuts.forget()
        plain = _shadowed(model, part) if model.cuts and measures_at(step) else None
        loss = _backward(model, dataset, part)
        if plain is not None and model.cuts is not None:
            model.shadows.append(_compared(model, loss, *plain))
            model.cuts.measured(model.shadows[-1].loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield step // a_pass, loss


def _visits(
    dataset: Dataset, batch: int, epochs: int, seed: int, in_a_row: int
) -> Iterator[tuple[Batch, bool]]:
    """Batches of as many steps as `epochs` passes have, and whether the one before was another."""
    generator = torch.Generator().manual_seed(seed)
    for done in range(0, epochs, in_a_row):
        for part in dataset.batches(batch, torch.randperm(len(dataset), generator=generator)):
            for again in range(min(in_a_row, epochs - done)):
                yield part, again == 0


@dataclass(frozen=True, slots=True)
class Shadow:
    """The effect of compression on one batch, with the same weights.

    Attributes:
        loss: how much more, in nats.
        cosine: of the gradients of all weights.
        error: squared, of their difference, over that of the uncompressed one.
    """

    loss: float
    cosine: float
    error: float


def _shadowed(model: CutModel, part: Batch) -> tuple[Tensor, Tensor]:
    """Loss and flat gradient of a batch that is not compressed."""
    model.zero_grad()
    loss, _ = model.loss(part, "off")
    loss.backward()
    return loss.detach(), _flat_gradient(model)


def _compared(model: CutModel, loss: Tensor, plain_loss: Tensor, plain: Tensor) -> Shadow:
    sent = _flat_gradient(model)
    cosine = functional.cosine_similarity(sent, plain, dim=0).item()
    error = ((sent - plain).square().sum() / plain.square().sum()).item()
    return Shadow((loss - plain_loss).item(), cosine, error)


def _flat_gradient(model: CutModel) -> Tensor:
    grads = [parameter.grad for _, parameter in sorted(model.named_parameters())]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def _backward(model: CutModel, dataset: Dataset, part: Batch) -> Tensor:
    """Set the gradients of a batch's mean loss, reduced over replicas if any; return the loss."""
    if model.replicas is None:
        return _set_gradients(model, part, 1.0)
    loss, gradients = flat_gradients(model, dataset, part, model.replicas.count)
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    total = model.replicas.reduce(gradients)
    for parameter, gradient in zip(
        parameters, total.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = gradient.view_as(parameter)
    return loss


def flat_gradients(
    model: CutModel, dataset: Dataset, part: Batch, count: int
) -> tuple[Tensor, list[Tensor]]:
    """Return a batch's mean loss and the gradients of `count` replicas, whose sum is its gradient.

    Each is float32 [n], parameters by name, as a peer has it.
    """
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    total, gradients = torch.zeros(()), []
    for rows in part.ids.chunk(count):
        share = len(rows) / len(part.ids)
        total += share * _set_gradients(model, dataset.batch(rows), share)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    return total, gradients


def _set_gradients(model: CutModel, part: Batch, scale: float) -> Tensor:
    """Gradients of `scale` times the mean loss in place of the present ones; the mean loss."""
    model.zero_grad()
    loss, _ = model.loss(part, "train")
    (loss * scale).backward()
    return loss.detach()


@torch.no_grad()
def evaluate(
    model: CutModel, dataset: Dataset, batch: int, mode: str = "off"
) -> tuple[float, Tensor]:
    """Mean loss over all samples, and the logits of all of them if they are classes."""
    losses, logits = [], []
    for part in dataset.batches(batch, keep_rest=True):
        loss, out = model.loss(part, mode)
        losses.append(loss.item() * len(part.ids))
        logits.append(out if model.head is not None else torch.empty(0))
    return math.fsum(losses) / len(dataset), torch.cat(logits)


def pretrained(
    regime: Regime, text: str, dataset: Dataset, seed: int, cache: Path
) -> dict[str, Tensor]:
    """Return the backbone's pre-trained weights, computed once a seed and stored in `cache`."""
    digest = hashlib.sha256((regime.backbone().digest() + text).encode()).hexdigest()[:12]
    path = cache / f"pretrained-{digest}-{seed}.safetensors"
    if not path.exists():
        torch.manual_seed(seed)
        model = CutModel(regime)
        epochs, rate = regime.pretrain_epochs, regime.pretrain_rate
        for _ in steps(model, dataset, regime.batch, epochs, rate, seed):
            pass
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        save_file(model.body.state_dict(), partial)
        partial.replace(path)  # whole or not at all, whoever else computes it
    return load_file(path)


def fine_tunable(
    regime: Regime, weights: dict[str, Tensor], seed: int, classes: int = 0
) -> CutModel:
    """Build the model that a run begins with: a pre-trained backbone, a new classifier if any."""
    torch.manual_seed(seed)
    model = CutModel(regime, classes)
    model.body.load_state_dict(weights)
    model.in_a_row = regime.in_a_row
    if regime.lora_r:
        _adapt(model, regime)
    return model


def _adapt(model: CutModel, regime: Regime) -> None:
    """Freeze all, and put peft's adapters beside the linear layers of the blocks that get some."""
    from peft import LoraConfig, inject_adapter_in_model

    model.body.requires_grad_(False)
    family = FAMILIES[regime.family]
    layers = [*family.attention, *family.mlp * regime.lora_mlp]
    blocks = range(regime.lora_from, regime.layers)
    config = LoraConfig(
        r=regime.lora_r,
        lora_alpha=2 * regime.lora_r,
        target_modules=[f"{family.blocks}.{block}.{layer}" for block in blocks for layer in layers],
        fan_in_fan_out=family.is_transposed,
    )
    inject_adapter_in_model(config, model.body)
