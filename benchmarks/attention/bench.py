"""Attention over pages by instruction set, codec, context and number of rows, without a model.

A call attends in every layer of a model in turn. The layers' pages together are far larger than the
caches and scattered at random, so every call reads its pages from memory. Each round measures the
memory bandwidth and all codecs and instruction sets, so that ratios compare measurements close in
time.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from quire.errors import ConfigError
from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary, NotLoaded, load_library
from quire.kv.store import PageStore
from quire.layout.layout import layout_for
from quire.profile.ceilings import (
    PLAIN,
    AttentionShape,
    MemoryProbe,
    ProductProbe,
    fill_pages,
    seconds,
)

SETS = ("plain", "avx2", "avx512", "avx512_bf16")
"""Instruction sets, in the order of `PATHS` of the C library."""
_CPU = torch.device("cpu")
_PRODUCT = (2_048, 2_048, 2_048)
_MOST_LAYERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Measurements to run.

    Attributes:
        heads: query heads, KV heads and head dimension of a layer.
        rows, contexts: numbers of sequences, and tokens of each, of decode steps.
        chunks: new tokens and context of each prefill step of one sequence.
        codecs: codecs of the pages.
        instruction_sets: names in SETS; () for all that this machine has, except plain.
        page_tokens: slots of a page.
        cold_bytes: least bytes of all layers of a decode step; larger than the caches.
        repeats: rounds, after one warm-up round.
        product: [rows, inner, columns] of the products that measure the compute rate.
    """

    heads: tuple[int, int, int] = (32, 8, 128)
    rows: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (512, 1_024, 4_096)
    chunks: tuple[tuple[int, int], ...] = ((512, 512), (512, 2_048), (2_048, 2_048))
    codecs: tuple[str, ...] = (PLAIN, "int8", "int4")
    instruction_sets: tuple[str, ...] = ()
    page_tokens: int = 16
    cold_bytes: int = 192 << 20
    repeats: int = 5
    product: tuple[int, int, int] = _PRODUCT

    def shape(self, batch: int, tokens: int) -> AttentionShape:
        """Shape of one layer."""
        num_heads, num_kv_heads, head_dim = self.heads
        return AttentionShape(
            batch=batch,
            tokens=tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_tokens=self.page_tokens,
        )


