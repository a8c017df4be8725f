"""A group of commands that suggests the nearest name for a mistyped one."""

from __future__ import annotations

import click

from swarm_ft.protocol.spec.options import suggestion


class CommandGroup(click.Group):
    """A group that lists its commands as they were added, and suggests the nearest name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order of their declaration."""
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names.

        Raises:
            UsageError: The group has no such command; the message suggests the nearest name.
        """
        word = args[0]
        name = ctx.token_normalize_func(word) if ctx.token_normalize_func else word
        is_mistyped = not word.startswith("-") and self.get_command(ctx, name) is None
        if is_mistyped and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            hint = suggestion(name, known) or f"; expected {', '.join(known)}"
            ctx.fail(f"no such command '{word}'{hint}")
        return super().resolve_command(ctx, args)
