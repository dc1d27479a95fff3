"""Configurations of the rebatch benchmark, at full size and small."""

from dataclasses import dataclass, field

W1, W2, TRACE = "w1", "w2", "trace"
STATIC, SHAPING, EMBEDDING, CONTINUOUS = "static", "baton", "baton_pd", "continuous"
ALL_ARMS = (STATIC, "pd", "orca", SHAPING, EMBEDDING, "baton_pd_best_fit", CONTINUOUS)
FEW_ARMS = (STATIC, "orca", EMBEDDING, "baton_pd_best_fit", CONTINUOUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """One of BATON's workloads.

    Attributes:
        name: w1 or w2.
        scale: factor on all lengths.
        batches: row counts; every arm runs once per row count.
        arms: names of the batchers, run in turn.
        queries: number of leading queries to run; None: all.
    """

    name: str
    scale: float
    batches: tuple[int, ...]
    arms: tuple[str, ...]
    queries: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """The recorded trace.

    Attributes:
        requests: number of leading requests to run.
        scale: factor on all lengths.
        load: arrival rate over the rate of ideal list scheduling.
        batch: number of rows.
        memory_share: KV memory of every arm over the peak of `baton_pd` without a limit.
        urgent_every: one of this many requests is urgent.
        arms: names of the batchers, run in turn.
    """

    requests: int = 120
    scale: float = 0.1
    load: float = 0.8
    batch: int = 8
    memory_share: float = 0.6
    urgent_every: int = 8
    arms: tuple[str, ...] = ALL_ARMS


@dataclass(frozen=True, slots=True, kw_only=True)
class RebatchConfig:
    """Configuration of the benchmark.

    Attributes:
        model: a name in SHAPES; random weights in float32.
        w1, w2: the workloads.
        trace: the recorded trace.
        repeats: rounds of all arms.
        shaping_columns: most columns of vector shaping's slab, over those of static batches.
        clock: wall, or cpu for a trial on a busy machine.
    """

    model: str = "wide"
    w1: WorkloadConfig = WorkloadConfig(name=W1, scale=0.04, batches=(4, 8), arms=ALL_ARMS)
    w2: WorkloadConfig = WorkloadConfig(name=W2, scale=0.2, batches=(2, 4, 6, 8, 10), arms=FEW_ARMS)
    trace: TraceConfig = field(default_factory=TraceConfig)
    repeats: int = 3
    shaping_columns: int = 8
    clock: str = "wall"


QUICK_REBATCH = RebatchConfig(
    model="tiny",
    w1=WorkloadConfig(name=W1, scale=0.01, batches=(4, 8), arms=ALL_ARMS, queries=40),
    w2=WorkloadConfig(name=W2, scale=0.1, batches=(2, 4, 6, 8, 10), arms=FEW_ARMS),
    trace=TraceConfig(requests=30, scale=0.05),
    repeats=1,
)
