"""Refuses options that would have no effect."""

from collections.abc import Iterator

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnsoundCombination
from quire.scheduler.schedule_config import ScheduleConfig


def refuse_without_effect(kv: KVConfig) -> None:
    """Refuse options that would have no effect, before memory is allocated.

    Args:
        kv: options of the KV memory.

    Raises:
        ConfigError: names the option, the reason, and the alternative.
    """
    for problem in _problems(kv):
        raise ConfigError(problem)


def _problems(kv: KVConfig) -> Iterator[str]:
    if not kv.scratch:
        yield (
            "expected --scratch above 0, got 0: attention gathers at least one sequence's pages "
            "at a time; give a size such as 1MiB, or leave it out"
        )


def refuse_on_ranks(ranks: int, kv: KVConfig, schedule: ScheduleConfig) -> None:
    """Refuse options that a model with several ranks does not support.

    Args:
        ranks: number of ranks of the model.
        kv: options of the KV memory.
        schedule: options of the scheduler.

    Raises:
        UnsoundCombination: names the option, the reason and the alternative.
    """
    for problem in _problems_on_ranks(kv, schedule) if ranks > 1 else ():
        raise UnsoundCombination(f"{problem}; or use --tensor-parallel-size 1")


def _problems_on_ranks(kv: KVConfig, schedule: ScheduleConfig) -> Iterator[str]:
    cache = kv.prefix_cache
    if cache.cpu_memory or cache.disk_memory or cache.remote:
        yield (
            "a tier for cached prefixes loads pages at times that differ between ranks: leave out "
            "--cpu-kv-memory, --disk-kv-memory and --remote-kv"
        )
    if kv.offload.kv_memory:
        yield (
            "KV offload splits sequences by times that differ between ranks: leave out "
            "--kv-offload-memory, and use --swap-space for preempted requests"
        )
    if schedule.batch_invariant:
        yield ("a sum over ranks depends on the rows of a batch: leave out --batch-invariant")
