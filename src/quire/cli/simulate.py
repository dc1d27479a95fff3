"""`quire simulate`: runs a request trace through scheduler and KV memory without a model."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.common import AsJson
from quire.cli.json_output import print_json
from quire.cli.options import MACHINE, SIMULATED_KV, SIMULATED_SCHEDULE, TRACE
from quire.cli.out_folder import prepare_folder, write_files
from quire.cli.report import envelope
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError
from quire.layout.codec_refusals import Storing, refuse_excluded, stored_codec
from quire.layout.eviction import KEEP_ALL, EvictionSpec, parse_policy
from quire.layout.extras import require_extra
from quire.layout.kv_format import read_format
from quire.layout.options import option_values
from quire.plan.ceilings import NotUsable, default_path, read_ceilings
from quire.plan.machine import this_machine
from quire.sim.machine import PROFILE, MachineConfig, Rates, measured_rates

if TYPE_CHECKING:
    from quire.layout.model import ModelSpec
    from quire.sim.run import SimConfig
    from quire.sim.simulator import SimResult

DEFAULT_MODEL = "llama-3.1-8b"
DTYPE = "bfloat16"
_ABOUT_MODEL = (
    "Name of a model shape: llama-3-8b, llama-3.1-8b, llama-3.1-70b, llama-3.2-1b, "
    "qwen2.5-7b, opt-6.7b, quire-tiny; or a folder with a config.json. No weights are read."
)
_PROGRESS_S = 2.0


@with_settings(
    SIMULATED_KV,
    SIMULATED_SCHEDULE,
    TRACE,
    MACHINE,
    model_default=DEFAULT_MODEL,
    about_model=_ABOUT_MODEL,
)
def simulate(
    *,
    settings: Settings,
    trace: Annotated[Path, typer.Option(help="Trace file of requests.")],
    out: Annotated[
        Path | None, typer.Option(help="Output folder for the result as JSON and for plots.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a request trace through the scheduler and the KV memory, without a model.

    The time of a step is computed from its bytes and FLOPs at the rates of a machine; weights and
    KV are bfloat16. The result has latency percentiles, throughput, memory use and waste,
    preemptions, prefix cache hits and fairness. `--kv-memory auto` is a memory that is never full.
    """
    from quire.cli.simulate_view import render
    from quire.sim.metrics import by_tenant, summarise
    from quire.sim.run import make_simulator
    from quire.sim.traces.loading import load_trace

    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    config = sim_config(settings)
    simulator = make_simulator(load_trace(trace, settings.trace), config)
    started_s = time.perf_counter()
    result = simulator.run(_Progress())
    took_s = time.perf_counter() - started_s
    claims = summarise(result)
    typer.echo(render(result, claims, took_s))
    used = _used(settings, config, trace)
    arms = {"tenants": by_tenant(result)}
    made = envelope("simulate", claims, arms, used, seconds=took_s)
    if out is not None:
        _write(out, result, made)
    if as_json:
        print_json(made)


def sim_config(settings: Settings) -> "SimConfig":
    """Create the config of a simulation.

    Raises:
        ConfigError: an invalid option; raised before the trace is read.
    """
    from quire.engine.option_effects import refuse_without_effect  # NumPy: never for --help
    from quire.scheduler.preemption.swapper import refuse_unused_swap_space
    from quire.sim.models import model_shape
    from quire.sim.run import SimConfig

    refuse_without_effect(settings.kv)
    if settings.kv.swap_space is not None:
        refuse_unused_swap_space(settings.kv.swap_space, settings.schedule)
    model = model_shape(settings.model)
    return SimConfig(
        model=model,
        rates=_rates(settings.machine),
        kv=settings.kv,
        schedule=settings.schedule,
        dtype=DTYPE,
        eviction=_eviction(settings, model)(model.max_positions),
        eviction_of=_eviction(settings, model),
    )


def _rates(machine: MachineConfig) -> Rates:
    if machine.name != PROFILE:
        return machine.rates()
    import torch  # measured rates are valid for one version of PyTorch

    found = read_ceilings(default_path(os.environ), this_machine(torch.get_num_threads()))
    if isinstance(found, NotUsable):
        raise ConfigError(f"--machine profile: {found.reason}")
    return machine.rates(measured_rates(found, DTYPE))


def _eviction(settings: Settings, model: "ModelSpec") -> Callable[[int], EvictionSpec]:
    """Return a function from prompt length in tokens to the resolved eviction spec."""
    codec = stored_codec(settings.kv.codec, DTYPE)
    if parse_policy(settings.kv.evict).name == "full":
        refuse_excluded(codec, Storing(form=read_format(codec)))
        return lambda tokens: KEEP_ALL
    # imports torch, which `full` does not need
    from quire.eviction.eviction_rules import EvictionRules

    page_tokens = settings.kv.page_tokens
    rules = EvictionRules(
        settings.kv.evict, "none", model=model, page_tokens=page_tokens, codec=codec
    )
    rule = rules.default
    lanes = rules.lanes_of(rule)
    return lambda tokens: rule.for_request(tokens, lanes).spec


def _used(settings: Settings, config: "SimConfig", trace: Path) -> dict[str, object]:
    return {
        "trace": asdict(settings.trace) | {"file": trace.name},
        "model": settings.model,
        "dtype": DTYPE,
        "machine": asdict(settings.machine) | {"rates": asdict(config.rates)},
        "kv": option_values(settings.kv),
        "schedule": asdict(settings.schedule),
    }


def _write(out: Path, result: "SimResult", made: dict[str, object]) -> None:
    from quire.sim.plots import pictures

    stored = {"simulate.json": (json.dumps(made, indent=2) + "\n").encode()}
    write_files(out, stored | dict(pictures(result)))
    typer.echo(f"written: {out}")


class _Progress:
    """Prints a progress line on standard error every `_PROGRESS_S` seconds."""

    def __init__(self) -> None:
        self._next_s = time.perf_counter() + _PROGRESS_S

    def __call__(self, clock_s: float, num_arrived: int) -> None:
        now_s = time.perf_counter()
        if now_s >= self._next_s:
            self._next_s = now_s + _PROGRESS_S
            typer.echo(f"simulated {clock_s:,.0f} s, {num_arrived:,} requests", err=True)