QUICK_ATTENTION = AttentionConfig(
    heads=(4, 2, 64),
    rows=(1, 2),
    contexts=(64,),
    chunks=((32, 48),),
    codecs=(PLAIN, "int8"),
    cold_bytes=1 << 20,
    repeats=2,
    product=(64, 64, 64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Measurements of one step shape, codec and instruction set.

    Attributes:
        instruction_set, codec: as in `AttentionConfig`.
        rows, new_tokens, context: sequences, new tokens of each, and tokens of each.
        kv_bytes, flops: bytes and FLOP of one layer.
        call_s: time of one layer by round.
        limits: bytes per second of memory (decode) or FLOP/s of products (prefill) by round.
    """

    instruction_set: str
    codec: str
    rows: int
    new_tokens: int
    context: int
    kv_bytes: int
    flops: int
    call_s: tuple[float, ...]
    limits: tuple[float, ...]

    @property
    def name(self) -> str:
        """Name of the step shape."""
        if self.new_tokens == 1:
            return f"decode_{self.rows}x{self.context}"
        return f"prefill_{self.new_tokens}_of_{self.context}"

    @property
    def median_s(self) -> float:
        """Median time of one layer."""
        return statistics.median(self.call_s)

    @property
    def work(self) -> int:
        """Bytes (decode) or FLOP (prefill) of one layer."""
        return self.kv_bytes if self.new_tokens == 1 else self.flops

    @property
    def over_limit(self) -> float:
        """Rate over the machine's limit: median of the ratios within rounds."""
        pairs = zip(self.call_s, self.limits, strict=True)
        return statistics.median(self.work / call_s / limit for call_s, limit in pairs)


class PagedLayers:
    """The KV of a batch in the pages of several layers, and calls that attend in all of them.

    Args:
        shape: shape of one layer.
        codec: codec of the pages.
        new_tokens: query tokens of each sequence.
        cold_bytes: least bytes of all layers.

    Attributes:
        num_layers: number of layers.
        kv_bytes: bytes that one layer reads, including codec metadata.
    """

    def __init__(self, shape: AttentionShape, codec: str, new_tokens: int, cold_bytes: int) -> None:
        (group,) = layout_for(shape.spec, page_tokens=shape.page_tokens, codec=codec).groups
        page_class, columns = group.page_class, -(-shape.tokens // shape.page_tokens)
        self.kv_bytes = shape.batch * columns * page_class.page_bytes
        self.num_layers = max(2, min(_MOST_LAYERS, -(-cold_bytes // self.kv_bytes)))
        self._shape, self._tokens = shape, new_tokens
        self._slot_bytes = page_class.page_bytes // page_class.tokens
        store = PageStore(self.kv_bytes * self.num_layers, _CPU)
        views = store.views(page_class)
        assert views.value is not None, "attention layers have a value plane"
        generator = torch.Generator().manual_seed(0)
        fill_pages(views, shape.head_dim, generator)
        pages = torch.randperm(shape.batch * self.num_layers * columns, generator=generator)
        table = pages.int().view(shape.batch, self.num_layers, columns)
        rows = torch.arange(shape.batch)
        self._layers = [
            LayerPages(
                key=views.key,
                value=views.value,
                table=table,
                rows=rows,
                first_lane=layer,
                num_lanes=1,
                coded=views.coded,
            )
            for layer in range(self.num_layers)
        ]
        self._query, self._fresh = (
            torch.randn(
                shape.batch * new_tokens, heads, shape.head_dim, generator=generator
            ).bfloat16()
            for heads in (shape.num_heads, shape.num_kv_heads)
        )

    def step(self, library: NativeLibrary) -> Callable[[], None]:
        """Create a call that attends once in every layer."""
        backend = NativeAttention(library, GatheredAttention(_CPU))
        shape = self._shape
        tokens = np.full(shape.batch, self._tokens, dtype=np.int32)
        lanes = LaneSlots(np.full((shape.batch, 1), shape.tokens, dtype=np.int32), None)
        math, fresh = AttentionMath(shape.head_dim**-0.5), (self._fresh, self._fresh)

        def attend() -> None:
            plan = backend.plan(StepShape.of(tokens), lanes, shape.page_tokens, self._slot_bytes)
            for pages in self._layers:
                backend.attend(plan, pages, math, self._query, fresh)

        return attend

    @property
    def flops(self) -> int:
        """FLOP of the two products of one layer; only visible slots count."""
        shape = self._shape
        before = shape.tokens - self._tokens
        seen = self._tokens * before + self._tokens * (self._tokens + 1) // 2
        return 4 * shape.batch * seen * shape.num_heads * shape.head_dim


def libraries(names: Sequence[str]) -> dict[str, NativeLibrary]:
    """Return the C library with each instruction set; all sets that this machine has for ().

    Raises:
        ConfigError: the library is not loaded, or the machine lacks an instruction set.
    """
    library = load_library()
    if isinstance(library, NotLoaded):
        raise ConfigError(library.reason)
    found = {name: replace(library, path=SETS.index(name)) for name in names or SETS[1:]}
    usable = {name: one for name, one in found.items() if one.path <= library.path}
    if len(usable) < len(names):
        raise ConfigError(f"expected instruction sets up to {SETS[library.path]}, got {names}")
    return usable


@dataclass(slots=True)
class _Measured:
    layers: PagedLayers
    steps: dict[str, Callable[[], None]]
    times_s: dict[str, list[float]] = field(default_factory=dict)


def measure(config: AttentionConfig, rows: int, new_tokens: int, context: int) -> list[Rate]:
    """Measure all codecs and instruction sets of one step shape in turn."""
    used = libraries(config.instruction_sets)
    shape = config.shape(rows, context)
    cold_bytes = config.cold_bytes if new_tokens == 1 else 0
    cells = {}
    for codec in config.codecs:
        layers = PagedLayers(shape, codec, new_tokens, cold_bytes)
        steps = {name: layers.step(library) for name, library in used.items()}
        cells[codec] = _Measured(layers, steps, {name: [] for name in used})
    memory = MemoryProbe(config.cold_bytes)
    products = {dtype: ProductProbe(dtype, *config.product) for dtype in ("bfloat16", "float32")}
    limits: dict[str, list[float]] = {name: [] for name in used}
    for i in range(config.repeats + 1):
        read = memory.read_rate() if new_tokens == 1 else 0
        rates = {} if new_tokens == 1 else {name: one.rate() for name, one in products.items()}
        for name in used:
            dtype = "bfloat16" if name == SETS[-1] else "float32"
            limits[name] += [read or rates[dtype]] if i else []
        for cell in cells.values():
            for name, step in cell.steps.items():
                time_s = seconds(step) / cell.layers.num_layers
                cell.times_s[name] += [time_s] if i else []
    return [
        Rate(
            instruction_set=name,
            codec=codec,
            rows=rows,
            new_tokens=new_tokens,
            context=context,
            kv_bytes=cell.layers.kv_bytes,
            flops=cell.layers.flops,
            call_s=tuple(times_s),
            limits=tuple(limits[name]),
        )
        for codec, cell in cells.items()
        for name, times_s in cell.times_s.items()
    ]


def step_shapes(config: AttentionConfig) -> list[tuple[int, int, int]]:
    """Rows, new tokens and context of all measured steps."""
    decode = [(rows, 1, context) for rows in config.rows for context in config.contexts]
    return decode + [(1, new, context) for new, context in config.chunks]


def claims(found: Sequence[Rate]) -> Mapping[str, float]:
    """Rates over the machine's limits, and speedups of codecs over bfloat16."""
    made = {}
    plain = {(r.instruction_set, r.name): r for r in found if r.codec == PLAIN}
    for rate in found:
        name = f"{rate.instruction_set}_{rate.codec}_{rate.name}"
        made[f"{name}_over_limit"] = rate.over_limit
        base = plain.get((rate.instruction_set, rate.name))
        if base is not None and base is not rate:
            pairs = zip(base.call_s, rate.call_s, strict=True)
            made[f"{name}_speedup"] = statistics.median(a / b for a, b in pairs)
    return made
