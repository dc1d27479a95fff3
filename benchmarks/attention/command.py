"""`python -m benchmarks attention`: rates of attention over pages."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.command import QUICK_NOTE
from quire.cli.common import AsJson, Threads, use_threads
from quire.cli.report import envelope, print_json
from quire.cli.startup import status
from quire.cli.tables import show_table

if TYPE_CHECKING:
    from benchmarks.attention.bench import Rate


def attention(  # noqa: PLR0913 - one parameter per option
    *,
    heads: Annotated[
        str, typer.Option(help="Query heads, KV heads and head dimension.")
    ] = "32,8,128",
    rows: Annotated[str, typer.Option(help="Numbers of decoding sequences.")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="Tokens of each sequence.")] = "512,1024,4096",
    chunks: Annotated[
        str, typer.Option(help="Prefill steps as NEW:CONTEXT tokens; '' for none.")
    ] = "512:512,512:2048,2048:2048",
    codecs: Annotated[str, typer.Option(help="Codecs of the pages.")] = "bfloat16,int8,int4",
    instruction_sets: Annotated[
        str, typer.Option(help="plain, avx2, avx512, avx512_bf16; '' for all but plain.")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes. No claims.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Compare attention over cold pages with the memory bandwidth and the rate of products."""
    import torch

    from benchmarks.attention.bench import (
        QUICK_ATTENTION,
        AttentionConfig,
        claims,
        measure,
        step_shapes,
    )

    use_threads(threads)
    config = QUICK_ATTENTION
    if not quick:
        num_heads, num_kv_heads, head_dim = _numbers(heads)
        config = AttentionConfig(
            heads=(num_heads, num_kv_heads, head_dim),
            rows=_numbers(rows),
            contexts=_numbers(contexts),
            chunks=tuple((new, context) for new, context in map(_pair, _words(chunks))),
            codecs=_words(codecs),
            repeats=repeats,
        )
    config = replace(config, instruction_sets=_words(instruction_sets))
    found: list[Rate] = []
    for shape in step_shapes(config):
        with status(f"measuring {shape}"):
            found += measure(config, *shape)
    columns = ("step", "codec", "instruction set", "us per layer", "rate", "limit", "of the limit")
    show_table(
        "Attention; rates in GB/s of decode steps, in GFLOP/s of prefill steps",
        columns,
        [_row(rate) for rate in found],
    )
    if quick:
        typer.echo(QUICK_NOTE)
    if as_json:
        arms = {"rates": [asdict(rate) for rate in found]}
        used = asdict(config) | {"threads": torch.get_num_threads()}
        run = envelope("bench attention", claims(found), arms, used, quick=quick)
        print_json(run)


def _row(rate: "Rate") -> tuple[str, ...]:
    return (
        rate.name,
        rate.codec,
        rate.instruction_set,
        f"{rate.median_s * 1e6:,.1f}",
        f"{rate.work / rate.median_s / 1e9:,.1f}",
        f"{sorted(rate.limits)[len(rate.limits) // 2] / 1e9:,.1f}",
        f"{rate.over_limit:.2f}",
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


def _pair(text: str) -> tuple[int, int]:
    new, _, context = text.partition(":")
    return int(new), int(context)
