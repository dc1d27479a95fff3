"""Eviction inside a cache: parsing of the rule, and the schedule on which rows evict.

prefill up to the cap -> evict -> prefill `every` more -> evict ...   prefill_and_decode
prefill the prompt -> evict once | before decoding                    prefill_end | decode
prefill -> no page is free -> evict -> continue                       pressure
"""

from collections.abc import Callable, Iterable
from functools import cache

import numpy as np

from quire.errors import ConfigError
from quire.eviction.eviction import PolicyEvictor
from quire.eviction.eviction_rules import EvictionRules
from quire.hf.cache_memory import SCRATCH_BYTES
from quire.kv.paged_kv import PagedKV
from quire.layout.eviction import PREFILL_END, PRESSURE, parse_policy
from quire.models.base import Decoder, attention_math
from quire.policies.eviction import make_eviction
from quire.policies.registry import FULL
from quire.scheduler.lanes import (
    Slots,
    division_is_due,
    evicting_lanes,
    free_tokens,
    has_atomic_chunk,
    lookahead,
    note_division,
    over_cap,
    slots_to_keep,
)
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig

# The engine's eviction schedules for the rows of a cache: when to evict, and the size of a chunk.

BLOCK_TOKENS = ScheduleConfig().chunk_tokens  # bounds activations, as in the engine


class Evicting:
    """Evicts from rows of a batch."""

    def __init__(self, decoder: Decoder, kv: PagedKV, rules: EvictionRules) -> None:
        self._layout, self._lanes = kv.memory.layout, evicting_lanes(kv.memory)
        self._evictor: PolicyEvictor | None = None
        if rules.evicts:
            math, rotations = attention_math(decoder), cache(decoder.rotations)
            self._evictor = PolicyEvictor(kv, rules, SCRATCH_BYTES, math, rotations)

    def chunk_tokens(self, row: Request, left: int) -> int:
        """Tokens of a row's next chunk, after `evict_for_chunk` has freed slots for them."""
        until_end = self._layout.until_chunk_end(row.progress.num_computed)
        left = left if until_end is None else min(left, until_end)
        tokens = min(left, free_tokens(row, self._lanes))
        return tokens if has_atomic_chunk(row) else min(tokens, BLOCK_TOKENS)

    def evict_for_chunk(self, row: Request) -> None:
        """Evict the tokens that the rule requires before the row's next chunk."""
        if self._lanes is None or self._evictor is None or row.eviction.spec.cap is None:
            return
        if division_is_due(row, self._lanes, lookahead(row)):
            self._divide(row)
        self._evict(row, slots_to_keep(row, self._lanes, lookahead(row)))

    def evict_after_prompt(self, row: Request) -> None:
        """Evict at once at the end of a prefill if the schedule is prefill_end."""
        if row.eviction.spec.when == PREFILL_END:
            self.evict_for_chunk(row)

    def evict_under_pressure(self, rows: Iterable[Request], enough: Callable[[], bool]) -> None:
        """Reduce rows with when=pressure to their cap, the longest first, until memory is free."""
        if self._lanes is None:
            return
        waiting = [row for row in rows if row.eviction.spec.when == PRESSURE]
        for row in sorted(waiting, key=self._held, reverse=True):
            if enough():
                return
            if row.eviction.pending and over_cap(row, self._lanes, tokens=1) is not None:
                self._divide(row)
            self._evict(row, over_cap(row, self._lanes, tokens=1))

    def _divide(self, row: Request) -> None:
        """Set the caps of a row's lanes by its cache."""
        assert self._evictor is not None, "only called if the rule evicts"
        self._evictor.finalize(row)
        note_division(row)

    def _held(self, row: Request) -> int:
        assert self._lanes is not None, "only called if the rule evicts"
        return int(self._lanes.held(row).sum())

    def _evict(self, row: Request, keep: Slots | None) -> None:
        assert self._lanes is not None, "only called if the rule evicts"
        assert self._evictor is not None, "only called if the rule evicts"
        if keep is not None and np.any(keep < self._lanes.held(row)):
            self._evictor.evict(row, keep)


# The arguments of a cache, converted to the policy text that the engine parses.


def rule_text(
    policy: object,
    budget: int | str | None,
    when: str | None,
    every: int | None,
    compression_ratio: float | None = None,
) -> str:
    """Build the text of the eviction rule from its arguments and check it."""
    if not isinstance(policy, str):
        raise ConfigError(f"expected policy to be a text such as 'h2o:recent=64', got {policy!r}")
    if compression_ratio is not None:
        ratio = _checked_ratio(compression_ratio, policy, budget)
        return _of_ratio(policy, ratio, when, every)
    if policy.strip() == FULL and budget is None:
        schedule = {"when": when, "every": every}
        unused = [name for name, value in schedule.items() if value is not None]
        if unused:
            raise ConfigError(
                f"'full' evicts no tokens: {', '.join(unused)} has no effect; remove it"
            )
        return FULL
    parts = {"cap": budget, "when": when, "every": every}
    options = [f"{name}={value}" for name, value in parts.items() if value is not None]
    separator = "," if ":" in policy else ":"
    text = policy + (separator + ",".join(options) if options else "")
    make_eviction(text)
    return text


def _checked_ratio(ratio: object, policy: str, budget: object) -> float:
    if not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise ConfigError(
            "expected compression_ratio to be the fraction of the prompt to remove, at least 0 and "
            f"below 1, got {ratio!r}"
        )
    if budget is not None or "cap" in parse_policy(policy).options:
        named = f"cap= in policy={policy!r}" if budget is None else f"budget={budget!r}"
        raise ConfigError(
            f"expected either {named} or compression_ratio={ratio!r}, got both: each sets the "
            "number of retained tokens; remove one"
        )
    return ratio


def _of_ratio(policy: str, ratio: float, when: str | None, every: int | None) -> str:
    if policy.strip() == FULL:
        if ratio:
            raise ConfigError(
                f"'full' evicts no tokens, got compression_ratio={ratio}; use an eviction policy "
                "such as 'snapkv'"
            )
        return rule_text(policy, None, when, every)
    if not ratio:
        rule_text(policy, "100%", when, every)  # raises the errors that any other ratio would raise
        return FULL
    retained = f"{100 * (1 - ratio):.9f}".rstrip("0").rstrip(".")
    return rule_text(policy, f"{retained}%", when, every)
