"""`quire eval fidelity`: how closely a configuration follows the outputs of full KV."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.common import AsJson
from quire.cli.evaluate_run import RESULT_FILE, json_bytes, opener
from quire.cli.json_output import print_json
from quire.cli.options import KV, MODEL, SCHEDULE
from quire.cli.out_folder import prepare_folder, write_files
from quire.cli.report import envelope
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.evals.fidelity import PromptFidelity, Reference
    from quire.evals.intervals import Mean
    from quire.evals.prompt_file import UserPrompt
    from quire.models.loader import LoadedModel


@with_settings(MODEL, KV, SCHEDULE)
def fidelity(
    *,
    settings: Settings,
    data: Annotated[
        Path,
        typer.Option(help="Prompts: JSON lines with prompt (a text or token ids) or messages."),
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each prompt.")] = 48,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Use the first prompts only. Default: all.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the result.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare outputs and distributions of an eviction rule or KV codec with full KV.

    The greedy output with full KV is the reference; its tokens are forced, so that every
    distribution follows equal tokens. Works with any model and any prompts.
    """
    if settings.loading.tensor_parallel_size > 1:
        raise ConfigError(
            "quire eval fidelity needs a model in one process: leave --tensor-parallel-size out"
        )
    if out is not None:
        prepare_folder(out)
    found = measured(settings, data, max_tokens, num_prompts)
    result = envelope(
        "fidelity",
        claims_of(found),
        {"prompts": [arm_of(*pair) for pair in found]},
        settings.as_dict()
        | {"data": data.name, "max_tokens": max_tokens, "num_prompts": num_prompts},
    )
    show(found)
    if out is not None:
        write_files(out, {RESULT_FILE: json_bytes(result)})
    if as_json:
        print_json(result)


_Pair = tuple["Reference", "PromptFidelity"]


def measured(
    settings: Settings, data: Path, max_tokens: int, num_prompts: int | None
) -> Sequence[_Pair]:
    """Reference and fidelity of each prompt.

    Raises:
        ConfigError: an invalid file or option.
    """
    from quire.evals.fidelity import FidelityScorer
    from quire.evals.prompt_file import read_prompts
    from quire.evals.suite.engines import full_kv

    llm = opener(settings)(settings.kv)
    model = llm.model
    llm.close()
    prompts = read_prompts(data, model, limit=num_prompts, content_format=llm.content_format)
    refuse_long(prompts, max_tokens, model)
    longest = max(len(one.token_ids) for one in prompts) + max_tokens
    full, configured = (
        FidelityScorer(model, kv, longest_tokens=longest, new_tokens=max_tokens)
        for kv in (full_kv(settings.kv), settings.kv)
    )
    references = [full.reference(one.token_ids) for one in prompts]
    return [(reference, configured.score(reference)) for reference in references]


def refuse_long(prompts: Sequence["UserPrompt"], max_tokens: int, model: "LoadedModel") -> None:
    """Refuse prompts that exceed the model's context.

    Raises:
        ConfigError: names the first such prompt.
    """
    most = model.spec.max_positions - max_tokens
    for number, one in enumerate(prompts, start=1):
        if len(one.token_ids) > most:
            raise ConfigError(
                f"prompt {number} of --data has {len(one.token_ids)} tokens; with --max-tokens "
                f"{max_tokens} the model's context holds {most}: shorten or remove it"
            )


def means_of(found: Sequence[_Pair]) -> "Mapping[str, Mean]":
    """Means over the prompts, with their intervals."""
    from quire.evals.intervals import mean_of

    scores = [score for _, score in found]
    return {
        "top_1": mean_of([score.top_1 for score in scores]),
        "exact": mean_of([score.exact for score in scores]),
        "kl_nats": mean_of([score.kl for score in scores]),
    }


def claims_of(found: Sequence[_Pair]) -> dict[str, int | float]:
    """The result as a flat mapping."""
    claims: dict[str, int | float] = {"prompts": len(found)}
    for name, mean in means_of(found).items():
        claims |= {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high}
    claims["kv_peak_bytes"] = max(score.kv_peak_bytes for _, score in found)
    claims["full_kv_peak_bytes"] = max(reference.kv_peak_bytes for reference, _ in found)
    return claims


def arm_of(reference: "Reference", score: "PromptFidelity") -> dict[str, object]:
    """One prompt as JSON values."""
    return {
        "prompt_tokens": len(reference.prompt),
        "output_tokens": len(reference.output),
        "full_kv_peak_bytes": reference.kv_peak_bytes,
        **asdict(score),
    }


def show(found: Sequence[_Pair]) -> None:
    """Print the means, and the KV bytes."""
    from quire.cli.evaluate_view import show_means
    from quire.layout.sizes import format_size

    claims = claims_of(found)
    show_means(f"Compared with full KV on {len(found)} prompts", means_of(found))
    typer.echo(
        f"KV peak of a request: {format_size(int(claims['kv_peak_bytes']))}, with full KV "
        f"{format_size(int(claims['full_kv_peak_bytes']))}"
    )
