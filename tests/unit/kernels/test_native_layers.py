"""The calls of a decode step in C: products, norms, RoPE, attention, recurrent states, chains."""

import ctypes
import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from quire.errors import InvariantError
from quire.kernels.backend import (
    AttentionMath,
    AttentionMeasure,
    AttentionStatistic,
    ChainLayer,
    HeadBuffers,
    LaneSlots,
    LayerPages,
    LayerRecords,
    NewSlots,
    StatisticRows,
    StepShape,
    StoredQueries,
)
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.arguments import (
    ADD,
    AVX2,
    GATE_SILU,
    GROUP_CODES,
    PANEL_COLUMNS,
    unfit_tensors,
)
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.chain import (
    CHAIN_PARTS,
    Chain,
    HeadShape,
    PartTimes,
    RowFunctions,
    empty_heads,
    set_heads,
)
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.linear import (
    CODED,
    KINDS,
    Products,
    can_pack,
    pack,
    pack_gated,
    pack_parts,
    set_input,
    set_output,
)
from quire.kernels.native.recurrent import PagedState, RecurrentUpdates
from support.lanes import num_threads
from support.pairwise import every_pair

LIBRARY = load_library()
PATHS = range(AVX2, LIBRARY.best_path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
pytestmark = pytest.mark.skipif(not PATHS, reason="no C extension with vector instructions")
every_path = pytest.mark.parametrize("path", PATHS, ids=lambda path: f"path{path}")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=PATHS, ids=lambda path: f"path{path}")
def products(request):
    return Products(LIBRARY, request.param)


def seeded(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def expected_product(products, x, weight):
    """The product of the activations that the kernel reads and the decoded weight, float64."""
    if weight.kind in CODED:
        x = decoded(products.code_rows(x))
    return x.double() @ weight.unpacked().double().T


def decoded(rows):
    scales = rows.scales.repeat_interleave(GROUP_CODES, dim=1)[:, : rows.codes.shape[1]]
    return rows.codes.float() * scales


def error(found, expected):
    return float((found.double() - expected).abs().max() / expected.abs().max())


@every_pair(
    kind=KINDS,
    rows=[1, 2, 3, 4, 5, 6, 7, 16, 31, 121, 250],
    shape=[(64, 128), (100, 208), (640, 1040)],
)
def test_product_equals_torch(products, kind, rows, shape):
    outer, inner = shape
    weight = pack(seeded(outer, inner), kind)
    x = seeded(rows, inner).to(products.activation_dtype(weight, torch.float32))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((rows, outer + 3), 7.0, dtype=dtype)
        products.prepare(weight).run(x, out[:, :outer])
        assert error(out[:, :outer], expected_product(products, x, weight)) < TOLERANCE[dtype]
        assert (out[:, outer:] == 7).all()


@every_pair(threads=[1, 2], kind=KINDS, shape=[(192, 512), (100, 208), (2_080, 688)])
def test_a_row_is_independent_of_the_number_of_rows(products, shape, kind, threads):
    outer, inner = shape
    product = products.prepare(pack(seeded(outer, inner), kind))
    x = seeded(200, inner).to(products.activation_dtype(product.weight, torch.float32))
    outs = {rows: torch.empty(rows, outer) for rows in (1, 5, 33, 200)}
    with num_threads(threads):
        for rows, out in outs.items():
            product.run(x[200 - rows :], out)
    for rows, out in outs.items():
        assert torch.equal(out, outs[200][200 - rows :])


@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_addition(products, kind):
    weight, bias = pack(seeded(100, 256), kind), torch.zeros(2 * PANEL_COLUMNS)
    bias[:100] = seeded(100)
    x = seeded(5, 256).to(products.activation_dtype(weight, torch.float32))
    out = seeded(5, 100)
    expected = out.double() + expected_product(products, x, weight) + bias[:100].double()
    products.prepare(weight, bias=bias, finish=ADD).run(x, out)
    assert error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [32, 80, 688])
