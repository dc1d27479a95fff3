"""Requests that a KV memory holds at once, by the engine's own accounting, without a run."""

from dataclasses import dataclass

from quire.eviction.eviction_rules import EvictionRules, first_served
from quire.kv.memory import KVMemory
from quire.layout.eviction import KEEP_ALL, EvictionSpec
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.layout.sparse import parse_sparse
from quire.plan.batch_verdict import row_steps
from quire.scheduler.peaks import Need, Peaks, rows_at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRows:
    """Rows of equal lengths in a KV memory."""

    rows: int  # most that run to completion at once
    row_bytes: int  # peak KV, in whole pages, including statistics
    held_tokens: int  # peak tokens of a lane
    eviction: EvictionSpec


def predicted_rows(  # noqa: PLR0913 - the options that change a row
    model: ModelSpec,
    *,
    codec: str,
    evict: str,
    sparse: str = "off",
    page_tokens: int,
    kv_bytes: int,
    prompt_tokens: int,
    new_tokens: int,
) -> PredictedRows:
    """Count the rows of a codec and an eviction rule."""
    rules = first_served(
        evict,
        lambda text: EvictionRules(text, "none", model=model, page_tokens=page_tokens, codec=codec),
    )
    tokens = prompt_tokens + new_tokens - 1  # the last token is never computed
    eviction = rules.default.for_request(prompt_tokens, rules.lanes_of(rules.default))
    spec = eviction.spec
    # a row that never exceeds its cap records no statistics
    held = KEEP_ALL if eviction.keeps_all(prompt_tokens, tokens) else spec
    layout = layout_for(
        model,
        codec=codec,
        page_tokens=page_tokens,
        evicting=rules.evicts,
        heads_apart=rules.heads_apart,
        statistics=rules.statistics,
        bounds=parse_sparse(sparse) is not None,
    )
    memory = KVMemory(layout, kv_bytes, 1)
    need = Need(tokens, prompt_tokens, held)
    first_tokens = next(row_steps(spec, prompt_tokens, new_tokens)).new
    return PredictedRows(
        rows=rows_at_once(memory, need, first_tokens=first_tokens, chunk_tokens=first_tokens),
        row_bytes=Peaks(memory, first_tokens).peak_bytes(need),
        held_tokens=spec.peak_tokens(tokens, prompt_tokens),
        eviction=spec,
    )
