"""`quire plan`: estimates memory use and batch sizes of a model without loading it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.common import (
    ABOUT_MODEL,
    json_option,
    refuse_no_name,
    threads_option,
    use_threads,
)
from quire.cli.completion import complete_model
from quire.cli.plan_maximize import BatchQuestion, maximize, parse_lengths, show
from quire.cli.plan_report import (
    RETAINED,
    STEP_TOKENS,
    PlanOptions,
    PlanReport,
    Quality,
    plan_report,
)
from quire.cli.report import envelope, print_json
from quire.cli.settings import config_option, is_from_file, with_flags
from quire.config.kv_config import policy_file_option
from quire.errors import ConfigError, ModelError, QuireError
from quire.layout.config import read_json_object
from quire.layout.options import option, parse_named
from quire.layout.packaged import PACKAGED_MODEL
from quire.layout.sizes import parse_size, parse_size_or
from quire.layout.sparse import OFF, parse_sparse
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """Options of `quire plan`."""

    memory: str | None = option(
        None,
        help="Memory of the device, e.g. 16GiB. Default: memory of this machine.",
        group=MEMORY,
        common=True,
    )
    device: str = option(
        "auto",
        help="Device of the model: cpu, where the memory of the process counts too, or cuda. auto: "
        "cpu.",
        group=MEMORY,
        common=True,
    )
    kv_memory: str = option(
        "auto", help="KV memory, e.g. 64MiB; auto: all remaining memory.", group=MEMORY, common=True
    )
    weights_memory: str = option(
        ALL_WEIGHTS,
        help="Device memory for weights, e.g. 4GiB; further layers are offloaded. all: no "
        "weight offload.",
        group=MEMORY,
        common=True,
    )
    disk_kv_memory: str = option(
        "0", help="Disk space for cached prefixes, e.g. 200GiB.", group=MEMORY, common=True
    )
    headroom: str | None = option(
        None,
        help="Memory to leave free, e.g. 1GiB. Default: 10% of the memory.",
        group=MEMORY,
        common=True,
    )
    dtype: str = option(
        "auto",
        help="Dtype of the weights: float32, float16, bfloat16; auto: of config.json.",
        group=MODEL,
        common=True,
    )
    weight_codec: str = option(
        "auto",
        help="Codec of the linear layers' weights: int8 or int4; auto: as stored.",
        group=MODEL,
        common=True,
    )
    kv_codec: str | None = option(
        None,
        help="KV codec, e.g. int8, or int8/int4 for keys/values. Default: dtype of the weights.",
        group=MODEL,
        common=True,
    )
    page_tokens: int = option(
        16, help="Tokens per page.", flag="block-size", group=MODEL, common=True
    )
    sparse: str = option(
        OFF,
        help="Pages that decode steps read, e.g. quest:budget=10%; see --sparse of quire serve.",
        group=MODEL,
        common=True,
    )
    sequence_tokens: int | None = option(
        None,
        help="Sequence length in tokens. Default: 2048 or the model's context.",
        group=REQUESTS,
        common=True,
    )
    batch: int | None = option(
        None,
        help="Batch size in sequences. Default: 8; with --maximize-batch the largest possible.",
        group=REQUESTS,
        common=True,
    )
    max_num_batched_tokens: int = option(
        STEP_TOKENS, help="Maximum tokens per step.", group=REQUESTS, common=True
    )
    activation_peak: str | None = option(
        None,
        help="Measured peak of activation memory, e.g. 300MiB. Default: estimated.",
        group=MEMORY,
        common=True,
    )
    workload: str | None = option(
        None,
        help="Assess the benefit of KV management for a workload: input tokens, output "
        "tokens, batch size.",
        metavar="IN,OUT,BATCH",
        group=REQUESTS,
        common=True,
    )
    maximize_batch: str | None = option(
        None,
        help="Compute the largest batch and its tokens/s for rows of INPUT and OUTPUT tokens: "
        "with full KV, with eviction in decode, and with eviction in prefill and decode.",
        metavar="INPUT,OUTPUT",
        group=LARGEST_BATCH,
        common=True,
    )
    evict: str | None = option(
        None,
        help="Eviction rule for --maximize-batch, as in h2o:cap=512,every=64. Default: average.",
        group=LARGEST_BATCH,
        common=True,
    )
    policy_file: str = policy_file_option()
    cap: str | None = option(
        None,
        help="Cap of the rule: tokens per lane, a fraction of the prompt, or 2MiB. Default: that "
        "of --evict, else 25%.",
        group=LARGEST_BATCH,
        common=True,
    )
    every: int | None = option(
        None,
        help="Tokens per eviction. Default: cap / 8, at most 64.",
        min_value=1,
        group=LARGEST_BATCH,
        common=True,
    )
    board: Path | None = option(
        None,
        help="Result of quire board with this model: shows the quality of its best rules for each "
        "KV codec.",
        metavar="board.json",
        group=REQUESTS,
    )
    threads: int = threads_option()
    config: Path | None = config_option()
    as_json: bool = json_option()


@with_flags
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"{ABOUT_MODEL} Weights are not read.",
            autocompletion=complete_model,
        ),
    ] = PACKAGED_MODEL,
    *,
    flags: PlanFlags,
) -> None:
    """Estimate memory use, batch size and longest sequence of a model without loading it.

    Rules that requests may name (--evict-allow of quire serve) are not planned: their attention
    statistics take KV memory too.
    """
    try:
        refuse_no_name(model)
        if flags.batch is not None and flags.batch < 1:
            raise ConfigError(f"--batch: expected 1 or more, got {flags.batch}")
        options = PlanOptions(
            memory_bytes=_size("memory", flags.memory),
            device=_device(flags),
            kv_memory_bytes=parse_named(parse_size_or("auto"), "kv-memory", flags.kv_memory),
            disk_kv_bytes=parse_named(parse_size, "disk-kv-memory", flags.disk_kv_memory),
            headroom_bytes=_size("headroom", flags.headroom),
            dtype=flags.dtype,
            weight_codec=flags.weight_codec,
            kv_codec=flags.kv_codec,
            page_tokens=flags.page_tokens,
            sparse=flags.sparse,
            sequence_tokens=flags.sequence_tokens,
            batch=DEFAULT_BATCH if flags.batch is None else flags.batch,
            max_num_batched_tokens=flags.max_num_batched_tokens,
            activation_peak_bytes=_size("activation-peak", flags.activation_peak),
            workload=None if flags.workload is None else parse_workload(flags.workload),
            weights_memory_bytes=parse_named(
                parse_size_or(ALL_WEIGHTS), "weights-memory", flags.weights_memory
            ),
        )
        folder, name = _find(model)
        report = plan_report(folder, options, name=name)
        quality = None if flags.board is None else board_quality(flags.board, model, report)
        if flags.maximize_batch is not None:
            if flags.board is not None:
                raise ConfigError("--board is for the table of codecs: leave out --maximize-batch")
            if parse_sparse(flags.sparse) is not None:
                raise ConfigError(
                    "--maximize-batch plans decode steps that read all KV: leave out --sparse"
                )
            prompt_tokens, new_tokens = parse_lengths(flags.maximize_batch)
            use_threads(flags.threads)
            question = BatchQuestion(
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                kv_bytes=report.memory.kv_bytes,
                kv_codec=report.kv_codec,
                page_tokens=flags.page_tokens,
                evict=flags.evict,
                cap=flags.cap,
                every=flags.every,
                batch=flags.batch,
            )
            show(report, maximize(report, question), as_json=flags.as_json)
            return
        _refuse_batch_options(flags)
    except QuireError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    from rich.console import Console  # not needed for --help

    from quire.cli.plan_report import render

    Console().print(render(report, quality))
    if flags.as_json:
        print_json(_object(report, options, quality))


def parse_workload(text: str) -> Workload:
    """Parse `in,out,batch`."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 3 or not all(map(is_count, parts)):
        raise ConfigError(
            f"workload {text!r}: expected input tokens, output tokens and batch, as in 1024,256,16"
        )
    input_tokens, output_tokens, batch = map(int, parts)
    return Workload(input_tokens=input_tokens, output_tokens=output_tokens, batch=batch)