def test_gated_product_equals_torch_and_that_of_a_row(products, kind, half):
    weight = pack_gated(seeded(half, 256) * 3, seeded(half, 256) + 1, kind)
    x = seeded(100, 256).to(products.activation_dtype(weight, torch.float32))
    product = products.prepare(weight, finish=GATE_SILU)
    alone, few, together = torch.empty(100, half), torch.empty(7, half), torch.empty(100, half)
    product.run(x, together)
    product.run(x[:7], few)
    for row in range(100):
        product.run(x[row : row + 1], alone[row : row + 1])
    assert torch.equal(together, alone)
    assert torch.equal(few, alone[:7])
    both = expected_product(products, x, weight)
    expected = torch.nn.functional.silu(both[:, :half]) * both[:, half:]
    assert error(together, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_joint_weight(products, kind):
    weights = [seeded(100, 256), seeded(32, 256), seeded(64, 256) + 1]
    joint, starts = pack_parts(weights, kind)
    assert starts == (0, 128, 192)
    x = seeded(3, 256).to(products.activation_dtype(joint, torch.float32))
    for start, weight in zip(starts, weights, strict=True):
        part, alone = joint.part(start, len(weight)), pack(weight, kind)
        assert torch.equal(part.unpacked(), alone.unpacked())
        found, expected = torch.empty(3, len(weight)), torch.empty(3, len(weight))
        products.prepare(part).run(x, found)
        products.prepare(alone).run(x, expected)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("kind", "max_error"), [("int8", 0.01), ("int4", 0.16)])
def test_codes_are_near_the_weight(kind, max_error):
    weight = seeded(70, 272)
    found = pack(weight, kind).unpacked()
    assert found.shape == weight.shape
    assert float((found - weight).norm() / weight.norm()) < max_error


@every_pair(
    threads=[1, 2, 3],
    kind=KINDS,
    shape=[
        *((33, 100, 208), (67, 64, 2_064), (130, 192, 512), (250, 160, 128)),
        *((50, 70, 5_632), (40, 64, 28_672)),
    ],
)
def test_many_rows_equal_rows_alone(products, kind, shape, threads):
    rows, outer, inner = shape
    weight, bias = pack(seeded(outer, inner), kind), torch.zeros(-(-outer // 64) * 64)
    bias[:outer] = seeded(outer)
    x = seeded(rows, inner).to(products.activation_dtype(weight, torch.float32))
    product = products.prepare(weight, bias=bias, finish=ADD)
    alone, together = seeded(rows, outer), seeded(rows, outer)
    with num_threads(threads):
        product.run(x, together)
    for row in range(rows):
        product.run(x[row : row + 1], alone[row : row + 1])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_unpacked_weight_is_the_weight(kind):
    weight = seeded(70, 272).to(torch.float32 if kind == "float32" else torch.bfloat16)
    assert torch.equal(pack(weight, kind).unpacked(), weight)
    part = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(70, 272)  # at an odd offset
    assert torch.equal(pack(part, kind).unpacked(), weight)


def test_activation_codes_round_to_nearest(products):
    x = seeded(4, 272)
    coded = products.code_rows(x)
    groups = torch.nn.functional.pad(x, (0, 112)).view(4, 3, GROUP_CODES)
    assert torch.allclose(coded.scales, groups.abs().amax(dim=2) / 127)
    assert (decoded(coded) - x).abs().max() <= coded.scales.max() * 0.501
    sums = torch.nn.functional.pad(coded.codes.int(), (0, 112)).view(4, 3, GROUP_CODES).sum(2)
    assert torch.equal(coded.sums, sums.int())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_whose_activations_cannot_be_quantized_in_whole_vectors_are_refused(kind):
    assert can_pack(352, kind)
    assert not can_pack(344, kind)  # 16 activations are quantized at a time

    with pytest.raises(InvariantError, match="multiple of 16, got 344"):
        pack(seeded(64, 344), kind)


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=PATHS, ids=lambda path: f"path{path}")
def functions(request):
    return RowFunctions(request.param)


def run_rows(*steps):
    Chain(LIBRARY, ("norms and RoPE", steps)).run()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 64), (33, 72), (5, 768)])
