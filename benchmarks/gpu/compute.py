"""Parts that compute: equality with Transformers, decode attention, a decode step, prefill.

Kernels are compared with a measured copy, steps with the time to read weights and KV once, prefill
with the measured rate of a matrix product.
"""

import statistics
from collections.abc import Mapping

import torch

from benchmarks.common.attention import AttentionShape, fill_pages
from benchmarks.common.decoding import generate_all
from benchmarks.common.models import SHAPES
from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.gpu.bench import GpuBench, decode_times, new_tokens_of
from benchmarks.gpu.others import OTHERS
from quire.errors import ConfigError
from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.select import select_backend
from quire.kv.store import PageStore
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel
from quire.plan.roofline import weights_read_bytes

NEAR = 1e-3
"""Logits that differ by less than this may be exchanged by rounding."""


def run_equality(bench: GpuBench) -> PartResult:
    """Run the part.

    equal_outputs: fraction of the outputs that are equal up to a near tie of the two likeliest
    tokens.
    """
    config = bench.config
    shape = SHAPES["15m" if bench.target.on_gpu else "tiny"]()
    rows: list[tuple[Cell, ...]] = []
    for graphs in (None, False):
        model = bench.model_of(shape, dtype=torch.float32)
        prompts = bench.prompts(config.equal_prompts, 40, shape.vocab_size)
        prompts = [prompt[: 5 + 3 * n] for n, prompt in enumerate(prompts)]
        kv_bytes = 4 * bench.kv_bytes(model, len(prompts), 64 + config.equal_tokens)
        engine = bench.engine(model, kv_bytes, len(prompts), cuda_graphs=graphs)
        outputs = generate_all(engine, prompts, config.equal_tokens).answers
        found = [
            agrees(model, prompt, [*tokens])
            for prompt, tokens in zip(prompts, outputs, strict=True)
        ]
        stats = engine.stats().graphs
        replayed = 0 if stats is None else stats.replayed
        name = "with graphs where possible" if graphs is None else "without graphs"
        rows.append((name, engine.pool.kv.backend.name, replayed, sum(found), len(found)))
    equal = min(int(row[3] or 0) / int(row[4] or 1) for row in rows)
    return PartResult(
        claims={"equal_outputs": equal},
        tables=(
            Table(
                name="gpu-equality",
                caption=(
                    f"{bench.where} Greedy outputs of {config.equal_tokens} tokens in float32 that "
                    "equal the likeliest tokens of Transformers' eager attention, up to a near tie."
                ),
                columns=("decode steps", "attention", "replayed", "equal", "outputs"),
                rows=tuple(rows),
            ),
        ),
    )


def agrees(model: LoadedModel, prompt: list[int], tokens: list[int]) -> bool:
    """Whether each token is the likeliest after the tokens before it, or nearly so."""
    decoder = model.decoder
    reference = getattr(decoder, "reference_logits")  # noqa: B009 - not part of the protocol
    ids = torch.tensor(prompt + tokens, device=decoder.device)
    logits = reference(ids)[len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens, device=decoder.device)[:, None])[:, 0]
    return bool((logits.amax(dim=1) - chosen <= NEAR).all())


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


VARIANTS: dict[str, dict[str, bool]] = {
    "Quire": {},
    "Quire, --no-async-scheduling": {"async_scheduling": False},
    "Quire, --no-cuda-graphs": {"cuda_graphs": False},
}


def run_step(bench: GpuBench) -> PartResult:
    """Run the part.

    step_over_floor: time of a decode step over the time of reading weights and KV at the bandwidth
    of a measured copy. graphs_gain: time without CUDA graphs over that with them, if they ran.
    async_gain: time without asynchronous scheduling over that with it, if it ran.
    """
    rows: list[tuple[Cell, ...]] = []
    found = {}
    for name, options in VARIANTS.items():
        step_s, floor_s, replayed = _quire(bench, options)
        found[name] = step_s
        rows.append((name, 1e3 * step_s, bench.config.rows / step_s, step_s / floor_s, replayed))
        bench.free()
    own_s, waiting_s, launched_s = found.values()
    claims: Numbers = {
        "step_over_floor": own_s / floor_s,
        "async_gain": waiting_s / own_s,
        "graphs_gain": launched_s / own_s,
    }
    for name in bench.config.others:
        other = OTHERS[name](bench)
        ms = None if other.step_s is None else 1e3 * other.step_s
        rate = None if other.step_s is None else bench.config.rows / other.step_s
        over = None if other.step_s is None else other.step_s / floor_s
        rows.append((other.label, ms, rate, over, other.note))
        if other.step_s is not None:
            claims[f"{name}_step_over_quire"] = other.step_s / own_s
        bench.free()
    return PartResult(
        claims=claims,
        tables=(
            Table(
                name="gpu-step",
                caption=(
                    f"{bench.where} A decode step of {bench.config.model} in {bench.config.dtype} "
                    f"with random weights, {bench.config.rows} rows of at least "
                    f"{bench.config.step_context:,} tokens; medians of {bench.config.steps} steps. "
                    f"Weights and KV can be read in {1e3 * floor_s:.3f} ms. Last column: steps "
                    "that a CUDA graph ran, or a remark."
                ),
                columns=("engine", "ms", "tokens/s", "over floor", "graphs"),
                rows=tuple(rows),
            ),
        ),
    )


