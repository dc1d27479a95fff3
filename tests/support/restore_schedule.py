"""The schedule of bringing a prefix back: the front is read again, the back is loaded meanwhile.

    device   read 0  read 1  read 2 ...          chunk by chunk from the front
    in                  ... load 2  load 1  load 0     piece by piece from the back

Nothing of the one needs anything of the other. If rates were wrong, whoever carries it out may go
on from either side: what lies in the middle is done last by both.
"""

from itertools import pairwise

from quire.errors import ConfigError
from quire.offload.timeline import DEVICE, IN, Kind, Operation, Schedule
from quire.plan.offload.restore import Loading, read_seconds
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
    """Operations of a restoration; `first` is the first token of each.

    Args:
        prefill: of the model; `call_s` counts once.
        loading: of the tier; `call_s` counts once.
        tokens: of the prefix.
        read_tokens: of its front, read again.
        token_bytes: of KV, all layers.
        chunk_tokens: of each piece.

    Raises:
        ConfigError: more is read than there is, or chunks have no token.
    """
    if not 0 <= read_tokens <= tokens or chunk_tokens < 1:
        raise ConfigError(
            f"expected 0 to {tokens} tokens in chunks of 1 or more, got {read_tokens}, "
            f"{chunk_tokens}"
        )
    front = [*range(0, read_tokens, chunk_tokens), read_tokens]
    back = [*range(tokens, read_tokens, -chunk_tokens), read_tokens]
    reads = [
        (Kind.PROJECT, DEVICE, a, b - a, read_seconds(prefill, b) - read_seconds(prefill, a))
        for a, b in pairwise(front)
    ]
    loads = [
        (Kind.KV_IN, IN, a, b - a, loading.seconds(tokens - a) - loading.seconds(tokens - b))
        for b, a in pairwise(back)
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