def test_norm_equals_torch(functions, dtype, rows, width):
    x, weight = seeded(rows, width + 16)[:, :width] * 3, seeded(width)
    out = torch.empty(rows, width, dtype=dtype)
    run_rows(functions.norm(x, weight, 1e-3, out))
    expected = F.rms_norm(x, (width,), weight, eps=1e-3)
    torch.testing.assert_close(out.float(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@every_pair(dtype=ROUNDING, dims=[(16, 16), (48, 16), (64, 64), (96, 48)], normed=[False, True])
def test_heads_are_split_normed_and_rotated(functions, dtype, dims, normed):
    head_dim, rotary_dim = dims
    rows, heads = 7, (4, 2, 2)
    x = seeded(rows, 16 * head_dim)
    norms = (seeded(head_dim), seeded(head_dim) + 1) if normed else None
    columns = (8 * head_dim, 0, 4 * head_dim)
    shape = HeadShape(columns, heads, head_dim, rotary_dim, norms, eps=1e-3)
    angles = seeded(rows, rotary_dim // 2).repeat(1, 2)
    cosine, sine = angles.cos(), angles.sin()
    args = functions.heads(x, shape, dtype)
    args.cosine, args.sine = cosine.data_ptr(), sine.data_ptr()
    found = empty_heads(rows, shape, dtype)
    set_heads(args, found)
    run_rows(args)
    for number, part in enumerate(found):
        start = columns[number]
        expected = x[:, start : start + heads[number] * head_dim].view(rows, -1, head_dim)
        if number < 2:
            if norms is not None:
                expected = F.rms_norm(expected, (head_dim,), norms[number], eps=1e-3)
            expected = rotated(expected, cosine, sine)
        torch.testing.assert_close(
            part.float(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype]
        )


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rows_are_converted_to_and_from_float32(functions, dtype):
    x, narrow, wide = seeded(5, 72), torch.empty(5, 72, dtype=dtype), torch.empty(5, 72)
    run_rows(functions.convert(x, narrow), functions.convert(narrow, wide))
    assert torch.equal(narrow, x.to(dtype))
    assert torch.equal(wide, narrow.float())


def rotated(x, cosine, sine):
    """RoPE as in Transformers (`apply_rotary_pos_emb`); elements beyond are unchanged."""
    width = cosine.shape[1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    other = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * cosine[:, None] + other * sine[:, None], rest], dim=-1)


class NormAndProduct:
    """RMSNorm, then a product with a weight of 256 KiB."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x, self.out = torch.randn(8, 256, generator=generator), torch.zeros(8, 256)
        self.weight, self.ones = torch.randn(256, 256, generator=generator), torch.ones(256)
        self._normed = torch.empty(8, 256)
        self._packed = pack(self.weight, "float32")
        product = Products(LIBRARY).linear_args(self._packed)
        set_input(product, self._normed)
        set_output(product, self.out)
        norm = RowFunctions(LIBRARY.path).norm(self.x, self.ones, 1e-6, self._normed)
        self.chain = Chain(LIBRARY, ("norms and RoPE", [norm]), ("mlp", [product]))
        self.chain.set_rows(8)

    def expected(self):
        normed = torch.nn.functional.rms_norm(self.x, (256,), self.ones, 1e-6)
        return normed @ self.weight.T


@pytest.mark.parametrize("times", [None, PartTimes()], ids=["untimed", "timed"])
def test_calls_run_in_order(times):
    calls = NormAndProduct()
    for rows in (4, 8):
        calls.chain.set_rows(rows)
        calls.chain.run(times)
        found, expected = calls.out[:rows], calls.expected()[:rows]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
        assert not calls.out[rows:].any()


def test_times_are_added_to_the_components_of_the_calls():
    calls, times = NormAndProduct(), PartTimes()
    started_s = time.perf_counter()
    for _ in range(50):
        calls.chain.run(times)
    whole_s = time.perf_counter() - started_s
    found = times.seconds()

    assert list(found) == list(CHAIN_PARTS)
    assert [part for part, part_s in found.items() if part_s] == ["mlp", "norms and RoPE"]
    assert 0 < sum(found.values()) <= whole_s
    calls.chain.run()
    assert times.seconds() == found  # a run without times adds nothing
    times.reset()
    assert not any(times.seconds().values())


HEADS, KV_HEADS, DIM, VALUE_DIM, PAGE, LAYERS = 6, 2, 32, 48, 16, 3
MATH = AttentionMath(DIM**-0.5)


class Step:
    """One decode step of rows with this many slots, in layers that share pages and a table."""

    def __init__(self, slots, dim=DIM, heads=HEADS, dtype=torch.float32):
        rows, columns = len(slots), -(-max(slots) // PAGE)
        generator = torch.Generator().manual_seed(0)
        pages, sizes = rows * LAYERS * columns, [KV_HEADS * PAGE * d for d in (dim, VALUE_DIM)]
        table = torch.arange(pages, dtype=torch.int32).view(rows, LAYERS, columns)
        arena = torch.randn(pages, sum(sizes), generator=generator).to(dtype)
        key, value = (side.unflatten(1, (KV_HEADS, PAGE, -1)) for side in arena.split(sizes, dim=1))
        self.shape = StepShape.of(np.ones(rows, dtype=np.int32))
        self.lanes = LaneSlots(np.array(slots, dtype=np.int32)[:, None], None)
        own, last, self.layers = torch.arange(rows), torch.tensor(slots) - 1, []
        for layer in range(LAYERS):
            page, offset = table[own, layer, last // PAGE].long()[:, None], (last % PAGE)[:, None]
            new = NewSlots(key, value, page, offset.contiguous())
            self.layers.append(ChainLayer(LayerPages(key, value, table, own, layer, 1), new, MATH))
        shapes = (heads, dim), (KV_HEADS, dim), (KV_HEADS, VALUE_DIM), (heads, VALUE_DIM)
        drawn = (torch.randn(rows, *shape, generator=generator).to(dtype) for shape in shapes)
        self.heads = HeadBuffers(*drawn)

    def record(self, apart):
        """Record sums and squares of all rows but the first, and the query of the last row."""
        rows, slots = len(self.lanes.slots), torch.tensor(self.lanes.slots)
        pages = self.layers[0].pages
        each = self.heads.query.shape[1] // KV_HEADS if apart else 1
        generator = torch.Generator().manual_seed(1)
        shape = (2, len(pages.key), KV_HEADS * each, PAGE, 1)
        self.numbers = torch.rand(shape, generator=generator)
        width = self.heads.query.shape[1] // KV_HEADS * self.heads.query.shape[2] + 1
        self.records = torch.zeros(LAYERS, KV_HEADS, 3, width)
        watched = torch.arange(1, rows)
        number = torch.arange(rows, dtype=torch.int32) - 1
        new = torch.ones(rows - 1, dtype=torch.int32)
        self.watched = StatisticRows(watched, watched, slots[1:], new, int(slots.max()), number)
        kinds = ((AttentionMeasure.SUM, "max"), (AttentionMeasure.SQUARES, "mean"))
        for index, layer in enumerate(self.layers):
            places = (torch.tensor(one) for one in ([[index]], [2], [rows - 1], [7.0]))
            tallies = tuple(
                (AttentionStatistic(own, pages.table, index, *kind), self.watched)
                for own, kind in zip(self.numbers, kinds, strict=True)
            )
            records = LayerRecords(tallies, (StoredQueries(self.records, *places),))
            self.layers[index] = layer._replace(records=records)

    def plan(self, backend):
        return backend.plan(self.shape, self.lanes, PAGE, 1)

    def chain(self, backend):
        return backend.chain(self.plan(backend), self.layers, self.heads)

    def attended(self, backend):
        plan, heads, outputs = self.plan(backend), self.heads, []
        for pages, slots, own, _ in self.layers:
            backend.write(slots, heads.key, heads.value)
            fresh = heads.key, heads.value
            outputs.append(backend.attend(plan, pages, own, heads.query, fresh))
        return outputs


def backend_of(path):
    return NativeAttention(replace(LIBRARY, path=path), GatheredAttention(torch.device("cpu")))


@every_path
@pytest.mark.parametrize("slots", [[1], [17, 40, 33], [3000, 5]])
def test_prepared_calls_equal_write_and_attend(path, slots):
    backend = backend_of(path)
    expected = Step(slots).attended(backend)
    step = Step(slots)

    for layer, out in zip(step.chain(backend), expected, strict=True):
        LIBRARY.write(ctypes.byref(layer.write), None)
        LIBRARY.attend(ctypes.byref(layer.attend), LIBRARY.parallel_for, layer.num_threads)
        assert torch.equal(step.heads.out, out)


@every_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "heads", "apart"), [(64, 6, False), (32, 6, True), (64, 20, False)]
)
def test_recorded_statistics_equal_column_sums_and_tally(path, dtype, dim, heads, apart):
    """Groups of 3, and of 10: more query vectors than one walk has. Long rows are divided."""
    backend, slots = backend_of(path), [40, 17, 1, 3000, 260]
    expected, step = (Step(slots, dim, heads, dtype) for _ in range(2))
    expected.record(apart)
    step.record(apart)
    plan, kept = expected.plan(backend), expected.heads
    for layer in expected.layers:
        backend.write(layer.slots, kept.key, kept.value)
        sums = torch.zeros(len(slots), heads, 3008)
        fresh = kept.key, kept.value
        backend.attend(plan, layer.pages, layer.math, kept.query, fresh, column_sums=sums)
        for tally, rows in layer.records.tallies:
            backend.tally(tally, rows, sums)

    for layer in step.chain(backend):
        LIBRARY.write(ctypes.byref(layer.write), None)
        LIBRARY.attend(ctypes.byref(layer.attend), LIBRARY.parallel_for, 2)
    assert torch.equal(step.numbers, expected.numbers)
    stored = step.heads.query[-1].float().view(KV_HEADS, -1).expand(LAYERS, -1, -1)
    assert torch.equal(step.records[:, :, 2, :-1], stored)
    assert (step.records[:, :, 2, -1] == 7).all()
    assert not step.records[:, :, :2].any()


def test_scratch_of_prepared_calls_lives_as_long_as_the_calls():
    backend = backend_of(LIBRARY.path)
    (first, *_) = Step([17]).chain(backend)
    (second, *_) = Step([3000] * 8).chain(backend)  # replaces the scratch memory of the first

    assert first.attend.scratch != second.attend.scratch
    for layer in (first, second):
        memory = [part for part in layer.owner if isinstance(part, torch.Tensor)]
        assert [part.data_ptr() for part in memory] == [layer.attend.scratch]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": torch.empty(12, KV_HEADS, PAGE, DIM, device="meta")}, "not all on the CPU"),
        ({"query": torch.zeros(2, HEADS, DIM, dtype=torch.float64)}, "queries of torch.float64"),
        ({"table": torch.zeros(2, LAYERS, 2, dtype=torch.int64)}, "page table of torch.int64"),
        ({"table": torch.zeros(2, 2, LAYERS, dtype=torch.int32).mT}, "not contiguous"),
        ({"query": torch.zeros(2, HEADS + 1, DIM)}, "for pages of 2 heads"),
        ({"sinks": torch.zeros(HEADS + 1)}, f"{HEADS + 1} sinks for {HEADS} heads"),
        ({"sums": torch.zeros(2, HEADS, 40).mT}, "column sums"),
    ],
    ids=["device", "dtype", "table", "strides", "heads", "sinks", "sums"],
)
def test_what_the_library_cannot_read_is_named(changes, reason):
    step = Step([17, 5])
    pages, _, math, _ = step.layers[0]
    planes = {name: changes[name] for name in ("key", "table") if name in changes}
    pages, math = replace(pages, **planes), replace(math, sinks=changes.get("sinks"))
    query = changes.get("query", step.heads.query)

    assert reason in unfit_tensors(pages, math, query, changes.get("sums"))


STATE_ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROWS, STATE_PAGES = (1, 3), 8


@pytest.fixture(params=PATHS, ids=lambda path: f"path{path}")
def updates(request):
    return RecurrentUpdates(LIBRARY, request.param)


def paged(rows, *shape):
    """A state in pages of a plane that it does not fill; two, if its vectors can be halved."""
    vectors = math.prod(shape[:-1])
    count = 1 if vectors % 2 else 2
    elements = vectors // count * shape[-1]
    plane = seeded(STATE_PAGES, elements + 16)[:, :elements].view(STATE_PAGES, -1, 1, shape[-1])
    pages = torch.tensor([[4, 1], [2, 6], [0, 5]])[:rows, :count].contiguous()
    return PagedState(plane, pages, shape)


def other_pages(state):
    return state.plane[[page for page in range(STATE_PAGES) if page not in state.pages]].clone()


def assert_near(found, expected, dtype):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=STATE_ROUNDING[dtype] * max(scale, 1))


@every_pair(
    dtype=STATE_ROUNDING,
    rows=ROWS,
    heads=[(1, 1), (2, 2), (2, 6)],
    dims=[(8, 8), (128, 128), (20, 36), (64, 72), (96, 200), (513, 8)],
    by_channel=[False, True],
    normed=[True, False],
)
def test_gated_delta_rule_equals_transformers(
    updates, dtype, rows, heads, dims, by_channel, normed
):
    """A head of 513 is wider than the library's, so that Transformers' function runs."""
    (key_heads, num_heads), (key_dim, value_dim) = heads, dims
    key_heads = num_heads if by_channel else key_heads
    # queries, keys and values are parts of one tensor, as behind a convolution
    widths = (key_heads * key_dim, key_heads * key_dim, num_heads * value_dim)
    parts = (seeded(rows, 1, sum(widths)) / key_dim**0.5).to(dtype).split(widths, dim=2)
    query, key, value = (
        part.unflatten(2, (-1, dim))
        for part, dim in zip(parts, (key_dim, key_dim, value_dim), strict=True)
    )
    decays = (key_dim,) if by_channel else ()
    options = {
        "g": -seeded(rows, 1, num_heads, *decays).abs(),
        "beta": seeded(rows, num_heads, 1).to(dtype).sigmoid().transpose(1, 2),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": normed,
    }
    of_heads, of_channels = (
        qwen.torch_recurrent_gated_delta_rule,
        kimi.recurrent_kimi_delta_attention,
    )
    rule = of_channels if by_channel else of_heads
    state = paged(rows, num_heads, key_dim, value_dim)
    others = other_pages(state)
    expected, last = rule(query, key, value, initial_state=state.load(), **options)

    found, returned = updates.delta_rule(rule, query, key, value, initial_state=state, **options)

    assert returned is state
    assert_near(found, expected, dtype)
    assert_near(state.load(), last, torch.float32)
    assert torch.equal(other_pages(state), others)


@every_pair(
    dtype=STATE_ROUNDING,
    rows=ROWS,
    heads=[(1, 1), (4, 2), (6, 6)],
    dims=[(8, 8), (64, 128), (24, 20), (5, 40), (8, 513)],
    of_heads=[True, False],
    with_gate=[False, True],
)
def test_mamba_2_equals_transformers(updates, dtype, rows, heads, dims, of_heads, with_gate):
    """With parameters that are not equal within a head, Transformers' function runs."""
    (num_heads, groups), (dim, size) = heads, dims
    state = paged(rows, num_heads, dim, size)
    decay = -seeded(num_heads, 1, 1).abs().expand(-1, dim, size)
    arguments = (
        seeded(rows, num_heads, dim).to(dtype),
        seeded(rows, 1, num_heads).to(dtype).transpose(1, 2).expand(-1, -1, dim),
        decay if of_heads else decay.contiguous(),
        *seeded(2, rows, groups, size).to(dtype),
        seeded(num_heads, 1).to(dtype).expand(-1, dim),
    )
    gate = seeded(rows, num_heads, dim).to(dtype) if with_gate else None
    options = {"z": gate, "dt_bias": seeded(num_heads, 1).expand(-1, dim), "dt_softplus": True}
    last, others = state.load(), other_pages(state)
    update = mamba2.mamba2_selective_state_update
    expected = update(last, *arguments, **options)

    found = updates.selective_state(update, state, *arguments, **options)

    assert_near(found, expected, dtype)
    assert_near(state.load(), last, dtype)  # Transformers rounds what it adds
    assert torch.equal(other_pages(state), others)


@every_pair(
    dtype=STATE_ROUNDING,
    rows=ROWS,
    shape=[(3, 4, 4), (200, 4, 4), (64, 3, 3), (130, 4, 2)],
    biased=[False, True],
    activation=[None, "silu", "gelu"],
)
def test_convolution_equals_transformers(updates, dtype, rows, shape, biased, activation):
    """GELU is not in the library, so that Transformers' function runs."""
    channels, length, taps = shape
    state = paged(rows, channels, length)
    state.store(state.load().to(dtype))
    x = seeded(rows, 1, channels + 8).to(dtype)[..., :channels].transpose(1, 2)
    weight = seeded(channels, taps).to(dtype)
    bias = seeded(channels).to(dtype) if biased else None
    last, others = state.load().to(dtype), other_pages(state)
    update = qwen.causal_conv1d_update
    expected = update(x, last, weight, bias, activation)

    found = updates.convolve(update, x, state, weight, bias, activation)

    assert_near(found, expected, dtype)
    assert torch.equal(state.load(), last.float())
    assert torch.equal(other_pages(state), others)


@every_pair(
    dtype=STATE_ROUNDING,
    rows=ROWS,
    tokens=[2, 16, 75],
    heads=[(1, 1), (2, 6)],
    dims=[(8, 8), (128, 128), (20, 36), (513, 8)],
    by_channel=[False, True],
    begins=[True, False],
)
def test_gated_delta_rule_of_chunks_equals_transformers(
    updates, dtype, rows, tokens, heads, dims, by_channel, begins
):
    (key_heads, num_heads), (key_dim, value_dim) = heads, dims
    key_heads = num_heads if by_channel else key_heads
    decays = (key_dim,) if by_channel else ()
    initial = None if begins else seeded(rows, num_heads, key_dim, value_dim)
    # channels are the last dimension of a convolution
    query, key = seeded(2, rows, key_heads, key_dim, tokens).to(dtype).permute(0, 1, 4, 2, 3)
    arguments = query, key, seeded(rows, tokens, num_heads, value_dim).to(dtype)
    options = {
        "g": -seeded(rows, tokens, num_heads, *decays).abs(),
        "beta": seeded(rows, num_heads, tokens).to(dtype).sigmoid().transpose(1, 2),
        "initial_state": initial,
    } | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    rule = kimi.chunk_kimi_delta_attention if by_channel else qwen.torch_chunk_gated_delta_rule
    before = None if initial is None else initial.clone()
    expected, last = rule(*arguments, **options)

    found, state = updates.delta_rule(rule, *arguments, **options)

    assert isinstance(state, Tensor)
    assert_near(found, expected, dtype)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)
    assert before is None or torch.equal(before, initial)


@every_pair(
    dtype=STATE_ROUNDING,
    rows=ROWS,
    tokens=[2, 16, 75],
    heads=[(1, 1), (4, 2)],
    dims=[(8, 8), (64, 128), (24, 20), (8, 513)],
    begins=[True, False],
    limit=[math.inf, 0.5],
    skips=[True, False],
)
def test_mamba_2_of_chunks_equals_transformers(
    updates, dtype, rows, tokens, heads, dims, begins, limit, skips
):
    (num_heads, groups), (dim, size) = heads, dims
    initial = None if begins else seeded(rows, num_heads, dim, size)
    arguments = (
        seeded(rows, tokens, num_heads, dim).to(dtype),
        seeded(rows, tokens, num_heads).to(dtype),
        -seeded(num_heads).abs(),
        *seeded(2, rows, tokens, groups, size).to(dtype),
    )
    options = {"chunk_size": 32, "D": seeded(num_heads) if skips else None, "dt_softplus": True}
    options |= {"dt_bias": seeded(num_heads), "dt_limit": (0.0, limit)}
    options |= {"initial_states": initial, "return_final_states": True}
    before = None if initial is None else initial.clone()
    expected, last = mamba2.mamba2_chunk_scan(*arguments, **options)

    found, state = updates.scan(mamba2.mamba2_chunk_scan, *arguments, **options)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)
    assert before is None or torch.equal(before, initial)


def test_functions_are_replaced_by_name(updates):
    functions = {"causal_conv1d_update": qwen.causal_conv1d_update, "softmax": torch.softmax}

    assert set(updates.replacements(functions)) == {"causal_conv1d_update"}
