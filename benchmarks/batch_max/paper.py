"""The paper's protocol on the user's model and examples.

    b0        the smallest batch at which decode-only eviction with a cap of 2 runs out of memory
    ED, FKV   at the largest batch below b0; ED has the highest throughput of decode-only eviction
    BM        at smaller caps and with larger batches, as long as quality equals FKV's

Caps are multiples of 128. Bisection finds them, on the assumption that quality grows with the cap;
then the cap minus 64 is tried. The search looks for two rows: the smallest cap whose score is at
least FKV's, and the smallest cap whose score is near FKV's. All tried caps are reported. The memory
is fixed: a batch runs out of memory if not all of its rows are admitted.

Source: Metel et al. 2025 (Batch-Max), section 4.

The rows become claims, and one of the paper's tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.batch_max.arms import ED, FKV, EvictionArm, batch_max, decode_only, full_kv
from benchmarks.batch_max.batches import batch_sizes, largest_of, rows_that_fit
from benchmarks.batch_max.judged import Batches, Encoded, Judged, judge
from benchmarks.common.result import Numbers, PartResult, Table
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.errors import ConfigError
from quire.models.loader import LoadedModel

COARSE = 128
NEAR = 0.963  # the paper's lowest ratio to FKV's score


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperConfig:
    """Configuration of the protocol.

    Attributes:
        model: model name as given.
        task: a task of `benchmarks.common.few_shot`.
        samples: number of prompts, equal for every arm; batch sizes divide it.
        input_tokens: prompt length; longer prompts are truncated at their beginning.
        new_tokens: tokens generated for each prompt; end-of-sequence tokens are ignored.
        every: number of tokens evicted at once.
        step: caps are multiples of this, and finally of half of it.
        near: fraction of FKV's score (0 to 1) that counts as near it.
    """

    model: str
    task: str
    samples: int = 960
    input_tokens: int = 3_584
    new_tokens: int = 512
    every: int = 64
    step: int = COARSE
    near: float = NEAR

    def __post_init__(self) -> None:
        for name in ("samples", "input_tokens", "new_tokens", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} of 1 or more, got {getattr(self, name)}")
        if self.every >= self.step:
            raise ConfigError(
                f"expected every below {self.step}, the smallest cap, got {self.every}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """A row of the paper's tables.

    Attributes:
        arm: name of the variant.
        label: label in tables.
        batch: rows at once.
        cap: cap of Batch-Max in tokens; None for other variants.
        judged: score and time; None if this batch runs out of memory.
    """

    arm: str
    label: str
    batch: int
    cap: int | None = None
    judged: Judged | None = None


class PaperProtocol:
    """Runs arms on one set of prompts.

    Args:
        model: evaluated model.
        kv: KV memory; its eviction is replaced.
        config: lengths and caps.
        prompts: encoded and truncated prompts, `config.samples` of them.
        show: called with every finished row.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: KVConfig,
        config: PaperConfig,
        prompts: list[Encoded],
        show: Callable[[PaperRow], None] = lambda row: None,
    ) -> None:
        self._model, self._kv, self._config = model, kv, config
        self._prompts, self._show = prompts, show
        self._longest = max(len(prompt.tokens) for prompt in prompts)
        self._by_cap: dict[int, PaperRow] = {}
        self.rows: list[PaperRow] = []

    def run(self) -> list[PaperRow]:
        """Run the protocol; return the rows in run order."""
        ed = decode_only(2)
        most = self._rows(ed)
        if most < self._config.samples:  # else no requested batch runs out of memory
            self._record(PaperRow(arm=ed.name, label=ed.label, batch=most + 1))
        batch = self._batch(most, ed)
        self._record(self._judge(ed, batch))
        self._record(self._judge(decode_only(self._config.every + 1), batch))
        full = self._judge(full_kv(), min(batch, self._batch(self._rows(full_kv()), full_kv())))
        self._record(full)
        assert full.judged is not None, "a batch that fits is judged"
        for fraction in (1.0, self._config.near):
            self._search(fraction * full.judged.score)
        return self.rows

    def _search(self, wanted: float) -> None:
        """Find the smallest cap that scores `wanted`; every tried cap becomes a row."""
        step = self._config.step
        low, high = 0, -(-self._longest // step)  # in steps; a cap of `high` evicts nothing
        while high - low > 1:
            middle = (low + high) // 2
            good = self._score(middle * step) >= wanted
            low, high = (low, middle) if good else (middle, high)
        finer = high * step - step // 2
        if self._config.every < finer < self._longest:
            self._score(finer)

    def _score(self, cap: int) -> float:
        if cap not in self._by_cap:
            arm = batch_max(cap, self._config.every)
            row = self._judge(arm, self._batch(self._rows(arm), arm), cap)
            self._by_cap[cap] = row
            self._record(row)
        judged = self._by_cap[cap].judged
        assert judged is not None, "batches that fit are judged"
        return judged.score

    def _judge(self, arm: EvictionArm, batch: int, cap: int | None = None) -> PaperRow:
        batches = Batches(
            arm=arm.name,
            kv=self._memory(arm),
            batch=batch,
            new_tokens=self._config.new_tokens,
        )
        judged = judge(self._model, self._config.task, self._prompts, batches)
        return PaperRow(arm=arm.name, label=arm.label, batch=batch, cap=cap, judged=judged)

    def _rows(self, arm: EvictionArm) -> int:
        return rows_that_fit(
            self._model,
            self._memory(arm),
            self._longest,
            self._config.new_tokens,
            most=self._config.samples,
        )

    def _batch(self, rows: int, arm: EvictionArm) -> int:
        batch = largest_of(batch_sizes(self._config.samples), rows)
        if not batch:
            raise ConfigError(
                f"the KV memory does not hold one row of {self._longest} tokens for arm "
                f"{arm.name}; raise --kv-memory or lower --input-tokens"
            )
        return batch

    def _memory(self, arm: EvictionArm) -> KVConfig:
        return replace(self._kv, evict=arm.evict, prefix_cache=PrefixCacheConfig(enabled=False))

    def _record(self, row: PaperRow) -> None:
        self.rows.append(row)
        self._show(row)


def paper_result(config: PaperConfig, rows: Sequence[PaperRow], score: str) -> PartResult:
    """Result of the protocol as a part.

    Args:
        config: configuration of the runs.
        rows: all rows.
        score: name of the task's score.
    """
    return PartResult(
        claims=claims(config, rows),
        tables=(_table(config, rows, score),),
        raw={"rows": [asdict(row) for row in rows]},
    )


def judged_arm(rows: Sequence[PaperRow], arm: str) -> Judged:
    """Result of an arm at the batch size that fits."""
    return next(row.judged for row in rows if row.arm == arm and row.judged is not None)


def smallest_cap(rows: Sequence[PaperRow], wanted: float) -> PaperRow | None:
    """The row of Batch-Max with the smallest cap that scores `wanted` or more."""
    good = [row for row in rows if row.cap and row.judged and row.judged.score >= wanted]
    return min(good, key=lambda row: row.cap or 0, default=None)


def claims(config: PaperConfig, rows: Sequence[PaperRow]) -> Numbers:
    """Batch-Max above FKV's score and near it: cap, batch, throughput and quality, if found."""
    full, ed = judged_arm(rows, FKV), judged_arm(rows, ED)
    made: Numbers = {
        "fkv_score": full.score,
        "fkv_tokens_per_s": full.tokens_per_s,
        "ed_tokens_per_s": ed.tokens_per_s,
        "ed_batch": ed.batch,
    }
    for name, fraction in (("above", 1.0), ("near", config.near)):
        row = smallest_cap(rows, fraction * full.score)
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
            f"{config.every} tokens evicted at once. OOM: a batch that does not fit."
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
