"""Rows of the paper's protocol as claims and as one of the paper's tables."""

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.batch_max.arms import ED, FKV
from benchmarks.batch_max.judged import Judged
from benchmarks.batch_max.paper import PaperConfig, PaperRow
from benchmarks.common.result import Numbers, PartResult, Table


def paper_result(config: PaperConfig, rows: Sequence[PaperRow], score: str) -> PartResult:
    """The part.

    Args:
        config: what was run.
        rows: all of them.
        score: what the task's score is called.
    """
    return PartResult(
        claims=claims(config, rows),
        tables=(_table(config, rows, score),),
        raw={"rows": [asdict(row) for row in rows]},
    )


def judged_arm(rows: Sequence[PaperRow], arm: str) -> Judged:
    """What an arm came to; of those that ran out of memory before, the one that did not."""
    return next(row.judged for row in rows if row.arm == arm and row.judged is not None)


def smallest_cap(rows: Sequence[PaperRow], wanted: float) -> PaperRow | None:
    """The row of Batch-Max with the smallest cap that scores `wanted` or more."""
    good = [row for row in rows if row.cap and row.judged and row.judged.score >= wanted]
    return min(good, key=lambda row: row.cap or 0, default=None)


def claims(config: PaperConfig, rows: Sequence[PaperRow]) -> Numbers:
    """Batch-Max above FKV's score and near it: cap, batch, throughput and quality, where found."""
    full, ed = judged_arm(rows, FKV), judged_arm(rows, ED)
    made: Numbers = {
        "fkv_score": full.score,
        "fkv_tokens_per_s": full.tokens_per_s,
        "ed_tokens_per_s": ed.tokens_per_s,
        "ed_batch": ed.batch,
    }
    for name, part in (("above", 1.0), ("near", config.near)):
        row = smallest_cap(rows, part * full.score)
        if row is not None and row.judged is not None and row.cap is not None:
            made[f"bm_{name}_cap"] = row.cap
            made[f"bm_{name}_batch"] = row.batch
            made[f"bm_{name}_tokens_per_s"] = row.judged.tokens_per_s
            made[f"bm_{name}_over_ed_throughput"] = row.judged.tokens_per_s / ed.tokens_per_s
            made[f"bm_{name}_over_fkv_throughput"] = row.judged.tokens_per_s / full.tokens_per_s
            if full.score:
                made[f"bm_{name}_quality_over_fkv"] = row.judged.score / full.score
    return made


def _table(config: PaperConfig, rows: Sequence[PaperRow], score: str) -> Table:
    return Table(
        name=f"paper-{config.task}",
        caption=(
            f"{config.task}, {config.model}: {config.samples} samples, prompts cut to "
            f"{config.input_tokens:,} tokens, {config.new_tokens} generated, end tokens ignored, "
            f"{config.every} leave at a time. OOM: so many rows do not fit."
        ),
        columns=("method", "b", "cap", score, "tokens/s", "peak KV MiB"),
        rows=tuple(_row(row) for row in rows),
    )


def _row(row: PaperRow) -> tuple[str | int | float | None, ...]:
    found = row.judged
    if found is None:
        return row.label, row.batch, row.cap, "OOM", "OOM", None
    peak_mib = found.peak_bytes / (1 << 20)
    return row.label, row.batch, row.cap, found.score, found.tokens_per_s, peak_mib
