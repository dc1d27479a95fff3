"""Options that were given and could have no effect: each is refused, with what to use instead."""

from collections.abc import Iterator

from quire.engine.schedule_config import ScheduleConfig
from quire.errors import ConfigError
from quire.kv.config import KVConfig
from quire.kv.stores.registry import STORES
from quire.plan.sizes import parse_size


def refuse_without_effect(kv: KVConfig, schedule: ScheduleConfig) -> None:
    """Refuse options that nothing would read; before memory is allocated.

    Args:
        kv: the KV memory.
        schedule: steps and queues.

    Raises:
        ConfigError: names the option, why it has no effect, and what to use instead.
    """
    for problem in (*_memory_problems(kv), *_swap_problems(kv, schedule)):
        raise ConfigError(problem)


def _memory_problems(kv: KVConfig) -> Iterator[str]:
    if not parse_size(kv.scratch):
        yield (
            "expected --scratch above 0, got 0: attention gathers at least one sequence's pages "
            "at a time, so a bound of 0 bounds nothing; give a size such as 1MiB, or leave it out"
        )
    if kv.store_tokens is not None and kv.store in STORES and not STORES[kv.store].run_lengths:
        contiguous = ", ".join(name for name, info in STORES.items() if info.run_lengths)
        yield (
            f"--kv-store-tokens {kv.store_tokens} has no effect: store {kv.store!r} reserves no "
            f"memory for a sequence; use --kv-store with one of {contiguous}, or leave it out"
        )


def _swap_problems(kv: KVConfig, schedule: ScheduleConfig) -> Iterator[str]:
    has_host = parse_size(kv.host_memory) > 0
    holds_on_host = schedule.batching.holds_on_host
    if holds_on_host and not has_host:
        yield (
            f"--batcher {schedule.batcher} swaps KV to the host, which has no memory for it; give "
            "--host-kv-memory SIZE, or use hold=device"
        )
    swaps = holds_on_host or schedule.scale_down_at is not None
    if has_host and schedule.preempt == "recompute" and not swaps:
        yield (
            f"--host-kv-memory {kv.host_memory} has no effect: --preempt recompute swaps no KV to "
            "the host; use --preempt auto, swap or hybrid, or leave out --host-kv-memory"
        )
