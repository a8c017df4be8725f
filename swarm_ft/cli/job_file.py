"""Job options of a command, from a YAML file and the command line, which overrides the file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from swarm_ft.cli.options import declared_options, stack
from swarm_ft.client.options import JobOptions
from swarm_ft.protocol.spec.options import OptionField, build, option_fields


def takes_job(
    parameter: str, without: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a job's options and JOB.yaml to a command, which gets the job as `parameter`.

    With `--print-config` the command prints the job and does not run.

    Args:
        parameter: Name of the command's parameter.
        without: Fields that get no option; a file may set them.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_job(*, print_config: bool, **values: Any) -> Any:
            own = {one.field: values.pop(one.field, None) for one in option_fields(JobOptions)}
            options = build(JobOptions, own)
            if not print_config:
                return command(**{parameter: options}, **values)
            from swarm_ft.api.job_file import job_yaml

            return click.echo(job_yaml(options), nl=False)

        options = declared_options(JobOptions, without=without)
        return stack(_file, options, _print_config)(with_job)

    return decorate


def _from_file(context: click.Context, _argument: object, path: Path | None) -> None:
    """Set the defaults of the command's options to a file's values."""
    if path is None:
        return
    from swarm_ft.api.job_file import read_job_file
    from swarm_ft.api.translation import translate_job
    from swarm_ft.client.formatting import printable

    document = read_job_file(path)
    own, found = {one.field: one for one in option_fields(JobOptions)}, {}
    for name, parameter in _other_parameters(context.command, own).items():
        if name in document:  # An option of the command itself, such as the invitation.
            found[parameter] = document.pop(name)
    job = translate_job(document, path)
    for field, value in job.fields.items():
        one = own[field]
        found[field] = one.value_of(value) if one.is_repeated else one.word_of(value)
    for note in job.notes:
        click.echo(f"{path}: {printable(note)}", err=True)
    context.default_map = {**(context.default_map or {}), **found}


def _other_parameters(command: click.Command, own: Mapping[str, OptionField]) -> dict[str, str]:
    """Return the command's parameters that are no options of a job, by their names in a file."""
    taken = {name for one in own.values() for name in one.names}
    names = {
        flag.lstrip("-").replace("-", "_"): param.name
        for param in command.params
        if isinstance(param, click.Option) and param.name and param.name not in own
        for flag in param.opts
    }
    return {name: param for name, param in names.items() if name not in taken}


_file = click.argument(
    "job_file",
    required=False,
    is_eager=True,
    expose_value=False,
    callback=_from_file,
    metavar="[JOB.yaml]",
    type=click.Path(path_type=Path),
)
_print_config = click.option(
    "--print-config",
    is_flag=True,
    help="Print the job with all its options as a JOB.yaml and exit.",
)
