"""`python -m tests.simulation --seeds 2000`: many simulations, and what they showed."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import click

from tests.simulation.many import Summary, outcomes, settle
from tests.simulation.scenario import Scenario, draw
from tests.simulation.shrink import only, shrink
from tests.simulation.simulate import simulate

SHOWN_LINES = 60
"""Of a failing trace, its last."""


@click.command()
@click.option("--seeds", "num_seeds", default=200, show_default=True, type=click.IntRange(1))
@click.option("--first", default=0, show_default=True, type=click.IntRange(0), help="First seed.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1), help="Processes.")
@click.option("--seed", type=click.IntRange(0), help="Run this one alone and print its trace.")
@click.option("--faults", help="With --seed: only these of its faults, for example 0,3; or none.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON.")
def main(
    num_seeds: int, first: int, jobs: int, seed: int | None, faults: str | None, *, as_json: bool
) -> None:
    """Run whole swarms on virtual time, with faults drawn from a seed; check what must hold."""
    settle()
    if seed is not None:
        outcome = simulate(_chosen(draw(seed), faults), keep_trace=True)
        click.echo("\n".join(outcome.lines))
        sys.exit(bool(outcome.failures))
    summary = _run(range(first, first + num_seeds), jobs, quiet=as_json)
    if as_json:
        click.echo(json.dumps(asdict(summary)))
    else:
        _print_summary(summary)
    for failed in summary.failed_seeds[:3]:
        _explain(failed)
    sys.exit(bool(summary.failed_seeds))


def _chosen(scenario: Scenario, faults: str | None) -> Scenario:
    if faults is None:
        return scenario
    return only(scenario, tuple(int(i) for i in faults.split(",") if i.strip().isdigit()))


def _run(seeds: range, jobs: int, *, quiet: bool) -> Summary:
    summary, begun_s = Summary(), time.monotonic()
    for seed, outcome in outcomes(seeds, jobs):
        summary.add(seed, outcome)
        if outcome.failures:
            click.echo(f"seed {seed}: {outcome.failures[0].splitlines()[0]}", err=True)
        if not quiet and summary.seeds % 100 == 0:
            took_s = time.monotonic() - begun_s
            click.echo(f"{summary.seeds} of {len(seeds)} seeds in {took_s:.0f} s", err=True)
    summary.failed_seeds.sort()
    return summary


def _print_summary(summary: Summary) -> None:
    click.echo(
        f"{summary.seeds} seeds, {summary.virtual_hours:.1f} virtual hours, "
        f"{summary.events} events, {summary.commits} commits, {summary.rollbacks} rollbacks"
    )
    for kind, count in sorted(summary.faults.items()):
        click.echo(f"  {kind:20} {count:8}")
    click.echo(f"{len(summary.failed_seeds)} failed")


def _explain(seed: int) -> None:
    """The shortest trace of a failing seed, and how to see it again."""
    whole = draw(seed)
    small = shrink(whole, lambda scenario: bool(simulate(scenario).failures))
    numbers = [str(i) for i, fault in enumerate(whole.faults) if fault in small.faults]
    outcome = simulate(small, keep_trace=True)
    click.echo(f"\nseed {seed}, shrunk from {len(whole.faults)} faults to {len(small.faults)}:")
    for fault in small.faults:
        click.echo(f"  {fault}")
    click.echo("\n".join(("  ...", *outcome.lines[-SHOWN_LINES:])))
    chosen = ",".join(numbers) or "none"
    click.echo(f"again: python -m tests.simulation --seed {seed} --faults {chosen}")


if __name__ == "__main__":
    main()
