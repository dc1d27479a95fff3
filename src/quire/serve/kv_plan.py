"""What-if: how many sequences a KV memory of another size would hold."""

from typing import Any

from quire.api.llm import LLM
from quire.layout.layout import statistics_used
from quire.layout.pages import CacheLayout
from quire.plan.capacity import capacity

MOST_BUDGET_BYTES = 1 << 50
DEFAULT_LENGTH = 2048


def plan_for(
    llm: LLM, budget_bytes: int | None, length: int | None, retained: int | None
) -> dict[str, Any]:
    """Sequences of a length that fit in a budget, as JSON values.

    Args:
        llm: the served model; its page layout is used.
        budget_bytes: size of the KV memory; None: the engine's.
        length: tokens of a sequence; None: `DEFAULT_LENGTH` or the model's context, if shorter.
        retained: tokens that an evicting lane without a window retains; None: all.

    Raises:
        ConfigError: the budget does not hold one sequence of one token.
    """
    memory, model = llm.engine.pool.kv.memory, llm.model.spec
    budget_bytes = memory.total_bytes if budget_bytes is None else budget_bytes
    length = min(DEFAULT_LENGTH, model.max_positions) if length is None else length
    layout, most = _used_layout(llm), llm.engine.schedule_config.max_num_seqs
    held = capacity(model, budget_bytes, layout=layout, sequence_tokens=length, batch=1)
    each_bytes = _sequence_bytes(layout, length, retained)
    is_too_long = length > model.max_positions
    sequences = 0 if is_too_long else budget_bytes // each_bytes
    return {
        "object": "kv.plan",
        "budget_bytes": budget_bytes,
        "length": length,
        "retained": retained,
        "bytes_per_sequence": each_bytes,
        "sequences": sequences,
        "max_num_seqs": most,
        "concurrency": min(sequences, most),
        "limit": "context" if is_too_long else "memory" if sequences < most else "max_num_seqs",
        "longest_tokens": held.longest_tokens,
        "longest_limit": held.longest_limit,
        "current_bytes": memory.total_bytes,
        "smallest_bytes": layout.smallest_sequence_bytes,
        "max_positions": model.max_positions,
    }


def _used_layout(llm: LLM) -> CacheLayout:
    """Lane groups of a request with the server's eviction policy: no statistics of other rules."""
    layout = llm.engine.pool.kv.memory.layout
    names = statistics_used(layout, llm.engine.pool.eviction.spec.statistics)
    return CacheLayout(tuple(g for g in layout.groups if g.name in names or not g.private))


def _sequence_bytes(layout: CacheLayout, length: int, retained: int | None) -> int:
    """Bytes of one sequence while it decodes, in whole pages of every layer."""
    least = length if retained is None else min(length, retained)
    return sum(
        group.bytes_at_most(length if group.window is not None else least, 1)
        for group in layout.groups
    )
