"""`quire plan`: estimates memory use and batch sizes of a model without loading it."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.common import ABOUT_MODEL, GGUF, PACKAGED_MODEL, AsJson, refuse_no_name
from quire.cli.completion import complete_model
from quire.cli.config_defaults import ConfigDefaults, is_from_file
from quire.cli.plan_maximize import MaximizeOptions, maximize, show
from quire.cli.plan_report import STEP_TOKENS, PlanOptions, PlanReport, plan_report
from quire.cli.report import envelope, print_json
from quire.errors import ConfigError, QuireError
from quire.layout.options import parse_named
from quire.layout.sizes import parse_size, parse_size_or
from quire.layout.values import is_count
from quire.plan.capacity import Workload

__all__ = ["PlanOptions", "PlanReport", "plan", "plan_report"]

ALL_WEIGHTS = "all"
DEFAULT_BATCH = 8

# Groups of the options in --help.
MEMORY = "Memory"
MODEL = "Model and KV"
REQUESTS = "Requests"
LARGEST_BATCH = "Largest batch"


def plan(  # noqa: PLR0913 - one parameter per option
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"{ABOUT_MODEL} Weights are not read.",
            autocompletion=complete_model,
        ),
    ] = PACKAGED_MODEL,
    *,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Device memory, e.g. 16GiB. Default: memory of this machine.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    kv_memory: Annotated[
        str,
        typer.Option(
            help="KV memory, e.g. 64MiB; auto: all remaining memory.", rich_help_panel=MEMORY
        ),
    ] = "auto",
    weights_memory: Annotated[
        str,
        typer.Option(
            help="Device memory for weights, e.g. 4GiB; further layers are offloaded. all: no "
            "weight offload.",
            rich_help_panel=MEMORY,
        ),
    ] = ALL_WEIGHTS,
    disk_kv_memory: Annotated[
        str,
        typer.Option(help="Disk space for cached prefixes, e.g. 200GiB.", rich_help_panel=MEMORY),
    ] = "0",
    headroom: Annotated[
        str | None,
        typer.Option(
            help="Memory to leave free, e.g. 1GiB. Default: 10% of the memory.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of the weights: float32, float16, bfloat16; auto: of config.json.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    weight_codec: Annotated[
        str,
        typer.Option(
            help="Codec of the linear layers' weights: int8 or int4; auto: as stored.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    kv_codec: Annotated[
        str | None,
        typer.Option(
            help="KV codec, e.g. int8, or int8/int4 for keys/values. Default: dtype of the "
            "weights.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    page_tokens: Annotated[
        int, typer.Option("--block-size", help="Tokens per page.", rich_help_panel=MODEL)
    ] = 16,
    sequence_tokens: Annotated[
        int | None,
        typer.Option(
            help="Sequence length in tokens. Default: 2048 or the model's context.",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Batch size in sequences. Default: 8; with --maximize-batch the largest possible.",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Maximum tokens per step.", rich_help_panel=REQUESTS)
    ] = STEP_TOKENS,
    activation_peak: Annotated[
        str | None,
        typer.Option(
            help="Measured peak of activation memory, e.g. 300MiB. Default: estimated.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="IN,OUT,BATCH",
            help="Assess the benefit of KV management for a workload: input tokens, output "
            "tokens, batch size.",
            rich_help_panel=REQUESTS,
        ),
    ] = None,
    maximize_batch: Annotated[
        str | None,
        typer.Option(
            metavar="INPUT,OUTPUT",
            help="Compute the largest batch and its tokens/s for rows of INPUT and OUTPUT tokens: "
            "with full KV, with eviction in decode, and with eviction in prefill and decode.",
            rich_help_panel=LARGEST_BATCH,
        ),
    ] = None,
    evict: Annotated[
        str | None,
        typer.Option(
            help="Eviction rule for --maximize-batch, as in h2o:cap=512,every=64. Default: "
            "average.",
            rich_help_panel=LARGEST_BATCH,
        ),
    ] = None,
    cap: Annotated[
        str | None,
        typer.Option(
            help="Cap of the rule: tokens per lane, 25% of the prompt, or 2MiB.",
            rich_help_panel=LARGEST_BATCH,
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per eviction. Default: cap / 8, at most 64.",
            rich_help_panel=LARGEST_BATCH,
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure step times now. Default: use those of quire profile.",
            rich_help_panel=LARGEST_BATCH,
        ),
    ] = False,
    config: ConfigDefaults = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory use, batch size and longest sequence of a model without loading it."""
    try:
        refuse_no_name(model)
        if batch is not None and batch < 1:
            raise ConfigError(f"--batch: expected 1 or more, got {batch}")
        options = PlanOptions(
            memory_bytes=_size("memory", memory),
            kv_memory_bytes=parse_named(parse_size_or("auto"), "kv-memory", kv_memory),
            disk_kv_bytes=parse_named(parse_size, "disk-kv-memory", disk_kv_memory),
            headroom_bytes=_size("headroom", headroom),
            dtype=dtype,
            weight_codec=weight_codec,
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
        if maximize_batch is None and is_from_file(config, "evict", evict):
            evict = None  # the rule of an engine; only --maximize-batch uses it here
        requested = MaximizeOptions.of(
            maximize_batch, evict=evict, cap=cap, every=every, batch=batch, measure=measure
        )
        if requested is not None:
            batches = maximize(folder, report, requested, page_tokens=page_tokens)
            show(report, batches, as_json=as_json)
            return
    except QuireError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    _show(report)
    if as_json:
        print_json(_object(report, options))


def parse_workload(text: str) -> Workload:
    """Parse `in,out,batch`.

    Raises:
        ConfigError: not three integers of at least 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(map(is_count, parts)):
        raise ConfigError(
            f"workload {text!r}: expected input tokens, output tokens and batch, as in 1024,256,16"
        )
    input_tokens, output_tokens, batch = map(int, parts)
    return Workload(input_tokens=input_tokens, output_tokens=output_tokens, batch=batch)


def _size(name: str, text: str | None) -> int | None:
    return None if text is None else parse_named(parse_size, name, text)


def _find(model: str, *, with_weights: bool) -> tuple[Path, str]:
    from quire.models.source import CONFIG_ONLY, WHOLE_MODEL, find_model

    if model.endswith(GGUF):
        return Path(model), Path(model).stem
    return find_model(model, wanted=WHOLE_MODEL if with_weights else CONFIG_ONLY)


def _show(report: PlanReport) -> None:
    # imported here: not needed for --help
    from rich.console import Console

    from quire.cli.plan_report import render

    Console().print(render(report))


def _object(report: PlanReport, options: PlanOptions) -> dict[str, object]:
    resolved = {
        "model": report.model_name,
        "dtype": report.dtype,
        "weight_codec": report.weight_codec,
        "kv_codec": report.kv_codec,
        "weights": asdict(report.weights),
        "memory_bytes": report.memory.total_bytes,
        "kv_memory_bytes": report.memory.kv_bytes,
        "headroom_bytes": report.memory.headroom_bytes,
        "activation_peak_bytes": report.memory.activation_peak_bytes,
        "sequence_tokens": report.capacity.sequence_tokens,
    }
    return envelope("plan", report.claims(), report.arms(), asdict(options) | resolved)
