"""Refuses a request that could not run even alone, with the bytes and what to change."""

from quire.errors import NeverFits
from quire.scheduler.admission.need import need_of
from quire.scheduler.admission.offload_split import offload_text
from quire.scheduler.admission.peaks import Peaks
from quire.scheduler.admission.ways_out import ways_out
from quire.scheduler.group import num_rows
from quire.scheduler.request import Request


def refuse_if_never(peaks: Peaks, request: Request) -> None:
    """Refuse a request that could not run even alone.

    Raises:
        NeverFits: with the bytes needed and the bytes there.
    """
    longest = peaks.memory.placement.longest_tokens
    if longest is not None and request.final_tokens > longest:
        raise NeverFits(
            f"{request.final_tokens} tokens: more than the {longest} the store reserves "
            "for a sequence; lower max_tokens, raise --kv-store-tokens or use --kv-store paged",
            param="prompt" if len(request.prompt_token_ids) > longest else "max_tokens",
        )
    if not peaks.fit_whole(request):
        raise NeverFits(_why_never(peaks, request), param=_field_at_fault(peaks, request))


def _field_at_fault(peaks: Peaks, request: Request) -> str:
    """The option to lower first: with all others as they are, it alone decides."""
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
        f"need {peaks.slab_bytes(peaks.whole_counts(need, width)):,} B of KV, the whole pool "
        f"has {arena.num_slabs * arena.slab_bytes:,} B, both in slabs of "
        f"{arena.slab_bytes:,} B; {offload_text(peaks, need)}"
        f"{ways_out(peaks, need, width)}"
    )
