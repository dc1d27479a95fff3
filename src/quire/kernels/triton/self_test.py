"""Compares the kernels with the reference on small steps of a device, before they are used.

Kernels with wrong results, or that Triton cannot compile or launch, are not used: the gathered
backend is selected instead, with a warning. On a GPU most of the time is Triton's compilation,
whose results are stored on disk for the next start.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.codecs.registry import make_codec
from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    AttentionMeasure,
    AttentionStatistic,
    CosSin,
    LaneSelector,
    LaneSlots,
    LayerPages,
    MovedSlots,
    NewSlots,
    StatisticRows,
    StepShape,
    rotated_and_written,
)
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.self_test import selects_right
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.triton import launch
from quire.kernels.triton.backend import TritonAttention
from quire.kernels.triton.hardware import Hardware, RowShape, cannot_run, failure_of
from quire.layout.codec_names import codec_spec
from quire.layout.statistics import MEAN

SLOTS, NEW_TOKENS = (3, 300, 20), (1, 1, 5)
HEADS, GROUP, PAGE_TOKENS = 2, 2, 16
COLUMNS = -(-max(SLOTS) // PAGE_TOKENS)
NUM_PAGES = len(SLOTS) * COLUMNS


def moves_right(backend: AttentionBackend, device: torch.device) -> bool:
    """Return whether slots that exchange places are copied correctly."""
    pages = torch.arange(2 * HEADS * PAGE_TOKENS * 3).view(2, HEADS, PAGE_TOKENS, 3).int()
    ends = (torch.tensor([0, 1, 0]), torch.tensor([2, 5, 7]))
    onto = (torch.tensor([1, 0, 0]), torch.tensor([5, 7, 2]))
    expected, got = pages.clone(), pages.to(device)
    ReferenceAttention().move(MovedSlots((expected,), ends, onto))
    source, target = ([x.to(device) for x in places] for places in (ends, onto))
    backend.move(MovedSlots((got,), (source[0], source[1]), (target[0], target[1])))
    return torch.equal(got.cpu(), expected)


def tallies_right(backend: AttentionBackend, device: torch.device) -> bool:
    """Return whether attention is added to the statistics of old slots, and replaces new ones."""
    numbers = torch.linspace(0, 1, NUM_PAGES * HEADS * PAGE_TOKENS)
    shape = (NUM_PAGES, HEADS, PAGE_TOKENS, 1)
    table = torch.arange(NUM_PAGES).flip(0).int().view(len(SLOTS), 1, COLUMNS)
    rows = torch.arange(len(SLOTS))
    held, fresh = torch.tensor(SLOTS).int()[:, None], torch.tensor(NEW_TOKENS).int()
    sums = torch.linspace(1, 0, len(SLOTS) * HEADS * GROUP * max(SLOTS))
    found = []
    for own, place in ((ReferenceAttention(), torch.device("cpu")), (backend, device)):
        planes = numbers.to(place, copy=True).view(shape)
        own.tally(
            AttentionStatistic(planes, table.to(place), 0, AttentionMeasure.SUM, MEAN),
            StatisticRows(
                step_rows=rows.to(place),
                table_rows=rows.to(place),
                slots=held.to(place),
                fresh=fresh.to(place),
                max_slots=max(SLOTS),
            ),
            sums.view(len(SLOTS), HEADS * GROUP, max(SLOTS)).to(place),
        )
        found.append(planes.cpu())
    return torch.allclose(found[0], found[1], atol=1e-5)


_ROWS, _EPS = 3, 1e-5
_HEADS = (6, 2, 2)  # of queries, keys and values
_MAX_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def wrong_kernels(device: torch.device, dtype: torch.dtype, shape: RowShape) -> tuple[str, ...]:
    """Return the names of kernels with wrong results.

    Args:
        device: runs the kernels.
        dtype: of the numbers.
        shape: sizes of the model.
    """
    rows = _Rows(dtype, shape)
    tests: Mapping[str, Callable[[torch.device], tuple[Tensor, Tensor]]] = {
        "RMSNorm": rows.norm,
        "the norms of heads": rows.head_norms,
        "the gated activation": rows.gate,
        "RoPE": rows.rope,
    }
    return tuple(name for name, test in tests.items() if not _is_near(*test(device), dtype))


def _is_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    difference = (found.cpu().float() - expected.float()).norm()
    return bool(difference <= _MAX_ERROR[dtype] * expected.float().norm())


class _Rows:
    """Random inputs, and the result of each kernel with that of PyTorch."""

    def __init__(self, dtype: torch.dtype, shape: RowShape) -> None:
        generator = torch.Generator().manual_seed(0)
        self._shape = shape
        width, heads = shape.width, (_ROWS, sum(_HEADS), shape.head_dim)
        self._stream, self._delta, self._weight = (
            torch.randn(rows, width, generator=generator).to(dtype) for rows in (_ROWS, _ROWS, 1)
        )
        self._heads = torch.randn(heads, generator=generator).to(dtype)
        self._norms = torch.randn(2, shape.head_dim, generator=generator).to(dtype)
        self._angles = torch.randn(_ROWS, shape.rotary_dim // 2, generator=generator)

    def norm(self, device: torch.device) -> tuple[Tensor, Tensor]:
        weight = self._weight[0]
        stream, delta, own = (x.to(device, copy=True) for x in (self._stream, self._delta, weight))
        found = launch.normed(stream, delta, own, _EPS)
        summed = self._stream + self._delta
        expected = F.rms_norm(summed.float(), (len(weight),), weight.float(), _EPS)
        return torch.cat([stream, found]), torch.cat([summed.float(), expected])

    def head_norms(self, device: torch.device) -> tuple[Tensor, Tensor]:
        found, norms = (x.to(device, copy=True) for x in (self._heads, self._norms))
        launch.norm_query_and_key(found.flatten(1), _HEADS[:2], (norms[0], norms[1]), _EPS)
        *both, value = torch.split(self._heads.float(), list(_HEADS), dim=1)
        parts = [
            F.rms_norm(part, (self._shape.head_dim,), weight.float(), _EPS)
            for part, weight in zip(both, self._norms, strict=True)
        ]
        return found, torch.cat([*parts, value], dim=1)

    def gate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        both = torch.cat([self._stream, self._delta], dim=1)
        expected = F.silu(self._stream.float()) * self._delta.float()
        return launch.gated(both.to(device)), expected

    def rope(self, device: torch.device) -> tuple[Tensor, Tensor]:
        angles = self._angles.repeat(1, 2)
        rope = CosSin(angles.cos(), angles.sin())
        found = self._heads.to(device, copy=True)
        query, key, value = torch.split(self._heads, list(_HEADS), dim=1)
        expected = torch.cat([rope.rotate(query), rope.rotate(key), value], dim=1)
        queries, keys, _ = torch.split(found, list(_HEADS), dim=1)
        on_device = CosSin(rope.cosine.to(device), rope.sine.to(device))
        launch.rotate(queries, keys, on_device)
        return found, expected


_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_CODECS = ("int8", "fp8", "int4")
_ALIGNMENT = 16
_SPLITS, _WHOLE_ROWS = 64, 1  # multiprocessors: with 64 the row of 300 slots is split

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NoTriton:
    """Why the kernels are not used."""

    reason: str


@functools.cache
def tested_hardware(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> Hardware | NoTriton:
    """Return the properties of a device on which the kernels are right, or why they are not used.

    Args:
        device: a device that `why_no_triton` has no objection to.
        dtype: type of the queries and of unquantized pages.
        head_dim: elements of a key.
        value_dim: elements of a value.
    """
    hardware = Hardware.of(device)
    splits, whole_rows = (
        TritonAttention(device, GatheredAttention(device), replace(hardware, multiprocessors=count))
        for count in (_SPLITS, _WHOLE_ROWS)
    )
    try:
        dims = head_dim, value_dim
        wrong = first_wrong(splits, device, dtype, dims)
        wrong = wrong or first_wrong(whole_rows, device, dtype, dims, with_sums=False)
    except cannot_run() as error:
        wrong = failure_of(error)
    if wrong is None:
        return hardware
    reason = f"the kernels are not used on {hardware.name}: {wrong}"
    _log.warning("attention in Triton: %s; please report it", reason)
    return NoTriton(reason)


def first_wrong(
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    dims: tuple[int, int],
    *,
    with_sums: bool = True,
) -> str | None:
    """Return what a backend computes wrongly, or None.

    Args:
        backend: the backend.
        device: device of the pages.
        dtype: type of the queries and of unquantized pages.
        dims: elements of a key and of a value.
        with_sums: whether column sums are computed too.
    """
    if not moves_right(backend, device):
        return "wrong copies of slots"
    if isinstance(backend, LaneSelector) and not selects_right(backend, device):
        return "wrong selections of slots"
    if with_sums and not tallies_right(backend, device):
        return "wrong statistics of slots"
    plain = str(dtype).removeprefix("torch.")
    codecs = (*_CODECS,) if not any(dim % 8 for dim in dims) else ()
    samples = ((plain, False), (plain, True), *((name, False) for name in codecs))
    with_rope = (False, True) if with_sums and dims[0] % 2 == 0 else (False,)
    for (codec, has_extras), rotates in itertools.product(samples, with_rope):
        if rotates and has_extras:
            continue
        step = _Sample(codec, dtype, dims, has_extras=has_extras, rotates=rotates)
        found = step.on(backend, device, with_sums=with_sums)
        for expected, got in zip(step.expected(), found, strict=False):
            error = (got.cpu().float() - expected).abs().max() / expected.abs().max()
            if not bool(error <= _TOLERANCES[dtype]):  # NaN is not
                return f"wrong numbers from pages of {codec}"
    return None


class _Sample:
    """A step with decode rows and a chunk; the newest slots are written by the backend.

    Args:
        codec: of keys and values; the name of `dtype` for unquantized pages.
        dtype: type of the queries and of new keys and values.
        dims: elements of a key and of a value.
        has_extras: whether scores have a softcap and heads have sinks.
        rotates: whether the newest slots are written by the kernel with RoPE.
    """

    def __init__(
        self,
        codec: str,
        dtype: torch.dtype,
        dims: tuple[int, int],
        *,
        has_extras: bool,
        rotates: bool = False,
    ) -> None:
        self._rotates = rotates
        generator = torch.Generator().manual_seed(0)
        self._codecs = [make_codec(codec_spec(codec), dim) for dim in dims]
        shapes = [(NUM_PAGES, HEADS, PAGE_TOKENS, dim) for dim in dims]
        vectors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self._fresh_source = vectors
        pairs = zip(self._codecs, vectors, strict=True)
        encoded = [plane for own, side in pairs for plane in own.encode(side)]
        sizes = [-(-plane[0].nbytes // _ALIGNMENT) * _ALIGNMENT for plane in encoded]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._forms = [(plane.dtype, plane.shape) for plane in encoded]
        self._arena = torch.zeros(NUM_PAGES, self._starts[-1], dtype=torch.uint8)
        for view, plane in zip(self._views(self._arena), encoded, strict=True):
            view.copy_(plane)
        order = torch.randperm(NUM_PAGES, generator=generator)
        self._table = order.int().view(len(SLOTS), 1, COLUMNS)
        tokens, heads = sum(NEW_TOKENS), HEADS * GROUP
        self._query = torch.randn(tokens, heads, dims[0], generator=generator).to(dtype)
        self._math = AttentionMath(
            scale=dims[0] ** -0.5,
            softcap=3.0 if has_extras else None,
            sinks=torch.linspace(-1, 1, heads) if has_extras else None,
        )

    def expected(self) -> tuple[Tensor, ...]:
        """Output and column sums of the reference, in float32."""
        query = self._query.float()
        out, sums = self._attend(ReferenceAttention(), self._arena, query, with_sums=True)
        return out.float(), sums

    def on(
        self, backend: AttentionBackend, device: torch.device, *, with_sums: bool
    ) -> tuple[Tensor, ...]:
        """Output, and column sums if wanted, of a backend after it wrote the newest slots."""
        arena = self._arena.clone()
        pages, offsets = self._newest()
        for view in self._views(arena):
            view[pages, :, offsets] = 0
        arena = arena.to(device)
        key, value, coded = self._sides(arena)
        places = (pages[:, None].to(device), offsets[:, None].to(device))
        fresh = tuple(x.to(device) for x in self._fresh())
        slots, query = NewSlots(key, value, *places, coded), self._query.to(device)
        if not self._written_with_rope(backend, slots, query, fresh):
            backend.write(slots, *fresh)
        return self._attend(backend, arena, query, with_sums=with_sums)

    def _written_with_rope(
        self,
        backend: AttentionBackend,
        slots: NewSlots,
        query: Tensor,
        fresh: tuple[Tensor, ...],
    ) -> bool:
        """Write by the kernel with RoPE, which turns back what is turned by 90 degrees here."""
        if not self._rotates:
            return False
        key, value = fresh
        half = key.shape[2] // 2
        turns = torch.ones(len(key), 2 * half, device=key.device)
        back = torch.cat([key[..., half:], -key[..., :half]], dim=2)
        own_query = torch.cat([query[..., half:], -query[..., :half]], dim=2)
        rope = CosSin(torch.zeros_like(turns), turns)
        if not rotated_and_written(backend, slots, (own_query, back, value), rope):
            return False
        query.copy_(own_query)
        return True

    def _attend(
        self, backend: AttentionBackend, arena: Tensor, query: Tensor, *, with_sums: bool
    ) -> tuple[Tensor, ...]:
        device = arena.device
        key, value, coded = self._sides(arena)
        rows = torch.arange(len(SLOTS), device=device)
        pages = LayerPages(key, value, self._table.to(device), rows, 0, 1, coded=coded)
        step = StepShape.of(np.array(NEW_TOKENS, dtype=np.int32))
        lanes = LaneSlots(np.array(SLOTS, dtype=np.int32)[:, None], None)
        plan = backend.plan(step, lanes, PAGE_TOKENS, 1)
        sinks = self._math.sinks
        math = replace(self._math, sinks=None if sinks is None else sinks.to(device))
        fresh = (query[:, :HEADS], query[:, :HEADS])  # not read: the slots are written
        if not with_sums:
            return (backend.attend(plan, pages, math, query, fresh),)
        sums = torch.zeros(len(SLOTS), query.shape[1], max(SLOTS), device=device)
        return backend.attend(plan, pages, math, query, fresh, column_sums=sums), sums

    def _sides(self, arena: Tensor) -> tuple[Tensor, Tensor, CodedPages | None]:
        views = self._views(arena)
        half = len(views) // 2
        halves = zip(self._codecs, (views[:half], views[half:]), strict=True)
        sides = [CodedPlanes(codec, tuple(part)) for codec, part in halves]
        coded = None if self._codecs[0].spec.is_plain else CodedPages(*sides)
        return views[0], views[half], coded

    def _views(self, arena: Tensor) -> list[Tensor]:
        """The planes of keys and of values in an arena."""
        views = []
        for start, (dtype, shape) in zip(self._starts, self._forms, strict=False):
            num_bytes = shape[1:].numel() * dtype.itemsize
            views.append(arena[:, start : start + num_bytes].view(dtype).view(shape))
        return views

    def _newest(self) -> tuple[Tensor, Tensor]:
        """Pages and offsets of the newest slots, [tokens] each."""
        pairs = list(zip(SLOTS, NEW_TOKENS, strict=True))
        slot = torch.cat([torch.arange(slots - new, slots) for slots, new in pairs])
        row = torch.arange(len(SLOTS)).repeat_interleave(torch.tensor(NEW_TOKENS))
        return self._table[row, 0, slot // PAGE_TOKENS].long(), slot % PAGE_TOKENS

    def _fresh(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the newest slots before they are encoded."""
        pages, offsets = self._newest()
        key, value = (side[pages, :, offsets] for side in self._fresh_source)
        return key, value
