"""Quantized pages: attention equals that over decoded values, and moves copy codes bit for bit.

Each quantized memory has a float32 twin that stores the decoded values. Both memories run the same
steps, evictions, forks and swaps.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.codecs.registry import make_codec
from quire.errors import InvariantError
from quire.kernels.backend import AttentionMath
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.select import select_backend
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.lane_reader import LaneReader
from quire.kv.paged_kv import PagedKV, allocate_kv
from quire.kv.sharing import fork
from quire.kv.step import StepAttention
from quire.kv.swap import swap_in, swap_out
from quire.layout.codec_names import CODECS, codec_pair
from quire.layout.pages import CacheLayout, LaneGroup, PageClass, kv_pages

HEAD_DIM, VALUE_DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 16, 32, 4, 2, 3
PAGE = 4
CPU = torch.device("cpu")
BY_TOKEN = [
    *(
        name
        for name, codec in CODECS.items()
        if not (codec.is_plain or codec.per_page or codec.constants)
    ),
    "int4:group=8",
    "int8/int4",
    "float32/int8",
    "int4_hadamard/float32",
]


def make_kv(codec: str, backend, page_tokens: int) -> PagedKV:
    """Make a memory with an unordered layer, a layer with one-head pages and a window layer."""
    key, value = codec_pair(codec)

    def pages(heads: int, *, positions: bool) -> PageClass:
        return kv_pages(
            key=key,
            value=value,
            head_dim=HEAD_DIM,
            value_dim=VALUE_DIM,
            heads=heads,
            tokens=page_tokens,
            positions=positions,
        )

    whole, apart = pages(NUM_KV_HEADS, positions=True), pages(1, positions=True)
    layout = CacheLayout(
        (
            LaneGroup(name="full", page_class=whole, layers=(0,), ordered=False),
            LaneGroup(
                name="ragged", page_class=apart, layers=(1,), lanes_per_layer=2, ordered=False
            ),
            LaneGroup(
                name="window",
                page_class=pages(NUM_KV_HEADS, positions=False),
                layers=(2,),
                window=7,
            ),
        )
    )
    pages = max(150, 600 // page_tokens)  # at most six rows of 80 tokens, and copies of forks
    total_bytes = layout.smallest_sequence_bytes * pages
    kv = allocate_kv(layout, total_bytes, 8, device=CPU, backend=backend)
    kv.store.arena.fill_(0xFF)  # NaN in every float type; no encoder writes this code
    return kv


class Twins:
    """A quantized memory and its float32 twin, always in the same state."""

    def __init__(self, codec: str, backend, page_tokens: int, seed: int) -> None:
        sides = zip(codec_pair(codec), (HEAD_DIM, VALUE_DIM), strict=True)
        self.codecs = [make_codec(*side) for side in sides]
        self.coded = make_kv(codec, backend, page_tokens)
        self.plain = make_kv("float32", GatheredAttention(CPU), page_tokens)
        self.both = (self.coded, self.plain)
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def start(self) -> int:
        _, row = [kv.memory.start() for kv in self.both]
        return row

    def step(self, tokens: dict[int, int]) -> None:
        """Grow rows, compute attention in all layers, and compare the outputs."""
        order = sorted(tokens, key=lambda row: tokens[row] != 1)
        rows = np.array(order, dtype=np.int64)
        counts = np.array([tokens[row] for row in order], dtype=np.int32)
        for kv in self.both:
            kv.memory.grow(rows, counts)
        coded, plain = (StepAttention(kv, rows, counts) for kv in self.both)
        for layer in range(NUM_LAYERS):
            query, key, value = self.draw(int(counts.sum()))
            got = coded.attend(layer, MATH, query, key, value)
            decoded = [
                codec.decode(codec.encode(x[:, :, None])).squeeze(2)
                for codec, x in zip(self.codecs, (key, value), strict=True)
            ]
            expected = plain.attend(layer, MATH, query, *decoded)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

    def draw(self, count: int) -> list[torch.Tensor]:
        shapes = (NUM_HEADS, HEAD_DIM), (NUM_KV_HEADS, HEAD_DIM), (NUM_KV_HEADS, VALUE_DIM)
        return [torch.randn(count, *shape, generator=self.generator) for shape in shapes]

    def evict(self, row: int) -> None:
        for name in ("full", "ragged"):
            slots = self.coded.memory.tables[name].num_slots[row]
            keep = self.rng.random((len(slots), int(slots.max(initial=0)))) < 0.7
            keep[:, :1] = True
            for kv in self.both:
                commit_compaction(kv.memory, plan_compaction(kv.memory, name, row, keep))

    def fork(self, row: int) -> int:
        _, child = [fork(kv.memory, row) for kv in self.both]
        return child

    def swap(self, row: int) -> int:
        for kv in self.both:
            swapped = swap_out(kv.memory, [row])
            if not kv.memory.used_bytes:
                kv.store.arena.fill_(0xFF)
            [back] = swap_in(kv.memory, swapped)
        return back

    def compare(self, row: int) -> None:
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


def slot_bytes(kv: PagedKV, name: str, row: int) -> dict[tuple[int, int], bytes]:
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
    kv = make_kv(codec, GatheredAttention(CPU), PAGE)
    row, generator = kv.memory.start(), torch.Generator().manual_seed(4)
    rows, count = np.array([row]), np.array([23], dtype=np.int32)
    kv.memory.grow(rows, count)
    step = StepAttention(kv, rows, count)
    for layer in range(NUM_LAYERS):
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
    auto = select_backend(
        "auto", CPU, dtype=torch.float32, head_dim={(HEAD_DIM, VALUE_DIM)}, scratch_bytes=1 << 20
    )
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
    reference = make_kv("int4", backends[1], 4)
    rows = [twins.start() for _ in range(3)]
    assert rows == [reference.memory.start() for _ in range(3)]
    for tokens in ([6, 6, 6], [1, 1, 5]):
        counts, numbers = np.array(tokens, dtype=np.int32), np.array(rows, dtype=np.int64)
        drawn = twins.draw(int(counts.sum()))
        for kv in (twins.coded, reference):
            kv.memory.grow(numbers, counts)
            StepAttention(kv, numbers, counts).attend(0, MATH, *drawn)
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
    kv = make_kv("int4_page", GatheredAttention(CPU), 4)
    page_class = kv.memory.layout.groups[0].page_class
    slot = np.array([0], dtype=np.int32), np.array([1])

    with pytest.raises(InvariantError, match="slots of pages in int4_page cannot move"):
        kv.store.move_slots(page_class, slot, slot)
