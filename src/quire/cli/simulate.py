"""`quire simulate`: runs a request trace through scheduler and KV memory without a model."""

import json
import os
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quire.cli.common import json_option
from quire.cli.options import CLUSTER, MACHINE, ROUTER, SIMULATED_KV, SIMULATED_SCHEDULE, TRACE
from quire.cli.report import envelope, prepare_folder, print_json, write_files
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError
from quire.layout.eviction import KEEP_ALL, EvictionSpec, parse_policy
from quire.layout.extras import require_extra
from quire.layout.kv_format import Storing, read_format, refuse_excluded, stored_codec
from quire.layout.options import option, option_values
from quire.layout.packaged import PACKAGED_MODEL
from quire.plan.ceilings import NotUsable, default_path, read_ceilings
from quire.plan.machine import this_machine
from quire.sim.machine import ASSUMED, AUTO, PROFILE, MachineConfig, Rates, measured_rates
from quire.sim.models import CONFIGS

if TYPE_CHECKING:
    from quire.layout.model import ModelSpec
    from quire.sim.run import SimConfig

DTYPE = "bfloat16"
_ABOUT_MODEL = (
    f"Name of a model shape: {', '.join(CONFIGS)}, {PACKAGED_MODEL}; or a folder with a "
    "config.json. No weights are read."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateFlags:
    """Options of `quire simulate`."""

    trace: Path = option(MISSING, help="Trace file of requests.", common=True)
    out: Path | None = option(
        None, help="Output folder for the result as JSON and for plots.", common=True
    )
    price_per_hour: float | None = option(
        None,
        help="Price of one replica's machine for an hour, for the cost of tokens; unset: no cost.",
        min_value=0,
        common=True,
    )
    as_json: bool = json_option()


@with_settings(
    SIMULATED_KV,
    SIMULATED_SCHEDULE,
    TRACE,
    MACHINE,
    CLUSTER,
    ROUTER,
    model_default="llama-3.1-8b",
    about_model=_ABOUT_MODEL,
)
def simulate(settings: Settings, *, flags: SimulateFlags) -> None:
    """Run a request trace through the scheduler and the KV memory, without a model.

    The time of a step is computed from its bytes and FLOPs at the rates of a machine; weights and
    KV are bfloat16. The result has latency percentiles, throughput, memory use and waste,
    preemptions, prefix cache hits and fairness. Without `--kv-memory` the memory is never full.
    With `--replicas`, several engines run behind a router.
    """
    from quire.cli.simulate_run import render_cost, run_cluster, run_engine
    from quire.sim.metrics import cost_of_tokens
    from quire.sim.traces.loading import load_trace

    if flags.out is not None:
        require_extra("report", "--out")
        prepare_folder(flags.out)
    _refuse_router_alone(settings)
    machine, rates, named = _machine(settings.machine)
    settings = replace(settings, machine=machine)
    config, requests = sim_config(settings, rates), load_trace(flags.trace, settings.trace)
    typer.echo(named)
    if settings.cluster.replicas > 1:
        found = run_cluster(requests, config, settings.cluster, settings.router)
    else:
        found = run_engine(requests, config)
    typer.echo(found.text)
    claims = found.claims
    if flags.price_per_hour is not None:
        cost = cost_of_tokens(claims, flags.price_per_hour, settings.cluster.replicas)
        typer.echo(render_cost(cost, flags.price_per_hour))
        claims = claims | cost
    used = {
        "trace": asdict(settings.trace) | {"file": flags.trace.name},
        "model": settings.model,
        "dtype": DTYPE,
        "machine": asdict(settings.machine) | {"rates": asdict(config.rates)},
        "kv": option_values(settings.kv),
        "schedule": asdict(settings.schedule),
        "cluster": asdict(settings.cluster),
        "router": asdict(settings.router),
    } | {"price_per_hour": flags.price_per_hour}
    made = envelope("simulate", claims, found.arms, used, seconds=found.took_s)
    if flags.out is not None:
        stored = {"simulate.json": (json.dumps(made, indent=2) + "\n").encode()}
        write_files(flags.out, stored | dict(found.draw()))
        typer.echo(f"written: {flags.out}")
    if flags.as_json:
        print_json(made)


def _refuse_router_alone(settings: Settings) -> None:
    """Refuse options of routing without a second replica."""
    if settings.cluster.replicas > 1:
        return
    for section in (CLUSTER, ROUTER):
        for found in section.options():
            if found.parameter in settings.given and found.flag != "replicas":
                raise ConfigError(
                    f"--{found.flag} has no effect with one replica: add --replicas 2 or more, or "
                    f"leave out --{found.flag}"
                )


def sim_config(settings: Settings, rates: Rates) -> "SimConfig":
    """Create the config of a simulation."""
    from quire.scheduler.preemption import refuse_unused_swap_space  # NumPy: not for --help
    from quire.sim.models import model_shape
    from quire.sim.run import SimConfig

    if settings.kv.swap_space is not None:
        refuse_unused_swap_space(settings.kv.swap_space, settings.schedule)
    model = model_shape(settings.model)
    return SimConfig(
        model=model,
        rates=rates,
        kv=settings.kv,
        schedule=settings.schedule,
        dtype=DTYPE,
        eviction=_eviction(settings, model)(model.max_positions),
        eviction_of=_eviction(settings, model),
    )


def _machine(machine: MachineConfig) -> tuple[MachineConfig, Rates, str]:
    """The machine that `auto` stands for, its rates, and a line that names it."""
    if machine.name not in (AUTO, PROFILE):
        rates = machine.rates()
        return machine, rates, machine.text(rates)
    measured = _measured()
    if isinstance(measured, Rates):
        machine = replace(machine, name=PROFILE)
        rates = machine.rates(measured)
        return machine, rates, machine.text(rates)
    if machine.name == PROFILE:
        raise ConfigError(f"--machine profile: {measured.reason}")
    machine = replace(machine, name=ASSUMED)
    rates = machine.rates()
    return machine, rates, f"{machine.text(rates)}; assumed, as {measured.reason}"


def _measured() -> Rates | NotUsable:
    path = default_path(os.environ)
    if not path.exists():  # without importing torch
        return NotUsable(f"{path} does not exist: run `quire profile MODEL`")
    import torch  # measured rates are valid for one version of PyTorch

    found = read_ceilings(path, this_machine(torch.get_num_threads()))
    if isinstance(found, NotUsable):
        return found
    if DTYPE not in {product.dtype for product in found.products}:
        return NotUsable(f"{path} has no matrix products in {DTYPE}: run `quire profile`")
    return measured_rates(found, DTYPE)


def _eviction(settings: Settings, model: "ModelSpec") -> Callable[[int], EvictionSpec]:
    """Return a function from prompt length in tokens to the resolved eviction spec."""
    codec = stored_codec(settings.kv.codec, DTYPE, latent=model.latent is not None)
    if parse_policy(settings.kv.evict).name == "full":
        refuse_excluded(codec, Storing(form=read_format(codec)))
        return lambda tokens: KEEP_ALL
    # imports torch, which `full` does not need
    from quire.eviction.eviction_rules import EvictionRules, first_served

    page_tokens = settings.kv.page_tokens
    rules = first_served(
        settings.kv.evict,
        lambda evict: EvictionRules(
            evict, "none", model=model, page_tokens=page_tokens, codec=codec
        ),
    )
    rule = rules.default
    lanes = rules.lanes_of(rule)
    return lambda tokens: rule.for_request(tokens, lanes).spec
