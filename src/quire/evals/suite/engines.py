"""Engines of an evaluation: one open at a time, for full KV, the configured KV, and the check."""

from collections.abc import Callable
from dataclasses import replace

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError

FULL, CONFIGURED = "full", "configured"
"""Names of the configurations: full KV, and the options of the command."""


def full_kv(kv: KVConfig) -> KVConfig:
    """The same KV memory without eviction, codecs and sparse attention."""
    plain = KVConfig()
    offload = replace(kv.offload, activation_codec=plain.offload.activation_codec)
    return replace(
        kv,
        codec=plain.codec,
        constants=plain.constants,
        evict=plain.evict,
        evict_allow=plain.evict_allow,
        sparse=plain.sparse,
        record_evictions=plain.record_evictions,
        offload=offload,
    )


def is_full(kv: KVConfig) -> bool:
    """Whether outputs are those of full KV: no eviction rule, no codec, all pages are read."""
    full = full_kv(kv)
    return full == replace(kv, evict_allow=full.evict_allow, record_evictions=full.record_evictions)


def kv_name(kv: KVConfig) -> str:
    """The codec and the rule of a configuration as in its options; `full` for full KV."""
    full = full_kv(kv)
    changed = [
        getattr(kv, name)
        for name in ("codec", "evict", "sparse")
        if getattr(kv, name) != getattr(full, name)
    ]
    return " ".join(changed) or (FULL if is_full(kv) else CONFIGURED)


class Engines:
    """Opens an engine for a KV configuration, and closes the one before."""

    def __init__(self, open_engine: Callable[[KVConfig], LLM]) -> None:
        self._open_engine = open_engine
        self._open: tuple[KVConfig, LLM] | None = None

    def of(self, kv: KVConfig) -> LLM:
        if self._open is None or self._open[0] != kv:
            self.close()
            self._open = (kv, self._open_engine(kv))
        return self._open[1]

    @property
    def current(self) -> LLM:
        assert self._open is not None, "an engine was opened before"
        return self._open[1]

    def refuse_long(self, tokens: int, option: str = "--tokens") -> None:
        """Refuse a length of prompts beyond the context, before long prompts are generated."""
        most = self.current.model.spec.max_positions
        if tokens > most:
            raise ConfigError(
                f"expected {option} of at most {most}, the model's context, got {tokens}: "
                f"lower {option}"
            )

    def measure(self, text: str) -> int:
        return len(self.current.encode(text)) if text else 0

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None
