"""The schedule of a prefix load: the start is recomputed while the end is loaded.

    device   compute 0  compute 1  compute 2 ...       chunk by chunk from the start
    in                     ... load 2  load 1  load 0     chunk by chunk from the end

Neither depends on the other. If the rates were wrong, an executor may continue from either side:
the tokens in the middle are last in both orders.
"""

from itertools import pairwise

from quire.errors import ConfigError
from quire.offload.split import Loading, read_seconds
from quire.offload.timeline import DEVICE, IN, Operation, Schedule, TaskKind
from quire.plan.rates import PrefillRates


def plan_restore(
    prefill: PrefillRates,
    loading: Loading,
    *,
    tokens: int,
    read_tokens: int,
    token_bytes: int | float,
    chunk_tokens: int = 512,
) -> Schedule:
    """Operations of a prefix load; `first` is the first token of each.

    Args:
        prefill: of the model; `call_s` counts once.
        loading: of the tier; `call_s` counts once.
        tokens: of the prefix.
        read_tokens: of its start, recomputed.
        token_bytes: of KV, all layers.
        chunk_tokens: of each operation.

    Raises:
        ConfigError: more tokens are recomputed than the prefix has, or chunks have no token.
    """
    if not 0 <= read_tokens <= tokens or chunk_tokens < 1:
        raise ConfigError(
            f"expected 0 to {tokens} tokens in chunks of 1 or more, got {read_tokens}, "
            f"{chunk_tokens}"
        )
    starts = [*range(0, read_tokens, chunk_tokens), read_tokens]
    ends = [*range(tokens, read_tokens, -chunk_tokens), read_tokens]
    reads = [
        (TaskKind.PROJECT, DEVICE, a, b - a, read_seconds(prefill, b) - read_seconds(prefill, a))
        for a, b in pairwise(starts)
    ]
    loads = [
        (TaskKind.KV_IN, IN, a, b - a, loading.seconds(tokens - a) - loading.seconds(tokens - b))
        for b, a in pairwise(ends)
    ]
    return Schedule(
        tuple(
            Operation(
                index=index,
                kind=kind,
                lane=lane,
                layer=0,
                part=index,
                first=first,
                tokens=count,
                num_bytes=round(count * token_bytes) if lane == IN else 0,
                seconds=seconds,
            )
            for index, (kind, lane, first, count, seconds) in enumerate([*reads, *loads])
        )
    )
