"""The group `quire eval`: without a subcommand it runs `quire eval run`."""

from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from quire.errors import nearest

DEFAULT_COMMAND = "run"
_HELP = ("--help", "-h")


class EvalGroup(TyperGroup):
    """Inserts `run` where the first argument is an option or a model.

    So `quire eval --suite quick` and `quire eval quire-tiny --suite quick` are evaluations.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the name of the command and leave its arguments."""
        return super().parse_args(ctx, self._with_command(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of a line, also of one that was not parsed."""
        return super().resolve_command(ctx, self._with_command(args))

    def _with_command(self, args: list[str]) -> list[str]:
        return [DEFAULT_COMMAND, *args] if args and self._is_run(args[0]) else args

    def _is_run(self, first: str) -> bool:
        if first in self.commands or first in _HELP:
            return False
        misspelt = nearest(first, list(self.commands)) and not Path(first).exists()
        return first.startswith("-") or not misspelt
