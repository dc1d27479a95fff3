"""`quire eval`: the group of quality measurements, and its task list."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from quire.cli.command import register
from quire.cli.common import json_option
from quire.cli.evaluate_run import fidelity, run
from quire.cli.report import print_json
from quire.cli.settings import with_flags
from quire.errors import nearest


class EvalGroup(TyperGroup):
    """Inserts `run` where the first argument is an option or a model.

    So `quire eval --suite quick` and `quire eval quire-tiny --suite quick` are evaluations.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._with_command(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, self._with_command(args))

    def _with_command(self, args: list[str]) -> list[str]:
        return ["run", *args] if args and self._is_run(args[0]) else args

    def _is_run(self, first: str) -> bool:
        if first in self.commands or first in ("--help", "-h"):
            return False
        misspelt = nearest(first, list(self.commands)) and not Path(first).exists()
        return first.startswith("-") or not misspelt


eval_app = typer.Typer(
    cls=EvalGroup,
    no_args_is_help=True,
    help="Measure quality: tasks and fidelity to full KV. The default command is run.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTasksFlags:
    """Options of `quire eval tasks`."""

    as_json: bool = json_option()


@with_flags
def tasks(*, flags: EvalTasksFlags) -> None:
    """List the tasks of quire eval run, one on each line."""
    from quire.cli.tables import show_summaries
    from quire.evals.suite.registry import SUITES, TASKS, suites_with

    if flags.as_json:
        listed = [
            {
                "name": task.name,
                "summary": task.summary,
                "metrics": list(task.metrics),
                "suites": list(suites_with(task.name)),
            }
            for task in TASKS.values()
        ]
        print_json({"name": "eval_tasks", "tasks": listed})
        return
    show_summaries(
        "Tasks, as in quire eval run MODEL --tasks NAME,NAME",
        ((task.name, task.summary) for task in TASKS.values()),
    )
    show_summaries(
        "\nSuites, as in quire eval run MODEL --suite NAME",
        ((name, ", ".join(suite.tasks)) for name, suite in SUITES.items()),
    )


for _command in (run, fidelity, tasks):
    register(eval_app, _command)
