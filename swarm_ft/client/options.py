"""What a user asks for, as `client train` and `demo` take it. Names are those of the options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """Options of one job.

    Attributes:
        dataset: a UTF-8 file, or a directory of .txt files.
        eval_dataset: held-out text; None evaluates on the training text, and says so.
        steps: optimizer steps; wins over `epochs`.
        batch_size: samples a step.
        clip_grad_norm: 0 is off.
        sync_tied_embeddings: keep tied embeddings tied, instead of untying them.
        max_eval_samples: evaluate on the first so many samples; None: all.
        out: directory for the trained checkpoint.
        json_file: where the report goes; None: nowhere.
        trace_file: where it goes what peers did when; None: nowhere, and nobody records it.
    """

    model: str
    dataset: str
    eval_dataset: str | None
    epochs: int
    steps: int | None
    batch_size: int
    micro_batch_size: int
    seq_length: int
    lr: float
    lr_schedule: str
    warmup_steps: int
    weight_decay: float
    clip_grad_norm: float
    seed: int
    shuffle: bool
    dropout: bool
    sync_tied_embeddings: bool
    fw: str
    bw: str
    key: str
    dp: str
    buffer_bits: int
    save_steps: int
    resume: bool
    max_eval_samples: int | None
    out: Path
    json_file: Path | None
    trace_file: Path | None = None
    fill: str = ""
    fill_microbatches: int = 1
