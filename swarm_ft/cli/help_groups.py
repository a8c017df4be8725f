"""Help of commands that take a job: options in groups, and rare options in `--help-all` only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

OTHERS = "Other options"
GROUPS: Mapping[str, str] = {
    "Data": """
        model dataset split probabilities stopping-strategy max-samples data-format subset
        text-column column template remove-columns label-column column-names delimiter field quotes
        separator packing packing-strategy truncation completion-only-loss assistant-only-loss
        eval-dataset eval-split eval-size max-eval-samples task labels num-samples num-eval-samples
        """,
    "Training": """
        epochs steps batch-size micro-batch-size seq-length lr lr-schedule warmup-steps warmup-ratio
        weight-decay clip-grad-norm optim gradient-checkpointing seed shuffle dropout train-layers
        tied-embeddings router-aux-loss-coef eval-strategy eval-steps evals-per-epoch
        early-stopping-patience early-stopping-threshold metric-for-best-model
        load-best-model-at-end
        """,
    "Adapter": """
        adapter lora-r lora-alpha lora-dropout target-modules merge base-dtype load-in-8bit
        load-in-4bit
        """,
    "Compression": """
        quality fw bw key dp fill fill-microbatches drain drain-microbatches frozen buffer-bits
        eval-compression
        """,
    "Snapshots": "save-strategy save-steps saves-per-epoch save-total-limit resume",
    "Swarm": """
        invite insecure initial-peers dht-prefix detach priority private-ends share-with stages
        replicas buffer-memory buffer-disk buffer-dir buffer-days
        """,
    "Output": """
        out dtype json trace report-to logging-dir push-to-hub hub-private-repo print-config
        show log-level help help-all
        """,
}
"""Options of each group, without their dashes."""
RARE = frozenset(
    """
    key dp fill fill-microbatches drain drain-microbatches frozen buffer-bits eval-compression
    router-aux-loss-coef tied-embeddings column-names delimiter field quotes separator
    """.split()  # noqa: SIM905 - a list of strings would be harder to read
)
"""Options that only `--help-all` shows: mostly codecs, whose defaults suit nearly all jobs."""
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}


class GroupedCommand(click.Command):
    """A command whose help lists its options in groups."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all,
                help="Show this message with all options and exit.",
            )
        )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group under its title, and the number of hidden options."""
        shows_all, sections, num_rare = ctx.meta.get(_SHOWS_ALL, False), _no_rows(), 0
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or not isinstance(param, click.Option):
                continue
            name = name_of(param)
            if name in RARE and not shows_all:
                num_rare += 1
            else:
                sections[_GROUP_OF.get(name, OTHERS)].append(record)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if num_rare:
            formatter.write_paragraph()
            formatter.write_text(f"--help-all shows {num_rare} more options, mostly for codecs.")


def name_of(param: click.Parameter) -> str:
    """Return the option's first name that a group contains, without dashes."""
    names = [flag.lstrip("-") for flag in param.opts]
    return next((name for name in names if name in _GROUP_OF), names[0])


_SHOWS_ALL = f"{__name__}.shows_all"


def _no_rows() -> dict[str, list[tuple[str, str]]]:
    return {title: [] for title in (*GROUPS, OTHERS)}


def _show_all(ctx: click.Context, _option: object, is_set: bool) -> None:
    if is_set and not ctx.resilient_parsing:
        ctx.meta[_SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
