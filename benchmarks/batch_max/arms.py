"""Arms of the comparison, each with its `--evict` value.

arm          eviction
fkv          none: the full KV cache
ed_2         decode only, cap 2: retains the newest token, which the next token joins (Algorithm 2)
ed_65        the same with a cap of `every` + 1: Algorithm 2 with a cap of 65
bm_CAP       prompt and output within CAP tokens by average attention: Algorithm 1
end_CAP      down to CAP tokens once, after prefill, by the same rule
decode_CAP   within CAP tokens while decoding, by the same rule: decode-only eviction of one quality

Source: Metel et al. 2025 (Batch-Max), Algorithms 1 and 2, section 4. The paper has no `end_CAP` and
no `decode_CAP`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FKV, ED = "fkv", "ed_2"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionArm:
    """One arm of the comparison.

    Attributes:
        name: name in claims.
        evict: value of `KVConfig.evict`.
        label: label in tables.
    """

    name: str
    evict: str
    label: str


def full_kv() -> EvictionArm:
    """The arm without eviction."""
    return EvictionArm(name=FKV, evict="full", label="FKV")


def decode_only(cap: int) -> EvictionArm:
    """Algorithm 2: evict all but the newest token each time the cap is reached."""
    evict = f"recent:cap={cap},every={cap - 1},when=decode"
    return EvictionArm(name=f"ed_{cap}", evict=evict, label=f"ED, cap {cap}")


def batch_max(cap: int, every: int) -> EvictionArm:
    """Algorithm 1 with the average attention rule."""
    return EvictionArm(
        name=bm_name(cap), evict=f"average:cap={cap},every={every}", label=f"BM, cap {cap:,}"
    )


def prefill_end(cap: int) -> EvictionArm:
    """One eviction by the average attention rule, after prefill."""
    return EvictionArm(
        name=f"end_{cap}",
        evict=f"average:cap={cap},when=prefill_end",
        label=f"end of prefill, cap {cap:,}",
    )


def decode_by_rule(cap: int, every: int) -> EvictionArm:
    """Decode-only eviction by the average attention rule: the whole prompt is prefilled first.

    At most half of the cap is evicted at once.
    """
    return EvictionArm(
        name=decode_name(cap),
        evict=f"average:cap={cap},every={min(every, cap // 2)},when=decode",
        label=f"decode only, cap {cap:,}",
    )


def decode_name(cap: int) -> str:
    """Name of the arm of decode-only eviction with a cap."""
    return f"decode_{cap}"


def bm_name(cap: int) -> str:
    """Name of Batch-Max's arm with a cap."""
    return f"bm_{cap}"


def arms_of(caps: Sequence[int], every: int) -> tuple[EvictionArm, ...]:
    """All arms; `end_CAP` uses the first cap.

    Args:
        caps: caps of Batch-Max.
        every: number of tokens evicted at once.
    """
    decoding = [decode_only(2)] + [decode_only(every + 1)] * (every > 1)
    return (
        full_kv(),
        *decoding,
        *(batch_max(cap, every) for cap in caps),
        prefill_end(caps[0]),
    )
