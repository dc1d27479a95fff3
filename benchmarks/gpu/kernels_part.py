"""Decode attention over scattered pages, against a measured copy."""

import torch

from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.gpu.bench import GpuBench
from quire.errors import ConfigError
from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.select import select_backend
from quire.kv.store import PageStore
from quire.layout.layout import layout_for
from quire.profile.ceilings import AttentionShape, fill_pages

PAGE_TOKENS = 16
_SCRATCH_BYTES = 256 << 20
_CALLS = 10


class DecodeAttention:
    """Decode attention of one layer over pages on the device.

    Args:
        bench: the run.
        codec: codec of the pages.

    Attributes:
        kv_bytes: bytes that a call reads, including codec metadata.
        backend: the selected backend.
    """

    def __init__(self, bench: GpuBench, codec: str) -> None:
        config, device = bench.config, bench.target.device
        self._shape = shape = _shape(bench)
        layout = layout_for(shape.spec, page_tokens=PAGE_TOKENS, codec=codec)
        (group,) = layout.groups
        per_row = -(-shape.tokens // PAGE_TOKENS)
        self.kv_bytes = shape.batch * per_row * group.page_class.page_bytes
        bench.target.require(self.kv_bytes, f"KV in {codec}", "lower rows or context")
        store = PageStore(self.kv_bytes, device)
        views = store.views(group.page_class)
        assert views.value is not None, "attention layers have a value plane"
        fill_pages(views, shape.head_dim, torch.Generator(device).manual_seed(0))
        scattered = torch.randperm(shape.batch * per_row, generator=torch.Generator())
        self._pages = LayerPages(
            key=views.key,
            value=views.value,
            table=scattered.int().view(shape.batch, 1, per_row).to(device),
            rows=torch.arange(shape.batch, device=device),
            first_lane=0,
            num_lanes=1,
            coded=views.coded,
        )
        self.backend = select_backend(
            config.attention,
            device,
            dtype=bench.dtype,
            head_dim=shape.head_dim,
            scratch_bytes=_SCRATCH_BYTES,
            codec=codec,
        ).backend
        heads = (shape.batch, shape.num_heads, shape.head_dim)
        self._query = torch.randn(heads, device=device).to(bench.dtype)
        fresh = torch.randn(shape.batch, shape.num_kv_heads, shape.head_dim, device=device)
        self._fresh = fresh.to(bench.dtype), fresh.to(bench.dtype)
        self._math = AttentionMath(shape.head_dim**-0.5)
        self._plan = self._make_plan(group.page_class.page_bytes // PAGE_TOKENS)

    def __call__(self) -> torch.Tensor:
        """Compute attention once."""
        return self.backend.attend(self._plan, self._pages, self._math, self._query, self._fresh)

    def _make_plan(self, slot_bytes: int) -> object:
        shape = self._shape
        step = StepShape.of(torch.ones(shape.batch, dtype=torch.int32).numpy())
        slots = torch.full((shape.batch, 1), shape.tokens, dtype=torch.int32).numpy()
        return self.backend.plan(step, LaneSlots(slots, None), PAGE_TOKENS, slot_bytes)


def run_kernels(bench: GpuBench) -> PartResult:
    """Run the part.

    attention_copy_share: bytes of KV read per second over the bytes per second of a copy, plain
    pages. attention_copy_share_CODEC: the same for pages of a codec.
    """
    rows: list[tuple[Cell, ...]] = []
    claims: Numbers = {}
    copy = bench.copy_bytes_per_s
    for number, codec in enumerate(bench.config.codecs):
        plain = bench.config.dtype if number == 0 else codec
        attention = DecodeAttention(bench, plain)
        calls = bench.target.repeated(attention, _CALLS)
        call_s = bench.target.median(calls, bench.config.repeats) / _CALLS
        rate = attention.kv_bytes / call_s
        claims["attention_copy_share" + (f"_{codec}" if number else "")] = rate / copy
        rows.append(
            (plain, attention.backend.name, attention.kv_bytes / 1e9, 1e3 * call_s, rate / 1e9)
        )
        del attention
        bench.free()
    rows.append(("copy", None, 2 * bench.config.copy_bytes / 1e9, None, copy / 1e9))
    return PartResult(
        claims=claims,
        tables=(
            Table(
                name="gpu-kernels",
                caption=(
                    f"{bench.where} Decode attention of one layer, {bench.config.rows} x "
                    f"{bench.config.context:,} tokens, pages scattered at random; medians of "
                    f"{bench.config.repeats} repeats of {_CALLS} calls, as a CUDA graph if that is "
                    "possible. The copy counts bytes read and written."
                ),
                columns=("KV", "attention", "GB", "ms", "GB/s"),
                rows=tuple(rows),
            ),
        ),
    )


def _shape(bench: GpuBench) -> AttentionShape:
    spec = bench.config.spec
    if bench.config.context % PAGE_TOKENS:
        raise ConfigError(f"expected a context that is a multiple of {PAGE_TOKENS} tokens")
    return AttentionShape(
        batch=bench.config.rows,
        tokens=bench.config.context,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_tokens=PAGE_TOKENS,
    )
