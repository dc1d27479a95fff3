"""`quire profile`: measures the performance ceilings of this machine and stores them."""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.common import json_option, refuse_no_name, threads_option, use_threads
from quire.cli.completion import complete_model
from quire.cli.progress import CountProgress
from quire.cli.report import envelope, print_json
from quire.cli.settings import config_option, with_flags
from quire.cli.startup import fast_imports, status
from quire.errors import ConfigError
from quire.layout.options import option
from quire.plan.machine import this_machine

if TYPE_CHECKING:
    from quire.models.loader import LoadedModel
    from quire.plan.ceilings import Ceilings
    from quire.plan.rates import PrefillRates, StepRates
    from quire.profile.ceilings import ProfileConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFlags:
    """Options of `quire profile`."""

    output: Path | None = option(
        None,
        help="Output file. Default: quire/ceilings.json in the user's cache folder.",
        common=True,
    )
    evict: str | None = option(
        None,
        help="Eviction rules for which the model's steps are measured, separated by "
        "semicolons; caps have no effect. Default: average. full and recent are always "
        "measured.",
        common=True,
    )
    weight_codec: str = option(
        "auto", help="Codec of the model's weights: int8 or int4; auto: as stored.", common=True
    )
    thorough: bool = option(
        False, help="Measure more batches and longer prompts, several times each.", common=True
    )
    quick: bool = option(
        False,
        help="Smoke test with small buffers and shapes; the results are not stored.",
        common=True,
    )
    threads: int = threads_option()
    config: Path | None = config_option()
    as_json: bool = json_option()


@with_flags
def profile(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="Also measure prefill and decode of this model. Default: only the machine.",
            show_default=False,
        ),
    ] = None,
    *,
    flags: ProfileFlags,
) -> None:
    """Measure the performance ceilings of this machine once and store them.

    Measures read and copy bandwidth, matrix products by shape, and swaps between KV memory and CPU
    memory; with a model also prefill, decode and eviction. The stored file is valid for one
    processor, number of threads and PyTorch version.
    """
    evict = flags.evict
    refuse_no_name(model)
    with status("starting"), fast_imports():
        import torch

        from quire.plan.ceilings import default_path, write_ceilings
        from quire.profile.ceilings import (
            QUICK_PROFILE,
            THOROUGH_PROFILE,
            ProfileConfig,
            measure_ceilings,
        )

    if evict is not None and model is None:
        raise ConfigError(
            f"--evict {evict!r} has no effect without a model: give MODEL "
            f"(quire profile MODEL --evict {evict!r}), or leave --evict out"
        )
    evict = "average" if evict is None else evict
    # the results of a quick run are not ceilings and never replace stored ones
    path = default_path(os.environ) if flags.output is None and not flags.quick else flags.output
    use_threads(flags.threads)
    if flags.quick and flags.thorough:
        raise ConfigError("--quick and --thorough exclude each other: leave one out")
    config = ProfileConfig()
    if flags.quick or flags.thorough:
        config = QUICK_PROFILE if flags.quick else THOROUGH_PROFILE
    machine = this_machine(torch.get_num_threads())
    # the model first: a wrong name fails at once
    prefill, steps = _of_model(model, evict, config, flags.weight_codec) if model else ({}, {})
    typer.echo("measuring memory, matrix products and copies of this machine", err=True)
    ceilings = measure_ceilings(config, machine, progress=typer.echo)
    ceilings = _with_known(ceilings, path, prefill, steps)
    if path is not None:
        write_ceilings(ceilings, path)
        typer.echo(f"written: {path}")
    if flags.as_json:
        used = {
            "threads": machine.threads,
            "model": model,
            "weight_codec": flags.weight_codec,
            "evict": evict if model else None,
            "output": None if path is None else str(path),
        }
        claims, arms = _claims(ceilings, config.dtypes), {"ceilings": asdict(ceilings)}
        print_json(envelope("profile", claims, arms, asdict(config) | used))


