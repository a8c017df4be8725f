"""Stages beside plain autograd: the same bits where a backward is cut in two, the same model whole.

Each case trains two steps in three stages twice: with split backwards, and without. Where these
differ, it trains without once more: where that differs too, the GPU's own sums have no fixed order,
and nothing can be held to the bit. Of a base in 8 or 4 bits, which plain autograd has no layers
for, weights' gradients come at once instead. Where all weights train, the gradients beside those of
transformers' whole model on the same device, and a short sample's loss beside the CPU's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.gpu.parts import Scene
from benchmarks.gpu.report import Row
from benchmarks.gpu.stages import (
    Chain,
    checkpoint_of,
    device_here,
    gpt2,
    llama,
    qwen3,
    some_tokens,
    spec_of,
)
from swarm_ft.protocol.spec.run_spec import Adapter, RunSpec
from swarm_ft.stage.checkpoint import Checkpoint

NUM_STAGES, MICROBATCHES, STEPS, DEPTH = 3, 4, 2, 2
LORA: dict[str, Any] = {"adapter": Adapter.LORA, "lora_r": 8}
METHODS: dict[str, dict[str, Any]] = {
    "all": {},
    "LoRA": LORA,
    "LoRA, base in 8 bits": {**LORA, "load_in_8bit": True},
    "LoRA, base in 4 bits": {**LORA, "load_in_4bit": True},
}
DTYPES = torch.bfloat16, torch.float32
CPU_TOKENS = 64
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Of gradients beside the whole model's: what another order of sums may come to."""


@dataclass(frozen=True, slots=True)
class Case:
    """The model and the method of training.

    Attributes:
        is_fixed: torch takes its deterministic algorithms, where it has some.
    """

    model: str
    method: str
    dtype: torch.dtype
    is_fixed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results of two steps.

    Attributes:
        losses: of each.
        gradients: of all weights after each step's microbatches, on the device, by step and name.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]

    def differing(self, other: Outcome) -> int:
        """Count the gradients that differ in any bit."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        return sum(
            not torch.equal(one[name], another[name]) for one, another in pairs for name in one
        )


def rows(scene: Scene) -> Iterator[Row]:
    """Models, what trains and dtypes, as stages are; then all again with torch's fixed orders."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    orders = (False, True) if torch.cuda.is_available() else (False,)
    with ExitStack() as stack:
        checkpoints: dict[str, Checkpoint] = {}
        named = configs(scene.rehearse)
        for is_fixed, method, name, dtype in product(orders, METHODS, named, DTYPES):
            if name not in checkpoints:
                checkpoints[name] = stack.enter_context(checkpoint_of(named[name]))
            case, checkpoint = Case(name, method, dtype, is_fixed), checkpoints[name]
            yield _row(case, checkpoint, _spec(checkpoint, scene, METHODS[method]))
            if scene.left_s < 0:
                return


def configs(rehearse: bool) -> Mapping[str, PretrainedConfig]:
    """Return the configs by name; they have few blocks of real widths."""
    if rehearse:
        return {
            "GPT-2": gpt2(32, 3, 97, 64),
            "Llama": llama(32, 48, 3, 97),
            "Qwen3": qwen3(32, 48, 3, 97),
        }
    return {
        "GPT-2 (768)": gpt2(768, 6, 50257),
        "Llama (2048)": llama(2048, 8192, 6, 32000),
        "Qwen3 (1024)": qwen3(1024, 3072, 6, 32000),
    }


def _spec(checkpoint: Checkpoint, scene: Scene, changes: Mapping[str, Any]) -> RunSpec:
    tokens = 16 if scene.rehearse else 512
    return spec_of(checkpoint, batch_size=MICROBATCHES, tokens=tokens, **changes)


