"""`quire eval`: the group of quality measurements, its task list, and `gate`.

`gate` checks that a model is fit to evaluate eviction rules.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from quire.cli.command import register
from quire.cli.common import json_option
from quire.cli.evaluate_run import fidelity, run
from quire.cli.options import KV, MODEL, SCHEDULE
from quire.cli.report import envelope, print_json
from quire.cli.settings import Settings, with_flags, with_settings
from quire.errors import ConfigError, nearest
from quire.evals.gate import GATE_CASES, GateCase, GateReport, run_gate
from quire.layout.options import option

if TYPE_CHECKING:
    from quire.api.llm import LLM


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


QUICK_CASES = (
    GateCase(task="lines", tokens=256, n=5),
    GateCase(task="kv", tokens=256, n=5),
    GateCase(task="niah", tokens=512, n=5),
)

eval_app = typer.Typer(
    cls=EvalGroup,
    no_args_is_help=True,
    help="Measure quality: tasks, fidelity to full KV, and a sanity check of models. The default "
    "command is run.",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalGateFlags:
    """Options of `quire eval gate`."""

    quick: bool = option(False, help="Fewer and shorter prompts.", common=True)
    seed: int = option(1, help="Seed of the prompts.", common=True)
    as_json: bool = json_option()


@with_settings(MODEL, KV, SCHEDULE)
def gate(settings: Settings, *, flags: EvalGateFlags) -> None:
    """Check that a model retrieves records from its context, and only from its context.

    Accuracy must be high with full KV and low after the records are evicted. Exit code 1 if not.
    """
    if settings.kv.evict != "full":
        raise ConfigError("the gate sets its own eviction rules: leave --evict out")
    judge = Judge(settings)
    cases = QUICK_CASES if flags.quick else GATE_CASES
    report = run_gate(judge.generate, measure=judge.measure, cases=cases, seed=flags.seed)
    _show(report)
    if flags.as_json:
        config = settings.as_dict() | {
            "seed": flags.seed,
            "cases": [asdict(case) for case in cases],
        }
        arms = {"rows": [asdict(row) for row in report.rows]}
        print_json(envelope("gate", report.claims(), arms, config))
    if not report.passed:
        raise typer.Exit(1)


class Judge:
    """Runs the gate's prompts under any eviction policy; the weights are loaded once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._llm = settings.open_llm()
        self._evicting: tuple[str, LLM] | None = None

    def generate(self, prompts: list[str], evict: str, max_tokens: int) -> list[str]:
        from quire.config.sampling_params import SamplingParams

        llm = self._llm if evict == "full" else self._llm_with(evict)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return [output.text for output in llm.generate(prompts, params)]

    def measure(self, text: str) -> int:
        return len(self._llm.encode(text)) if text else 0

    def _llm_with(self, evict: str) -> "LLM":
        # one at a time: each allocates a KV memory
        from quire.api.llm import LLM

        if self._evicting is None or self._evicting[0] != evict:
            self._evicting = None
            kv = replace(self._settings.kv, evict=evict)
            llm = LLM(self._llm.model, kv=kv, schedule=self._settings.schedule)
            self._evicting = (evict, llm)
        return self._evicting[1]


for _command in (run, fidelity, tasks, gate):
    register(eval_app, _command)


def _show(report: GateReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "task", "prompt tokens", "accuracy, full KV", "accuracy, records evicted", "result"
    )
    for verdict in report.verdicts:
        table.add_row(
            verdict.task,
            str(verdict.tokens),
            f"{verdict.full:.0%}",
            f"{verdict.evicted:.0%}",
            "passed" if verdict.passed else "failed",
        )
    Console().print(table)
