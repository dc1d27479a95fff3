"""`quire tune`: finds the codec and eviction rule that run most requests at a wanted quality."""

from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.common import json_option, split_texts
from quire.cli.options import KV, MODEL, SCHEDULE
from quire.cli.report import envelope, prepare_folder, print_json, write_files
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError
from quire.evals.pace import Pace
from quire.evals.tune.space import Space
from quire.layout.extras import has_extra
from quire.layout.options import option

if TYPE_CHECKING:
    from quire.evals.tune.run import TuneConfig, Tuned
    from quire.models.loader import LoadedModel

_SPACE = Space()


def time_limit_option() -> Any:
    """`--time-limit` of `quire tune` and of `quire board`."""
    return option(
        None,
        help="Stop after this time in seconds; the same command goes on.",
        unit="s",
        common=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneFlags:
    """Options of `quire tune`."""

    data: Path = option(
        MISSING,
        help="Prompts: JSON lines with prompt (a text or token ids) or messages, and "
        "optionally answer.",
        common=True,
    )
    min_quality: float = option(
        0.99, help="Least mean quality on held-out prompts, 0 to 1.", common=True
    )
    metric: str = option(
        "top_1",
        help="Quality: top_1 (agreement with full KV by token), exact (equal outputs), or "
        "answer (outputs that contain the answer).",
        common=True,
    )
    objective: str = option(
        "requests", help="requests (most at once), or throughput (output tokens/s)."
    )
    codecs: str = option(
        ",".join(_SPACE.codecs),
        help="KV codecs, separated by commas; the first is the baseline's.",
        common=True,
    )
    rules: str = option(
        ";".join(_SPACE.rules),
        help="Eviction rules without cap, separated by semicolons.",
        common=True,
    )
    caps: str = option(",".join(_SPACE.caps), help="Caps of the rules.", common=True)
    schedules: str = option(
        ",".join(_SPACE.schedules), help="When to evict: values of when= of an eviction rule."
    )
    budgets: str = option(
        ";".join(_SPACE.budgets),
        help="Budgets over layers and heads, separated by semicolons, or uniform.",
    )
    max_tokens: int = option(48, help="Output tokens of each prompt.", common=True)
    num_prompts: int | None = option(
        None, help="Use the first prompts only. Default: all.", min_value=1
    )
    held_out: float = option(0.5, help="Share of the prompts that only check the result.")
    seed: int = option(0, help="Divides the prompts.")
    measure: bool = option(True, help="Run baseline and result in the KV memory at the end.")
    time_limit: float | None = time_limit_option()
    out: Path = option(
        Path("tuned"), help="Folder for the configuration, the page and all scores.", common=True
    )
    as_json: bool = json_option()


SEARCHED_KV = KV.without("kv-codec", "evict", "evict-allow")  # by `quire board` too
NO_AUTO = {"kv-memory": None}  # its size could differ in a later run, which could not go on


@with_settings(MODEL, SEARCHED_KV, SCHEDULE, defaults=NO_AUTO)
def tune(settings: Settings, *, flags: TuneFlags) -> None:
    """Find the KV codec and eviction rule that hold most requests at a wanted quality.

    Each candidate follows the outputs of the full KV cache on your prompts. Scores are stored in
    the folder of --out, so that an interrupted search goes on, as after --time-limit. The result is
    a file for --config.
    --data and --kv-memory are required.
    """
    from quire.evals.tune.run import TuneConfig

    space = Space(
        codecs=split_texts(flags.codecs, ","),
        rules=split_texts(flags.rules, ";"),
        caps=split_texts(flags.caps, ","),
        schedules=split_texts(flags.schedules, ","),
        budgets=split_texts(flags.budgets, ";"),
    )
    config = TuneConfig(
        space=space,
        metric=flags.metric,
        min_quality=flags.min_quality,
        objective=flags.objective,
        max_tokens=flags.max_tokens,
        held_out=flags.held_out,
        seed=flags.seed,
        measure=flags.measure,
    )
    refuse_missing(flags.data)
    refuse_settings(settings)
    prepare_folder(flags.out)
    pace = Pace(flags.time_limit, partial(typer.echo, err=True))
    tuned = run_search(settings, config, flags.data, flags.out, flags.num_prompts, pace)
    write_result(tuned, settings, flags.out)
    if flags.as_json:
        print_json(envelope("tune", tuned.claims(), arms_of(tuned), settings.as_dict()))


def refuse_missing(data: Path) -> None:
    """Refuse a missing file of prompts, before the model is loaded."""
    if not data.is_file():
        wrong = "not a regular file" if data.exists() else "no such file"
        raise ConfigError(f"expected --data as a file of prompts, got {data}: {wrong}")


def refuse_settings(settings: Settings, command: str = "tune") -> None:
    """Refuse a KV memory without a size."""
    if settings.kv.memory is None:
        raise ConfigError(
            f"quire {command} needs a KV memory of a fixed size: add --kv-memory, such as 64MiB; "
            "auto may be another size in a later run, which could not go on"
        )


def run_search(
    settings: Settings,
    config: "TuneConfig",
    data: Path,
    out: Path,
    num_prompts: int | None,
    pace: Pace,
) -> "Tuned":
    """Load the model and the prompts, and search."""
    from quire.evals.prompt_file import read_prompts
    from quire.evals.tune.run import Tuner, refuse_long
    from quire.evals.tune.scores import ANSWER, CandidateScorer, ScoreFile, fingerprint_of

    model = _load(settings)
    form = settings.loading.chat_template_content_format
    prompts = read_prompts(data, model, limit=num_prompts, content_format=form)
    refuse_long(prompts, config, model)
    with_answers = config.metric == ANSWER
    identity = fingerprint_of(
        *(settings.model, model.spec, settings.loading, settings.kv),
        *(config.max_tokens, with_answers, prompts),
    )
    stored = ScoreFile(out / "scores.jsonl", identity)
    for line in stored.resumption():
        pace.report(line)
    scorer = CandidateScorer(
        model,
        settings.kv,
        prompts,
        new_tokens=config.max_tokens,
        stored=stored,
        baseline=config.space.baseline,
        with_answers=with_answers,
    )
    tuner = Tuner(
        model,
        settings.kv,
        settings.schedule,
        prompts,
        config,
        scorer=scorer,
        pace=pace,
    )
    return tuner.run()


def _load(settings: Settings) -> "LoadedModel":
    from quire.models.loader import load_model
    from quire.offload.weights.placement import place_beyond

    settings.set_threads()
    loading = settings.loading
    return load_model(
        settings.model,
        dtype=loading.dtype,
        device=loading.device,
        trust_remote_code=loading.trust_remote_code,
        verify=loading.verify,
        placer=place_beyond(loading.weights_memory),
        model_impl=loading.model_impl,
        weight_codec=loading.weight_codec,
    )


def write_result(tuned: "Tuned", settings: Settings, out: Path) -> None:
    """Write the configuration, the page and, where matplotlib is installed, the chart."""
    from quire.evals.tune import report

    has_chart = has_extra("report")
    files = {
        report.CONFIG_FILE: report.config_toml(
            tuned, settings.model, settings.kv, settings.loading.dtype
        ),
        report.PAGE_FILE: report.page(tuned, settings.model, has_chart=has_chart),
    }
    write_files(out, {name: text.encode() for name, text in files.items()})
    if has_chart:
        write_files(out, {report.CHART_FILE: report.chart(tuned)})
    quality = tuned.held_out[tuned.chosen]
    typer.echo(
        f"{tuned.chosen}: the KV memory holds {tuned.predicted[tuned.chosen].rows} requests of "
        f"{tuned.prompt_tokens} prompt and {tuned.config.max_tokens} output tokens, "
        f"{tuned.gain:.2f} times the baseline; {tuned.config.metric} {quality} on {quality.count} "
        f"held-out prompts"
    )
    if tuned.doubt:
        typer.echo(tuned.doubt)
    use = f"Use it with --config {out / report.CONFIG_FILE}"
    if tuned.chosen == tuned.baseline:
        use = f"{out / report.CONFIG_FILE} holds the baseline, which has no gain"
        rows = {one: found.rows for one, found in tuned.predicted.items()}
        tried = {one for one, held in rows.items() if held > rows[tuned.baseline]}
        typer.echo(
            "All candidates that hold more requests were refused."
            if tuned.refused and tried <= tuned.refused.keys()
            else "No candidate that holds more requests reached --min-quality "
            f"{tuned.config.min_quality:g} on the {tuned.rounds[-1].prompts} prompts of the "
            f"search and the {quality.count} others: use more prompts, or lower --min-quality."
        )
    if tuned.refused:
        one, why = next(iter(tuned.refused.items()))
        typer.echo(f"Refused: {len(tuned.refused)}, such as {one}: {why}")
    typer.echo(f"{use}; details: {out / report.PAGE_FILE}")


def arms_of(tuned: "Tuned") -> dict[str, object]:
    """Rounds, held-out qualities, runs and refusals as JSON values."""
    from dataclasses import asdict

    return {
        "chosen": asdict(tuned.chosen),
        "rounds": [
            {
                "prompts": each.prompts,
                "quality": {str(one): asdict(found) for one, found in each.quality.items()},
                "kept": [str(one) for one in each.kept],
            }
            for each in tuned.rounds
        ],
        "requests": {str(one): found.rows for one, found in tuned.predicted.items()},
        "held_out": {str(one): asdict(found) for one, found in tuned.held_out.items()},
        "runs": {str(one): asdict(run) for one, run in tuned.runs.items()},
        "refused": {str(one): why for one, why in tuned.refused.items()},
    }
