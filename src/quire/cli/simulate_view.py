"""What `quire simulate` prints."""

from collections.abc import Iterator, Mapping

from quire.layout.sizes import format_size
from quire.sim.metrics import PERCENTILES
from quire.sim.simulator import SimResult

Numbers = Mapping[str, int | float]
_LATENCIES = {"queue": "in the queue", "ttft": "to the first token", "tpot": "per token after it"}
_LATENCIES |= {"e2e": "to the end"}


def render(result: SimResult, claims: Numbers, took_s: float) -> str:
    """The result as text.

    Args:
        result: of a run.
        claims: its numbers.
        took_s: seconds the simulation itself took.
    """
    return "\n".join(
        (
            *_requests(result, claims, took_s),
            *_table(claims),
            *_memory(claims),
            *_fairness(claims),
        )
    )


def _requests(result: SimResult, claims: Numbers, took_s: float) -> Iterator[str]:
    yield (
        f"{result.trace.name} ({result.trace.format}): {claims['requests']:,} requests in "
        f"{claims['virtual_s']:,.0f} s, simulated in {took_s:.1f} s"
    )
    refused = claims["refused_too_long"], claims["refused_never_fits"]
    if any(refused):
        yield (
            f"refused: {refused[0]:,} longer than the context, "
            f"{refused[1]:,} larger than the memory"
        )
    if claims["left_out"] or claims["cut_answers"]:
        yield (
            f"left out as too long: {claims['left_out']:,}; answers cut at the context: "
            f"{claims['cut_answers']:,}"
        )
    yield (
        f"{claims['requests_per_s']:.2f} requests/s, {claims['prompt_tokens_per_s']:,.0f} prompt "
        f"and {claims['generated_tokens_per_s']:,.0f} generated tokens/s, steps run "
        f"{claims['busy_share']:.0%} of the time"
    )


def _table(claims: Numbers) -> Iterator[str]:
    if not claims["finished"]:
        return
    yield f"\n{'seconds':22}" + "".join(f"{f'p{q}':>10}" for q in PERCENTILES)
    for name, words in _LATENCIES.items():
        cells = [claims.get(f"{name}_p{q}_s") for q in PERCENTILES]
        yield f"{words:22}" + "".join(
            f"{'':>10}" if cell is None else f"{cell:>10.3f}" for cell in cells
        )


def _memory(claims: Numbers) -> Iterator[str]:
    yield (
        f"\nKV memory {format_size(int(claims['kv_total_bytes']))}: mean use "
        f"{claims['kv_mean_share']:.1%}, peak {claims['kv_peak_share']:.1%}; of running sequences' "
        f"slots {claims['waste_fraction']:.2%} empty"
    )
    yield (
        f"{claims['running_mean']:.1f} running ({claims['running_peak']:,} at most), "
        f"{claims['waiting_mean']:.1f} waiting ({claims['waiting_peak']:,} at most)"
    )
    yield (
        f"{claims['preemptions']:,} preemptions, {claims['preemptions_per_minute']:.2f} a minute; "
        f"{claims['recomputed_tokens']:,} tokens read again "
        f"({claims['recomputed_fraction']:.2%} of the work)"
    )
    yield (
        f"prompt tokens found in the cache: {claims['prefix_hit_fraction']:.2%}; repeated in the "
        f"trace: {claims['reusable_token_fraction']:.2%} of tokens, "
        f"{claims['reusable_block_fraction']:.2%} of blocks"
    )


def _fairness(claims: Numbers) -> Iterator[str]:
    if "served_while_all_wait_tokens" not in claims:
        return
    index = "never long enough on end for a Jain index"
    if "jain_index" in claims:
        index = f"Jain index {claims['jain_index']:.3f}"
    yield f"while all tenants wait: {claims['served_while_all_wait_tokens']:,} tokens, {index}"
