"""Error messages for Python callers, with `steps` in place of `--steps`.

Commands and calls share the declarations and the checks of options, whose messages name options
as the command line does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from swarm_ft.api.coordinator_options import CoordinatorOptions
from swarm_ft.api.serve_options import ServeOptions
from swarm_ft.client.options import GenerateOptions, JobOptions, PlanOptions
from swarm_ft.errors import SwarmError
from swarm_ft.protocol.spec.options import option_fields

_OF_CALLS = {
    "--invite": "invite",
    "--run": "run_id",
    "--stages": "stages",
    "--replicas": "replicas",
}
"""Arguments of calls that no dataclass declares, by the flag of the command line."""
_FLAG = re.compile(
    r"'swarm-ft [^']*'|(serve-stage|coordinator) --[\w-]+|(?<![\w-])--[a-z][a-z0-9-]*"
)


@contextmanager
def keyword_errors() -> Iterator[None]:
    """Rewrite the message of an error that leaves the context: flags become arguments."""
    try:
        yield
    except SwarmError as error:
        error.message = as_keywords(error.message)
        error.args = (error.message,)
        raise


def as_keywords(message: str) -> str:
    """Replace the flags in a message by arguments, except in quoted commands."""
    return _FLAG.sub(lambda found: _arguments().get(found[0], found[0]), message)


@functools.cache
def _arguments() -> Mapping[str, str]:
    names = dict(_OF_CALLS)
    for one in (part for of in _DECLARING for part in option_fields(of)):
        names |= {flag: one.field for flag in (one.flag, one.long_flag) if flag}
        if one.no_flag:
            names[one.no_flag] = f"{one.field}=False"
    return names


_DECLARING = (CoordinatorOptions, ServeOptions, PlanOptions, GenerateOptions, JobOptions)
