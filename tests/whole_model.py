"""The quality of a result by transformers and peft alone, in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def whole_loss(model_dir: Path | str, tokens: Tensor) -> float:
    """Mean loss of samples [B, T] with a checkpoint, or with an adapter beside its model."""
    model = whole_model(Path(model_dir)).eval()
    with torch.no_grad():
        loss: float = model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    return loss


def whole_model(model_dir: Path) -> Any:
    """A checkpoint's model, or an adapter's with the model that it stands beside."""
    if not (model_dir / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(str(model_dir)).base_model_name_or_path or ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about peft
        return PeftModel.from_pretrained(whole_model(Path(base)), str(model_dir))