def _row(case: Case, checkpoint: Checkpoint, spec: RunSpec) -> Row:
    cells: dict[str, Any] = {
        "model": case.model,
        "trains": case.method,
        "dtype": str(case.dtype).removeprefix("torch."),
        "fixed orders": case.is_fixed,
    }
    began_s = time.monotonic()
    torch.use_deterministic_algorithms(case.is_fixed, warn_only=True)
    try:
        cells |= _found(case, checkpoint, spec)
    except Exception as error:  # noqa: BLE001 - the other cases are to run
        cells["trouble"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        torch.use_deterministic_algorithms(False)
    return {**cells, "s": time.monotonic() - began_s}


def _found(case: Case, checkpoint: Checkpoint, spec: RunSpec) -> dict[str, Any]:
    def plain_once() -> Outcome:
        return trained(Chain.loaded(checkpoint, spec, NUM_STAGES, case.dtype).without_split(), 0)

    split, plain = (
        trained(Chain.loaded(checkpoint, spec, NUM_STAGES, case.dtype), DEPTH),
        plain_once(),
    )
    differ = split.differing(plain)
    found: dict[str, Any] = {
        "gradients": sum(map(len, plain.gradients)),
        "split beside plain: differ": differ,
        "plain, run twice: differ": plain.differing(plain_once()) if differ else None,
        "losses alike": split.losses == plain.losses,
    }
    del split
    if spec.train.adapts or case.is_fixed:
        return found
    distance = whole_error(spec, case.dtype, plain)
    found |= {"beside the whole model": distance, "near": distance < NEAR[case.dtype]}
    if torch.cuda.is_available() and case.dtype is torch.float32:
        del plain
        found["loss beside the CPU's"] = cpu_error(checkpoint)
    return found


def cpu_error(checkpoint: Checkpoint) -> float:
    """Return the error of a short sample's loss, relative to the CPU's result."""
    spec = spec_of(checkpoint, batch_size=1, tokens=CPU_TOKENS)
    tokens = some_tokens(spec, 1)
    own_loss, cpu_loss = (
        Chain.loaded(checkpoint, spec, NUM_STAGES, torch.float32, device).step(0, tokens, 0)
        for device in (device_here(), torch.device("cpu"))
    )
    return abs(own_loss - cpu_loss) / cpu_loss


def trained(chain: Chain, depth: int) -> Outcome:
    """Train a chain that keeps the weight passes of `depth` microbatches waiting."""
    tokens, losses, gradients = some_tokens(chain.spec, MICROBATCHES), [], []
    for number in range(STEPS):
        losses.append(chain.step(number, tokens, depth))
        gradients.append({name: g.detach().clone() for name, g in chain.gradients().items()})
        chain.apply()
    return Outcome(losses=losses, gradients=gradients)


def whole_error(spec: RunSpec, dtype: torch.dtype, plain: Outcome) -> float:
    """Return the largest relative error of the first step's gradients against the whole model."""
    device = device_here()
    model = AutoModelForCausalLM.from_pretrained(
        spec.model.reference, attn_implementation="sdpa", dtype=torch.float32
    )
    model.eval().to(device)
    tokens = some_tokens(spec, MICROBATCHES).to(device)
    num_targets = tokens.shape[0] * (tokens.shape[1] - 1)
    for row in tokens:
        with torch.autocast(device.type, torch.bfloat16, dtype is torch.bfloat16):
            logits = model(input_ids=row[None]).logits[:, :-1].float()
        loss = cross_entropy(logits.flatten(0, 1), row[1:], reduction="sum") / num_targets
        torch.autograd.backward(loss)
    errors = [
        float((plain.gradients[0][name] - of_whole).norm() / of_whole.norm().clamp(min=1e-12))
        for name, parameter in model.named_parameters()
        if name in plain.gradients[0] and parameter.grad is not None
        for of_whole in (parameter.grad,)
        if not name.endswith(("c_attn.bias", "k_proj.bias"))  # softmax ignores keys' biases
    ]
    return max(errors)
