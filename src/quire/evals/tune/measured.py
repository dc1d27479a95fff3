"""Runs prompts together in the whole KV memory: requests at once, speed, peak bytes."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.stats import EngineStats
from quire.models.loader import LoadedModel
from quire.sampling.outputs import OutputDelta
from quire.scheduler.schedule_config import ScheduleConfig

REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured run.

    Attributes:
        running_at_once: most running requests in a step.
        tokens_per_s: output tokens per second, median of the repeats.
        kv_peak_bytes: most KV bytes in use.
        requests: number of requests.
    """

    running_at_once: int
    tokens_per_s: float
    kv_peak_bytes: int
    requests: int


def measured_run(
    model: LoadedModel,
    kv: KVConfig,
    schedule: ScheduleConfig,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    repeats: int = REPEATS,
) -> MeasuredRun:
    """Run all prompts at once, without a prefix cache.

    Args:
        model: the model.
        kv: KV memory, codec and rule.
        schedule: scheduling options; the number of sequences is at least that of the prompts.
        prompts: token ids.
        new_tokens: output tokens of each.
        repeats: number of runs.
    """
    most = max(schedule.max_num_seqs, len(prompts))
    llm = LLM(
        model,
        kv=replace(kv, prefix_cache=PrefixCacheConfig(enabled=False)),
        schedule=replace(schedule, max_num_seqs=most),
        verify=False,
    )
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    running, seconds = 0, list[float]()

    def progress(stats: EngineStats, deltas: list[OutputDelta]) -> None:
        nonlocal running
        running = max(running, stats.num_running)

    for _ in range(repeats):
        started_s = time.perf_counter()
        llm.generate([list(one) for one in prompts], params, progress=progress)
        seconds.append(time.perf_counter() - started_s)
    return MeasuredRun(
        running_at_once=running,
        tokens_per_s=len(prompts) * new_tokens / statistics.median(seconds),
        kv_peak_bytes=llm.stats().kv_peak_bytes,
        requests=len(prompts),
    )
