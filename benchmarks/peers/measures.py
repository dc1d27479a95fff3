"""Numbers of one run, computed from the token times that a worker reports, and their medians."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from benchmarks.peers.config import Shape
from quire.errors import InvariantError

_COPIED = (
    "version", "weights_type", "weight_bytes", "kv_type", "kv_bytes", "load_s", "total_s",
    "peak_rss_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Numbers of one run of an engine.

    Attributes:
        version: version of the engine.
        weights_type, kv_type: element types.
        weight_bytes, kv_bytes: sizes of weights and of KV memory.
        load_s: time to load and warm up.
        total_s: time from the first prompt to the last token.
        prefill_s: time until every prompt has its first token.
        decode_tokens_per_s: tokens after `prefill_s` over the time after it; None without such
            tokens.
        first_token_s: time to the first token, median over the prompts.
        max_at_once: most requests that had their first token and not yet their last one.
        peak_rss_bytes: peak resident memory.
        new_tokens: generated tokens.
        judged: output tokens of the first prompts.
        figures: further numbers of the engine.
    """

    version: str
    weights_type: str
    weight_bytes: int
    kv_type: str
    kv_bytes: int
    load_s: float
    total_s: float
    prefill_s: float
    decode_tokens_per_s: float | None
    first_token_s: float
    max_at_once: int
    peak_rss_bytes: int
    new_tokens: int
    judged: list[list[int]]
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, with prefill included in the time."""
        return self.new_tokens / self.total_s


def measures_of(result: Mapping[str, Any], shape: Shape, judged_prompts: int) -> Measures:
    """Numbers of a worker's result.

    Raises:
        InvariantError: the outputs do not have the requested lengths.
    """
    expected = [new for _, new in shape.lengths]
    got = [len(tokens) for tokens in result["tokens"]]
    if got != expected or [len(times_s) for times_s in result["times_s"]] != expected:
        raise InvariantError(
            f"expected {len(expected)} outputs of {sum(expected)} tokens with a time each, got "
            f"{len(got)} outputs of {sum(got)} tokens"
        )
    firsts = [times_s[0] for times_s in result["times_s"]]
    prefill_s, total_s = max(firsts), result["total_s"]
    later = sum(time_s > prefill_s for times_s in result["times_s"] for time_s in times_s)
    return Measures(
        **{name: result[name] for name in _COPIED},
        prefill_s=prefill_s,
        decode_tokens_per_s=later / (total_s - prefill_s) if later else None,
        first_token_s=statistics.median(firsts),
        max_at_once=max_at_once(result["times_s"]),
        new_tokens=sum(expected),
        judged=[list(tokens) for tokens in result["tokens"][:judged_prompts]],
        figures=dict(result.get("figures", {})),
    )


def max_at_once(times_s: Sequence[Sequence[float]]) -> int:
    """Largest number of requests between their first and last token, from their token times."""
    changes = sorted(
        change for times in times_s for change in ((times[0], 1), (times[-1], -1)) if times
    )
    return max(accumulate((by for _, by in changes), initial=0))


Number = Callable[[Measures], float | None]


def median(runs: Sequence[Measures], number: Number) -> float | None:
    """Median of a number over runs; None if a run does not have it."""
    found = [number(run) for run in runs]
    known = [value for value in found if value is not None]
    return statistics.median(known) if known and len(known) == len(found) else None


Rounds = Sequence[Mapping[str, Measures]]
"""The engines that ran in each round, by name."""


def runs_of(rounds: Rounds, engine: str) -> list[Measures]:
    """All runs of an engine."""
    return [found[engine] for found in rounds if engine in found]


def paired(rounds: Rounds, engine: str, other: str, number: Number) -> float | None:
    """Ratio of a number of two engines: median over the rounds in which both ran; None if none."""
    ratios = []
    for found in rounds:
        if engine in found and other in found:
            above, below = number(found[engine]), number(found[other])
            if above is not None and below:
                ratios.append(above / below)
    return statistics.median(ratios) if ratios else None