def _quire(bench: GpuBench, options: Mapping[str, bool]) -> tuple[float, float, int]:
    """Median seconds of a step, the floor in seconds, and steps that a graph ran."""
    config = bench.config
    most = new_tokens_of(config.rows, config.step_context, config.warm_steps + config.steps)
    total = config.step_context + most
    model = bench.large_model(total)
    kv_bytes = bench.kv_bytes(model, config.rows, total)
    bench.target.require(kv_bytes, "the KV memory", "lower rows or step_context")
    engine = bench.engine(
        model,
        kv_bytes,
        config.rows,
        cuda_graphs=options.get("cuda_graphs"),
        async_scheduling=options.get("async_scheduling"),
    )
    prompts = bench.prompts(config.rows, config.step_context, model.spec.vocab_size)
    times_s = decode_times(engine, prompts, warm_steps=config.warm_steps, steps=config.steps)
    stats = engine.stats().graphs
    return statistics.median(times_s), floor_seconds(bench), 0 if stats is None else stats.replayed


def floor_seconds(bench: GpuBench) -> float:
    """Seconds to read all weights, and the KV that every row has at the least, at the copy's rate.

    Rows have generated some tokens more, so that the floor is a little too low.
    """
    config, value_bytes = bench.config, bench.dtype.itemsize
    kv_bytes = config.rows * config.spec.kv_bytes(config.step_context, value_bytes)
    weight_bytes = weights_read_bytes(config.spec, config.rows, value_bytes)
    return float(weight_bytes + kv_bytes) / bench.copy_bytes_per_s


def run_prefill(bench: GpuBench) -> PartResult:
    """Run the part.

    prefill_share: FLOP/s of a prefill over the FLOP/s of a large product.
    """
    config = bench.config
    model = bench.large_model(config.prefill_tokens + 64)
    engine = bench.engine(model, bench.kv_bytes(model, 2, config.prefill_tokens), 2)
    prompts = bench.prompts(config.repeats + 1, config.prefill_tokens, model.spec.vocab_size)
    times_s = [generate_all(engine, [prompt], 1).total_s for prompt in prompts]
    prefill_s = statistics.median(times_s[1:])
    rate = prefill_flops(config.spec, config.prefill_tokens) / prefill_s
    share = rate / bench.product_flops_per_s
    return PartResult(
        claims={"prefill_share": share},
        tables=(
            Table(
                name="gpu-prefill",
                caption=(
                    f"{bench.where} Prefill of {config.prefill_tokens:,} tokens of {config.model} "
                    f"in {config.dtype}; median of {config.repeats}. Product: "
                    f"{' x '.join(f'{size:,}' for size in config.product)}."
                ),
                columns=("tokens", "s", "TFLOP/s", "product, TFLOP/s", "share"),
                rows=(
                    (
                        config.prefill_tokens,
                        prefill_s,
                        rate / 1e12,
                        bench.product_flops_per_s / 1e12,
                        share,
                    ),
                ),
            ),
        ),
        raw={"seconds": times_s},
    )


def prefill_flops(spec: ModelSpec, tokens: int) -> int:
    """FLOPs of a prefill: products with all layers' weights, causal attention, one head row."""
    mlp = (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.intermediate_size
    products = 2 * tokens * (sum(spec.projections) + spec.num_layers * mlp)
    scores = 2 * spec.num_layers * tokens**2 * spec.num_heads * spec.head_dim  # half of 4 n^2 d
    return products + scores + 2 * spec.hidden_size * spec.vocab_size
