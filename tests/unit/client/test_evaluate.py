from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarm_ft.client.evaluate import evaluate
from swarm_ft.client.sample import SampleInput
from swarm_ft.errors import BadDataset, BadModel
from swarm_ft.protocol.spec.sample_rows import NO_TOKEN, samples_in, words_of

SAMPLES = np.random.default_rng(0).integers(0, 512, size=(5, 12), dtype=np.uint32)


def _copy_with(
    sample: SampleInput, target: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> str:
    shutil.copytree(sample.model_dir, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def test_loss_is_that_of_transformers_over_all_targets(sample: SampleInput) -> None:
    got = evaluate(sample.model_dir, SAMPLES)
    model = AutoModelForCausalLM.from_pretrained(sample.model_dir).eval()
    ids = torch.from_numpy(SAMPLES.astype(np.int64))
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss.item()
    assert got.loss == pytest.approx(expected, rel=1e-6)
    assert got.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


def test_loss_is_over_what_is_to_be_learned_alone(sample: SampleInput) -> None:
    rows = np.stack([words_of(row, np.arange(12) % 3 > 0) for row in SAMPLES])
    rows[1, 7:], rows[4, 3:] = NO_TOKEN, NO_TOKEN
    model = AutoModelForCausalLM.from_pretrained(sample.model_dir).eval()
    losses, counts = [], []
    for row in rows:
        samples = samples_in(row[None])
        ids, labels = torch.from_numpy(samples.token_ids), torch.from_numpy(samples.labels)
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=labels, num_items_in_batch=1).loss.item())
        counts.append(int((labels[:, 1:] >= 0).sum()))
    for batch_size in (1, 2, 5):
        got = evaluate(sample.model_dir, rows, batch_size=batch_size)
        assert got.loss == pytest.approx(sum(losses) / sum(counts), rel=1e-6)
    read = np.stack([words_of(row, is_target=False) for row in SAMPLES])
    with pytest.raises(BadDataset, match="all are only read"):
        evaluate(sample.model_dir, read)


def test_the_batch_size_changes_nothing_and_each_batch_is_told(sample: SampleInput) -> None:
    told: list[bool] = []
    whole = evaluate(sample.model_dir, SAMPLES)
    parts = evaluate(sample.model_dir, SAMPLES, batch_size=2, on_batch=lambda: told.append(True))
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert len(told) == 3


def test_a_loss_beyond_the_range_of_exp_has_infinite_perplexity(
    sample: SampleInput, tmp_path: Path
) -> None:
    def blow_up(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] *= 1e6

    got = evaluate(_copy_with(sample, tmp_path / "huge", blow_up), SAMPLES)
    assert math.isfinite(got.loss)
    assert got.perplexity == math.inf


def test_a_checkpoint_with_missing_weights_is_refused(sample: SampleInput, tmp_path: Path) -> None:
    torn = _copy_with(
        sample, tmp_path / "torn", lambda tensors: tensors.pop("transformer.h.1.ln_1.bias")
    )
    with pytest.raises(BadModel, match=r"1 weights are missing \(transformer\.h\.1\.ln_1\.bias\)"):
        evaluate(torn, SAMPLES)


def test_a_directory_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="expected a causal language model") as caught:
        evaluate(str(tmp_path), SAMPLES)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (8,)])
def test_samples_without_targets_are_refused(sample: SampleInput, shape: tuple[int, ...]) -> None:
    with pytest.raises(BadDataset, match="2 or more tokens"):
        evaluate(sample.model_dir, np.zeros(shape, dtype=np.uint32))


def test_nothing_is_printed(sample: SampleInput, capfd: pytest.CaptureFixture[str]) -> None:
    evaluate(sample.model_dir, SAMPLES)
    assert capfd.readouterr() == ("", "")
