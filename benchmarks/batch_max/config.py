"""Arms and configurations of the Batch-Max benchmark, at full size and a quarter of it.

arm          eviction
fkv          none: the full KV cache
ed_2         decode only, cap 2: retains the newest token, which the next token joins (Algorithm 2)
ed_65        the same with a cap of `every` + 1: Algorithm 2 with a cap of 65
bm_CAP       prompt and output within CAP tokens by average attention: Algorithm 1
end_CAP      down to CAP tokens once, after prefill, by the same rule

Source: Metel et al. 2025 (Batch-Max), Algorithms 1 and 2, section 4. The paper has no `end_CAP`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.models import SHAPES
from quire.errors import ConfigError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMaxConfig:
    """Configuration: time of the variants in one KV memory, with random weights.

    Attributes:
        model: a name in SHAPES.
        dtype: PyTorch name of the data type of the weights and the KV.
        prompt_tokens, new_tokens: lengths of every row.
        caps: caps of Batch-Max, in tokens; the claims use the first.
        every: tokens evicted at a time.
        pool: KV memory, in rows of full KV.
        repeats: interleaved rounds of the claimed variants; the others run in the first.
        continuous_prompts: requests submitted at once to the default engine.
    """

    model: str = "125m"
    dtype: str = "bfloat16"
    prompt_tokens: int = 3_584
    new_tokens: int = 512
    caps: tuple[int, ...] = (896, 1_792)
    every: int = 64
    pool: int = 2
    repeats: int = 5
    continuous_prompts: int = 8

    def __post_init__(self) -> None:
        context = SHAPES[self.model]().max_position_embeddings
        if self.final_tokens > context:
            raise ConfigError(
                f"{self.final_tokens} tokens exceed the context of the model {self.model}, "
                f"{context}: lower prompt_tokens or new_tokens"
            )

    @property
    def final_tokens(self) -> int:
        """Final length of each row."""
        return self.prompt_tokens + self.new_tokens

    @property
    def arms(self) -> tuple[EvictionArm, ...]:
        """All arms."""
        return arms_of(self.caps, self.every)

    def arms_of_round(self, number: int) -> tuple[EvictionArm, ...]:
        """Arms of round `number`, from 0: all arms, later only the claimed ones."""
        claimed = (FKV, ED, bm_name(self.caps[0]))
        return tuple(arm for arm in self.arms if number == 0 or arm.name in claimed)


QUICK_BATCH_MAX = BatchMaxConfig(
    prompt_tokens=896, new_tokens=128, caps=(224,), every=16, repeats=1, continuous_prompts=4
)
"""A quarter of all lengths."""
