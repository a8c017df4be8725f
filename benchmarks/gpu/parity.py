"""Stages beside plain autograd: the same bits where a backward is cut in two, the same model whole.

Each case trains two steps in three stages three times: with split backwards, without, and without
again. Where the last two differ, the GPU's own sums have no fixed order, and the first cannot be
held to the bit. Of a base in 8 or 4 bits, which plain autograd has no layers for, weights'
gradients come at once instead. Then the gradients beside those of transformers' whole model on the
same device, and the first step's loss beside the CPU's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
NEAR = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Of gradients beside the whole model's: what another order of sums may come to."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and how.

    Attributes:
        is_fixed: torch takes its deterministic algorithms, where it has some.
    """

    model: str
    method: str
    dtype: torch.dtype
    is_fixed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of two steps.

    Attributes:
        losses: of each.
        gradients: of all weights after each step's microbatches, on the CPU, by step and name.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]

    def differing(self, other: Outcome) -> int:
        """How many gradients have not the same bits."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        return sum(
            not torch.equal(one[name], another[name]) for one, another in pairs for name in one
        )


def rows(scene: Scene) -> Iterator[Row]:
    """Families, dtypes and what trains; first as stages are, then with torch's fixed orders."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    orders = (False, True) if torch.cuda.is_available() else (False,)
    for name, config in configs(scene.rehearse).items():
        with checkpoint_of(config) as checkpoint:
            for method, changes in METHODS.items():
                for dtype in (torch.float32, torch.bfloat16):
                    for is_fixed in orders:
                        case = Case(name, method, dtype, is_fixed)
                        yield _row(case, checkpoint, _spec(checkpoint, scene, changes))
                        if scene.left_s < 0:
                            return


def configs(rehearse: bool) -> Mapping[str, PretrainedConfig]:
    """By name; few blocks of real widths."""
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
    dtype = case.dtype
    said: dict[str, Any] = {
        "model": case.model,
        "trains": case.method,
        "dtype": str(dtype).removeprefix("torch."),
        "fixed orders": case.is_fixed,
    }
    torch.use_deterministic_algorithms(case.is_fixed, warn_only=True)
    try:
        split = trained(Chain.loaded(checkpoint, spec, NUM_STAGES, dtype), DEPTH)
        plain, again = (
            trained(Chain.loaded(checkpoint, spec, NUM_STAGES, dtype).without_split(), 0)
            for _ in range(2)
        )
    except Exception as error:  # noqa: BLE001 - the other cases are to run
        return {**said, "trouble": f"{type(error).__name__}: {error}"[:300]}
    finally:
        torch.use_deterministic_algorithms(False)
    said["gradients"] = sum(map(len, plain.gradients))
    said["plain, run twice: differ"] = plain.differing(again)
    said["split beside plain: differ"] = split.differing(plain)
    said["losses alike"] = split.losses == plain.losses
    if not spec.train.adapts:
        distance = whole_error(spec, dtype, plain)
        said["beside the whole model"] = distance
        said["near"] = distance < NEAR[dtype]
    if torch.cuda.is_available() and dtype is torch.float32 and not case.is_fixed:
        on_cpu = Chain.loaded(checkpoint, spec, NUM_STAGES, dtype, torch.device("cpu"))
        loss = on_cpu.step(0, some_tokens(spec, MICROBATCHES), 0)
        said["loss beside the CPU's"] = abs(split.losses[0] - loss) / loss
    return said


def trained(chain: Chain, depth: int) -> Outcome:
    """Steps of a chain, of whose microbatches `depth` wait for their weights."""
    tokens, losses, gradients = some_tokens(chain.spec, MICROBATCHES), [], []
    for number in range(STEPS):
        losses.append(chain.step(number, tokens, depth))
        gradients.append({name: g.detach().cpu().clone() for name, g in chain.gradients().items()})
        chain.apply()
    return Outcome(losses=losses, gradients=gradients)


def whole_error(spec: RunSpec, dtype: torch.dtype, plain: Outcome) -> float:
    """The largest relative error of a first step's gradients beside those of the whole model."""
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
        for of_whole in (parameter.grad.cpu(),)
        if not name.endswith(("c_attn.bias", "k_proj.bias"))  # softmax ignores keys' biases
    ]
    return max(errors)
