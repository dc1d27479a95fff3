"""Start-up lines of the server: model, KV memory, concurrent requests and attention backend."""

from collections.abc import Iterator

from quire.api.llm import LLM
from quire.layout.sizes import format_size
from quire.scheduler.admission.need import Need
from quire.serve.service import Service

LENGTHS = (512, 2048, 8192)
"""Lengths in tokens, prompt and output together, for which the concurrent requests are shown."""

_MOST = 1 << 20


def banner(service: Service) -> str:
    """Lines for standard output when the server starts."""
    llm = service.llm
    pool, model = llm.engine.pool, llm.model
    decoder, memory = model.decoder, pool.kv.memory
    implementation = model.implementation
    layers = "" if implementation is None else f", {implementation.name} layers"
    dtype = str(decoder.dtype).removeprefix("torch.")
    return "\n".join(
        (
            f"Model: {model.name}, {dtype} on {decoder.device}{layers}, "
            f"{format_size(model.weight_bytes)} of weights",
            f"KV memory: {memory.total_bytes:,} B ({format_size(memory.total_bytes)}), "
            f"{_pages(llm)}, {pool.codec}, attention {pool.kv.backend.name}",
            f"Maximum concurrent requests: {_concurrency(llm)}",
            *_longest(llm),
        )
    )


def _longest(llm: LLM) -> Iterator[str]:
    """A line if the KV memory does not hold a request of the model's whole context."""
    peaks, eviction = llm.engine.scheduler.peaks, llm.engine.pool.eviction.spec
    context = llm.model.spec.max_positions
    longest = peaks.longest_sequence(context, eviction)
    if longest < context:
        [counts] = peaks.counts([Need(context, eviction=eviction, may_offload=True)])
        needed_mib = -(-peaks.slab_bytes(counts) // 2**20)
        yield (
            f"Longest request: {longest:,} of the {context:,} tokens of the model's context; "
            f"--kv-memory {needed_mib}MiB holds the whole context"
        )


def _pages(llm: LLM) -> str:
    """Number and sizes of pages; lanes with pages of several sizes share the memory."""
    memory = llm.engine.pool.kv.memory
    sizes = [page_class.page_bytes for page_class in memory.layout.page_classes]
    if len(sizes) == 1:
        return f"{memory.total_bytes // sizes[0]:,} pages of {sizes[0]:,} B"
    return f"pages of {', '.join(f'{size:,}' for size in sizes[:-1])} and {sizes[-1]:,} B"


def _concurrency(llm: LLM) -> str:
    """The concurrent requests at each length that the model's context allows."""
    context = llm.model.spec.max_positions
    lengths = [tokens for tokens in LENGTHS if tokens <= context] or [context]
    found = [f"{concurrent_requests(llm, tokens):,} of {tokens:,} tokens" for tokens in lengths]
    limit = llm.engine.schedule_config.max_num_seqs
    return f"{', '.join(found)} (at most --max-num-seqs {limit:,} run at once)"


def concurrent_requests(llm: LLM, tokens: int) -> int:
    """Requests of a length that the KV memory holds at once, with the engine's eviction rule.

    Args:
        llm: an idle LLM.
        tokens: prompt and output tokens of each request.
    """
    peaks, pool = llm.engine.scheduler.peaks, llm.engine.pool
    need = Need(tokens, eviction=pool.eviction.spec)
    counts = peaks.counts([need])[0]
    if not peaks.fit_alone(counts):
        return 0
    low, high = 1, _MOST
    while low < high:  # the largest number that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peaks.fit_alone(counts * middle) else (low, middle - 1)
    return low
