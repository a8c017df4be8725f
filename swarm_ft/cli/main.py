"""`swarm-ft`: finds the command, runs it, turns errors into one line and an exit code.

Exit codes: 0 done (or left, or detached), 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from io import TextIOWrapper
from typing import Any

import click

from swarm_ft.build import described_version
from swarm_ft.cli.defaults import defaults_for
from swarm_ft.cli.groups import CommandGroup
from swarm_ft.cli.options import examples
from swarm_ft.errors import BadInput, SwarmError
from swarm_ft.systems import hide_in_command_line

_COMMANDS = {
    "demo": "swarm_ft.cli.demo:demo",
    "serve-stage": "swarm_ft.cli.serve_stage:serve_stage",
    "peer": "swarm_ft.cli.peer:peer",
    "doctor": "swarm_ft.cli.doctor:doctor",
    "plan": "swarm_ft.cli.plan:plan",
    "client": "swarm_ft.cli.client:client",
    "init": "swarm_ft.cli.keys:init",
    "coordinator": "swarm_ft.cli.coordinator:coordinator",
    "invite": "swarm_ft.cli.keys:invite",
    "keys": "swarm_ft.cli.keys:keys",
    "backup": "swarm_ft.cli.backup:backup",
    "relay": "swarm_ft.cli.relay:relay",
    "dht": "swarm_ft.cli.coordinator:dht",
    "status": "swarm_ft.cli.status:status",
    "top": "swarm_ft.cli.top:top",
    "events": "swarm_ft.cli.watching:events",
    "losses": "swarm_ft.cli.watching:losses",
    "replay": "swarm_ft.cli.replay:replay",
    "clean": "swarm_ft.cli.clean:clean",
    "bench": "swarm_ft.cli.bench:bench",
    "sample": "swarm_ft.cli.demo:sample",
}


INVITATION = re.compile("swarm1[0-9A-Za-z]{16,}")
"""Looks like the word of one; known here without what it takes to read one."""


class LazyGroup(CommandGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in the order a newcomer needs them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # `--lora_r` is `--lora-r`, as other trainers write it.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
    epilog=examples(
        "swarm-ft demo                        all of it on this machine, in a minute",
        "swarm-ft serve-stage @invitation.txt",
        "swarm-ft client train --model gpt2 --dataset text.txt --invite @invitation.txt",
    ),
)
@click.version_option(described_version(), prog_name="swarm-ft")
def cli() -> None:
    """Fine-tune a Hugging Face transformer across volunteers' machines.

    Defaults of options are read from ~/.config/swarm-ft.toml, with one section per command:
    [serve-stage], [client.train].
    """


def run(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code; errors go to standard error, in one line."""
    # Read when gRPC and huggingface_hub are imported; their notes would cut into our one line.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    words = sys.argv[1:] if arguments is None else arguments
    _print_whatever_the_encoding()
    try:
        defaults = defaults_for(cli, words)
        result: Any = cli.main(
            words, prog_name="swarm-ft", standalone_mode=False, default_map=defaults
        )
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except BadInput as error:
        return _fail(error.message, 2)
    except SwarmError as error:
        return _fail(error.message, 1)
    except OSError as error:
        if error.filename is None:
            raise  # not about a file, so nothing a user could see to
        return _fail(f"{error.filename}: {error.strerror}", 1)
    return result if isinstance(result, int) else 0


def _print_whatever_the_encoding() -> None:
    """Have letters that the output's encoding lacks replaced, so that no summary fails by one."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def main() -> None:
    """The console script."""
    _leave_scipy_out()
    for word in sys.argv[1:]:
        for invitation in INVITATION.findall(word):
            hide_in_command_line(invitation)
    sys.exit(run())


def _leave_scipy_out() -> None:
    """Make imports of scipy fail in this process, unless scikit-learn is there, which needs it.

    transformers imports scipy where it finds it, for losses of object detection. No command
    computes these, and the import takes a third of a second of a core.
    """
    if importlib.util.find_spec("sklearn") is None:
        sys.modules.setdefault("scipy", None)  # type: ignore[arg-type] # marks a missing module


def _fail(message: str, code: int) -> int:
    click.echo(f"swarm-ft: {' '.join(message.split())}", err=True)
    return code
