"""`quire demo`: runs real prompts in a small KV memory, in less than a minute."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from quire.cli.common import AsJson
from quire.cli.demo_work import demo_prompts
from quire.cli.options import ModelConfig
from quire.cli.report import envelope
from quire.cli.settings import Settings
from quire.config.kv_config import KVConfig

_CHECKED = 8  # outputs compared with Transformers: seven questions and one retrieval prompt


def demo(
    *,
    kv_memory: Annotated[str, typer.Option(metavar="SIZE", help="Size of KV memory.")] = "8MiB",
    requests: Annotated[int, typer.Option(help="Number of requests, 1 to 64.")] = 56,
    max_tokens: Annotated[int, typer.Option(help="Maximum output tokens per request.")] = 48,
    threads: Annotated[
        int, typer.Option(help="CPU threads; 1 is fastest for such a small model.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Run real prompts in a small KV memory and print memory use and speed.

    The model is quire-tiny, a small model inside this package. It continues text and retrieves
    records from its context, but cannot calculate. Exit code 1 if an output differs from
    Transformers.
    """
    # imported here: they import torch
    from quire.cli.demo_run import DemoRun
    from quire.cli.demo_view import show_demo
    from quire.cli.exactness import compare_with_generate

    settings = Settings(
        loading=ModelConfig(dtype="float32", device="cpu", threads=threads),
        kv=KVConfig(memory=kv_memory),
    )
    typer.echo("loading quire-tiny ...", err=True)
    llm = settings.open_llm()
    prompts = demo_prompts(requests, max_tokens, lambda text: len(llm.encode(text)))
    typer.echo(f"running {requests} requests in {kv_memory} of KV memory ...", err=True)
    result = DemoRun(llm, prompts).run()
    typer.echo("comparing with Transformers ...", err=True)
    exactness = compare_with_generate(settings.model, result.outputs[:_CHECKED])
    claims = result.claims() | {
        "exactness_checked": exactness.checked,
        "exactness_equal": exactness.equal,
        "exactness_ties": exactness.ties,
    }
    show_demo(result, claims, exactness)
    if as_json:
        arms = {"answers": [asdict(output.usage) for output in result.outputs]}
        config = settings.as_dict() | {"requests": requests, "max_tokens": max_tokens}
        typer.echo(json.dumps(envelope("demo", claims, arms, config)))
    if not exactness.passed:
        raise typer.Exit(1)
