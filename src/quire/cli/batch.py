"""`quire batch`: runs a file of requests and writes a file of records; resumes after a kill."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.batch.lines import BatchTask, LineFormat
from quire.batch.records import USAGE, BatchTally
from quire.cli.batch_files import (
    BatchOutput,
    RunState,
    Survey,
    refuse_one_file_for_two,
    report_failures,
    survey_of,
    warn_of_other_models,
    warn_of_repeated,
)
from quire.cli.common import json_option
from quire.cli.kv_events import KVWatch, kv_events_option, watching
from quire.cli.on_ray import refuse_on_ray, refuse_ray_options, run_on_ray
from quire.cli.options import KV, MODEL, RAY_BATCH, SAMPLING, SCHEDULE
from quire.cli.report import envelope, print_json
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError
from quire.layout.options import option
from quire.layout.sizes import format_size
from quire.layout.sparse import OFF

if TYPE_CHECKING:
    from quire.engine.stats import EngineStats

_SEED_BITS = 62
_LABELS = {
    "requests_completed_before": ("completed in earlier runs", "requests"),
    "requests_with_errors_before": ("failed in earlier runs", "requests"),
    "requests_completed": ("completed in this run", "requests"),
    "requests_with_errors": ("failed in this run", "requests"),
    "prompt_tokens": ("prompt", "tokens"),
    "completion_tokens": ("output", "tokens"),
    "run_s": ("run time", "s"),
    "completion_tokens_per_s": ("output throughput", "tokens/s"),
    "kv_total_bytes": ("KV memory", "bytes"),
    "kv_peak_bytes": ("peak KV memory in use", "bytes"),
    "preemptions": ("preemptions", ""),
    "recomputed_tokens": ("recomputed after preemptions", "tokens"),
    "cached_tokens": ("prompt in the prefix cache", "tokens"),
    "evictions": ("evictions", ""),
    "evicted_tokens": ("evicted", "tokens"),
}
"""Label and unit of each row of the printed table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFlags:
    """Options of `quire batch`."""

    prompt_key: str = option(
        "prompt", help="Key of the prompt in a plain line; other keys are ignored."
    )
    prefix: str = option("", help="Text prepended to every text prompt, such as '<|doc|>'.")
    with_prompt: bool = option(False, help="Include the prompt in records of plain lines.")
    overwrite: bool = option(False, help="Discard existing records in OUTPUT.", common=True)
    retry_failed: bool = option(
        False,
        help="Run lines again that have error records, for example with more memory, and lines "
        "that were changed in INPUT; records of lines that are gone are discarded.",
    )
    base_url: str | None = option(
        None,
        help="URL of an OpenAI-compatible server that runs the requests, such as "
        "http://gpu1:8000. MODEL is then its name of the model.",
        common=True,
    )
    api_key: str | None = option(
        None, help="Key of the server; unset: environment variable OPENAI_API_KEY."
    )
    max_concurrency: int = option(64, help="Most requests in flight at the server.", min_value=1)
    max_retries: int = option(
        8, help="Most repetitions of a request that the server refused for the moment.", min_value=0
    )
    kv_events: Path | None = kv_events_option()
    as_json: bool = json_option()


@with_settings(
    MODEL, KV, SCHEDULE, SAMPLING, RAY_BATCH, defaults={"max-tokens": 128}, model_required=True
)
def batch(
    settings: Settings,
    *,
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="File of requests, one JSON object per line.")
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="File for the records, one JSON object per line, in the order of completion.",
        ),
    ],
    flags: BatchFlags,
) -> None:
    """Run a file of requests and write one record for each.

    A line is a request in OpenAI's batch format, or an object with a prompt (or messages) and
    sampling options. A line with a cache_salt shares KV only with lines of the same cache_salt. An
    invalid line gets an error record; the other lines run. A killed batch resumes if it is started
    again with the same arguments; INPUT may have further lines. In bfloat16, the remaining outputs
    may then differ from those of an uninterrupted run, except with --batch-invariant. Exit code 1
    if OUTPUT has error records.

    With --ray, engines in actors of Ray Data run the requests, and the records have the order of
    the lines.

    With --base-url, a server runs the requests. Lines may then be for any path of its API. Requests
    that it refuses for the moment (status 429 or 503) are repeated after the time it names.
    """
    settings.refuse_other_tenants()
    if flags.overwrite and flags.retry_failed:
        raise ConfigError(
            "--overwrite runs every line again, so --retry-failed has no effect: leave one out"
        )
    task = BatchTask(
        source=source,
        form=LineFormat(prompt_key=flags.prompt_key, prefix=flags.prefix),
        sampling=settings.sampling,
        with_prompt=flags.with_prompt,
    )
    refuse_one_file_for_two(source, target, flags.kv_events)
    survey = survey_of(source)
    warn_of_repeated(survey)
    server = None
    refuse_ray_options(settings)
    if settings.ray.enabled:
        refuse_on_ray("--base-url", flags.base_url)
        refuse_on_ray("--kv-events", flags.kv_events)
    if flags.base_url is None:
        warn_of_other_models(survey, settings.model)
    else:
        from quire.cli.batch_server import server_of  # imports httpx

        server = server_of(
            settings, flags.base_url, flags.api_key, flags.max_concurrency, flags.max_retries
        )
    state = _state(settings, task, survey, flags.base_url)
    with BatchOutput(
        target, source, state, overwrite=flags.overwrite, retry_failed=flags.retry_failed
    ) as output:
        left = survey.requests - len(output.completed)
        failed = len(output.failed)  # in earlier runs; the run adds its own
        before = {
            "requests_completed_before": len(output.completed) - failed,
            "requests_with_errors_before": failed,
        }
        with watching(flags.kv_events if left else None) as watch:
            if settings.ray.enabled:
                result = _Result(*run_on_ray(settings, task, output, left))
            elif server is None:
                result = _run(settings, task, output, left, watch)
            else:
                from quire.cli.batch_server import run_on_server

                result = _Result(*run_on_server(settings, server, task, output, left))
            _remark(source, survey.requests, left)
            claims = before | _claims(result)
            _show(target, claims)
            if flags.as_json:
                arms = {"finish_reasons": result.tally.finish_reasons}
                config = settings.as_dict() | asdict(task.form) | {"source": str(source)}
                print_json(envelope("batch", claims, arms, config))
            if output.failed:
                output.flush()
                form = task.form if server is None else None
                report_failures(source, target, output.failed, survey.requests, form)
                raise typer.Exit(1)


