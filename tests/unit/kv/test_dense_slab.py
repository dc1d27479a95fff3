"""A dense slab compared with lists of tokens under random operations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.errors import HostMemoryFull, InvariantError, SlabFull
from quire.kv.dense.row import NOTHING, POSITION_BYTES, KVShape, LayerShape, RowKV
from quire.kv.dense.slab import DenseSlab, SlabRows
from quire.kv.dense.space import ByteMeter, Window, spare_columns

CPU = torch.device("cpu")
SHAPE = KVShape((LayerShape(2, 4, 3), LayerShape(1, 2, 2)), torch.float32, CPU)
TOKEN_BYTES = (2 * 7 + 4) * 4


def numbers(name, position, layer):
    """Keys and values of a token, different for every token."""
    found = SHAPE.layers[layer]
    value = float(1 + name * 1_000 + position)
    keys = torch.full((found.num_kv_heads, found.key_dim), value)
    return keys, -torch.full((found.num_kv_heads, found.value_dim), value)


def packed(name, tokens, meter):
    layers = []
    for layer in range(len(SHAPE.layers)):
        pairs = [numbers(name, position, layer) for position in range(tokens)]
        layers.append(tuple(torch.stack(part, dim=1) for part in zip(*pairs, strict=True)))
    meter.reserve(tokens * TOKEN_BYTES)
    return RowKV(layers, meter)


def feed(slab, names, counts, **options):
    """Run a forward pass with `counts[i]` tokens of sequence `names[i]` for row i."""
    columns, known = max(counts), list(slab.lengths)
    slab.begin(counts, columns, **options)
    for layer, found in enumerate(SHAPE.layers):
        keys = torch.full((slab.rows, found.num_kv_heads, columns, found.key_dim), 9e9)
        values = torch.full((slab.rows, found.num_kv_heads, columns, found.value_dim), 9e9)
        for row, (name, count) in enumerate(zip(names, counts, strict=True)):
            for i in range(count):
                column = i if options else columns - count + i
                made = numbers(name or 0, known[row] + i, layer)
                keys[row, :, column], values[row, :, column] = made
        seen, _ = slab.append(layer, keys, values)
        assert seen.data_ptr() == slab.tensors.keys[layer][:, :, slab.window.lo].data_ptr()
    slab.end()


def prefill_in_place(slab, rows, names, lengths, chunk):
    """Prefill prompts into rows of the slab, `chunk` columns at a time, with padding."""
    columns = max(lengths)
    view = SlabRows(slab, rows.start, len(rows), columns)
    for first in range(0, columns, chunk):
        new = min(chunk, columns - first)
        view.begin([min(max(0, n - first), new) for n in lengths], new)
        for layer, found in enumerate(SHAPE.layers):
            keys = torch.full((len(rows), found.num_kv_heads, new, found.key_dim), 9e9)
            values = torch.full((len(rows), found.num_kv_heads, new, found.value_dim), 9e9)
            for row, (name, tokens) in enumerate(zip(names, lengths, strict=True)):
                for i in range(min(new, tokens - first)):
                    keys[row, :, i], values[row, :, i] = numbers(name, first + i, layer)
            seen, _ = view.append(layer, keys, values)
            assert seen.shape[2] == first + new
        view.end()
    view.register(lengths)


def held(slab, row):
    return [p for p in slab.positions[row, slab.window.lo : slab.window.hi].tolist() if p >= 0]


def check(slab, names, lengths, meter):
    slab.window.check()
    assert slab.lengths == lengths
    used = slice(slab.window.lo, slab.window.hi)
    positions = slab.positions[:, used]
    planes = zip(slab.tensors.keys, slab.tensors.values, strict=True)
    for layer, (keys, values) in enumerate(planes):
        for row, name in enumerate(names):
            for column, position in enumerate(positions[row].tolist()):
                if position == NOTHING:  # masked slots hold zeros
                    assert not keys[row, :, used][:, column].any()
                    assert not values[row, :, used][:, column].any()
                    continue
                expected = numbers(name or 0, position, layer)
                assert torch.equal(keys[row, :, used][:, column], expected[0])
                assert torch.equal(values[row, :, used][:, column], expected[1])
    for row, length in enumerate(lengths):
        assert held(slab, row) == list(range(length))
    stored = [*slab.tensors.keys, *slab.tensors.values, slab.positions]
    assert meter.used_bytes == sum(part.untyped_storage().nbytes() for part in stored)


class SlabMachine(RuleBasedStateMachine):
    """Random operations on a slab: rows keep their tokens and all bytes are counted."""

    @initialize(capacity=st.integers(1, 8))
    def begin(self, capacity):
        self.meter, self.outside = ByteMeter(), ByteMeter()
        self.slab = DenseSlab(SHAPE, 2, capacity, meter=self.meter)
        self.names: list[int | None] = [None] * 2
        self.count = 0

    @property
    def free(self):
        return [row for row, name in enumerate(self.names) if name is None]

    @property
    def used_rows(self):
        return [row for row, name in enumerate(self.names) if name is not None]

    def new(self, row):
        self.count += 1
        self.names[row] = self.count
        return self.count

    @precondition(lambda self: self.used_rows)
    @rule(more=st.integers(0, 6))
    def feed(self, more):
        """Add a token to each row, and `more` tokens of a new row, which leaves holes."""
        counts = [int(name is not None) for name in self.names]
        if more and self.free:
            row = self.free[0]
            counts[row] = more
            self.new(row)
        feed(self.slab, self.names, counts)

    @precondition(lambda self: self.free)
    @rule(tokens=st.integers(1, 12))
    def embed(self, tokens):
        row = self.free[0]
        kv = packed(self.new(row), tokens, self.outside)
        self.slab.embed(row, kv)
        kv.free()

    @precondition(lambda self: self.free)
    @rule(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), chunk=st.integers(1, 40))
    def prefill(self, lengths, chunk):
        first = self.free[0]
        rows = range(first, first + 1)
        while rows.stop in self.free and len(rows) < len(lengths):
            rows = range(first, rows.stop + 1)
        names = [self.new(row) for row in rows]
        prefill_in_place(self.slab, rows, names, lengths[: len(rows)], chunk)

    @precondition(lambda self: self.used_rows)
    @rule()
    def clear(self):
        self.slab.clear(self.used_rows[0])
        self.names[self.used_rows[0]] = None
        self.slab.release_prefix()

    @rule(empty=st.integers(0, 2), width=st.integers(0, 10), rng=st.randoms(use_true_random=False))
    def resize(self, empty, width, rng):
        order: list[int | None] = [*self.used_rows, *[None] * max(empty, not self.used_rows)]
        rng.shuffle(order)
        self.slab.select(order, width)
        self.names = [None if row is None else self.names[row] for row in order]

    @rule(empty=st.integers(0, 3))
    def take(self, empty):
        free_rows = self.slab.held_rows - len(self.used_rows)
        order: list[int | None] = [*self.used_rows, *[None] * min(empty, free_rows)]
        if order:
            self.slab.take_rows(order)
            self.names = [None if row is None else self.names[row] for row in order]

    @rule(columns=st.integers(0, 60))
    def plan(self, columns):
        self.slab.window.planned = columns

    @rule()
    def release(self):
        self.slab.release_prefix()

    @precondition(lambda self: self.used_rows)
    @rule(data=st.data())
    def extract_and_embed(self, data):
        row = data.draw(st.sampled_from(self.used_rows))
        kv = self.slab.extract(row, CPU, self.outside)
        assert kv.tokens * TOKEN_BYTES == kv.num_bytes == self.outside.used_bytes
        self.slab.clear(row)
        self.slab.release_prefix()
        self.slab.embed(row, kv)
        kv.free()

    @invariant()
    def check_tokens(self):
        check(self.slab, self.names, list(self.slab.lengths), self.meter)
        used_rows = [name is not None for name in self.names]
        assert [bool(length) for length in self.slab.lengths] == used_rows

    def teardown(self):
        if hasattr(self, "slab"):
            self.slab.free()
            assert self.meter.used_bytes == self.outside.used_bytes == 0


TestSlab = SlabMachine.TestCase


@pytest.fixture
def meter():
    return ByteMeter()


@pytest.fixture
def released(meter):
    """A slab of two rows of which the first, of 10 tokens, was cleared."""
    slab = DenseSlab(SHAPE, 2, 20, meter=meter)
    slab.embed(0, packed(1, 10, meter))
    slab.embed(1, packed(2, 3, meter))
    addresses = [part.data_ptr() for part in slab.tensors.keys]
    slab.clear(0)
    slab.release_prefix()
    assert [part.data_ptr() for part in slab.tensors.keys] == addresses  # without a copy
    return slab


def test_growth_copies_one_layer_at_a_time(meter):
    slab = DenseSlab(SHAPE, 4, 8, meter=meter)
    feed(slab, [1, 2, 3, 4], [8, 8, 8, 8])
    before = slab.num_bytes

    feed(slab, [1, 2, 3, 4], [1, 1, 1, 1])

    assert slab.num_bytes == meter.used_bytes == 4 * (9 + 4) * (TOKEN_BYTES + POSITION_BYTES)
    assert meter.peak_bytes < before + slab.num_bytes
    assert meter.peak_bytes <= SHAPE.growing_bytes(4, slab.window.capacity)


def test_window_moves_to_column_0_in_place_when_it_reaches_the_end(released, meter):
    peak, starts = meter.peak_bytes, []
    assert (released.window.lo, released.window.hi) == (7, 10)
    for _ in range(12):
        feed(released, [None, 2], [0, 1])
        starts.append(released.window.lo)

    assert starts == [7] * 10 + [0] * 2
    assert meter.peak_bytes == peak
    assert held(released, 1) == list(range(15))


def assert_equal(found, expected):
    for got, want in zip(found.layers, expected.layers, strict=True):
        assert all(map(torch.equal, got, want))


def test_extracted_row_with_holes_is_packed_and_exact():
    slab, outside = DenseSlab(SHAPE, 2, 4, meter=ByteMeter()), ByteMeter()
    feed(slab, [1, None], [3, 0])
    feed(slab, [1, 2], [1, 5])  # a hole of four columns in row 0
    expected = packed(1, 4, ByteMeter())

    kv = slab.extract(0, CPU, outside)

    assert kv.tokens == 4
    assert_equal(kv, expected)


def test_left_aligned_rows_are_split_layer_by_layer(meter):
    slab = DenseSlab(SHAPE, 3, 6, meter=meter)
    feed(slab, [1, 2, 3], [4, 2, 4], at_start=True)
    feed(slab, [1, 2, 3], [2, 0, 1], at_start=True)
    whole = meter.used_bytes

    rows = slab.split()

    assert [kv.tokens for kv in rows] == [6, 2, 5]
    assert meter.used_bytes == sum(kv.num_bytes for kv in rows) == 13 * TOKEN_BYTES
    assert meter.peak_bytes < whole + meter.used_bytes
    for name, kv in zip((1, 2, 3), rows, strict=True):
        assert_equal(kv, packed(name, kv.tokens, ByteMeter()))


def test_limits_of_a_slab_and_of_host_memory_and_a_used_row_raise_and_change_nothing(meter):
    slab, host = DenseSlab(SHAPE, 1, 4, meter=meter, limit=6), ByteMeter(100)
    feed(slab, [1], [5])
    with pytest.raises(SlabFull, match=r"at most capacity_tokens=6 columns, got 7"):
        slab.begin([2], 2)
    check(slab, [1], [5], meter)
    with pytest.raises(HostMemoryFull, match=r"360 B more within 100 B of CPU memory, 0 B are"):
        slab.extract(0, CPU, host)
    assert host.used_bytes == 0
    check(slab, [1], [5], meter)
    with pytest.raises(InvariantError, match="row 0 of the slab holds"):
        slab.embed(0, packed(2, 1, ByteMeter()))


@pytest.mark.parametrize("fails", [0, 1, 3])
def test_failed_slab_allocation_leaves_no_counted_bytes(monkeypatch, meter, fails):
    full, num_tensors = torch.full, 0

    def failing_full(*arguments, **options):
        nonlocal num_tensors
        if num_tensors == fails:
            raise MemoryError
        num_tensors += 1
        return full(*arguments, **options)

    monkeypatch.setattr(torch, "full", failing_full)
    with pytest.raises(MemoryError):
        DenseSlab(SHAPE, 2, 8, meter=meter)

    assert meter.used_bytes == 0


@pytest.mark.parametrize("rows", [1, 4])
def test_split_copies_one_tensor_at_a_time(meter, rows):
    slab = DenseSlab(SHAPE, rows, 5, meter=meter)
    feed(slab, list(range(rows)), [5] * rows, at_start=True)
    address = slab.tensors.keys[0].data_ptr()

    split_rows = slab.split()

    assert (split_rows[0].layers[0][0].data_ptr() == address) == (rows == 1)  # without a copy

    assert meter.used_bytes == rows * 5 * TOKEN_BYTES == sum(kv.num_bytes for kv in split_rows)
    assert meter.peak_bytes <= SHAPE.growing_bytes(rows, 5)


@given(st.integers(1, 400), st.integers(0, 400), st.integers(1, 60))
def test_new_capacity_has_spare_columns_for_many_steps(capacity, width, columns):
    """A move or growth copies the window once: spare columns must be proportional to it."""
    width = min(width, capacity)
    window = Window(capacity, lo=capacity - width, hi=capacity)

    new = window.capacity_for(columns)

    assert new == capacity or new == width + columns + spare_columns(width + columns)
    assert new - width - columns >= spare_columns(width + columns) // 2
