"""Attention over pages: every backend equals the reference, codes equal decoded values.

Each quantized memory has a float32 twin that stores the decoded values. Both memories run the same
steps, evictions, forks and swaps; codes move bit for bit.
"""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.codecs.registry import make_codec
from quire.errors import InvariantError
from quire.kernels.backend import AttentionMath
from quire.kernels.gathered import GatheredAttention
from quire.kernels.paging import gather_pages
from quire.kernels.reference_backend import ReferenceAttention, attend_reference
from quire.kernels.select import select_backend
from quire.kernels.sparse import select_pages
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.lane_reader import LaneReader
from quire.kv.paged_kv import allocate_kv
from quire.kv.sharing import fork
from quire.kv.step import StepAttention
from quire.kv.swap import swap_in, swap_out
from quire.layout.codec_names import CODECS, codec_pair
from quire.layout.kv_format import fill_plain
from quire.layout.layout import layout_for
from quire.layout.pages import CacheLayout, LaneGroup, kv_pages
from quire.layout.sparse import parse_sparse
from support.interpreted import triton_backend
from support.lanes import grown_step
from support.model_specs import small_spec

NUM_HEADS = 4
LAYERS = ((2, 10, 6), (4, 8, 8), (2, 10, 6), (2, 6, 12))
"""KV heads, elements of a key, elements of a value."""
CPU = torch.device("cpu")


def pages_of(codec, head_dim, value_dim, **shape):
    key, value = codec_pair(codec)
    return kv_pages(key=key, value=value, head_dim=head_dim, value_dim=value_dim, **shape)