def _remark(source: Path, requests: int, left: int) -> None:
    """Say on standard error why no line ran."""
    if not requests:
        typer.echo(f"{source} has no requests: expected one JSON object on each line", err=True)
    elif not left:
        typer.echo("nothing to do: every line has a record", err=True)


@dataclass(frozen=True, slots=True)
class _Result:
    """Tally of a run, its duration, and the engine's statistics (None if no engine ran)."""

    tally: BatchTally
    seconds: float
    stats: "EngineStats | None" = None


def _state(
    settings: Settings, task: BatchTask, survey: Survey, base_url: str | None = None
) -> RunState:
    folder = Path(settings.model)
    seed = task.sampling.seed
    return RunState(
        input_sha256=survey.sha256,
        input_lines=survey.lines,
        config={
            "model": str(folder.resolve()) if folder.is_dir() else settings.model,
            "dtype": settings.loading.dtype,
            "kv-codec": settings.kv.codec,
            "evict": settings.kv.evict,
            "evict-allow": settings.kv.evict_allow,
            "sparse": None if settings.kv.sparse == OFF else settings.kv.sparse,
            "with-prompt": task.with_prompt,
            **asdict(task.form),
            **asdict(task.sampling),
            "base-url": base_url,
        },
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        line_digests=survey.line_digests,
    )


def _run(
    settings: Settings, task: BatchTask, output: BatchOutput, left: int, watch: KVWatch
) -> _Result:
    """Run the remaining lines; without remaining lines no model is loaded."""
    if not left:
        return _Result(BatchTally(), 0.0)
    llm = settings.open_llm()
    watch.follow(llm)
    # imported here: they import torch
    from quire.cli.batch_run import BatchRun
    from quire.cli.progress import LiveProgress

    start_s = time.monotonic()
    with LiveProgress("batch", left) as progress:
        run = BatchRun(llm, task, output, lambda tally: progress.show(tally.completed, llm.stats))
        try:
            run.run()
        except KeyboardInterrupt:
            typer.echo(
                f"interrupted: {left - run.tally.completed} requests remaining; run the same "
                "command to resume",
                err=True,
            )
            raise
    return _Result(run.tally, time.monotonic() - start_s, llm.stats())


def _claims(result: _Result) -> dict[str, int | float]:
    tally, stats = result.tally, result.stats
    claims: dict[str, int | float] = {
        "requests_completed": tally.completed - tally.errors,
        "requests_with_errors": tally.errors,
        "prompt_tokens": tally.usage["prompt_tokens"],
        "completion_tokens": tally.usage["completion_tokens"],
        "run_s": result.seconds,
    }
    if tally.completed:
        claims["completion_tokens_per_s"] = claims["completion_tokens"] / max(result.seconds, 1e-9)
    if stats is not None:
        claims |= {
            "kv_total_bytes": stats.kv_total_bytes,
            "kv_peak_bytes": stats.kv_peak_bytes,
            "preemptions": stats.num_preemptions,
        }
    claims |= {name: tally.usage[name] for name in USAGE if name in tally.usage}
    return claims


def _show(target: Path, claims: Mapping[str, int | float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=str(target), show_header=False, title_justify="left")
    for name, value in claims.items():
        label, unit = _LABELS[name]
        table.add_row(label, _shown(value, unit))
    Console().print(table)


def _shown(value: int | float, unit: str) -> str:
    if unit == "bytes":
        return format_size(int(value))
    number = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
    unit = unit.removesuffix("s") if value == 1 and unit in ("requests", "tokens") else unit
    return f"{number} {unit}".rstrip()
