"""Low-rank adapters beside the linear layers of a stage's blocks, with peft's modules.

The base is frozen, except a classifier's head, which trains in full. An adapter's initial values
follow from the run's seed and its layer's name, by arithmetic with the same result on every
machine. Replicas therefore begin with the same bits, and a run does not depend on the cut of its
model. Base layers may have any form of `stage.weight_formats`; adapters and heads are float32.

Shape suffixes: o outputs, i inputs of a layer, r the rank.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from swarm_ft.errors import BadOption
from swarm_ft.protocol.spec.run_spec import (
    ALL_LINEAR,
    BYTES_PER_FLOAT,
    Adapter,
    RunSpec,
    TaskKind,
    TrainOptions,
)
from swarm_ft.stage.architecture import Architecture, block_part
from swarm_ft.stage.checkpoint import Checkpoint
from swarm_ft.stage.device import sum_in_order
from swarm_ft.stage.heads import draw_uniform
from swarm_ft.stage.module import StageModule
from swarm_ft.stage.skeleton import is_below
from swarm_ft.stage.weight_formats import Lazy, in_float32, packing_of, weight_of

if TYPE_CHECKING:  # only runs with adapters import peft, which takes seconds
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""Files of a directory that `PeftModel.from_pretrained` loads."""
_NAME = "default"
"""Name that peft gives to the only adapter.

It is part of names in a stage's state, not in a result.
"""
_PREFIX = "base_model.model."
_TASKS = {
    TaskKind.CAUSAL_LM: "CAUSAL_LM",
    TaskKind.CLASSIFICATION: "SEQ_CLS",
    TaskKind.TOKEN_CLASSIFICATION: "TOKEN_CLS",
}
"""Task names of peft."""


# ---- the layers that get adapters


@torch.no_grad()
def is_linear(layer: nn.Module) -> bool:
    """Whether an adapter can stand beside a layer: the layer returns `out_features` outputs.

    Some routers of mixtures are linear layers with more outputs.
    """
    if type(layer).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    if not isinstance(layer, nn.Linear):
        return False
    weight = layer.weight
    output = layer(torch.zeros(1, layer.in_features, dtype=weight.dtype, device=weight.device))
    return isinstance(output, Tensor) and output.shape == (1, layer.out_features)


def targets_of(model: PreTrainedModel, architecture: Architecture, spec: RunSpec) -> list[str]:
    """Return the names of the layers that get adapters, of a whole model or of a stage."""
    layers = spec.trained_layers
    parts = {block_part(index) for index in range(layers.start, layers.stop)}
    linear = [name for name, layer in model.named_modules() if is_linear(layer)]
    targeted = [name for name in linear if _is_target(name, spec.train)]
    names = [name for name in targeted if architecture.part_of(name) in parts]
    ends = {_end_of(name) for name in names}
    experts = {end for end in ends if _means_experts(end, model)}
    return [name for name in names if _end_of(name) not in experts]


