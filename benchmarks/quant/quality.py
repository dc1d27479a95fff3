"""Part `quality`: quality of texts and tasks with quantized KV, and KV bytes.

Tasks are those of the eviction benchmark, on a model whose KV is stored in a codec. Every cell is
stored when it finishes.
"""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.common.result import Chart, Numbers, PartResult, Table
from benchmarks.eviction.cells import FULL, Cell, CellFile, CellKey
from benchmarks.eviction.quality import Judge, mean_share, measure_cells, tasks_table
from benchmarks.eviction.texts import RunningText, cut_texts
from benchmarks.quant.config import PLAIN, QuantBenchConfig, TextsConfig
from benchmarks.quant.text_scores import CodecTexts, score_texts
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
    """All cells, task by task, plain KV first."""
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
    run_cell: Callable[[CellKey], Cell],
    *,
    commit: str | None,
    stored: CellFile,
    show: Callable[[Cell], None],
) -> PartResult:
    """Run the part.

    Args:
        model: evaluated model.
        config: configuration of the part.
        running: text that is cut into samples.
        run_cell: runs a cell.
        commit: commit of this code.
        stored: store of finished cells.
        show: called with every cell that runs.
    """
    cells = list(measure_cells(run_cell, task_keys(config, commit), stored, show))
    texts = cut_texts(model, running, config.texts.tokens, config.texts.texts)
    found = score_texts(model, config.texts, config.texts.codecs, texts)
    by_codec = by_rule(cells)
    return PartResult(
        claims=claims(found) | task_claims(by_codec),
        tables=(
            _texts_table(config.texts, running.name, found),
            tasks_table("quant-tasks", "codec", config.tasks, by_codec),
        ),
        charts=(_chart(found),),
        raw={
            "texts": [one.to_json() for one in found.values()],
            "cells": [cell.to_json() for cell in cells],
        },
    )


def by_rule(cells: Sequence[Cell]) -> dict[str, dict[str, Cell]]:
    """Cells by codec and task."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        found.setdefault(cell.key.rule, {})[cell.key.task] = cell
    return found


def claims(found: Mapping[str, CodecTexts]) -> Numbers:
    """KL, top-1 agreement and perplexity increase of every codec."""
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
    """Mean fraction of correct answers over tasks."""
    return {f"{name_of(codec)}_tasks": mean_share(cells) for codec, cells in by_codec.items()}


def name_of(codec: str) -> str:
    """A codec as a component of a claim's name."""
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
            f"{config.texts} texts of {config.tokens:,} tokens from {name}, with quantized KV, "
            f"scored from token {config.first} on, compared with plain KV. KL in nats; KV: most "
            f"bytes of a text, in pages of {config.page_tokens}."
        ),
        columns=("codec", "KV KiB", "times smaller", "KL", "top-1", "perplexity", "% more"),
        rows=rows,
    )


def _chart(found: Mapping[str, CodecTexts]) -> Chart:
    """One point per codec."""
    return Chart(
        name="quant-quality",
        title="Quality and size of codecs",
        x_label="KiB of KV",
        y_label="KL, nats",
        lines={
            codec: ((one.request_bytes / 1024, max(one.mean_kl, 1e-9)),)
            for codec, one in found.items()
            if codec != PLAIN
        },
        log_y=True,
    )
