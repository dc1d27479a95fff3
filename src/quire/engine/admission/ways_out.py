"""What to change for a request that the memory can never hold: only what would let it run."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.engine.admission.lane_peaks import UNBOUNDED
from quire.engine.admission.need import Need
from quire.spec.eviction import PREFILL_AND_DECODE, PRESSURE

if TYPE_CHECKING:
    from quire.engine.admission.peaks import Peaks


def ways_out(peaks: "Peaks", need: Need, width: int) -> str:
    """The changes that help, each by itself, as the end of an error message.

    Args:
        peaks: of the memory.
        need: of each sequence of the request, with the tokens of its prompt.
        width: sequences that share the prompt.
    """
    changes = [
        *_smaller_requests(peaks, need, width),
        "raise --kv-memory",
        *_offload(peaks, need, width),
        *_evictions(peaks, need, width),
    ]
    return " or ".join(filter(None, (", ".join(changes[:-1]), changes[-1])))


def _fits(peaks: "Peaks", need: Need, width: int) -> bool:
    return peaks.fit_alone(peaks.whole_counts(need, width))


def _smaller_requests(peaks: "Peaks", need: Need, width: int) -> Iterator[str]:
    prompt = need.tokens if need.prompt_tokens is None else need.prompt_tokens
    if width > 1 and _fits(peaks, need, 1):
        yield "ask for fewer beams"
    shorter = replace(need, tokens=1 + need.tokens - prompt, prompt_tokens=1)
    fewer = replace(need, tokens=prompt)
    helps = [_fits(peaks, shorter, width), _fits(peaks, fewer, width)]
    if helps[0]:
        yield "shorten the prompt"
    if helps[1]:
        yield "lower max_tokens"
    if not any(helps) and _fits(peaks, replace(need, tokens=1, prompt_tokens=1), width):
        yield "shorten the prompt and lower max_tokens"


def _offload(peaks: "Peaks", need: Need, width: int) -> Iterator[str]:
    """KV offload, if more of it would do: a part of every sequence stays in the KV memory."""
    larger = copy(peaks)
    larger.front_tokens = UNBOUNDED
    placement = peaks.memory.placement
    if placement.shares and not placement.reserves and _fits(larger, need, width):
        yield "raise --stream-kv-memory" if peaks.front_tokens else "give --stream-kv-memory SIZE"


def _evictions(peaks: "Peaks", need: Need, width: int) -> Iterator[str]:
    if need.eviction.cap is None:
        if peaks.fit_alone(width * peaks.capped_counts(need.tokens)):
            yield "cap it with --evict RULE:cap=TOKENS"
        return
    smaller = replace(need.eviction, cap=2, every=1, lane_caps=None)
    if _fits(peaks, replace(need, eviction=smaller), width):
        yield "lower the cap of its eviction rule"
    blocks = replace(need.eviction, when=PREFILL_AND_DECODE)
    if need.eviction.when == PRESSURE and _fits(peaks, replace(need, eviction=blocks), width):
        yield "let it evict with when=prefill_and_decode"
    elif need.eviction.when != PREFILL_AND_DECODE and _fits(
        peaks, replace(need, eviction=replace(smaller, when=PREFILL_AND_DECODE)), width
    ):
        yield "let it evict with when=prefill_and_decode and a lower cap"