def _means_experts(end: str, model: PreTrainedModel) -> bool:
    """Whether peft takes a name for experts that transformers now stores in one tensor.

    Then no `adapter_config.json` can name another layer of this name: a shared expert, or the dense
    block of a mixture.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules={end})
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # the name is one of several in one tensor
        return True
    taken: set[str] = config.target_modules
    return taken != {end}


def _end_of(name: str) -> str:
    return name.rpartition(".")[2]


def with_adapters(checkpoint: Checkpoint, spec: RunSpec) -> RunSpec:
    """Return the run with the size of its adapters in its model, if it trains any.

    The client calls this before it submits a job, to refuse adapters that the model cannot have.

    Raises:
        BadOption: A target is no linear layer of the blocks, or peft rejects it.
    """
    if not spec.train.adapts:
        return spec
    names = targets_of(checkpoint.skeleton, checkpoint.architecture, spec)
    for target in spec.train.targets:
        if not any(_ends_with(name, target) for name in names) and target != ALL_LINEAR:
            raise BadOption(
                f"--target-modules {target}: expected ends of names of linear layers in the blocks "
                f"that train; there are {_linear_in(checkpoint, spec)}"
            )
    if not names:
        raise BadOption("--adapter: the blocks that train have no linear layers")
    by_block = Counter[str]()
    for name, tensor in _inject_and_export(
        copy.deepcopy(checkpoint.skeleton), names, spec.train
    ).items():
        layer = name.partition(".lora_")[0]
        by_block[checkpoint.architecture.part_of(layer)] += tensor.numel() * BYTES_PER_FLOAT
    return replace(spec, model=replace(spec.model, adapter_bytes=max(by_block.values())))


def _inject_and_export(
    model: PreTrainedModel, names: Collection[str], train: TrainOptions
) -> dict[str, Tensor]:
    """Inject adapters into a model without memory, and read them back as peft does."""
    from peft import get_peft_model_state_dict
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers as converted,
    )

    _inject(model, names, train)
    own: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    written = {f"{_PREFIX}{name}": tensor for name, tensor in own.items()}
    config = _config(model, names, train)
    lost = written.keys() - converted(model, config, written, _NAME).keys()
    if lost:
        raise BadOption(
            f"--target-modules {train.target_modules}: peft reads {min(lost)} as something else; "
            f"name other layers"
        )
    return own


def _is_target(name: str, train: TrainOptions) -> bool:
    return ALL_LINEAR in train.targets or any(_ends_with(name, end) for end in train.targets)


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _linear_in(checkpoint: Checkpoint, spec: RunSpec) -> str:
    """Return the last parts of the names of all layers that could have adapters."""
    every = replace(spec, train=replace(spec.train, target_modules=ALL_LINEAR))
    names = targets_of(checkpoint.skeleton, checkpoint.architecture, every)
    return ", ".join(dict.fromkeys(map(_end_of, names))) or "none"


# ---- peft's modules


def attach(module: StageModule, spec: RunSpec) -> None:
    """Freeze a stage, and put adapters beside its layers.

    Args:
        module: Stage with its weights.
        spec: Run with adapters.

    Raises:
        BadOption: peft rejects a layer.
    """
    module.requires_grad_(False)
    names = targets_of(module.causal_model, module.architecture, spec)
    for layer in map(module.causal_model.get_submodule, names):
        packing = packing_of(layer)
        if packing is not None:  # peft reads the shape here if the layer does not have it
            layer.weight.ds_shape = packing.shape
    if names:
        _inject(module.causal_model, names, spec.train)
    for name, layer in _adapted(module).items():
        _initialise(layer, f"{spec.train.seed}/adapter/{name}")
    for head in heads_in(module, spec):  # last, because peft freezes all other weights
        module.get_submodule(head).requires_grad_(True)


def heads_in(module: StageModule, spec: RunSpec) -> tuple[str, ...]:
    """Return the names of modules of a stage that train in full beside adapters."""
    return module.architecture.new_ends if spec.train.has_classes and module.is_last else ()


def _inject(model: PreTrainedModel, names: Collection[str], train: TrainOptions) -> None:
    from peft import inject_adapter_in_model

    try:
        with torch.device("meta"):  # peft's own initial values are not used
            inject_adapter_in_model(_config(model, names, train), model, _NAME)
    except (ValueError, TypeError) as error:
        raise BadOption(f"--target-modules {train.target_modules}: {error}") from error


def _config(model: PreTrainedModel, names: Collection[str], train: TrainOptions) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        task_type=_TASKS[train.task_kind],
        r=train.lora_r,
        lora_alpha=train.lora_alpha,
        lora_dropout=train.lora_dropout if train.dropout else 0.0,
        use_dora=train.adapter is Adapter.DORA,
        target_modules=set(names),
        fan_in_fan_out=all(isinstance(model.get_submodule(name), Conv1D) for name in names),
    )


def _adapted(module: StageModule) -> dict[str, LoraLayer]:
    if not hasattr(module.causal_model, "peft_config"):  # as `_inject` leaves it
        return {}
    from peft.tuners.lora import LoraLayer

    found = module.named_modules()
    return {name: layer for name, layer in found if isinstance(layer, LoraLayer)}


@torch.no_grad()
def _initialise(layer: LoraLayer, seed: str) -> None:
    """Initialise an adapter: A uniform within 1 / sqrt(inputs), as in peft; B 0.

    DoRA's lengths as W's.
    """
    base = layer.get_base_layer()
    a_ri, b_or = layer.lora_A[_NAME], layer.lora_B[_NAME]
    drawn_ri = draw_uniform(seed, a_ri.weight.shape) * (1.0 / math.sqrt(a_ri.weight.shape[1]))
    a_ri.weight = _on(base, drawn_ri)
    b_or.weight = _on(base, torch.zeros(b_or.weight.shape))
    if _NAME in layer.lora_magnitude_vector:
        weight_oi = base.weight.t() if isinstance(base, Conv1D) else base.weight
        layer.lora_magnitude_vector[_NAME].weight = _on(base, _lengths(weight_oi))


def _on(base: nn.Module, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.to(base.get_parameter("weight").device))


def _lengths(weight_oi: Tensor) -> Tensor:
    """Return the Euclidean norms of the rows, summed in the same order on every machine."""
    squares = weight_oi.detach().cpu().double().square()
    return sum_in_order(squares, 1)[:, 0].sqrt().float()


# ---- results


def adapter_weights(module: StageModule) -> dict[str, Tensor]:
    """Return a stage's part of `WEIGHTS_FILE` by peft's names, with a head that trains in full."""
    found = {
        name: weight.detach()
        for name, weight in module.trainable().items()
        if is_below(name, module.architecture.new_ends)
    }
    if _adapted(module):
        from peft import get_peft_model_state_dict

        found |= get_peft_model_state_dict(module.causal_model, save_embedding_layers=False)
    return {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in found.items()}


def merged_weights(module: StageModule) -> dict[str, Lazy]:
    """Return a stage's weights with its adapters merged, by the names of the base model."""
    weights = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in in_float32(module).items()
        if not any(part.startswith("lora_") for part in name.split("."))
    }
    adapted = {f"{name}.weight": layer for name, layer in _adapted(module).items()}
    return weights | {
        name: replace(weights[name], how=partial(_merged, layer)) for name, layer in adapted.items()
    }


