"""A stage that loads needs little more memory than it keeps; bytes are counted, not pages."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
)

from swarm_ft.digest import digest_of
from swarm_ft.protocol.spec.layers import LayerRange
from swarm_ft.protocol.spec.run_spec import TaskKind, TrainOptions
from swarm_ft.stage.checkpoint import open_checkpoint
from swarm_ft.stage.tensor_files import PIECE_BYTES, StoredFile, pieces_of
from tests.states import tensor_digest
from tests.unit.stage.conftest import save_random_model

WIDE = 512
SUM_BYTES = 4
"""Of a piece's sum, by which values that are not finite are found."""


class BytesAlive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of tensors, made inside, that lived at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, num_bytes = storage.data_ptr(), storage.nbytes()
        if key in self._known or not num_bytes:
            return
        self._known.add(key)
        self._now += num_bytes
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._on_freed, key, num_bytes)

    def _on_freed(self, key: int, num_bytes: int) -> None:
        self._known.remove(key)
        self._now -= num_bytes


def test_what_lives_is_counted() -> None:
    with BytesAlive() as alive:
        live = torch.ones(1000)
        for _ in range(3):
            live = live + torch.ones(1000)
    assert alive.most == 3 * 4000


CONFIGS = {
    "gpt2": GPT2Config(n_layer=2, n_embd=WIDE, n_head=8, vocab_size=20000, n_positions=64),
    "llama": LlamaConfig(
        num_hidden_layers=2,
        hidden_size=WIDE,
        intermediate_size=3 * WIDE,
        num_attention_heads=8,
        vocab_size=20000,
    ),
}
ENCODER = BertConfig(
    num_hidden_layers=2,
    hidden_size=WIDE,
    intermediate_size=3 * WIDE,
    num_attention_heads=8,
    vocab_size=20000,
)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("layers", [LayerRange(0, 2), LayerRange(0, 1), LayerRange(1, 2)], ids=str)
@pytest.mark.sampled(4)
def test_a_stage_loads_with_one_piece_beside_what_stays(
    config: PretrainedConfig, layers: LayerRange, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(str(save_random_model(config, tmp_path)))
    model = checkpoint.describe()
    with BytesAlive() as alive:
        tensors = checkpoint.load(layers, model)
    stays = sum(tensor.nbytes for tensor in tensors.values())
    assert alive.most <= stays + PIECE_BYTES + SUM_BYTES
    assert alive.most <= 1.2 * stays


@pytest.mark.parametrize("layers", [LayerRange(0, 2), LayerRange(1, 2)], ids=str)
def test_a_stage_with_a_new_head_loads_so_too(layers: LayerRange, tmp_path: Path) -> None:
    source = save_random_model(ENCODER, tmp_path, auto=AutoModelForMaskedLM)
    train = TrainOptions(task_kind=TaskKind.CLASSIFICATION, label_names="bad,good")
    checkpoint = open_checkpoint(str(source), train)
    model = checkpoint.describe()
    with BytesAlive() as alive:
        tensors = checkpoint.load(layers, model)
    assert {"bert.pooler.dense.weight", "classifier.weight"} <= tensors.keys()
    stays = sum(tensor.nbytes for tensor in tensors.values())
    assert alive.most <= stays + PIECE_BYTES + SUM_BYTES


def test_a_model_is_described_in_the_memory_of_one_piece(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_random_model(CONFIGS["llama"], tmp_path)))
    with BytesAlive() as alive:
        checkpoint.describe()
    assert alive.most == PIECE_BYTES + SUM_BYTES


def test_both_ends_of_a_tied_model_can_be_one_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save_random_model(CONFIGS["gpt2"], tmp_path)))
    model = checkpoint.describe()
    tensors = checkpoint.load(model.layers, model, tie=True)
    assert tensors["lm_head.weight"] is tensors["transformer.wte.weight"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool],
    ids=str,
)
def test_a_tensor_is_read_as_it_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "large": torch.arange(3 * (PIECE_BYTES // 4) + 5).reshape(-1, 1).to(dtype),
        "number": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 7, dtype=dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    file = StoredFile(tmp_path / "x.safetensors", torch.empty(PIECE_BYTES, dtype=torch.uint8))
    with closing(file):
        for name, tensor in tensors.items():
            stored = file.tensor(name)
            assert (stored.dtype, stored.shape) == (dtype, tensor.shape)
            assert torch.equal(stored.whole(), tensor)
            header = f"{dtype} {list(tensor.shape)}".encode()
            data = b"".join(piece.view(torch.uint8).numpy().tobytes() for piece in stored.pieces())
            assert tensor_digest(stored) == tensor_digest(tensor) == digest_of(header, data)


def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(100_000)}, path)
    file = StoredFile(path, torch.empty(PIECE_BYTES, dtype=torch.uint8))
    os.truncate(path, path.stat().st_size - 4)
    with closing(file), pytest.raises(OSError, match="shorter"):
        list(pieces_of(file.tensor("x")))
