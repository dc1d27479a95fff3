"""Configurations of the codec benchmark, at full size and small."""

from dataclasses import dataclass, field, replace

from benchmarks.common.attention import AttentionShape
from benchmarks.common.models import SHAPES
from quire.errors import ConfigError
from quire.layout.config import dtype_bytes
from quire.layout.kv_format import fill_plain, read_format


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantAttentionConfig:
    """Attention of a decode batch, without a model.

    Attributes:
        codecs: codecs compared with bfloat16.
        shape: attention shape of the claims.
        lengths: sequence lengths; the length of `shape` must be one of them.
        repeats: rounds of all codecs in turn, after one warm-up round.
        buffer_bytes: bytes of the buffer that measures the memory bandwidth.
    """

    codecs: tuple[str, ...] = ("int8", "int4", "int4_outliers", "int8/int4", "fp8")
    shape: AttentionShape = field(default_factory=lambda: AttentionShape(tokens=4_096))
    lengths: tuple[int, ...] = (2_048, 4_096, 8_192)
    repeats: int = 7
    buffer_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.shape.tokens not in self.lengths:
            raise ConfigError(
                f"expected the claimed length {self.shape.tokens} among {self.lengths}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """Computed bytes of KV.

    Attributes:
        codecs: codecs compared with bfloat16.
        full_precision: options for full-precision tokens, added to each codec in one column.
        head_dim, num_kv_heads: head shape of a layer.
        page_tokens: slots in a page; codecs per page have 32.
        tokens: tokens of a sequence.
    """

    codecs: tuple[str, ...] = (
        *("int8", "fp8", "int4", "int4:group=32", "int4_outliers", "int4_hadamard"),
        *("int3", "int2", "kivi4", "kivi2"),
    )
    full_precision: str = "+sinks=4+residual=128"
    head_dim: int = 128
    num_kv_heads: int = 8
    page_tokens: int = 16
    tokens: int = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantThroughputConfig:
    """Decoding in one KV memory, each codec with as many rows as fit.

    Attributes:
        codecs: codecs compared with plain KV.
        model: a name in SHAPES.
        rows: rows that fit with plain KV.
        prompt_tokens: prompt length of each row.
        steps: measured steps in each round.
        repeats: rounds of all codecs, in turn.
        dtype: dtype of weights and plain KV.
    """

    codecs: tuple[str, ...] = ("int8", "int4")
    model: str = "125m"
    rows: int = 8
    prompt_tokens: int = 1_024
    steps: int = 8
    repeats: int = 5
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.model not in SHAPES:
            raise ConfigError(f"expected one of {', '.join(SHAPES)}, got {self.model!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantBenchConfig:
    """Configuration of all parts."""

    attention: QuantAttentionConfig = field(default_factory=QuantAttentionConfig)
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    throughput: QuantThroughputConfig = field(default_factory=QuantThroughputConfig)


_TINY = AttentionShape(batch=2, tokens=64, num_heads=4, num_kv_heads=2, head_dim=64)
QUICK_QUANT = QuantBenchConfig(
    attention=QuantAttentionConfig(
        codecs=("int8", "int4"), shape=_TINY, lengths=(64,), repeats=2, buffer_bytes=16 << 20
    ),
    throughput=QuantThroughputConfig(
        model="tiny", rows=2, prompt_tokens=64, steps=2, repeats=2, dtype="float32"
    ),
)


def configured(
    codecs: str, batch: int | None, dtype: str | None, *, quick: bool
) -> QuantBenchConfig:
    """Apply the given options; unset options keep their defaults.

    Raises:
        UnknownName: no such codec or type.
        ConfigError: invalid option of a codec.
    """
    config = QUICK_QUANT if quick else QuantBenchConfig()
    attention, throughput = config.attention, config.throughput
    if batch is not None:
        attention = replace(attention, shape=replace(attention.shape, batch=batch))
    if dtype is not None:
        dtype_bytes(dtype)
        throughput = replace(throughput, dtype=dtype)
    if codecs.strip():
        selected = tuple(codec.strip() for codec in codecs.split(";"))
        for codec in selected:
            read_format(fill_plain(codec, "float32"))
        attention = replace(attention, codecs=selected)
        throughput = replace(throughput, codecs=selected)
    return replace(config, attention=attention, throughput=throughput)
