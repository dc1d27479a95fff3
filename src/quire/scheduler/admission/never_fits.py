"""Refuses requests that do not fit even alone; the error states the bytes and possible changes."""

from bisect import bisect_left
from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from quire.errors import NeverFits
from quire.layout.eviction import PREFILL_AND_DECODE, PRESSURE
from quire.layout.layout import offloaded_token_bytes
from quire.layout.sizes import option_size, rounded_size
from quire.scheduler.admission.lane_peaks import UNBOUNDED
from quire.scheduler.admission.need import Need, need_of
from quire.scheduler.admission.offload_split import offload_text
from quire.scheduler.admission.peaks import Peaks
from quire.scheduler.group import num_rows
from quire.scheduler.request import Request


def refuse_if_never(peaks: Peaks, request: Request) -> None:
    """Refuse a request that does not fit in the KV memory even alone.

    Raises:
        NeverFits: states the bytes needed and the bytes of the KV memory.
    """
    if not peaks.fit_whole(request):
        raise NeverFits(_why_never(peaks, request), param=_field_at_fault(peaks, request))


def _field_at_fault(peaks: Peaks, request: Request) -> str:
    """The option to lower first."""
    if not peaks.fits_alone(need_of(request, len(request.prompt_token_ids))):
        return "prompt"
    if num_rows(request) > 1 and peaks.fits_alone(need_of(request, request.final_tokens)):
        return "beam_width"
    return "max_tokens"


def _why_never(peaks: Peaks, request: Request) -> str:
    need, width = need_of(request, request.final_tokens), num_rows(request)
    beams, arena = f" in {width} beams" if width > 1 else "", peaks.memory.arena
    return (
        f"{len(request.prompt_token_ids)} prompt tokens and "
        f"{request.params.max_tokens} to generate{beams} "
        f"need {peaks.fitting_bytes(need, width):,} B of KV, the whole KV memory "
        f"has {arena.num_slabs * arena.slab_bytes:,} B; {offload_text(peaks, need)}"
        f"{possible_changes(peaks, need, width)}"
    )


def possible_changes(peaks: Peaks, need: Need, width: int) -> str:
    """List the changes that would each make the request fit, for an error message.

    Args:
        peaks: page arithmetic of the KV memory.
        need: need of each sequence of the request, with its prompt length.
        width: number of sequences that share the prompt.
    """
    memory = option_size(peaks.fitting_bytes(need, width))
    changes = [
        *_smaller_requests(peaks, need, width),
        f"raise {peaks.memory.arena.size_option} to {memory}",
        *_offload(peaks, need, width),
        *_evictions(peaks, need, width),
    ]
    return " or ".join(filter(None, (", ".join(changes[:-1]), changes[-1])))


def _fits(peaks: Peaks, need: Need, width: int) -> bool:
    return peaks.fit_alone(peaks.whole_counts(need, width))


def _smaller_requests(peaks: Peaks, need: Need, width: int) -> Iterator[str]:
    prompt = need.tokens if need.prompt_tokens is None else need.prompt_tokens
    if width > 1 and _fits(peaks, need, 1):
        yield "use fewer beams"
    shorter = replace(need, tokens=1 + need.tokens - prompt, prompt_tokens=1)
    fewer = replace(need, tokens=prompt)
    helps = [_fits(peaks, shorter, width), _fits(peaks, fewer, width)]
    if helps[0]:
        yield "shorten the prompt"
    if helps[1]:
        yield "lower max_tokens"
    if not any(helps) and _fits(peaks, replace(need, tokens=1, prompt_tokens=1), width):
        yield "shorten the prompt and lower max_tokens"


def _offload(peaks: Peaks, need: Need, width: int) -> Iterator[str]:
    """The offload memory size that fits the request, if any does.

    Some pages of every sequence always remain in the KV memory.
    """
    larger = copy(peaks)

    def fits(tokens: int) -> bool:
        larger.offloaded_tokens = tokens
        return _fits(larger, need, width)

    if not fits(UNBOUNDED):
        return
    tokens = bisect_left(range(need.tokens), True, key=fits)
    if peaks.offloaded_tokens:
        num_bytes = -(-tokens * peaks.offload_bytes // peaks.offloaded_tokens)
        yield f"raise --kv-offload-memory to {option_size(rounded_size(num_bytes))}"
    else:  # activation checkpoints may use a fraction of it, by rates that are measured later
        num_bytes = tokens * offloaded_token_bytes(peaks.memory.layout)
        yield f"set --kv-offload-memory to {option_size(rounded_size(num_bytes))}"


def _evictions(peaks: Peaks, need: Need, width: int) -> Iterator[str]:
    if need.eviction.cap is None:
        if peaks.fit_alone(width * peaks.capped_counts(need.tokens)):
            yield "evict tokens with --evict RULE:cap=TOKENS"
        return
    smaller = replace(need.eviction, cap=2, every=1, lane_capacities=None)
    if _fits(peaks, replace(need, eviction=smaller), width):
        yield "lower cap= of its eviction rule"
    blocks = replace(need.eviction, when=PREFILL_AND_DECODE)
    if need.eviction.when == PRESSURE and _fits(peaks, replace(need, eviction=blocks), width):
        yield "set when=prefill_and_decode in its eviction rule"
    elif need.eviction.when != PREFILL_AND_DECODE and _fits(
        peaks, replace(need, eviction=replace(smaller, when=PREFILL_AND_DECODE)), width
    ):
        yield "set when=prefill_and_decode and a lower cap= in its eviction rule"
