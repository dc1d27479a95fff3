"""`quire demo`: a chat model answers questions in a small KV memory, full and compressed."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.common import ABOUT_MODEL, json_option
from quire.cli.completion import complete_model
from quire.cli.options import ModelConfig
from quire.cli.report import envelope, print_json
from quire.cli.settings import Settings, config_option, with_flags
from quire.config.kv_config import KVConfig
from quire.layout.options import option
from quire.layout.packaged import SMOLLM2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFlags:
    """Options of `quire demo`."""

    kv_memory: str = option("120MiB", help="Size of KV memory.", metavar="SIZE", common=True)
    max_tokens: int = option(32, help="Maximum output tokens per request.", common=True)
    threads: int = option(0, help="CPU threads; 0: PyTorch's default.", min_value=0, common=True)
    config: Path | None = config_option()
    as_json: bool = json_option()


@with_flags
def demo(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help=f"A chat model. {ABOUT_MODEL}", autocompletion=complete_model
        ),
    ] = SMOLLM2,
    *,
    flags: DemoFlags,
) -> None:
    """Ask a chat model questions about texts in a small KV memory, and print speed and answers.

    SmolLM2 answers eight questions about four passages of books in the public domain and holds a
    chat of three turns, with full KV, int8 pages, eviction, and both. On a terminal, a live view
    shows the KV of each running request. One answer and the chat with full KV are compared with
    Transformers; exit code 1 if one differs.
    """
    settings = Settings(
        model=model,
        loading=ModelConfig(dtype="float32", device="cpu", threads=flags.threads),
        kv=KVConfig(memory=flags.kv_memory),
    )
    typer.echo(f"loading {model} ...", err=True)
    llm = settings.open_llm()
    # imported here: they import torch
    from quire.api.llm import LLM
    from quire.cli.demo_run import COMPRESSED, FULL, DemoRun, show_demo
    from quire.cli.exactness import compare_with_generate

    results = {}
    for variant in (FULL, *COMPRESSED):
        typer.echo(f"asking with {variant.title} ...", err=True)
        if variant is not FULL:
            kv = replace(settings.kv, codec=variant.codec, evict=variant.evict)
            llm = LLM(llm.model, kv=kv, schedule=settings.schedule)
        results[variant] = DemoRun(llm, variant.title, flags.max_tokens).run()
    full = results[FULL]
    typer.echo("comparing with Transformers ...", err=True)
    # one question and the chat: Transformers needs as long for a question as Quire for three
    exactness = compare_with_generate(model, [full.answers[0], *full.chat])
    show_demo(results, exactness)
    if flags.as_json:
        claims: dict[str, int | float] = {
            "questions": len(full.answers),
            "exactness_checked": exactness.checked,
            "exactness_equal": exactness.equal,
            "exactness_ties": exactness.ties,
        }
        for variant, found in results.items():
            claims |= found.claims(f"{variant.name}_")
        arms = {
            variant.name: [output.text for output in (*found.answers, *found.chat)]
            for variant, found in results.items()
        }
        config = settings.as_dict() | {"max_tokens": flags.max_tokens}
        config["variants"] = [asdict(variant) for variant in results]
        print_json(envelope("demo", claims, arms, config))
    if not exactness.passed:
        raise typer.Exit(1)
