"""Refuses options that would have no effect."""

from collections.abc import Iterator

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.kv.stores.registry import STORES


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
    if kv.store_tokens is not None and kv.store in STORES and not STORES[kv.store].run_lengths:
        contiguous = ", ".join(name for name, info in STORES.items() if info.run_lengths)
        yield (
            f"--kv-store-tokens {kv.store_tokens} has no effect: store {kv.store!r} reserves no "
            f"memory per sequence; use --kv-store with one of {contiguous}, or leave it out"
        )
