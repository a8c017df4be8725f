"""Checks what the compose swarm trained, inside the client's container; fails if it is no result.

It knows the paths of docker-compose.yml, and repeats no measurement but the held-out loss.
"""

import json
import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

REPORT = Path("/result/report.json")
MODEL = "/result/model"
HELD_OUT = Path("/model/heldout.txt")
SEQ_LENGTH = 128


def held_out_loss() -> float:
    """Mean loss over the target tokens of the held-out text, by transformers' own arithmetic."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tokens = AutoTokenizer.from_pretrained(MODEL)(HELD_OUT.read_text("utf-8"))["input_ids"]
    used = len(tokens) // SEQ_LENGTH * SEQ_LENGTH
    samples = torch.tensor(tokens[:used]).view(-1, SEQ_LENGTH)
    with torch.inference_mode():
        return float(model(input_ids=samples, labels=samples).loss)


def main() -> None:
    """Compare the report with the model.

    Raises:
        SystemExit: they disagree, or training taught nothing.
    """
    report = json.loads(REPORT.read_text("utf-8"))
    reported, before = report["eval"]["loss"], report["eval_before"]["loss"]
    measured = held_out_loss()
    if not math.isclose(measured, reported, rel_tol=1e-4):
        raise SystemExit(f"{MODEL}: loss {measured}, but the report says {reported}")
    if not reported < before:
        raise SystemExit(f"{MODEL}: loss {reported} after training, {before} before")
    sys.stdout.write(f"{MODEL} loads; held-out loss {before:.3f} -> {measured:.3f}\n")


main()
