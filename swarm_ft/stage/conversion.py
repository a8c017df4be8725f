"""Conversion of a file's tensors to those of a model, and back. Reads no files.

Checkpoints keep the names with which they were published. transformers may use other names, and may
join several tensors to one, such as all experts of a block, by its own rules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from swarm_ft.protocol.spec.run_spec import Dtype

TORCH_DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}


@dataclass(slots=True)
class Recipe:
    """A rule that makes one or more tensors of a model.

    Attributes:
        makes: Names of the model's tensors.
        rule: Converter of transformers; None if the tensor is used as stored.
        stored: Stored tensors that it needs, each with the pattern of the rule that matches it.
    """

    makes: tuple[str, ...]
    rule: WeightConverter | None
    stored: dict[str, str] = field(default_factory=dict)

    def follow(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's tensors by name.

        Args:
            model: Model of the tensors; its weights are not modified.
            tensors: Stored tensors by their stored names.

        Raises:
            Exception: Any error of transformers' conversion.
        """
        if self.rule is None:
            return {self.makes[0]: tensors[next(iter(self.stored))]}
        rule = copy.deepcopy(self.rule)
        for name, pattern in self.stored.items():
            rule.add_tensor(self.makes[0], name, pattern, tensors[name])
        made = rule.convert(self.makes[0], model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def recipes_for(model: PreTrainedModel, stored_names: Iterable[str]) -> dict[str, Recipe]:
    """Return the recipe of each tensor of a model; a checkpoint may lack some, or have more."""
    own, rules = model.state_dict(), get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    rule_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Recipe] = {}
    # This is the order in which transformers stacks experts.
    for stored in sorted(stored_names, key=dot_natural_key):
        name, pattern = rename_source_key(
            stored, renamings, converters, model.base_model_prefix, own
        )
        if name not in own:
            name, pattern = rename_source_key(stored, [], [], model.base_model_prefix, own)
        if name not in own:
            continue
        if name not in found:
            rule = None if pattern is None else rule_of[pattern]
            recipe = Recipe((name,) if rule is None else _made_by(rule, name), rule)
            found |= dict.fromkeys(recipe.makes, recipe)
        if found[name].rule is not None or not found[name].stored:
            found[name].stored[stored] = pattern or stored
    return found


def to_published(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the names and division of `save_pretrained`; parts may be views."""
    published: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return published


def cast_for_storage(
    model: PreTrainedModel, name: str, tensor: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return a tensor in the dtype in which it is stored in a file of this dtype.

    Tensors that transformers always computes in float32, such as routers' biases, stay float32, and
    integers stay integers.
    """
    in_float32 = set(model._keep_in_fp32_modules_strict or ())  # noqa: SLF001 - no public name
    if dtype is torch.float16:
        in_float32 |= set(model._keep_in_fp32_modules or ())  # noqa: SLF001
    stays_float32 = any(f".{one}." in f".{name}." for one in in_float32)
    return tensor if stays_float32 or not tensor.is_floating_point() else tensor.to(dtype)


def _made_by(rule: WeightConverter, first: str) -> tuple[str, ...]:
    targets = rule.target_patterns
    head, found, tail = first.partition(targets[0])
    return tuple(f"{head}{target}{tail}" for target in targets) if found else (first,)
