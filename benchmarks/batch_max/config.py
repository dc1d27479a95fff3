"""Configurations of the Batch-Max benchmark, at full size and a quarter of it."""

from dataclasses import dataclass, field

from benchmarks.batch_max.arms import (
    ED,
    FKV,
    EvictionArm,
    arms_of,
    batch_max,
    bm_name,
    decode_by_rule,
    decode_only,
    full_kv,
)
from benchmarks.common.models import SHAPES
from quire.errors import ConfigError

TASKS = (
    *("lines", "longeval", "kv", "niah", "facts"),
    *("copy", "headline", "variables", "labels", "arithmetic"),
)
"""All tasks, fixed before any run; none is dropped afterwards."""


PARTS = ("speed", "equal_quality", "quality")

EQUAL_SHARE = 0.1875
"""Three quarters of the cap of Batch-Max; part quality measures 0.1865 on quire-tiny."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedConfig:
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
        equal_prompts: requests of part equal_quality, submitted at once to the default engine.
        equal_share: cap of decode-only eviction, as a fraction of the prompt, that has the quality
            of Batch-Max at its first cap: claim `equal_quality_decode_share` of part quality.
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
    equal_prompts: int = 16
    equal_share: float = EQUAL_SHARE

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

    @property
    def equal_arm(self) -> EvictionArm:
        """Decode-only eviction with the quality of Batch-Max at its first cap."""
        cap = int(self.equal_share * self.prompt_tokens)
        return decode_by_rule(cap, self.every)

    def equal_arms(self, number: int) -> tuple[EvictionArm, ...]:
        """Arms of round `number`, from 0, of part equal_quality."""
        bm = batch_max(self.caps[0], self.every)
        others = (full_kv(), decode_only(2)) if number == 0 else ()
        return (*others, bm, self.equal_arm)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """Configuration: quality and time of the variants from the same runs, with trained weights.

    Attributes:
        model: folder, hub name or quire-tiny.
        tasks: tasks of `quire.evals`.
        tokens: maximum length of a prompt with its output.
        new_tokens: tokens generated for each prompt; an end-of-sequence token is ignored.
        samples: prompts of each task.
        pool: KV memory, in rows of full KV.
        shares: caps of Batch-Max as fractions of `tokens`, ascending; the claims use the first.
        decode_shares: caps of decode-only eviction by the same rule, as fractions of `tokens`,
            ascending; the one with the quality of Batch-Max is interpolated between them.
        every: tokens evicted at a time.
    """

    model: str = "quire-tiny"
    tasks: tuple[str, ...] = TASKS
    tokens: int = 512
    new_tokens: int = 48
    samples: int = 48
    pool: int = 8
    shares: tuple[float, ...] = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
    decode_shares: tuple[float, ...] = (0.125, 0.1875, 0.25)
    every: int = 16

    @property
    def caps(self) -> tuple[int, ...]:
        """Caps in tokens."""
        return tuple(int(share * self.tokens) for share in self.shares)

    @property
    def final_tokens(self) -> int:
        """Most final tokens of a row."""
        return self.tokens + self.new_tokens

    def arms(self) -> tuple[EvictionArm, ...]:
        """The paper's arms, and those that evict after prefill."""
        decoding = (decode_by_rule(cap, self.every) for cap in self.decode_caps)
        return (*arms_of(self.caps, self.every), *decoding)

    @property
    def decode_caps(self) -> tuple[int, ...]:
        """Caps of decode-only eviction, in tokens."""
        return tuple(int(share * self.tokens) for share in self.decode_shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMaxConfig:
    """Configuration of both parts.

    Attributes:
        speed, quality: configurations of the parts.
    """

    speed: SpeedConfig = field(default_factory=SpeedConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)


QUICK_BATCH_MAX = BatchMaxConfig(
    speed=SpeedConfig(
        prompt_tokens=896,
        new_tokens=128,
        caps=(224,),
        every=16,
        repeats=1,
        continuous_prompts=4,
        equal_prompts=4,
    ),
    quality=QualityConfig(
        tasks=("lines", "niah", "labels"),
        tokens=256,
        new_tokens=32,
        samples=4,
        pool=2,
        shares=(0.25, 0.5, 0.75),
    ),
)
"""A quarter of all lengths; half for quire-tiny, where three of its tasks still fit."""