def _claims(ceilings: "Ceilings", dtypes: Sequence[str]) -> dict[str, int | float]:
    claims: dict[str, int | float] = {
        "read_bytes_per_s": ceilings.read_bytes_per_s,
        "copy_bytes_per_s": ceilings.copy_bytes_per_s,
    }
    for dtype in dtypes:
        claims[f"{dtype}_flops_per_s"] = ceilings.peak_product_rate(dtype)
    for device, rates in ceilings.copies.items():
        name = device.replace(" ", "_")
        claims[f"swap_out_{name}_bytes_per_s"] = rates.out.bytes_per_s
        claims[f"swap_in_{name}_bytes_per_s"] = rates.back.bytes_per_s
    return claims


def _of_model(
    name: str, evict: str, config: "ProfileConfig", weight_codec: str
) -> "tuple[dict[str, PrefillRates], dict[str, StepRates]]":
    from quire.models.loader import load_model
    from quire.profile.ceilings import measure_chunks, measure_prefill_rates
    from quire.profile.step_rates import usual_shapes

    rules = ["full", "recent", *(rule.strip() for rule in evict.split(";") if rule.strip())]
    with status(f"loading {name}"):
        model = load_model(name, weight_codec=weight_codec)
    context_tokens = model.spec.max_positions
    tokens = min(64, context_tokens - 1)
    [chunk] = measure_chunks(model, chunks=(tokens,), prompt_tokens=tokens, repeats=1)
    work = sum(
        config.step_repeats * shape.work_tokens
        for rule in rules
        for shape in usual_shapes(rule, context_tokens=context_tokens, config=config)
    )
    prompt_tokens = config.repeats * min(config.prompt_tokens, context_tokens)
    work += sum(chunk_tokens + prompt_tokens for chunk_tokens in config.chunks)
    token_s = chunk.seconds / chunk.tokens
    typer.echo(
        f"measuring prefill and steps of {name}: about {work * token_s:.0f} s, then the machine; "
        "the rates are stored at the end",
        err=True,
    )
    prefill = measure_prefill_rates(
        model,
        chunks=config.chunks,
        prompt_tokens=config.prompt_tokens,
        repeats=config.repeats,
        progress=typer.echo,
    )
    return prefill, _steps_of(model, rules, config, token_s)


def _steps_of(
    model: "LoadedModel", rules: Sequence[str], config: "ProfileConfig", token_s: float
) -> "dict[str, StepRates]":
    """Measure the steps of rules, by `steps_key`; rules that differ only in numbers share one."""
    from quire.offload.swap.host_store import device_name
    from quire.plan.rates import model_key, steps_key
    from quire.profile import step_rates

    dtype = str(model.decoder.dtype).removeprefix("torch.")
    device = device_name(model.decoder.device)
    key = model_key(model.spec, dtype=dtype, device=device, weight_codec=model.weight_codec)
    found: dict[str, StepRates] = {}
    for evict in rules:
        if (name := steps_key(key, evict)) in found:
            continue
        shapes = step_rates.usual_shapes(
            evict, context_tokens=model.spec.max_positions, config=config
        )
        total = config.step_repeats * sum(shape.work_tokens for shape in shapes)
        title = f"measuring steps with {name.rpartition('; ')[2]}"
        typer.echo(f"{title}, about {total * token_s:.0f} s", err=True)
        start_s, done = time.monotonic(), 0
        with CountProgress(title, total) as bar:

            def ran(shape: "step_rates.RunShape") -> None:
                nonlocal done
                done += config.step_repeats * shape.work_tokens
                bar.count(done)

            found[name] = step_rates.measure_step_rates(
                model, shapes, repeats=config.step_repeats, done=ran
            )
        token_s = (time.monotonic() - start_s) / total
    return found


def _with_known(
    ceilings: "Ceilings",
    path: Path | None,
    prefill: "dict[str, PrefillRates]",
    steps: "dict[str, StepRates]",
) -> "Ceilings":
    """Add a model's rates, and the valid rates of the file that will be overwritten."""
    from quire.plan.ceilings import Ceilings, read_ceilings

    found = None if path is None else read_ceilings(path, ceilings.machine)
    if isinstance(found, Ceilings):
        prefill, steps = {**found.prefill, **prefill}, {**found.steps, **steps}
    return replace(ceilings, prefill=prefill, steps=steps)