@torch.no_grad()
def _merged(layer: LoraLayer) -> Tensor:
    weight = weight_of(layer.get_base_layer())
    if _NAME in layer.lora_variant:
        merged: Tensor = layer.lora_variant[_NAME].merge_safe(layer, _NAME, weight.clone())
    else:
        merged = weight + layer.get_delta_weight(_NAME)
    return merged


def save_adapter_config(directory: Path, checkpoint: Checkpoint, spec: RunSpec) -> None:
    """Write `CONFIG_FILE`: the base model of the adapter, and the layers that it adapts.

    Layers are named by the ends of their names where these are unambiguous, as people write them.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    skeleton, layers = checkpoint.skeleton, spec.trained_layers
    names = set(targets_of(skeleton, checkpoint.architecture, spec))
    config = _config(skeleton, names, spec.train)
    config.base_model_name_or_path, config.revision = checkpoint.reference, checkpoint.revision
    config.inference_mode = True
    if spec.train.has_classes:
        config.modules_to_save = [_end_of(name) for name in checkpoint.architecture.new_ends]
    config.target_modules = {_end_of(name) for name in names}
    if layers != spec.model.layers:
        config.layers_to_transform = list(range(layers.start, layers.stop))
    every = (name for name, _ in skeleton.named_modules())
    if {name for name in every if check_target_module_exists(config, name)} != names:
        config.target_modules, config.layers_to_transform = names, None
    config.save_pretrained(str(directory))
