"""`quire plan --maximize-batch`: options, step rates and output."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quire.cli.json_output import print_json
from quire.cli.plan_report import PlanReport
from quire.cli.report import envelope
from quire.errors import ConfigError
from quire.layout.values import is_count
from quire.plan.ceilings import default_path, read_ceilings
from quire.plan.machine import this_machine
from quire.plan.rates import StepRates, model_key, steps_key

if TYPE_CHECKING:
    from quire.cli.plan_batches import BatchReport, Rates
    from quire.models.loader import LoadedModel

MEASURED_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MaximizeOptions:
    """Options of `--maximize-batch` in addition to those of every plan.

    Attributes:
        prompt_tokens, new_tokens: prompt and output length of each row.
        evict, cap, every: see `quire.plan.batch_verdict.arm_rules`.
        batch: fixed batch size; None: the largest possible.
        measure: measure the step times now; otherwise use those of `quire profile`.
    """

    prompt_tokens: int
    new_tokens: int
    evict: str | None = None
    cap: str | None = None
    every: int | None = None
    batch: int | None = None
    measure: bool = False

    @classmethod
    def of(
        cls,
        lengths: str | None,
        *,
        evict: str | None,
        cap: str | None,
        every: int | None,
        batch: int | None,
        measure: bool,
    ) -> "MaximizeOptions | None":
        """Create the options from the command line; None without `--maximize-batch`.

        Raises:
            ConfigError: invalid lengths, or other options without `--maximize-batch`.
        """
        if lengths is None:
            given = {"evict": evict, "cap": cap, "every": every, "measure": measure or None}
            names = [f"--{name}" for name, value in given.items() if value is not None]
            if names:
                raise ConfigError(
                    f"{', '.join(names)} needs --maximize-batch with input and output tokens, such "
                    "as --maximize-batch 3584,512"
                )
            return None
        prompt_tokens, new_tokens = parse_lengths(lengths)
        return cls(
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            evict=evict,
            cap=cap,
            every=every,
            batch=batch,
            measure=measure,
        )


def parse_lengths(text: str) -> tuple[int, int]:
    """Parse `input,output`.

    Raises:
        ConfigError: not two integers of at least 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(is_count(part) and int(part) for part in parts):
        raise ConfigError(
            f"maximize-batch {text!r}: expected input tokens and output tokens, as in 3584,512"
        )
    return int(parts[0]), int(parts[1])


def maximize(
    folder: Path, plan: PlanReport, options: MaximizeOptions, *, page_tokens: int
) -> "BatchReport":
    """Compute the largest batches of a planned model.

    Args:
        folder: model folder; the weights are read only if steps are measured.
        plan: shape, dtypes and KV memory of the model.
        options: options of `--maximize-batch`.
        page_tokens: tokens per page.

    Raises:
        ConfigError: see `quire.cli.plan_batches.batch_report`.
    """
    # imported here: rules import torch, which other plans do not need
    from quire.cli.plan_batches import BatchQuestion, batch_report

    question = BatchQuestion(
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        kv_bytes=plan.memory.kv_bytes,
        kv_codec=plan.kv_codec,
        page_tokens=page_tokens,
        evict=options.evict,
        cap=options.cap,
        every=options.every,
        batch=options.batch,
    )
    return batch_report(plan.model, question, _rates(folder, plan, options))


def _rates(folder: Path, plan: PlanReport, options: MaximizeOptions) -> "Rates":
    import torch

    from quire.cli.plan_batches import stored_rates

    if not options.measure:
        path = default_path(os.environ)
        ceilings = read_ceilings(path, this_machine(torch.get_num_threads()))
        codec = plan.weight_codec
        return stored_rates(ceilings, plan.model, dtype=plan.dtype, weight_codec=codec)
    return Stopwatch(
        lambda: load_for(folder, plan.dtype, plan.weight_codec), repeats=MEASURED_REPEATS
    )


def load_for(folder: Path, dtype: str, weight_codec: str = "auto") -> "LoadedModel":
    """Load the planned model on the CPU."""
    from quire.models.loader import load_model

    return load_model(str(folder), dtype=dtype, device="cpu", weight_codec=weight_codec)


class Stopwatch:
    """Step rates of a model, measured on first use.

    Args:
        load: loads the model; called at most once.
        repeats: measurements per batch.
        quick: measure a few small batches only.

    Attributes:
        found: measured step rates by `steps_key`.
    """

    def __init__(
        self, load: "Callable[[], LoadedModel]", *, repeats: int, quick: bool = False
    ) -> None:
        self._load, self._repeats, self._quick = load, repeats, quick
        self._model: LoadedModel | None = None
        self.found: dict[str, StepRates] = {}

    def __call__(self, evict: str) -> StepRates:
        """Step rates of a rule; rules that differ only in numbers share a measurement."""
        from quire.offload.swap.host_store import device_name
        from quire.profile import step_rates

        if self._model is None:
            self._model = self._load()
        model = self._model
        dtype = str(model.decoder.dtype).removeprefix("torch.")
        device = device_name(model.decoder.device)
        key = model_key(model.spec, dtype=dtype, device=device, weight_codec=model.weight_codec)
        name = steps_key(key, evict)
        if name not in self.found:
            typer.echo(f"measuring steps with {name.rpartition('; ')[2]}", err=True)
            most_tokens = model.spec.max_positions
            shapes = step_rates.usual_shapes(evict, most_tokens=most_tokens, quick=self._quick)
            self.found[name] = step_rates.measure_step_rates(model, shapes, repeats=self._repeats)
        return self.found[name]


def show(plan: PlanReport, report: "BatchReport", *, as_json: bool) -> None:
    """Print the result; with `as_json` followed by a line of JSON."""
    from rich.console import Console

    from quire.cli.plan_batches_view import render_batches

    Console().print(render_batches(report))
    if as_json:
        used = asdict(report.question) | {"model": plan.model_name, "dtype": plan.dtype}
        arms = report.details() | {"missing": list(report.missing)}
        print_json(envelope("plan --maximize-batch", report.claims(), arms, used))
