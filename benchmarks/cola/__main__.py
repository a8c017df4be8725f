"""A test that a swarm learns CoLA: a model is pre-trained, then fine-tuned in two ways.

    nice -n 19 python -m benchmarks.cola --wikitext DIR --cola DIR

The first holds `wikitext2-valid.txt` and `wikitext2-test.txt`, the other `cola-train.tsv` and
`cola-dev.tsv`. Nothing is fetched, and all is drawn from seeds. The figures are in
benchmarks/reports/quality.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.cola.finetune import Data, Tuning, by_swarm, by_transformers, judged, read
from benchmarks.cola.pretrain import Recipe, pretrain

TEXTS = ("wikitext2-valid.txt", "wikitext2-test.txt")
CODECS = ("--fw aq3+z --bw q3+z", "--fw none --bw none")
"""What swarms send: by default, and whole."""


def main() -> None:
    """Print a line of each way and seed."""
    options = _parser().parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="cola-") as name:
        folder = Path(name)
        model = options.model or folder / "pretrained"
        if not model.exists():
            text = "\n".join((options.wikitext / one).read_text() for one in TEXTS)
            pretrain(text, model, Recipe())
        train, dev = (options.cola / f"cola-{part}.tsv" for part in ("train", "dev"))
        for seed in range(options.seeds):
            _compare(Data(model, train, dev), folder, Tuning(seed=seed))


def _compare(data: Data, folder: Path, tuning: Tuning) -> None:
    _print_score(f"transformers, seed {tuning.seed}", *by_transformers(data, tuning))
    for codecs in CODECS:
        out = folder / f"swarm-{tuning.seed}-{CODECS.index(codecs)}"
        found = by_swarm(data, out, tuning, codecs.split())
        _print_score(
            f"swarm {codecs}, seed {tuning.seed}", found["loss"], found["matthews_correlation"]
        )
        tuned = AutoModelForSequenceClassification.from_pretrained(out).eval()
        own = judged(tuned, AutoTokenizer.from_pretrained(out), read(data.dev))
        _print_score("  its result, by transformers", *own)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wikitext", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cola", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="keep what is pre-trained here, or take it"
    )
    return parser


def _print_score(what: str, loss: float, score: float) -> None:
    sys.stdout.write(f"{what}: loss {loss:.3f}, Matthews' correlation {score:.3f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
