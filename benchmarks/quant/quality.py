"""Part `quality`: quality of texts and tasks with quantized KV, and KV bytes.

Tasks are those of the eviction bench, on a model whose KV is stored in a codec. Every cell is
stored when it finishes.
"""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.common.result import Cell as Shown
from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.eviction.cells import FULL, Cell, CellFile, CellKey
from benchmarks.eviction.quality import Judge, mean_share, measure_cells
from benchmarks.eviction.texts import RunningText, pieces
from benchmarks.quant.config import PLAIN, QuantBenchConfig, TextsConfig
from benchmarks.quant.reading import CodecTexts, read_texts
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.models.loader import LoadedModel

ByCodec = Mapping[str, Mapping[str, Cell]]


class CodecJudge(Judge):
    """Runs cells whose rule is a codec; no token is evicted."""

    def kv_config(self, key: CellKey, memory: int) -> KVConfig:
        """See `Judge`."""
        return KVConfig(
            memory=memory,
            page_tokens=key.page_tokens,
            codec=key.rule,
            prefix_cache=PrefixCacheConfig(enabled=False),
        )


def task_keys(config: QuantBenchConfig, commit: str | None) -> list[CellKey]:
    """All cells, task by task, plain numbers first."""
    return [
        CellKey(
            model=config.model,
            task=task,
            tokens=config.tasks.tokens,
            prompts=config.tasks.prompts,
            rule=codec,
            when="",
            budget=1.0,
            evict=FULL,
            commit=commit,
        )
        for task in config.tasks.tasks
        for codec in (PLAIN, *config.task_codecs)
    ]


def run_quality(
    model: LoadedModel,
    config: QuantBenchConfig,
    running: RunningText,
    ask: Callable[[CellKey], Cell],
    *,
    commit: str | None,
    kept: CellFile,
    show: Callable[[Cell], None],
) -> PartResult:
    """The part.

    Args:
        model: reads.
        config: of the part.
        running: what texts are cut from.
        ask: runs a cell.
        commit: of this code.
        kept: file that finished cells are read from and written to.
        show: called with every cell that runs.
    """
    cells = list(measure_cells(ask, task_keys(config, commit), kept, show))
    texts = pieces(model, running, config.texts.tokens, config.texts.texts)
    found = read_texts(model, config.texts, config.texts.codecs, texts)
    by_codec = by_rule(cells)
    return PartResult(
        claims=claims(found) | task_claims(by_codec),
        tables=(_texts_table(config.texts, running.name, found), _tasks_table(config, by_codec)),
        charts=(_chart(found),),
        raw={
            "texts": [one.to_json() for one in found.values()],
            "cells": [cell.to_json() for cell in cells],
        },
    )


def by_rule(cells: Sequence[Cell]) -> dict[str, dict[str, Cell]]:
    """Codec to task to cell."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        found.setdefault(cell.key.rule, {})[cell.key.task] = cell
    return found


def claims(found: Mapping[str, CodecTexts]) -> Numbers:
    """KL, top-1 agreement, and how much perplexity rises, of every codec."""
    plain = found[PLAIN]
    made: Numbers = {"plain_perplexity": plain.perplexity}
    for codec, one in found.items():
        if codec == PLAIN:
            continue
        name = name_of(codec)
        made[f"{name}_kl"] = one.mean_kl
        made[f"{name}_top_1"] = sum(one.top_1) / len(one.top_1)
        made[f"{name}_perplexity_change"] = one.perplexity / plain.perplexity - 1
    return made


def task_claims(by_codec: ByCodec) -> Numbers:
    """Right answers, mean over tasks."""
    return {f"{name_of(codec)}_tasks": mean_share(cells) for codec, cells in by_codec.items()}


def name_of(codec: str) -> str:
    """A codec as part of the name of a claim."""
    return "".join(letter if letter.isalnum() else "_" for letter in codec)


def _texts_table(config: TextsConfig, name: str, found: Mapping[str, CodecTexts]) -> Table:
    plain = found[PLAIN]
    rows = tuple(
        (
            codec,
            one.request_bytes / 1024,
            plain.request_bytes / one.request_bytes,
            one.mean_kl,
            sum(one.top_1) / len(one.top_1),
            one.perplexity,
            100 * (one.perplexity / plain.perplexity - 1),
        )
        for codec, one in found.items()
    )
    return Table(
        name="quant-texts",
        caption=(
            f"{config.texts} texts of {config.tokens:,} tokens from {name}, read through codes, "
            f"scored from token {config.first} on, against plain numbers. KL in nats; KV: most "
            f"bytes of a text, in pages of {config.page_tokens}."
        ),
        columns=("codec", "KV KiB", "less", "KL", "top-1", "perplexity", "% more"),
        rows=rows,
    )


def _tasks_table(config: QuantBenchConfig, by_codec: ByCodec) -> Table:
    tasks = config.tasks
    rows: tuple[tuple[Shown, ...], ...] = tuple(
        (codec, *map(_shown, cells.values()), mean_share(cells))
        for codec, cells in by_codec.items()
    )
    return Table(
        name="quant-tasks",
        caption=(
            f"Right answers, {tasks.prompts} prompts of at most {tasks.tokens} tokens a cell, and "
            "their 95 % interval (Wilson)."
        ),
        columns=("codec", *tasks.tasks, "mean"),
        rows=rows,
    )


def _shown(cell: Cell) -> str:
    low, high = cell.interval
    return f"{cell.share:.2f} [{low:.2f}, {high:.2f}]"


def _chart(found: Mapping[str, CodecTexts]) -> Chart:
    """One point a codec."""
    return Chart(
        name="quant-quality",
        title="What codes cost, and what they save",
        x_label="KiB of KV",
        y_label="KL, nats",
        lines={
            codec: ((one.request_bytes / 1024, max(one.mean_kl, 1e-9)),)
            for codec, one in found.items()
            if codec != PLAIN
        },
        log_y=True,
    )
