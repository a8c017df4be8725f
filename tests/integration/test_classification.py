"""A swarm turns a TSV of sentences and classes into a classifier that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DebertaV2Config,
    PretrainedConfig,
)

from swarm_ft.client.data.progress import Listener
from swarm_ft.client.demo_input import write_demo_input
from swarm_ft.client.job import prepare_job
from swarm_ft.client.options import EvalOptions, JobOptions, Outputs, ReadOptions
from swarm_ft.client.report import RunProgress
from swarm_ft.client.train import WatchedRun
from swarm_ft.protocol.messages.client import RunStatus
from swarm_ft.protocol.spec.run_spec import Adapter, TaskKind, TrainOptions
from tests.local_swarm import LocalSwarm

WORDS = ("def", "class", "import", "return")
"""A sentence is of class `yes` where it has an `import`."""


def write_tsv(path: Path, count: int, first: int) -> list[tuple[str, str]]:
    rows = []
    for number in range(first, first + count):
        word, size = WORDS[number % 3 if number % 2 else 2], number % 5
        rows.append((f"{'x ' * size}{word} self", "yes" if word == "import" else "no"))
    lines = ["id\tsentence\tmark", *(f"{i}\t{text}\t{mark}" for i, (text, mark) in enumerate(rows))]
    path.write_text("\n".join(lines) + "\n")
    return rows


class Quiet(RunProgress):
    """A console that records its lines."""

    lines: list[str]

    def message(self, text: str) -> None:
        self.lines.append(text)


_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}
BERT = BertConfig(**_SIZES)
DEBERTA = DebertaV2Config(
    **_SIZES,
    relative_attention=True,
    position_buckets=8,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type=["p2c", "c2p"],
    position_biased_input=False,
)


def save_encoder(config: PretrainedConfig, model_dir: Path) -> None:
    """Save an encoder in the place of a decoder, whose tokenizer stays."""
    torch.manual_seed(4)
    AutoModelForMaskedLM.from_config(config).save_pretrained(model_dir)


@pytest.mark.parametrize(
    ("layers", "encoder", "more"),
    [
        (["0-4"], None, {}),
        (["0-1", "1-3", "3-4"], None, {}),
        (["0-2", "2-4", "2-4"], None, {}),
        (["0-1", "1-3", "3-4"], BERT, {}),
        (["0-1", "1-3", "1-3", "3-4"], DEBERTA, {}),
        (["0-1", "1-3", "3-4"], DEBERTA, {"adapter": Adapter.LORA, "merge": True}),
    ],
)
async def test_a_swarm_learns_classes_of_a_tsv(
    tmp_path: Path, layers: list[str], encoder: PretrainedConfig | None, more: dict[str, Any]
) -> None:
    made = write_demo_input(
        tmp_path / "input", seed=0, num_layers=4, hidden_size=32, vocab_size=300
    )
    if encoder is not None:
        save_encoder(encoder, Path(made.model_dir))
    write_tsv(tmp_path / "train.tsv", 24, 0)
    held_out = write_tsv(tmp_path / "test.tsv", 14, 100)
    options = JobOptions(
        model=made.model_dir,
        dataset=str(tmp_path / "train.tsv"),
        reading=ReadOptions(text_column="sentence", label_column="mark"),
        evaluation=EvalOptions(eval_dataset=str(tmp_path / "test.tsv")),
        epochs=6,
        train=TrainOptions(
            task_kind=TaskKind.CLASSIFICATION,
            seq_length=24,
            batch_size=8,
            micro_batch_size=4,
            learning_rate=5e-3,
            forward_codec="none",
            backward_codec="none",
            **more,
        ),
    )
    lines: list[str] = []
    job = prepare_job(options, Listener(on_line=lines.append))
    assert job.spec.train.labels == ("no", "yes")
    assert any("its class is 'mark'; not used: 'id'" in line for line in lines)
    assert "24 documents, 24 samples of up to 24 tokens; classes no 33.3%, yes 66.7%" in lines[-1]
    progress = Quiet(job.spec.train)
    progress.lines = []
    async with LocalSwarm(tmp_path, layers) as swarm:
        last = (await swarm.train(job.spec, job.samples))[-1]
        assert isinstance(last, RunStatus)
        run = WatchedRun(
            client=swarm.client,
            run_id=last.run_id,
            checkpoint=job.checkpoint,
            progress=progress,
            spec=job.spec,
        )
        outputs = Outputs(out=tmp_path / "out")
        await run.fetch(outputs)
        report = run.report(outputs)
    loss, accuracy = whole(tmp_path / "out", held_out)
    found = json.loads(report.to_json())
    assert found["eval"]["accuracy"] == accuracy == 1.0
    assert found["eval"]["matthews_correlation"] == found["eval"]["f1"] == 1.0
    assert found["eval_before"]["accuracy"] < 1.0
    assert found["eval"]["loss"] == pytest.approx(loss, rel=1e-4)
    assert "perplexity" not in found["eval"]
    assert any(line.startswith("matthews_correlation ") for line in report.summary_lines())
    assert "accuracy 1.000" in progress.lines[-2] + progress.lines[-1]


def whole(model_dir: Path, rows: list[tuple[str, str]]) -> tuple[float, float]:
    """Loss and accuracy by transformers alone, in one padded batch."""
    model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    encoded = tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")
    labels = torch.tensor([model.config.label2id[mark] for _, mark in rows])
    with torch.no_grad():
        logits = model(**encoded).logits
    right = int((logits.argmax(1) == labels).sum())
    return cross_entropy(logits, labels).item(), right / len(rows)
