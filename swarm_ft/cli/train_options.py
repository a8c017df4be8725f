"""The options of a job: the same names in `client train` and `demo`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_ft.cli.options import stack

if TYPE_CHECKING:
    from swarm_ft.client.job import TrainOptions

_count = click.IntRange(min=1)
_amount = click.FloatRange(min=0.0)


def _codec(direction: str) -> Callable[[click.Context, click.Parameter, str], str]:
    """Checks a codec as it is parsed, before a model is read."""

    def check(_context: click.Context, _option: click.Parameter, text: str) -> str:
        from swarm_ft.protocol.spec.codec_spec import Direction, parse_codec_spec

        parse_codec_spec(text, Direction[direction])
        return text

    return check


def _fill_codec(context: click.Context, option: click.Parameter, text: str | None) -> str:
    return _codec("FORWARD")(context, option, text) if text else ""


def _key_codec(_context: click.Context, _option: click.Parameter, text: str) -> str:
    from swarm_ft.protocol.spec.codec_spec import parse_key_spec

    parse_key_spec(text)
    return text


def _dp_codec(_context: click.Context, _option: click.Parameter, text: str) -> str:
    from swarm_ft.protocol.spec.codec_spec import parse_dp_spec

    parse_dp_spec(text)
    return text


result_options = stack(
    click.option(
        "--out",
        default="swarm-ft-output",
        show_default=True,
        metavar="DIR",
        help="Where the trained model goes.",
    ),
    click.option("--json", "json_file", metavar="FILE", help="Write a report for programs."),
    click.option(
        "--trace",
        "trace_file",
        metavar="FILE",
        help="Write what each peer does when, for ui.perfetto.dev.",
    ),
)
eval_options = stack(
    click.option("--eval-dataset", metavar="PATH", help="Held-out UTF-8 text to evaluate on."),
    click.option("--max-eval-samples", type=_count, help="Evaluate on so many samples at most."),
)
train_options = stack(
    eval_options,
    click.option(
        "--epochs", default=3, show_default=True, type=_count, help="Passes over the data."
    ),
    click.option("--steps", type=_count, help="Optimizer steps; wins over --epochs."),
    click.option("--batch-size", default=8, show_default=True, type=_count, help="Samples a step."),
    click.option(
        "--micro-batch-size",
        default=2,
        show_default=True,
        type=_count,
        help="Samples that travel together; no effect on the result.",
    ),
    click.option(
        "--seq-length", default=128, show_default=True, type=_count, help="Tokens a sample."
    ),
    click.option(
        "--lr",
        type=_amount,
        help="Peak learning rate.  [default: 5e-5; 2e-3 for the demo's own model]",
    ),
    click.option(
        "--lr-schedule",
        default="linear",
        show_default=True,
        type=click.Choice(["constant", "linear", "cosine"]),
        help="How the learning rate moves after the warm-up.",
    ),
    click.option(
        "--warmup-steps",
        default=0,
        show_default=True,
        type=click.IntRange(0),
        help="Steps from 0 to --lr.",
    ),
    click.option(
        "--weight-decay",
        default=0.0,
        show_default=True,
        type=_amount,
        help="Of AdamW; spares biases and norms.",
    ),
    click.option(
        "--clip-grad-norm",
        default=1.0,
        show_default=True,
        type=_amount,
        help="Bound of the gradient's norm over all stages; 0 is off.",
    ),
    click.option(
        "--seed",
        default=42,
        show_default=True,
        type=click.IntRange(0),
        help="Draws all that is random.",
    ),
    click.option(
        "--shuffle/--no-shuffle", default=False, show_default=True, help="New order every epoch."
    ),
    click.option(
        "--dropout/--no-dropout",
        default=False,
        show_default=True,
        help="Train with the model's own dropout; its noise is a floor under every delta.",
    ),
    click.option(
        "--tied-embeddings",
        default="untie",
        show_default=True,
        type=click.Choice(["untie", "sync"]),
        help="Of models that tie head and embeddings: train them apart, or keep them tied.",
    ),
    click.option(
        "--fw",
        default="aq3+z",
        show_default=True,
        callback=_codec("FORWARD"),
        metavar="SPEC",
        help="Codec of activations: none, fp16, aq4 (changes in 4 bits), aq2+z (2 bits a value, "
        "entropy-coded), q4, hq4, aqc0.5, top10 ...",
    ),
    click.option(
        "--bw",
        default="q3+z",
        show_default=True,
        callback=_codec("BACKWARD"),
        metavar="SPEC",
        help="Codec of gradients: none, fp16, q4, q2+z, top10+ef ...",
    ),
    click.option(
        "--key",
        default="q4+z",
        show_default=True,
        callback=_key_codec,
        metavar="SPEC",
        help="Codec of a sample's first activation, where --fw sends changes: fp16, q8, q4+z ...",
    ),
    click.option(
        "--fill",
        metavar="SPEC",
        callback=_fill_codec,
        help="Codec of the activations that fill the pipeline, for which all later stages idle: "
        "aq2 with --fw aq4.  [default: as --fw]",
    ),
    click.option(
        "--fill-microbatches",
        default=1,
        show_default=True,
        type=_count,
        help="The first of a step, which --fill is for.",
    ),
    click.option(
        "--dp",
        default="none",
        show_default=True,
        callback=_dp_codec,
        metavar="SPEC",
        help="Codec of the gradients that replicas of a stage sum: none, fp16, bf16, q4, q2+z ...",
    ),
    click.option(
        "--buffer-bits",
        default="16",
        show_default=True,
        type=click.Choice(["16", "8", "4"]),
        help="Of a value in the buffers that --fw aq ... keeps of each sample at both ends: fewer "
        "take less memory and disk.",
    ),
    click.option(
        "--save-steps",
        default=0,
        show_default="never",
        type=click.IntRange(0),
        help="Steps from one snapshot of the run to the next; the coordinator and the peers must "
        "be told where, with --snapshots.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Go on with the unfinished run of this very job, from its newest snapshot if need be.",
    ),
    result_options,
)


def collect_options(model: str, dataset: str, *, default_lr: float, **given: Any) -> TrainOptions:
    """What `train_options` parsed, as one value."""
    from swarm_ft.client.job import TrainOptions

    lr, out = given.pop("lr"), given.pop("out")
    json_file, trace_file = given.pop("json_file"), given.pop("trace_file")
    tied, buffer_bits = given.pop("tied_embeddings"), given.pop("buffer_bits")
    return TrainOptions(
        model=model,
        dataset=dataset,
        lr=default_lr if lr is None else lr,
        json_file=Path(json_file) if json_file else None,
        trace_file=Path(trace_file) if trace_file else None,
        out=Path(out),
        sync_tied_embeddings=tied == "sync",
        buffer_bits=int(buffer_bits),
        **given,
    )
