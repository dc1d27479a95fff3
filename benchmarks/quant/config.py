"""Configurations of the codec benchmark, at full size and small."""

from dataclasses import dataclass, field, replace

from benchmarks.common.attention import AttentionShape
from benchmarks.common.models import SHAPES
from benchmarks.quality.cells import TasksConfig
from benchmarks.quality.texts import TextsConfig
from quire.cli.settings import Settings
from quire.errors import ConfigError
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


QUALITY_CODECS = (
    *("int8", "fp8", "int4", "int4_outliers", "int4_hadamard", "int3", "int3_hadamard", "int2"),
    *("int4_page/int4", "int2_page/int2", "int8/int4", "int4_outliers+residual=64"),
)
GRID = ("none", "int8", "int4", "int3", "int2")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderingsConfig:
    """Comparison of pairs of codecs on the same texts.

    Attributes:
        grid: codecs for keys and for values; all pairs are measured.
        texts: configuration of the texts; their codecs follow from the pairs.
    """

    grid: tuple[str, ...] = GRID
    texts: TextsConfig = field(default_factory=lambda: TextsConfig(texts=8))


EVICTING_CODECS = (
    *("int8+residual=64", "int4+residual=64", "int3+residual=64", "int2+residual=64"),
    *("int4_page/int4+residual=64", "int2_page/int2+residual=64"),
    *("int4+residual=64+promoted=32:int4", "int4+residual=64+promoted=64:int2"),
    *("int3+residual=64+promoted=32:int4", "int3+residual=64+promoted=64:int4"),
    *("int2+residual=64+promoted=32:int4", "int2+residual=64+promoted=64:int4"),
    *("int2+residual=64+promoted=64:int2",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictingConfig:
    """Codecs together with an eviction rule, in the same bytes.

    Attributes:
        rule: eviction rule in the format of `--evict`, without a cap.
        shares: caps over the bytes of a whole text in plain KV.
        texts: configuration of the texts, with the codecs.
    """

    rule: str = "h2o:recent=32,every=64"
    shares: tuple[float, ...] = (0.25, 0.15)
    texts: TextsConfig = field(
        default_factory=lambda: TextsConfig(codecs=EVICTING_CODECS, texts=8, first=256)
    )

    def evict(self, cap_bytes: int) -> str:
        """The rule with a cap."""
        return f"{self.rule},cap={cap_bytes}B"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantBenchConfig:
    """Configuration of all parts.

    Attributes:
        model: evaluated model: a folder, a hub name or quire-tiny.
        attention, capacity, throughput, orderings, evicting: parts of the same names.
        texts, task_codecs, tasks: configuration of the part quality.
    """

    model: str = "quire-tiny"
    attention: QuantAttentionConfig = field(default_factory=QuantAttentionConfig)
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    throughput: QuantThroughputConfig = field(default_factory=QuantThroughputConfig)
    texts: TextsConfig = field(default_factory=lambda: TextsConfig(codecs=QUALITY_CODECS))
    task_codecs: tuple[str, ...] = ("int8", "int4", "int4_outliers", "int2")
    tasks: TasksConfig = field(default_factory=TasksConfig)
    orderings: OrderingsConfig = field(default_factory=OrderingsConfig)
    evicting: EvictingConfig = field(default_factory=EvictingConfig)


_TINY = AttentionShape(batch=2, tokens=64, num_heads=4, num_kv_heads=2, head_dim=64)
QUICK_QUANT = QuantBenchConfig(
    attention=QuantAttentionConfig(
        codecs=("int8", "int4"), shape=_TINY, lengths=(64,), repeats=2, buffer_bytes=16 << 20
    ),
    throughput=QuantThroughputConfig(
        model="tiny", rows=2, prompt_tokens=64, steps=2, repeats=2, dtype="float32"
    ),
    texts=TextsConfig(codecs=("int8", "int4", "int4_outliers"), tokens=160, texts=2),
    task_codecs=("int8", "int4"),
    tasks=TasksConfig(tasks=("lines",), tokens=128, prompts=4),
    orderings=OrderingsConfig(
        grid=("none", "int4", "int2"), texts=TextsConfig(tokens=160, texts=2)
    ),
    evicting=EvictingConfig(
        rule="h2o:recent=8,every=16",
        shares=(0.5,),
        texts=TextsConfig(
            codecs=(*("int8+residual=16", "int2+residual=16", "int2+residual=16+promoted=8:int8"),),
            tokens=160,
            texts=2,
            page_tokens=8,
        ),
    ),
)


def configured(
    settings: Settings, codecs: str, batch: int | None, prompts: int | None, *, quick: bool
) -> QuantBenchConfig:
    """Apply the given options; unset options keep their defaults.

    Raises:
        UnknownName: no such codec.
        ConfigError: invalid option of a codec.
    """
    config = replace(QUICK_QUANT if quick else QuantBenchConfig(), model=settings.model)
    if batch is not None:
        shape = replace(config.attention.shape, batch=batch)
        config = replace(config, attention=replace(config.attention, shape=shape))
    if prompts is not None:
        config = replace(config, tasks=replace(config.tasks, prompts=prompts))
    if settings.loading.dtype != "auto" and not quick:
        throughput = replace(config.throughput, dtype=settings.loading.dtype)
        config = replace(config, throughput=throughput)
    if not codecs.strip():
        return config
    selected = tuple(codec.strip() for codec in codecs.split(";"))
    for codec in selected:
        read_format(fill_plain(codec, "float32"))
    return replace(
        config,
        attention=replace(config.attention, codecs=selected),
        throughput=replace(config.throughput, codecs=selected),
        texts=replace(config.texts, codecs=selected),
        task_codecs=selected,
    )
