"""Model card of a result (its README.md): data, training, evaluation, traffic and peers.

Cards are often published, so paths of this machine appear only by their last component.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_ft.client.formatting import printable
from swarm_ft.client.options import JobOptions, Outputs
from swarm_ft.client.report import RunReport, metrics_of
from swarm_ft.protocol.messages.control import StageAssignment, stages_of
from swarm_ft.protocol.spec.options import arguments
from swarm_ft.protocol.spec.run_spec import Adapter, Dtype, RunSpec, TaskKind

if TYPE_CHECKING:
    from swarm_ft.protocol.messages.client import CodecChange, Evaluated

CARD = "README.md"
TAG = "swarm-ft"
PIPELINES = {
    TaskKind.CAUSAL_LM: "text-generation",
    TaskKind.CLASSIFICATION: "text-classification",
    TaskKind.TOKEN_CLASSIFICATION: "token-classification",
}


def model_card(
    report: RunReport,
    spec: RunSpec,
    assignments: Sequence[StageAssignment],
    options: JobOptions | None,
) -> str:
    """Return the model card of a result.

    Args:
        report: Report of the run.
        spec: Parameters of the run.
        assignments: Hosting peers at the end of the run.
        options: Options of the job; None for an attached run, whose data is unknown here.
    """
    parts = (
        _metadata(spec, options),
        f"# {_named(spec.model.reference)}, fine-tuned",
        "Fine-tuned with swarm-ft by a swarm of volunteers' machines over ordinary links.",
        "## Training procedure",
        _table(dict(_training(report, spec, options))),
        *_evaluation(report),
        "## Traffic between peers",
        _table(dict(_links(report, spec))),
        "## Peers",
        _contributors(assignments),
        *_command(options),
    )
    return "\n\n".join(parts) + "\n"


def _metadata(spec: RunSpec, options: JobOptions | None) -> str:
    from huggingface_hub import ModelCardData

    train = spec.train
    is_adapter = train.gives_adapter
    base = spec.model.reference
    data = list(filter(_is_public, options.datasets)) if options else []
    found = ModelCardData(
        base_model=base if _is_public(base) else None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=PIPELINES[train.task_kind],
        datasets=data or None,
        tags=[TAG, *([train.adapter.name.lower()] if train.adapts else [])],
        base_model_relation=("adapter" if is_adapter else "finetune") if _is_public(base) else None,
    )
    return f"---\n{found.to_yaml()}\n---"


def _training(
    report: RunReport, spec: RunSpec, options: JobOptions | None
) -> Iterator[tuple[str, str]]:
    train = spec.train
    yield "base model", _named(spec.model.reference)
    if options is not None:
        split = f", split {options.split}" if options.split else ""
        yield "data", f"{', '.join(map(_named, options.datasets))}{split}"
    yield "samples", f"{train.num_samples:,} of up to {train.seq_length} tokens"
    early = ", stopped early" if report.has_stopped_early else ""
    best_step = report.steps_in_result
    best = f"; best weights: step {best_step}" if best_step < len(report.losses) else ""
    yield "steps", f"{len(report.losses)} of {train.batch_size} samples{early}{best}"
    if report.losses:
        yield "training loss", f"{report.losses[0]:.3f} to {report.losses[-1]:.3f}"
    yield "optimizer", f"{train.optim.name.lower()}, {train.lr_schedule.name.lower()} schedule"
    yield "learning rate", f"{train.learning_rate:g}, {train.warmup_steps} steps of warm-up"
    if train.adapter is not Adapter.NONE:
        rank = f"r {train.lora_r}, alpha {train.lora_alpha}, on {train.target_modules}"
        yield "adapter", f"{train.adapter.name.lower()}, {rank}"
    if train.train_layers:
        yield "trained blocks", train.train_layers
    yield "seed", str(train.seed)
    if spec.result_dtype is not Dtype.FLOAT32:
        stored = spec.result_dtype.name.lower()
        yield "weights", f"stored as {stored}; losses were measured with float32 weights"


def _evaluation(report: RunReport) -> Iterator[str]:
    before, after = report.eval_before, report.eval_after
    if before is None or after is None:
        return
    first, last = _values(report, before), _values(report, after)
    rows = [f"| {name} | {first[name]:.3f} | {last[name]:.3f} |" for name in last if name in first]
    yield "## Evaluation results"
    yield "\n".join(("| on held-out samples | before | after |", "|---|---|---|", *rows))


def _values(report: RunReport, found: Evaluated) -> dict[str, float]:
    return {"loss": found.loss, **metrics_of(found, report.task)}


def _links(report: RunReport, spec: RunSpec) -> Iterator[tuple[str, str]]:
    sent, train, changes = report.sent, spec.train, report.codecs
    ways = (
        (
            "activations",
            _in_turn(train.forward_codec, ((c.first_step, c.codecs.forward) for c in changes))
            if report.quality is None
            else _at_last(train.forward_codec, changes),
            sent.forward_bytes,
            sent.forward_uncompressed_bytes,
        ),
        (
            "gradients",
            _in_turn(train.backward_codec, ((c.first_step, c.codecs.backward) for c in changes)),
            sent.backward_bytes,
            sent.backward_uncompressed_bytes,
        ),
        (
            "between replicas",
            f"`{train.dp_codec}`",
            sent.gradient_bytes,
            sent.gradient_uncompressed_bytes,
        ),
    )
    for name, codec, num_bytes, uncompressed in ways:
        if uncompressed:
            bits = 32 * num_bytes / uncompressed
            yield name, f"{codec}: {bits:.2f} bits a value, {num_bytes / 1e6:,.1f} MB"
    if not any(uncompressed for *_, uncompressed in ways):
        yield "between peers", "nothing"


def _in_turn(first: str, changes: Iterable[tuple[int, str]]) -> str:
    """Return the first codec and each later one with the step from which it applied."""
    words, last = f"`{first}`", first
    for step, codec in changes:
        if codec != last:
            words, last = f"{words}, from step {step} on `{codec}`", codec
    return words


def _at_last(first: str, changes: Sequence[CodecChange]) -> str:
    """Return the first and the last codec; codecs that follow a quality do not list the others."""
    last = changes[-1].codecs.forward if changes else first
    return f"`{first}`" if last == first else f"`{first}` at first, `{last}` at last"


def _contributors(assignments: Sequence[StageAssignment]) -> str:
    lines = [
        f"| {stage.layers} | {', '.join(f'`{printable(peer)}`' for peer in stage.peers)} |"
        for stage in stages_of(assignments)
    ]
    return "\n".join(("| layers | peers at the end |", "|---|---|", *lines))


def _command(options: JobOptions | None) -> Iterator[str]:
    if options is None:
        return
    evaluation = options.evaluation
    if evaluation.eval_dataset is not None:
        evaluation = replace(evaluation, eval_dataset=_named(evaluation.eval_dataset))
    shown = replace(
        options,
        model=_named(options.model),
        dataset=tuple(map(_named, options.datasets)),
        evaluation=evaluation,
        outputs=Outputs(),
        resume=False,
    )
    yield "## Command"
    yield f"```\nswarm-ft client train {shlex.join(arguments(shown))}\n```"


def _table(rows: Mapping[str, Any]) -> str:
    cells = (f"| {name} | {printable(str(value))} |" for name, value in rows.items())
    return "\n".join(("| | |", "|---|---|", *cells))


def _is_public(reference: str) -> bool:
    """Return whether a reference is the id of a repository on the hub and not a path."""
    is_id = reference.count("/") <= 1 and not reference.startswith((".", "/", "~"))
    return is_id and not Path(reference).suffix and not Path(reference).exists()


def _named(reference: str) -> str:
    """Return a hub id unchanged, and the last component of a path."""
    return reference if _is_public(reference) else Path(reference).name