def board_quality(file: Path, model: str, report: PlanReport) -> Quality:
    """The quality of the best rule of a board for each KV codec, by retained tokens."""
    from quire.evals.board.grid import QUIRE
    from quire.evals.board.result import Row  # NumPy: not for --help

    try:
        result: Any = read_json_object(file)
        measured, rows = result["config"]["model"], [Row.stored(r) for r in result["arms"]["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        why = error if isinstance(error, ModelError) else f"{file} is another file"
        raise ConfigError(f"--board: expected the board.json of quire board: {why}") from error
    if measured != model:
        raise ConfigError(f"--board {file} measured {measured}, not {model}")
    found: dict[str, dict[str, float]] = {}
    for codec in dict.fromkeys(choice.kv_codec for choice in report.choices):
        of_codec = ("none" if codec == report.dtype else codec, QUIRE)
        for name, share in RETAINED.items():
            budget = "" if share == 1 else name
            means = [
                row.quality.mean
                for row in rows
                if row.quality.count
                and (row.entry.codec, row.entry.source) == of_codec
                and row.entry.budget == budget
            ]
            if means:
                found.setdefault(codec, {})[name] = max(means)
    return found


def _size(name: str, text: str | None) -> int | None:
    return None if text is None else parse_named(parse_size, name, text)


def _device(flags: PlanFlags) -> str:
    kind = flags.device.partition(":")[0]  # as in cuda:0
    if kind == "cuda" and flags.memory is None:
        raise ConfigError("--device cuda needs --memory with the memory of the GPU, such as 24GiB")
    return "cpu" if kind == "auto" else kind


def _find(model: str) -> tuple[Path, str]:
    from quire.models.source import CONFIG_ONLY, find_model

    return find_model(model, wanted=CONFIG_ONLY)


def _refuse_batch_options(flags: PlanFlags) -> None:
    """Refuse options of --maximize-batch without it; those in a file are for other commands."""
    given: dict[str, object] = {"evict": flags.evict, "threads": flags.threads}
    given["policy-file"] = flags.policy_file
    given = {n: v for n, v in given.items() if not is_from_file(flags.config, n, str(v))}
    given |= {"cap": flags.cap, "every": flags.every}
    names = [f"--{name}" for name, value in given.items() if value]
    if names:
        raise ConfigError(
            f"{', '.join(names)} needs --maximize-batch with input and output tokens, such as "
            "--maximize-batch 3584,512"
        )


def _object(report: PlanReport, options: PlanOptions, quality: Quality | None) -> dict[str, object]:
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
    arms = report.arms() | ({} if quality is None else {"quality": quality})
    return envelope("plan", report.claims(), arms, asdict(options) | resolved)
