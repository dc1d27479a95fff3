"""`quire plan`: where memory would go and what would fit, before anything is loaded."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.common import ABOUT_MODEL, PACKAGED_MODEL, AsJson, refuse_no_name
from quire.cli.plan_maximize import MaximizeOptions, maximize, show
from quire.cli.plan_report import STEP_TOKENS, PlanOptions, PlanReport, plan_report
from quire.cli.report import envelope
from quire.errors import ConfigError, QuireError
from quire.layout.options import parse_named
from quire.layout.sizes import parse_size, parse_size_or
from quire.plan.workload import Workload

__all__ = ["PlanOptions", "PlanReport", "plan", "plan_report"]

ALL_WEIGHTS = "all"
DEFAULT_BATCH = 8


def plan(  # noqa: PLR0913 - one parameter per option
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"{ABOUT_MODEL} Weights are not read.")
    ] = PACKAGED_MODEL,
    *,
    memory: Annotated[
        str | None,
        typer.Option(help="Memory of the device, e.g. 16GiB. Default: this machine's."),
    ] = None,
    kv_memory: Annotated[
        str, typer.Option(help="Memory for KV, e.g. 64MiB; auto: what is left.")
    ] = "auto",
    weights_memory: Annotated[
        str,
        typer.Option(help="Memory for weights, e.g. 4GiB: layers beyond it are brought; or all."),
    ] = ALL_WEIGHTS,
    disk_kv_memory: Annotated[
        str, typer.Option(help="Room on disk for cached prefixes, e.g. 200GiB.")
    ] = "0",
    headroom: Annotated[
        str | None, typer.Option(help="Memory left alone, e.g. 1GiB. Default: a tenth.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Weights: float32, float16, bfloat16; auto: as the model says.")
    ] = "auto",
    kv_codec: Annotated[
        str | None,
        typer.Option(
            help="Format of the KV, e.g. int8, or int8/int4 for keys and values apart. "
            "Default: like the weights."
        ),
    ] = None,
    page_tokens: Annotated[int, typer.Option("--block-size", help="Tokens in a page.")] = 16,
    sequence_tokens: Annotated[
        int | None,
        typer.Option(help="Length asked about, in tokens. Default: 2048 or the context."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences wanted at once. Default: 8, or as many as can be.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens of the largest step.")
    ] = STEP_TOKENS,
    activation_peak: Annotated[
        str | None, typer.Option(help="A measured peak, e.g. 300MiB. Default: estimated.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="IN,OUT,BATCH", help="Say whether managing KV pays: tokens in, out, requests."
        ),
    ] = None,
    maximize_batch: Annotated[
        str | None,
        typer.Option(
            metavar="INPUT,OUTPUT",
            help="Say which batch of rows of so many tokens fits for full KV, for eviction while "
            "decoding and for eviction while prompts are read too, and its tokens a second.",
        ),
    ] = None,
    evict: Annotated[
        str | None,
        typer.Option(help="The rule asked about, as in h2o:cap=512,every=64. Default: average."),
    ] = None,
    cap: Annotated[
        str | None, typer.Option(help="Its cap: tokens of a lane, 25% of the prompt, or 2MiB.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that leave at a time. Default: cap / 8, at most 64."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Time this model's steps now; else those of quire profile are used."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show where memory would go and what would fit, before anything is loaded."""
    try:
        refuse_no_name(model)
        options = PlanOptions(
            memory_bytes=_size("memory", memory),
            kv_memory_bytes=parse_named(parse_size_or("auto"), "kv-memory", kv_memory),
            disk_kv_bytes=parse_named(parse_size, "disk-kv-memory", disk_kv_memory),
            headroom_bytes=_size("headroom", headroom),
            dtype=dtype,
            kv_codec=kv_codec,
            page_tokens=page_tokens,
            sequence_tokens=sequence_tokens,
            batch=DEFAULT_BATCH if batch is None else batch,
            max_num_batched_tokens=max_num_batched_tokens,
            activation_peak_bytes=_size("activation-peak", activation_peak),
            workload=None if workload is None else parse_workload(workload),
            weights_memory_bytes=parse_named(
                parse_size_or(ALL_WEIGHTS), "weights-memory", weights_memory
            ),
        )
        folder, name = _find(model, with_weights=measure)
        report = plan_report(folder, options, name=name)
        requested = MaximizeOptions.of(
            maximize_batch, evict=evict, cap=cap, every=every, batch=batch, measure=measure
        )
        if requested is not None:
            answer = maximize(folder, report, requested, page_tokens=page_tokens)
            show(report, answer, as_json=as_json)
            return
    except QuireError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    _show(report)
    if as_json:
        typer.echo(json.dumps(_object(report, options)))


def parse_workload(text: str) -> Workload:
    """Read `in,out,batch`.

    Raises:
        ConfigError: not three numbers of 1 or more.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise ConfigError(
            f"workload {text!r}: expected input tokens, output tokens and batch, as in 1024,256,16"
        )
    input_tokens, output_tokens, batch = map(int, parts)
    return Workload(input_tokens=input_tokens, output_tokens=output_tokens, batch=batch)


def _size(name: str, text: str | None) -> int | None:
    return None if text is None else parse_named(parse_size, name, text)


def _find(model: str, *, with_weights: bool) -> tuple[Path, str]:
    from quire.models.source import CONFIG_ONLY, WHOLE_MODEL, find_model

    return find_model(model, wanted=WHOLE_MODEL if with_weights else CONFIG_ONLY)


def _show(report: PlanReport) -> None:
    # loaded here: nothing of it is needed for --help
    from rich.console import Console

    from quire.cli.plan_view import render

    Console().print(render(report))


def _object(report: PlanReport, options: PlanOptions) -> dict[str, object]:
    resolved = {
        "model": report.model_name,
        "dtype": report.dtype,
        "kv_codec": report.kv_codec,
        "weights": asdict(report.weights),
        "memory_bytes": report.memory.total_bytes,
        "kv_memory_bytes": report.memory.kv_bytes,
        "headroom_bytes": report.memory.headroom_bytes,
        "activation_peak_bytes": report.memory.activation_peak_bytes,
        "sequence_tokens": report.capacity.sequence_tokens,
    }
    return envelope("plan", report.claims(), report.arms(), asdict(options) | resolved)
