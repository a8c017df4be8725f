"""The small GPT-2-type model of the study, cut in stages, and its pre-training. Knows no codecs."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2Model

from benchmarks.quality.boundary import Cuts
from benchmarks.quality.data import Batch, Dataset
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

    def backbone(self) -> Regime:
        """With only what pre-training depends on."""
        plain = self.without_adapters()
        return replace(plain, cuts=(), train_samples=0, cola_sentences=0, cola_tokens=0)

    def without_adapters(self) -> Regime:
        """Where all weights train."""
        return replace(self, **_NO_ADAPTERS)

    @property
    def trains(self) -> str:
        """What of the model does, in words."""
        if not self.lora_r:
            return "all"
        layers = "all linear layers" if self.lora_mlp else "attention"
        blocks = f", blocks {self.lora_from}-" if self.lora_from else ""
        return f"LoRA of rank {self.lora_r}, {layers}{blocks}"

    def digest(self) -> str:
        """A short name that differs where any field does.

        Where all weights train it is what it was before there were adapters.
        """
        values = asdict(self)
        if not self.lora_r:
            values = {name: value for name, value in values.items() if name not in _NO_ADAPTERS}
        return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:8]


_NO_ADAPTERS: dict[str, Any] = {"lora_r": 0, "lora_from": 0, "lora_mlp": 1}


def regime_of(settings: list[str]) -> Regime:
    """The default regime with `field=number` settings; `cuts=1,3` takes several."""
    kinds = {field.name: field.type for field in fields(Regime)}
    values: dict[str, object] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in kinds:
            raise SystemExit(f"--set {setting}: expected one of {', '.join(kinds)}")
        if name == "cuts":
            values[name] = tuple(int(part) for part in text.split(","))
        else:
            values[name] = float(text) if kinds[name] == "float" else int(text)
    return replace(Regime(), **values)  # type: ignore[arg-type]


class CutModel(nn.Module):
    """GPT-2 with boundaries between blocks and a head: next tokens, or two classes."""

    def __init__(self, regime: Regime, classes: int = 0) -> None:
        super().__init__()
        self.body = GPT2Model(
            GPT2Config(
                vocab_size=regime.vocabulary,
                n_positions=regime.tokens,
                n_embd=regime.width,
                n_layer=regime.layers,
                n_head=regime.heads,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        self.head = nn.Linear(regime.width, classes) if classes else None
        self.cuts: Cuts | None = None  # None while the backbone is pre-trained, uncut
        self.replicas: Replicas | None = None  # None where one peer trains
        self.shadows: list[Shadow] = []
        for index, block in enumerate(regime.cuts):
            self.body.h[block - 1].register_forward_hook(self._hook(index))

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
        logits = hidden @ self.body.wte.weight.T
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
    generator = torch.Generator().manual_seed(seed)
    total, step = epochs * (len(dataset) // batch), 0
    for epoch in range(epochs):
        for part in dataset.batches(batch, torch.randperm(len(dataset), generator=generator)):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / total)
            plain = _shadowed(model, part) if model.cuts and measures_at(step) else None
            loss = _backward(model, dataset, part)
            if plain is not None and model.cuts is not None:
                model.shadows.append(_compared(model, loss, *plain))
                model.cuts.measured(model.shadows[-1].loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            yield epoch, loss


@dataclass(frozen=True, slots=True)
class Shadow:
    """What compression did to one batch, by the same weights.

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
    """The gradients of a batch's mean loss, by one peer or as replicas sum them; the loss."""
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
    """A batch's mean loss, and the gradients of `count` replicas, which add up to that loss's.

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
    """The pre-trained weights of the backbone; computed once for a seed and kept in `cache`."""
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
    """The model that a run begins with: pre-trained backbone, new classifier head if any."""
    torch.manual_seed(seed)
    model = CutModel(regime, classes)
    model.body.load_state_dict(weights)
    if regime.lora_r:
        _adapt(model.body, regime)
    return model


def _adapt(body: GPT2Model, regime: Regime) -> None:
    """Freeze all, and put peft's adapters beside the linear layers of the blocks that get some."""
    from peft import LoraConfig, inject_adapter_in_model

    body.requires_grad_(False)
    layers = ["attn.c_attn", "attn.c_proj", *["mlp.c_fc", "mlp.c_proj"] * regime.lora_mlp]
    blocks = range(regime.lora_from, regime.layers)
    config = LoraConfig(
        r=regime.lora_r,
        lora_alpha=2 * regime.lora_r,
        target_modules=[f"h.{block}.{layer}" for block in blocks for layer in layers],
        fan_in_fan_out=True,
    )
    inject_adapter_in_model(config, body)