def make_layout(page_tokens, dtype):
    """Two full layers, a window layer, and a layer with one-head pages, each of other widths."""

    def pages(layer, *, lanes=1, positions=True):
        heads, *dims = LAYERS[layer]
        shape = {"heads": heads // lanes, "tokens": page_tokens, "positions": positions}
        return pages_of(dtype, *dims, **shape)

    ragged = {"lanes_per_layer": 2, "ordered": False}
    return CacheLayout(
        (
            LaneGroup(name="full", page_class=pages(0), layers=(0, 2), ordered=False),
            LaneGroup(name="window", page_class=pages(1, positions=False), layers=(1,), window=5),
            LaneGroup(name="ragged", page_class=pages(3, lanes=2), layers=(3,), **ragged),
        )
    )


def make_kv(page_tokens, backend, dtype="float32"):
    layout = make_layout(page_tokens, dtype)
    kv = allocate_kv(layout, layout.smallest_sequence_bytes * 200, 8, device=CPU, backend=backend)
    kv.store.arena.fill_(0xFF)  # NaN in every float type: detects reads of free slots
    return kv


def start_rows(kvs, count):
    for kv in kvs:
        rows = [kv.memory.start() for _ in range(count)]
    return rows


def run_step(kv, tokens, tensors, math):
    """Grow the rows, then attend in every layer; returns [tokens, heads, dim] of each."""
    step = grown_step(kv, tokens)[0]
    return [step.attend(layer, math, *parts) for layer, parts in enumerate(tensors)]


def draw_tensors(generator, count, dtype=torch.float32):
    def drawn(*shape):
        return torch.randn(count, *shape, generator=generator).to(dtype)

    return [
        [drawn(NUM_HEADS, key_dim), drawn(heads, key_dim), drawn(heads, value_dim)]
        for heads, key_dim, value_dim in LAYERS
    ]


def evict_some(kvs, row, rng):
    for name in ("full", "ragged"):
        slots = kvs[0].memory.tables[name].num_slots[row]
        keep = rng.random((len(slots), int(slots.max(initial=0)))) < 0.7
        keep[:, :1] = True
        if name == "full":
            keep[:] = keep[0]  # equal counts in the full group
        for kv in kvs:
            commit_compaction(kv.memory, plan_compaction(kv.memory, name, row, keep))


@pytest.mark.parametrize("name", ["gathered", "auto"])  # auto: native if it was built
@given(
    seed=st.integers(0, 10_000),
    page_tokens=st.sampled_from([1, 3, 16]),
    softcap=st.sampled_from([None, 3.0]),
    sinks=st.booleans(),
    scratch_bytes=st.sampled_from([1, 10_000, 1 << 26]),
)
def test_backends_equal_the_reference(name, seed, page_tokens, softcap, sinks, scratch_bytes):
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    options = {"head_dim": {layer[1:] for layer in LAYERS}, "scratch_bytes": scratch_bytes}
    choice = select_backend(name, CPU, dtype=torch.float32, **options)
    kvs = [make_kv(page_tokens, backend) for backend in (ReferenceAttention(), choice.backend)]
    logits = torch.randn(NUM_HEADS, generator=generator) if sinks else None
    math = AttentionMath(scale=0.4, softcap=softcap, sinks=logits)
    rows = start_rows(kvs, 4)
    for _ in range(5):
        chosen = [row for row in rows if rng.random() < 0.8] or rows
        tokens = {row: int(rng.choice([1, 1, 2, 7, 20])) for row in chosen}
        tensors = draw_tensors(generator, sum(tokens.values()))
        expected, got = (run_step(kv, tokens, tensors, math) for kv in kvs)

        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        evict_some(kvs, int(rng.choice(rows)), rng)
        for kv in kvs:
            kv.memory.check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_pages_stay_near_the_float32_reference(dtype):
    torch_dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    kvs = [make_kv(4, b, dtype) for b in (ReferenceAttention(), GatheredAttention(CPU))]
    rows = start_rows(kvs, 3)
    math = AttentionMath(scale=0.35)
    for counts in ([9, 1, 30], [1, 1, 1], [1, 5, 1]):
        tokens = dict(zip(rows, counts, strict=True))
        tensors = draw_tensors(generator, sum(counts), torch_dtype)
        expected, got = (run_step(kv, tokens, tensors, math) for kv in kvs)

        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_column_sums_of_the_reference_are_the_attention_per_slot():
    """Of two equal products, query 0 sees slot 0 only (weight 1), query 1 both (1/2 each)."""
    query, key, math = torch.zeros(2, 1, 4), torch.randn(2, 1, 4), AttentionMath(scale=1.0)
    positions = {"query_positions": torch.arange(2), "key_positions": torch.arange(2)}
    out, sums = attend_reference(query, key, key, math=math, **positions)

    assert sums.tolist() == [[1.5, 0.5]]
    torch.testing.assert_close(out[1], key.mean(dim=0))


@pytest.mark.parametrize(("tokens", "one_row"), [([31, 1], 4_096), ([1, 1], 0)])
def test_scratch_is_bounded_and_reported(tokens, one_row):
    """Eight rows of 32 slots, or of 2 slots in pages of 16 (2 KiB), in one layer."""
    backend = GatheredAttention(CPU, scratch_bytes=8_192)
    kv, generator = make_kv(16, backend), torch.Generator().manual_seed(0)
    rows = [kv.memory.start() for _ in range(8)]
    for count in tokens:
        tensors = draw_tensors(generator, count * 8)
        run_step(kv, dict.fromkeys(rows, count), tensors, AttentionMath(scale=1.0))

    assert one_row in (0, 32 * 2 * (10 + 6) * 4)
    assert one_row <= backend.peak_scratch_bytes <= 8_192


HEAD_DIM, VALUE_DIM, NUM_KV_HEADS, CODED_LAYERS = 16, 32, 2, 3
PAGE = 4
BY_TOKEN = [name for name, codec in CODECS.items() if not codec.is_plain and not codec.per_page]
BY_TOKEN = [name for name in BY_TOKEN if not CODECS[name].constants]
BY_TOKEN += ["int4:group=8", "int8/int4", "float32/int8", "int4_hadamard/float32"]


def make_coded_kv(codec, backend, page_tokens):
    """Make a memory with an unordered layer, a layer with one-head pages and a window layer."""

    def pages(heads, *, positions=True):
        shape = {"heads": heads, "tokens": page_tokens, "positions": positions}
        return pages_of(codec, HEAD_DIM, VALUE_DIM, **shape)

    ragged = {"lanes_per_layer": 2, "ordered": False}
    ordered = pages(NUM_KV_HEADS, positions=False)
    layout = CacheLayout(
        (
            LaneGroup(name="full", page_class=pages(NUM_KV_HEADS), layers=(0,), ordered=False),
            LaneGroup(name="ragged", page_class=pages(1), layers=(1,), **ragged),
            LaneGroup(name="window", page_class=ordered, layers=(2,), window=7),
        )
    )
    num_pages = max(150, 600 // page_tokens)  # at most six rows of 80 tokens, and copies of forks
    total_bytes = layout.smallest_sequence_bytes * num_pages
    kv = allocate_kv(layout, total_bytes, 8, device=CPU, backend=backend)
    kv.store.arena.fill_(0xFF)  # NaN in every float type; no encoder writes this code
    return kv


class Twins:
    """A quantized memory and its float32 twin, always in the same state."""

    def __init__(self, codec, backend, page_tokens, seed):
        sides = zip(codec_pair(codec), (HEAD_DIM, VALUE_DIM), strict=True)
        self.codecs = [make_codec(*side) for side in sides]
        self.coded = make_coded_kv(codec, backend, page_tokens)
        self.plain = make_coded_kv("float32", GatheredAttention(CPU), page_tokens)
        self.both = (self.coded, self.plain)
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def start(self):
        _, row = [kv.memory.start() for kv in self.both]
        return row

    def step(self, tokens):
        """Grow rows, compute attention in all layers, and compare the outputs."""
        coded, plain = (grown_step(kv, tokens)[0] for kv in self.both)
        for layer in range(CODED_LAYERS):
            query, key, value = self.draw(sum(tokens.values()))
            got = coded.attend(layer, MATH, query, key, value)
            decoded = [
                codec.decode(codec.encode(x[:, :, None])).squeeze(2)
                for codec, x in zip(self.codecs, (key, value), strict=True)
            ]
            expected = plain.attend(layer, MATH, query, *decoded)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

    def draw(self, count):
        shapes = (NUM_HEADS, HEAD_DIM), (NUM_KV_HEADS, HEAD_DIM), (NUM_KV_HEADS, VALUE_DIM)
        return [torch.randn(count, *shape, generator=self.generator) for shape in shapes]

    def evict(self, row):
        for name in ("full", "ragged"):
            slots = self.coded.memory.tables[name].num_slots[row]
            keep = self.rng.random((len(slots), int(slots.max(initial=0)))) < 0.7
            keep[:, :1] = True
            for kv in self.both:
                commit_compaction(kv.memory, plan_compaction(kv.memory, name, row, keep))

    def fork(self, row):
        _, child = [fork(kv.memory, row) for kv in self.both]
        return child

    def swap(self, row):
        for kv in self.both:
            swapped = swap_out(kv.memory, [row])
            if not kv.memory.used_bytes:
                kv.store.arena.fill_(0xFF)
            [back] = swap_in(kv.memory, swapped)
        return back

    def compare(self, row):
        """Check that the quantized lanes decode to the twin's values, bit for bit."""
        for name in ("full", "ragged"):
            coded, plain = (LaneReader(kv, name, row) for kv in self.both)
            assert torch.equal(coded.positions, plain.positions)
            assert torch.equal(coded.keys(), plain.keys())
            assert torch.equal(coded.values(), plain.values())


MATH = AttentionMath(scale=HEAD_DIM**-0.5)


@pytest.mark.parametrize("codec", BY_TOKEN)
@settings(max_examples=4)
@given(
    seed=st.integers(0, 10_000),
    page_tokens=st.sampled_from([1, 3, 16]),
    scratch_bytes=st.sampled_from([1, 20_000, 1 << 26]),
)
def test_attention_over_codes_equals_attention_over_decoded_values(
    codec, seed, page_tokens, scratch_bytes
):
    backend = GatheredAttention(CPU, scratch_bytes=scratch_bytes)
    twins = Twins(codec, backend, page_tokens, seed)
    rows = [twins.start() for _ in range(3)]
    for _ in range(4):
        chosen = [row for row in rows if twins.rng.random() < 0.8] or rows
        twins.step({row: int(twins.rng.choice([1, 1, 2, 9, 20])) for row in chosen})
        twins.evict(int(twins.rng.choice(rows)))
        rows[0] = twins.swap(rows[0])
        if len(rows) < 6:
            rows.append(twins.fork(int(twins.rng.choice(rows))))
        for row in rows:
            twins.compare(row)
        for kv in twins.both:
            kv.memory.check()


@pytest.mark.parametrize("codec", BY_TOKEN)
def test_reference_backend_attends_to_codes(codec):
    twins = Twins(codec, ReferenceAttention(), 4, seed=1)
    rows = [twins.start() for _ in range(2)]
    for count in (9, 1, 6):
        twins.step(dict.fromkeys(rows, count))
        twins.evict(rows[0])


def slot_bytes(kv, name, row):
    """All bytes of each slot (codes, scales, outliers) by lane and position."""
    table, found = kv.memory.tables[name], {}
    views = kv.store.views(table.group.page_class)
    for lane, held in enumerate(table.num_slots[row].tolist()):
        for slot in range(held):
            page, offset = int(table.pages[row, lane, slot // PAGE]), slot % PAGE
            planes = [plane[page, :, offset] for plane in views.by_slot]
            raw = b"".join(plane.contiguous().numpy().tobytes() for plane in planes)
            found[lane, int(views.positions[page, offset])] = raw
    return found


@pytest.mark.parametrize("codec", BY_TOKEN)
def test_codes_and_scales_move_bit_for_bit(codec):
    """Evictions move slots into holes; forks and swaps copy pages."""
    kv = make_coded_kv(codec, GatheredAttention(CPU), PAGE)
    row, generator = kv.memory.start(), torch.Generator().manual_seed(4)
    step = grown_step(kv, {row: 23})[0]
    for layer in range(CODED_LAYERS):
        shapes = (NUM_HEADS, HEAD_DIM), (2, HEAD_DIM), (2, VALUE_DIM)
        tensors = [torch.randn(23, *shape, generator=generator) for shape in shapes]
        step.attend(layer, MATH, *tensors)
    written = {name: slot_bytes(kv, name, row) for name in ("full", "ragged")}

    child = fork(kv.memory, row)
    for name, before in written.items():
        lanes = 1 if name == "full" else 2
        keep = np.random.default_rng(5).random((lanes, 23)) < 0.6
        plan = plan_compaction(kv.memory, name, row, keep)
        assert len(plan.moves)
        commit_compaction(kv.memory, plan)
        after = slot_bytes(kv, name, row)
        assert len(after) == keep.sum()
        assert after.items() <= before.items()
    after_eviction = {name: slot_bytes(kv, name, row) for name in written}
    swapped = swap_out(kv.memory, [row, child])
    kv.store.arena.fill_(0xFF)
    row, child = swap_in(kv.memory, swapped)

    assert {name: slot_bytes(kv, name, row) for name in written} == after_eviction
    assert {name: slot_bytes(kv, name, child) for name in written} == written


@pytest.mark.parametrize("codec", ["int8", "int4_outliers"])
def test_slots_move_identically_in_c_and_in_torch(codec):
    """The arenas are equal byte for byte, if the C extension was built."""
    options = {"head_dim": {(HEAD_DIM, VALUE_DIM)}, "scratch_bytes": 1 << 20}
    auto = select_backend("auto", CPU, dtype=torch.float32, **options)
    arenas = []
    for backend in (auto.backend, GatheredAttention(CPU)):
        twins = Twins(codec, backend, 4, seed=3)
        row = twins.start()
        for _ in range(3):
            twins.step({row: 11})
            twins.evict(row)
        twins.compare(row)
        arenas.append(twins.coded.store.arena)

    assert torch.equal(*arenas)


class RecordsColumnSums:
    """A backend that computes column sums in every call of `attend`."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def attend(self, *arguments, **_options):
        self.column_sums = torch.zeros(3, NUM_HEADS, 16)
        return self._inner.attend(*arguments, column_sums=self.column_sums)


def test_column_sums_over_codes_equal_those_of_the_reference():
    backends = [RecordsColumnSums(b) for b in (GatheredAttention(CPU), ReferenceAttention())]
    twins = Twins("int4", backends[0], 4, seed=5)
    reference = make_coded_kv("int4", backends[1], 4)
    rows = [twins.start() for _ in range(3)]
    assert rows == [reference.memory.start() for _ in range(3)]
    for tokens in ([6, 6, 6], [1, 1, 5]):
        drawn = twins.draw(sum(tokens))
        for kv in (twins.coded, reference):
            counts = dict(zip(rows, tokens, strict=True))
            grown_step(kv, counts)[0].attend(0, MATH, *drawn)
        sums = [backend.column_sums for backend in backends]

        torch.testing.assert_close(*sums, atol=1e-5, rtol=1e-4)
        assert sums[0].sum() == pytest.approx(NUM_HEADS * sum(tokens), rel=1e-4)


def test_scratch_includes_decoded_values_and_stays_below_its_limit():
    """32 slots of two heads of 16 + 32: float32 keys and values, and a temporary copy: 24 KiB."""
    backend = GatheredAttention(CPU, scratch_bytes=40_000)
    twins = Twins("int4", backend, 16, seed=0)
    rows = [twins.start() for _ in range(8)]
    twins.step(dict.fromkeys(rows, 31))
    twins.step(dict.fromkeys(rows, 1))

    one_row = 32 * NUM_KV_HEADS * (HEAD_DIM + VALUE_DIM) * 2 * 4
    assert one_row == 24_576
    assert one_row <= backend.peak_scratch_bytes <= 40_000


def test_slot_with_shared_scales_cannot_be_moved():
    kv = make_coded_kv("int4_page", GatheredAttention(CPU), 4)
    page_class = kv.memory.layout.groups[0].page_class
    slot = np.array([0], dtype=np.int32), np.array([1])

    with pytest.raises(InvariantError, match="slots of pages in int4_page cannot move"):
        kv.store.move_slots(page_class, slot, slot)


# ---- bounds of pages -----------------------------------------------------------------------------


def check_bounds(kv, rows):
    """Bounds of pages with one owner are those of its live keys; others contain them."""
    for group in kv.memory.layout.groups:
        table, views = kv.memory.tables[group.name], kv.store.views(group.page_class)
        pool, tokens = kv.memory.pools[group.page_class], group.page_class.tokens
        if not group.page_class.has_bounds:
            continue
        for row in rows:
            for lane, held in enumerate(table.num_slots[row].tolist()):
                for column in range(-(-held // tokens)):
                    page = int(table.pages[row, lane, column])
                    key = views.key[page].float()
                    if views.coded is not None:
                        one = [plane[page] for plane in views.coded.key.planes]
                        key = views.coded.key.codec.decode(one).float()
                    live = key[:, : held - column * tokens]
                    low, high = views.bounds[page, :, 0].float().chunk(2, dim=-1)
                    assert (low <= live.amin(dim=1)).all()
                    assert (high >= live.amax(dim=1)).all()
                    if pool.ref_counts[page] == 1:
                        exact = views.coded is None
                        near = {"rtol": 0 if exact else 1e-3, "atol": 0 if exact else 1e-4}
                        torch.testing.assert_close(low, live.amin(dim=1), **near)
                        torch.testing.assert_close(high, live.amax(dim=1), **near)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "fp8", "int4_outliers"])
@pytest.mark.parametrize("heads_apart", [False, True])
def test_bounds_follow_the_keys_of_their_pages(codec, backend, heads_apart):
    """Chunks, decode, forks, copy on write, compaction of each kind, swap, truncation."""
    rng, generator = np.random.default_rng(3), torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if codec == "bfloat16" else torch.float32
    choice = select_backend(backend, CPU, dtype=dtype, head_dim=16, scratch_bytes=1 << 20)
    spec = small_spec(None, 5, None, num_heads=4, num_kv_heads=2, head_dim=16)
    options = {"evicting": True, "heads_apart": heads_apart, "bounds": True}
    layout = layout_for(spec, codec=codec, page_tokens=4, **options)
    kv = allocate_kv(
        layout, layout.smallest_sequence_bytes * 300, 8, device=CPU, backend=choice.backend
    )
    kv.store.arena.fill_(0xFF)
    memory = kv.memory

    def run(tokens):
        step, count = grown_step(kv, tokens)[0], sum(tokens.values())
        drawn = [torch.randn(count, n, 16, generator=generator).to(dtype) for n in (4, 2, 2)]
        for layer in range(3):
            step.attend(layer, AttentionMath(scale=0.2), *drawn)
        check_bounds(kv, tokens)

    first, second = memory.start(), memory.start()
    run({first: 6, second: 1})
    run({first: 1, second: 9})
    memory.truncate(second, 7)
    check_bounds(kv, [second])
    child = fork(memory, second)
    for _ in range(3):
        run({second: 1, child: 1, first: 1})
    for kind in (Kind.FILL_HOLES, Kind.KEEP_ORDER):
        keep = rng.random((memory.tables["full"].group.num_lanes, 16)) < 0.6
        keep[:] = keep[0]
        for row in (first, child):
            commit_compaction(memory, plan_compaction(memory, "full", row, keep, kind))
        check_bounds(kv, [first, second, child])
        run({first: 3, child: 5})
    first, child = swap_in(memory, swap_out(memory, [first, child]))
    check_bounds(kv, [first, child])
    run({first: 1, child: 1, second: 1})
    memory.check()


# ---- sparse attention ----------------------------------------------------------------------------


def sparse_kvs(backends, codec, *, heads_apart=False, page_tokens=4, dtype=torch.float32):
    spec = small_spec(None, 5, None, num_heads=4, num_kv_heads=2, head_dim=16)
    options = {"evicting": heads_apart, "heads_apart": heads_apart, "bounds": True}
    layout = layout_for(spec, codec=codec, page_tokens=page_tokens, **options)
    for name in backends:
        if name == "triton":
            backend = triton_backend()  # no row falls back to torch
        else:
            options = {"dtype": dtype, "head_dim": 16, "scratch_bytes": 1 << 20}
            backend = select_backend(name, CPU, **options).backend
        total_bytes = layout.smallest_sequence_bytes * 600
        kv = allocate_kv(layout, total_bytes, 8, device=CPU, backend=backend)
        kv.store.arena.fill_(0xFF)
        yield kv


def sparse_step(kv, tokens, drawn, rules, *, sums=False, softcap=None):
    order = sorted(tokens, key=lambda row: tokens[row] != 1)
    counts = np.array([tokens[row] for row in order], dtype=np.int32)
    kv.memory.grow(np.array(order), counts)
    sparse = [rules.get(row) if tokens[row] == 1 else None for row in order]
    step = StepAttention(kv, np.array(order), counts, sparse=sparse)
    sinks = torch.linspace(-1, 1, 4)
    math = AttentionMath(scale=0.25, softcap=softcap, sinks=sinks)
    return [step.attend(layer, math, *parts) for layer, parts in enumerate(drawn)]


def plain_sparse(kv, group, layer, row, query, rule, tokens_of=None):
    """The attention of a decode row in float64, page by page; `tokens_of` reads codes."""
    table, views = kv.memory.tables[group.name], kv.store.views(group.page_class)
    tokens, heads = group.page_class.tokens, group.page_class.heads
    outputs = []
    for head in range(4):
        kv_head = head // 2
        lane = group.layers.index(layer) * group.lanes_per_layer + kv_head // heads
        own, held = kv_head % heads, int(table.num_slots[row, lane])
        numbers = table.pages[row, lane, : -(-held // tokens)]
        count = rule.pages_read(len(numbers))
        keys, values, scores = [], [], []
        for column, page in enumerate(numbers):
            live = min(tokens, held - column * tokens)
            if tokens_of is None:
                coded = key = views.key[page, own, :live].double()
                value = views.value[page, own, :live].double()
            else:
                coded, key, value = tokens_of(
                    views, page, kv_head, own, column * tokens, live, held
                )
            keys.append(key)
            values.append(value)
            low, high = coded.amin(dim=0), coded.amax(dim=0)
            queries = query[2 * kv_head : 2 * kv_head + 2].double()
            score = torch.maximum(queries * low, queries * high).sum().item()
            always = column < rule.sinks or column >= len(numbers) - rule.recent
            scores.append(float("inf") if always else score)
        chosen = range(len(numbers))
        if count and layer >= rule.dense_layers:
            chosen = sorted(sorted(chosen, key=lambda c: -scores[c])[:count])
        key, value = (torch.cat([x[c] for c in chosen]) for x in (keys, values))
        logits = torch.cat(
            [key @ query[head].double() * 0.25, torch.linspace(-1, 1, 4)[head, None]]
        )
        outputs.append(torch.softmax(logits, 0)[:-1] @ value)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", ["reference", "gathered", "auto", "triton"])
@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("page_tokens", [3, 16])
def test_decode_rows_read_the_pages_with_the_highest_scores(name, heads_apart, page_tokens):
    generator = torch.Generator().manual_seed(1)
    (kv,) = sparse_kvs([name], "float32", heads_apart=heads_apart, page_tokens=page_tokens)
    rows = [kv.memory.start() for _ in range(3)]
    rules = {
        rows[0]: parse_sparse("quest:pages=5,recent=2"),
        rows[1]: parse_sparse("quest:budget=30%,sinks=0,recent=1,dense_layers=0"),
    }

    def draw(count):
        return [
            [torch.randn(count, n, 16, generator=generator) for n in (4, 2, 2)] for _ in range(3)
        ]

    sparse_step(kv, dict(zip(rows, (170, 90, 9), strict=True)), draw(269), rules)
    full = kv.memory.layout.groups[0]
    for _ in range(page_tokens + 1):
        drawn = draw(4)
        out = sparse_step(kv, {rows[0]: 1, rows[1]: 1, rows[2]: 2}, drawn, rules)

        for layer in (0, 2):
            for index, row in enumerate(rows[:2]):
                expected = plain_sparse(kv, full, layer, row, drawn[layer][0][index], rules[row])
                torch.testing.assert_close(
                    out[layer][index].double(), expected, atol=1e-5, rtol=1e-4
                )


@pytest.mark.parametrize("name", ["gathered", "auto"])
@pytest.mark.parametrize(
    ("codec", "heads_apart", "softcap"),
    [
        ("float32", False, None),
        ("float32", True, 4.0),
        ("bfloat16", False, None),
        ("int8", True, None),
        ("int8", False, 4.0),
        ("int4", False, None),
        ("fp8", False, None),
        ("int4_outliers", True, None),
    ],
)
def test_backends_agree_on_sparse_rows(name, codec, heads_apart, softcap):
    dtype = torch.bfloat16 if codec == "bfloat16" else torch.float32
    options = {"heads_apart": heads_apart, "page_tokens": 16, "dtype": dtype}
    kvs = list(sparse_kvs(["reference", name], codec, **options))
    generator = torch.Generator().manual_seed(2)
    rows = start_rows(kvs, 3)
    rules = {row: parse_sparse("quest:budget=20%,dense_layers=1") for row in rows[:2]}
    for tokens in ([299, 798, 40], *[[1, 1, 1]] * 4, [1, 1, 7]):
        drawn = [
            [torch.randn(sum(tokens), n, 16, generator=generator).to(dtype) for n in (4, 2, 2)]
            for _ in range(3)
        ]
        parts = dict(zip(rows, tokens, strict=True))
        expected, got = (sparse_step(kv, parts, drawn, rules, softcap=softcap) for kv in kvs)

        near = (
            {"atol": 2e-2, "rtol": 2e-2}
            if dtype == torch.bfloat16
            else {"atol": 2e-5, "rtol": 1e-4}
        )
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, **near)


@pytest.mark.parametrize("name", ["gathered", "auto", "triton"])
def test_budget_of_all_pages_equals_dense_bit_for_bit(name):
    kvs = list(sparse_kvs([name] * 2, "float32"))
    generator = torch.Generator().manual_seed(2)
    rows = start_rows(kvs, 3)
    rules = {row: parse_sparse("quest:budget=100%") for row in rows}
    for tokens in ([50, 120, 4], *[[1, 1, 1]] * 5):
        drawn = [
            [torch.randn(sum(tokens), n, 16, generator=generator) for n in (4, 2, 2)]
            for _ in range(3)
        ]
        parts = dict(zip(rows, tokens, strict=True))
        dense = sparse_step(kvs[0], parts, drawn, {})
        sparse = sparse_step(kvs[1], parts, drawn, rules)

        assert all(torch.equal(one, other) for one, other in zip(dense, sparse, strict=True))


class Exact:
    """Reads tokens of a row as attention does: as codes, or from its history in full precision."""

    def __init__(self, kv, group, row):
        self.kv, self.group, self.row = kv, group, row
        [self.full] = [
            one.full_precision for one in kv.memory.layout.groups if one.of == group.name
        ]
        self.keys, self.values = [], []

    def tokens(self, views, page, kv_head, own, first, live, held):
        slots = first + torch.arange(live)
        positions = slots + len(self.keys) - held
        if views.positions is not None:
            positions = views.positions[page, :live].long()
        exact = (positions < self.full.sinks) | (positions >= len(self.keys) - self.full.residual)
        if self.full.page_tokens > 1 and live < views.key.shape[2]:
            exact[:] = True
        found, sides = [], (views.coded.key, views.coded.value)
        for side, history in zip(sides, (self.keys, self.values), strict=True):
            coded = side.codec.decode([plane[page] for plane in side.planes])[own, :live].double()
            known = torch.stack(history)[positions, kv_head].double()
            found.append((coded, torch.where(exact[:, None], known, coded)))
        (coded, key), (_, value) = found
        # a page that is not full has no codes, and is read in any case
        return torch.where(exact[:, None], key, coded), key, value


@pytest.mark.parametrize("name", ["reference", "gathered"])
@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize(
    "codec",
    [
        "int8+sinks=5+residual=20",
        "int4+residual=3",
        "int4_page",
        "int8/int4_page",
        "int4_page/int4",
    ],
)
def test_sparse_rows_read_tokens_in_full_precision(name, heads_apart, codec):
    generator = torch.Generator().manual_seed(4)
    (kv,) = sparse_kvs([name], fill_plain(codec, "float32"), heads_apart=heads_apart, page_tokens=8)
    rows = [kv.memory.start() for _ in range(3)]
    rules = {
        rows[0]: parse_sparse("quest:pages=6,recent=2"),
        rows[1]: parse_sparse("quest:budget=30%,sinks=0,recent=1,dense_layers=0"),
    }
    group = kv.memory.layout.groups[0]
    known = {(row, layer): Exact(kv, group, row) for row in rows for layer in (0, 2)}

    def run(tokens):
        count = sum(tokens.values())
        drawn = [
            [torch.randn(count, n, 16, generator=generator) for n in (4, 2, 2)] for _ in range(3)
        ]
        first = 0
        for row in sorted(tokens, key=lambda row: tokens[row] != 1):
            for layer in (0, 2):
                own = slice(first, first + tokens[row])
                known[row, layer].keys += drawn[layer][1][own]
                known[row, layer].values += drawn[layer][2][own]
            first += tokens[row]
        return drawn, sparse_step(kv, tokens, drawn, rules)

    def check():
        drawn, out = run({rows[0]: 1, rows[1]: 1, rows[2]: 2})
        for layer in (0, 2):
            for index, row in enumerate(rows[:2]):
                query = drawn[layer][0][index]
                read = known[row, layer].tokens
                expected = plain_sparse(kv, group, layer, row, query, rules[row], read)
                torch.testing.assert_close(
                    out[layer][index].double(), expected, atol=1e-4, rtol=1e-3
                )

    run(dict(zip(rows, (170, 90, 9), strict=True)))
    for _ in range(10):
        check()
    if heads_apart and "page" not in codec:
        keep = np.random.default_rng(3).random((kv.memory.tables[group.name].group.num_lanes, 190))
        plan = plan_compaction(kv.memory, group.name, rows[0], keep < 0.7, Kind.KEEP_ORDER)
        commit_compaction(kv.memory, plan)
        check()


def plain_selection(bounds, query, count, *, sinks, recent):
    """The pages that each KV head of one lane reads, ascending."""
    weights = torch.cat([query.clamp_max(0).sum(dim=1), query.clamp_min(0).sum(dim=1)], dim=1)
    scores = (bounds.float() * weights.float()).sum(dim=2).T.contiguous()
    scores[:, :sinks] = torch.inf
    scores[:, len(bounds) - recent :] = torch.inf
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return best.sort(dim=1).values


@given(data=st.data(), sizes=st.tuples(*[st.integers(1, 3)] * 3), columns=st.integers(1, 12))
def test_pages_of_all_lanes_are_those_of_each_lane_alone(data, sizes, columns):
    rows, lanes, heads = sizes
    pages = st.integers(1, columns)
    held, wanted = (
        np.array(data.draw(st.lists(pages, min_size=rows * lanes, max_size=rows * lanes)))
        for _ in range(2)
    )
    held = held.reshape(rows, lanes)
    counts = np.minimum(wanted.reshape(rows, lanes), held)
    sinks = np.array([data.draw(st.integers(0, int(counts[row].min()))) for row in range(rows)])
    recent = np.array(
        [data.draw(st.integers(0, int(counts[row].min()) - int(sinks[row]))) for row in range(rows)]
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    # few values: many scores are equal
    bounds = torch.randint(-1, 2, (rows, lanes, columns, heads, 4), generator=generator).float()
    query = torch.randint(-1, 2, (rows, lanes, heads, 2, 2), generator=generator).float()

    found = select_pages(bounds, query, (held, counts), sinks=sinks, recent=recent)

    by_lane = found.view(rows, lanes, heads, -1)
    for row, lane in product(range(rows), range(lanes)):
        count = int(counts[row, lane])
        one = bounds[row, lane, : held[row, lane]]
        edges = {"sinks": int(sinks[row]), "recent": int(recent[row])}
        assert torch.equal(
            by_lane[row, lane, :, :count], plain_selection(one, query[row, lane], count, **edges)
        )
        assert not by_lane[row, lane, :, count:].any()


def test_the_last_page_is_read_where_pages_of_heads_are_views():
    pages = torch.arange(3 * 2 * 4 * 8, dtype=torch.float32).view(3, 2, 4, 8)
    heads = pages.as_strided((6, 1, 4, 8), (32, 32, 8, 1))
    wide = pages.as_strided((11, 1, 4, 8), (16, 32, 8, 1))  # a page begins in another

    for view, number in ((heads, 5), (wide, 10)):
        out = torch.empty(32)
        found = gather_pages(view, torch.tensor([[number]]), out)
        assert torch.equal(found[0, 0], pages[2, 1])
