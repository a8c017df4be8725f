"""The console script `swarm-ft`: run a command, and turn errors into one line and an exit code.

Exit codes: 0 done (or left, or detached), 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from typing import Any

import click

from swarm_ft.base.systems import hide_in_command_line
from swarm_ft.build import described_version
from swarm_ft.cli.defaults import defaults_for
from swarm_ft.cli.groups import CommandGroup
from swarm_ft.cli.options import examples
from swarm_ft.errors import BadInput, SwarmError

COMMAND_GROUPS: Mapping[str, Mapping[str, str]] = {
    "Start": {
        "demo": "swarm_ft.cli.demo:demo",
        "sample": "swarm_ft.cli.demo:sample",
    },
    "Take part": {
        "serve-stage": "swarm_ft.cli.serve_stage:serve_stage",
        "peer": "swarm_ft.cli.peer:peer",
        "doctor": "swarm_ft.cli.doctor:doctor",
    },
    "Train": {
        "client": "swarm_ft.cli.client:client",
        "plan": "swarm_ft.cli.plan:plan",
    },
    "Watch": {
        "status": "swarm_ft.cli.status:status",
        "top": "swarm_ft.cli.top:top",
        "events": "swarm_ft.cli.status_text:events",
        "losses": "swarm_ft.cli.status_text:losses",
        "replay": "swarm_ft.cli.replay:replay",
    },
    "Run a swarm": {
        "init": "swarm_ft.cli.keys:init",
        "coordinator": "swarm_ft.cli.coordinator:coordinator",
        "invite": "swarm_ft.cli.keys:invite",
        "keys": "swarm_ft.cli.keys:keys",
        "backup": "swarm_ft.cli.backup:backup",
        "relay": "swarm_ft.cli.relay:relay",
        "dht": "swarm_ft.cli.coordinator:dht",
    },
    "Tools": {
        "clean": "swarm_ft.cli.clean:clean",
        "bench": "swarm_ft.cli.bench:bench",
    },
}
"""Groups of the help, with the module and the object of each command."""
_COMMANDS = {
    name: place for commands in COMMAND_GROUPS.values() for name, place in commands.items()
}


INVITATION = re.compile("swarm1[0-9A-Za-z]{16,}")
"""Pattern of an invitation's text. Parsing one would need imports that take time."""


class LazyGroup(CommandGroup):
    """A group that imports a command when it is called or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, group after group."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of this name; return None if there is none."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of commands under its title, all in the same columns."""
        width = max(map(len, _COMMANDS))
        limit = formatter.width - 6 - width
        for title, names in COMMAND_GROUPS.items():
            commands = ((name, self.get_command(ctx, name)) for name in names)
            rows = [
                (name.ljust(width), command.get_short_help_str(limit))
                for name, command in commands
                if command is not None
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # `--lora_r` is `--lora-r`, as other trainers write it.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
    epilog=examples(
        "swarm-ft demo                        a whole swarm on this machine, in a minute",
        "swarm-ft serve-stage @invitation.txt",
        "swarm-ft client train --model gpt2 --dataset text.txt --invite @invitation.txt",
    ),
)
@click.version_option(described_version(), prog_name="swarm-ft")
def cli() -> None:
    """Fine-tune a Hugging Face model on a swarm of home machines.

    The file ~/.config/swarm-ft.toml sets defaults of options, with one section per command:
    [serve-stage], [client.train].
    """


def run(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code; errors go to standard error, in one line."""
    # gRPC and huggingface_hub read these when they are imported. Their own log lines would
    # interrupt ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    arguments = sys.argv[1:] if arguments is None else arguments
    _replace_unprintable_letters()
    try:
        defaults = defaults_for(cli, arguments)
        result: Any = cli.main(
            arguments, prog_name="swarm-ft", standalone_mode=False, default_map=defaults
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
            raise  # The error is about no file, so a user cannot fix it.
        return _fail(f"{error.filename}: {error.strerror}", 1)
    return result if isinstance(result, int) else 0


def _replace_unprintable_letters() -> None:
    """Replace letters that the output's encoding lacks, so that printing them cannot fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def main() -> None:
    """Run the console script, after it hid the invitation from the list of processes."""
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
