"""`quire demo`: runs real prompts in a small KV memory, full and compressed, within a minute."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quire.cli.common import json_option
from quire.cli.options import ModelConfig
from quire.cli.report import envelope, print_json
from quire.cli.settings import Settings, config_option, with_flags
from quire.config.kv_config import KVConfig
from quire.layout.options import option

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.cli.demo_run import Variant

_CHECKED = 8  # outputs compared with Transformers: seven questions and one retrieval prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFlags:
    """Options of `quire demo`."""

    kv_memory: str = option("8MiB", help="Size of KV memory.", metavar="SIZE", common=True)
    requests: int = option(56, help="Number of requests, 1 to 64.", common=True)
    max_tokens: int = option(48, help="Maximum output tokens per request.", common=True)
    threads: int = option(1, help="CPU threads; 1 is fastest for such a small model.", common=True)
    config: Path | None = config_option()
    as_json: bool = json_option()


@with_flags
def demo(*, flags: DemoFlags) -> None:
    """Run real prompts in a small KV memory and print memory use and speed.

    The same prompts run with full KV, int8 pages, Batch-Max eviction, and both. On a terminal, a
    live view shows the KV of each running request. The model is quire-tiny, a small model inside
    this package. It continues text and retrieves records from its context, but cannot calculate.
    Exit code 1 if an output with full KV differs from Transformers.
    """
    settings = Settings(
        loading=ModelConfig(dtype="float32", device="cpu", threads=flags.threads),
        kv=KVConfig(memory=flags.kv_memory),
    )
    typer.echo("loading quire-tiny ...", err=True)
    llm = settings.open_llm()
    # imported here: they import torch
    from quire.cli.demo_run import (
        COMPRESSED,
        FULL,
        DemoRun,
        demo_prompts,
        show_comparison,
        show_demo,
    )
    from quire.cli.exactness import compare_with_generate

    prompts = demo_prompts(flags.requests, flags.max_tokens, lambda text: len(llm.encode(text)))
    typer.echo(f"running {flags.requests} requests in {flags.kv_memory} of KV memory ...", err=True)
    results = {FULL: DemoRun(llm, prompts).run()}
    result = results[FULL]
    for variant in COMPRESSED:
        typer.echo(f"running them with {variant.title} ...", err=True)
        results[variant] = DemoRun(_with(llm, settings, variant), prompts, variant.title).run()
    typer.echo("comparing with Transformers ...", err=True)
    exactness = compare_with_generate(settings.model, result.outputs[:_CHECKED])
    claims = result.claims() | {
        "exactness_checked": exactness.checked,
        "exactness_equal": exactness.equal,
        "exactness_ties": exactness.ties,
    }
    show_demo(result, claims, exactness)
    for variant, found in results.items():
        claims |= found.comparison(variant.name, result)
    show_comparison([*results], claims)
    if flags.as_json:
        arms = {"answers": [asdict(output.usage) for output in result.outputs]}
        config = settings.as_dict() | {"requests": flags.requests, "max_tokens": flags.max_tokens}
        config["variants"] = [asdict(variant) for variant in results]
        print_json(envelope("demo", claims, arms, config))
    if not exactness.passed:
        raise typer.Exit(1)


def _with(llm: "LLM", settings: Settings, variant: "Variant") -> "LLM":
    """Create an LLM with the same weights and another use of the KV memory."""
    from quire.api.llm import LLM

    kv = replace(settings.kv, codec=variant.codec, evict=variant.evict)
    return LLM(llm.model, kv=kv, schedule=settings.schedule)
