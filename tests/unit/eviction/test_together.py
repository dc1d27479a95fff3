"""Evictions: several requests in one pass, on a device, of all ranks; without pages; promotion."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import OutOfPages, PolicyError
from quire.eviction.decisions import AllHeads
from quire.eviction.eviction import PolicyEvictor
from quire.eviction.promotion import leaving_window
from quire.kernels import device_copies
from quire.kv.lane_reader import LaneReader, SlotOrder, slot_moves
from quire.kv.sharing import fork
from quire.layout.eviction import DECODE, PREFILL_END, EvictionSpec
from quire.layout.statistics import AttentionSum
from quire.layout.token_precision import FullPrecisionTokens
from quire.models.base import attention_math
from quire.policies.base import LAYER
from quire.policies.eviction import Eviction
from quire.policies.recent import Recent
from quire.policies.registry import registered
from quire.policies.view import KVView
from support import engines
from support.kv_options import kv_config
from support.ranks import on_ranks

OPTIONS = dict.fromkeys(("snapkv", "rkv"), "window=3") | {"roco": "recent=2"}
OPTIONS |= {"criticalkv": "base=(snapkv:window=3)", "lagkv": "sinks=1,lag=2"}
NAMES = sorted(set(registered()) - {"streaming", "kvcrush_openvino", "threshold", "kvzip"})
"""Without rules that need keys before RoPE, evict whole pages or layer by layer, or retain less."""
ALONE, TOGETHER, ON_DEVICE = "alone", "together", "on a device"
PROMPTS = (9, 9, 14, 20, 27)
STRIDE = 7
"""Difference between the tokens of neighbouring prompts."""


def text_of(name, cap=16):
    extra = f",{OPTIONS[name]}" if name in OPTIONS else ""
    return f"{name}:cap={cap},every=4{extra}"


def on_device(monkeypatch):
    """Treat the CPU as a device whose tensors are not read."""
    monkeypatch.setattr(device_copies, "reads_freely", lambda device: False)


def evicted(evict, monkeypatch, way, **kv):
    """Run requests; return their evicted positions, outputs, and how many evicted together."""
    engine = Engine(
        engines.load("llama"), kv_config(memory="2MiB", page_tokens=4, evict=evict, **kv)
    )
    together = Counter()
    inner = PolicyEvictor.evict_together

    def evict_together(self, due):
        found = [None] * len(due) if way == ALONE else inner(self, due)
        together[sum(one is not None for one in found)] += 1
        return found

    with monkeypatch.context() as patch:
        patch.setattr(PolicyEvictor, "evict_together", evict_together)
        if way == ON_DEVICE:
            on_device(patch)
        options = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        for index, tokens in enumerate(PROMPTS):
            prompt = [3 + (STRIDE * index + token) % 90 for token in range(tokens)]
            named = {"request_id": str(index), "record_evictions": True}
            engine.submit(GenerationRequest(prompt, options, **named))
        outputs = {}
        while engine.has_work:
            for delta in engine.step():
                assert not delta.error, delta.error
                outputs[delta.request_id] = outputs.get(delta.request_id, ()) + delta.token_ids
        retained = [
            [[lane.tolist() for lane in one.retained] for one in engine.eviction_trace(str(index))]
            for index in range(len(PROMPTS))
        ]
    engine.check()
    return retained, outputs, together


@pytest.mark.parametrize("name", NAMES)
def test_requests_retain_the_same_tokens_together_alone_and_on_a_device(name, monkeypatch):
    alone, outputs, _ = evicted(text_of(name), monkeypatch, ALONE)
    together, same, counts = evicted(text_of(name), monkeypatch, TOGETHER)
    device, also, of_device = evicted(text_of(name), monkeypatch, ON_DEVICE)
    assert all(alone)
    assert together == alone
    assert device == alone
    assert outputs == same == also
    assert max(counts) > 1
    assert max(of_device) > 1


PER_ENGINE = 50
"""Cases with the same pages, whose contents are replaced."""
RANDOM_CASES = ["recent:sinks=2", "sinks:sinks=1", "h2o:sinks=1", "average:recent=2", "tova:"]
RANDOM_CASES += ["snapkv:window=2,kernel=3", "keydiff:recent=1", "knorm:", "value_norm:base=h2o"]
RANDOM_CASES += ["criticalkv:base=h2o", "random:sinks=1", "kvcrush:", "lagkv:sinks=1,lag=2"]


def filled_rows(text, rng):
    evict = f"{text}{'' if text.endswith(':') else ','}cap=64,every=8"
    config = kv_config(memory="4MiB", page_tokens=int(rng.choice([1, 4, 16])), evict=evict)
    engine = Engine(engines.load("llama"), config)
    tokens = int(rng.integers(8, 40))
    options = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    for index in range(int(rng.integers(1, 4))):
        engine.submit(GenerationRequest([3 + index] * tokens, options))
    while len(engine.scheduler.running) == 0 or any(
        request.num_uncomputed != 1 for request in engine.scheduler.running
    ):
        engine.step()
    return engine, engine.scheduler.capacities._optional_evictor


def fill_pages(kv, rows, rng):
    """Replace positions, keys, values and statistics of rows, in half of the cases by integers."""
    memory, rounded = kv.memory, rng.random() < 0.5
    held = int(memory.tables["full"].num_slots[rows[0]].max())
    length = held + int(rng.integers(0, 30))
    memory.lengths[rows] = length

    def numbers(shape, scale):
        found = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) * scale
        return found.round() if rounded else found

    views = kv.store.views(memory.tables["full"].group.page_class)
    for row in rows:
        for lane in memory.tables["full"].pages[row]:
            positions, tokens = rng.permutation(length)[:held], views.positions.shape[1]
            for column, page in enumerate(lane[: -(-held // tokens)].tolist()):
                some = torch.from_numpy(positions[column * tokens : (column + 1) * tokens])
                views.positions[page, : len(some)] = some
                for plane in (views.key, views.value):
                    plane[page] = numbers(plane[page].shape, 2)
        for place in kv.statistics.get("full", ()):
            pages = place.table.pages[row]
            for page in pages[pages >= 0].tolist():
                place.numbers[page] = numbers(place.numbers[page].shape, 3).abs()
                if not place.statistic.per_slot:
                    place.numbers[page, ..., -1] = length - float(rng.integers(0, 3))


@pytest.mark.parametrize("cases", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", RANDOM_CASES)
def test_kernels_retain_the_slots_of_the_rule_in_random_cases(text, cases):
    rng = np.random.default_rng([cases, sorted(RANDOM_CASES).index(text)])
    for case in range(cases):
        if case % PER_ENGINE == 0:
            engine, evictor = filled_rows(text, rng)
            requests, kv = list(engine.scheduler.running), engine.pool.kv
            rows = [request.memory.row for request in requests]
            least = requests[0].eviction.selection.policy.min_cap
        fill_pages(kv, rows, rng)
        reader = LaneReader(kv, "full", rows)
        keep = rng.integers(least, reader.held + 1)
        if requests[0].eviction.selection.policy.scope == LAYER:
            keep[:] = keep[0]
        expected = evictor._cut_in_torch(requests, reader, keep, None)
        found = evictor._cut_by_kernels(requests, reader, keep, None)

        assert found is not None, "the C extension selects slots"
        gone, evicted = found.gone, found.evicted.numpy()[:, 2:]
        evicted = evicted[np.arange(evicted.shape[1]) < gone[:, None]]
        assert evicted.tolist() == expected.evicted.tolist()
        moves, (lane, target) = found.moves.moves, found.targets()
        used = np.arange(moves.shape[2]) < found.evicted[:, 1:2].numpy()
        sources = moves[:, 0].numpy()[used]
        assert [x.tolist() for x in (lane, sources, target)] == [x.tolist() for x in expected.moves]


@pytest.mark.parametrize("codec", ["", "int8"])
def test_requests_that_share_pages_retain_the_same_tokens_together(codec, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PROMPTS", (27, 27, 27))
    monkeypatch.setattr(f"{__name__}.STRIDE", 0)
    options = {"codec": codec} if codec else {}
    alone = evicted(text_of("h2o", cap=20), monkeypatch, ALONE, **options)
    together = evicted(text_of("h2o", cap=20), monkeypatch, TOGETHER, **options)
    assert together[:2] == alone[:2]
    assert max(together[2]) == 3


@pytest.mark.parametrize(
    "codec", ["int8", "int4:group=8", "int8+plain_layers=1", "int8+residual=8"]
)
def test_codecs_retain_the_same_tokens_together_and_alone(codec, monkeypatch):
    evict = text_of("keydiff")
    alone = evicted(evict, monkeypatch, ALONE, codec=codec)
    together = evicted(evict, monkeypatch, TOGETHER, codec=codec)
    device = evicted(evict, monkeypatch, ON_DEVICE, codec=codec)
    assert together[:2] == alone[:2]
    assert device[:2] == alone[:2]


def engine_with_wrong_scores(monkeypatch):
    """An engine on a device, the rule `recent` breaks its contract; and options of requests."""
    on_device(monkeypatch)
    config = kv_config(memory="2MiB", page_tokens=4, evict=text_of("h2o"), evict_allow="all")
    score = Recent.score
    monkeypatch.setattr(Recent, "score", lambda self, view: score(self, view) * float("nan"))
    options = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    return Engine(engines.load("llama"), config), options


def test_rule_that_breaks_its_contract_on_a_device_ends_only_its_requests(monkeypatch):
    engine, options = engine_with_wrong_scores(monkeypatch)
    for name in ("recent", "h2o"):
        request = GenerationRequest(list(range(3, 15)), options, request_id=name)
        engine.submit(replace(request, evict=text_of(name)))
    last = {}
    while engine.has_work:
        last |= {delta.request_id: delta for delta in engine.step()}

    assert last["recent"].finish_reason == "error"
    assert "broke its contract" in last["recent"].error
    assert last["h2o"].finish_reason == "length"
    engine.check()

    # Each chunk asks whether its request evicts, after decoding rows of the step have evicted.
    engine, options = engine_with_wrong_scores(monkeypatch)
    own = {"request_id": "recent", "evict": text_of("recent")}
    engine.submit(GenerationRequest(list(range(3, 15)), options, **own))
    last = {}
    for step in range(60):
        if step in (2, 3, 4):  # chunks of these prompts are in the steps in which `recent` evicts
            prompt = [3 + token % 90 for token in range(60)]
            engine.submit(GenerationRequest(prompt, options, request_id=f"prompt{step}"))
        last |= {delta.request_id: delta for delta in engine.step()}

    assert not engine.has_work
    assert "broke its contract" in last.pop("recent").error
    assert {delta.finish_reason for delta in last.values()} == {"length"}
    engine.check()


@pytest.mark.parametrize("seed", range(20))
def test_order_and_moves_on_a_device_equal_those_on_a_cpu(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    lanes, slots = 6, int(rng.integers(1, 40))
    held = rng.integers(1, slots + 1, lanes)
    held[0] = slots
    positions = torch.from_numpy(rng.permuted(np.tile(np.arange(slots), (lanes, 1)), axis=1) * 3)
    live = np.arange(slots) < held[:, None]
    keep = live & (rng.random((lanes, slots)) < 0.6)
    kept = keep.sum(axis=1)

    def moved(way):
        order = SlotOrder.of(positions.int(), held)
        lane, source, target = slot_moves(torch.from_numpy(keep), kept, held)
        numbers = torch.arange(lanes * slots).view(lanes, slots)
        after = numbers.clone()
        after[lane, target] = numbers[lane, source]
        return order, after

    order, after = moved(TOGETHER)
    on_device(monkeypatch)
    device, also = moved(ON_DEVICE)

    assert order.positions.equal(device.positions)
    assert order.slot[torch.from_numpy(live)].equal(device.slot[torch.from_numpy(live)])
    for lane in range(lanes):
        assert after[lane, : kept[lane]].equal(also[lane, : kept[lane]])
        wanted = (lane * slots + np.flatnonzero(keep[lane])).tolist()
        assert sorted(after[lane, : kept[lane]].tolist()) == wanted


LAYERS, HEADS, SLOTS, DIM = 3, 4, 5, 2
LANES = LAYERS * HEADS


class Vectors:
    def __init__(self, lanes):
        self._lanes = lanes

    def keys(self):
        return self._lanes[:, None, None].expand(-1, SLOTS, DIM).float()

    def values(self):
        return -self.keys()


def own_lanes(rank, size):
    heads = HEADS // size
    first = rank * heads
    return torch.arange(LANES).view(LAYERS, HEADS)[:, first : first + heads].flatten()


def view_of(lanes, heads):
    positions = torch.arange(SLOTS).expand(len(lanes), -1) + lanes[:, None]
    more = {"heads_per_layer": heads, "layers": tuple(range(LAYERS)), "slots": Vectors(lanes)}
    statistics = {"attention_sum.mean": lanes[:, None].expand(-1, SLOTS).float()}
    return KVView(positions, SLOTS, statistics=statistics, **more)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_view_is_that_of_one_rank_and_each_gets_its_part_of_a_decision(size):
    expected = view_of(torch.arange(LANES), HEADS)

    def seen(group):
        own = view_of(own_lanes(group.rank, size), HEADS // size)
        view = AllHeads(group, LAYERS).view(own)
        assert torch.equal(view.keys, expected.keys)
        assert torch.equal(view.values, expected.values)
        return view

    for view in on_ranks(size, seen):
        assert view.heads_per_layer == HEADS
        assert torch.equal(view.positions, expected.positions)
        assert torch.equal(view.statistic(AttentionSum()), expected.statistic(AttentionSum()))

    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(LANES, SLOTS, generator=generator).argsort(dim=1) < 3

    def part(group):
        found = AllHeads(group, LAYERS).own_part(mask)
        assert torch.equal(found, mask[own_lanes(group.rank, size)])

    on_ranks(size, part)


def test_unequal_ranks_are_refused():
    mask = torch.ones(LANES, SLOTS, dtype=torch.bool)
    mask[HEADS - 1, 0] = False  # a head of the last rank

    def part(group):
        with pytest.raises(PolicyError, match="different numbers of tokens"):
            AllHeads(group, LAYERS).own_part(mask)

    on_ranks(2, part)


CRUSHED = "kvcrush:cap=16,every=4,base=(h2o:recent=4),share=0.5"


def test_nothing_is_written_if_slots_cannot_be_moved(monkeypatch):
    engine = Engine(engines.load("llama"), KVConfig(memory="2MiB", page_tokens=4, evict=CRUSHED))
    memory, kv = engine.pool.kv.memory, engine.pool.kv
    decoder = engine.model.decoder
    math = attention_math(decoder)
    evictor = PolicyEvictor(kv, engine.pool.rules, 1 << 20, math, decoder.rotations)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.submit(GenerationRequest(list(range(3, 15)), params))
    engine.step()
    [request] = engine.scheduler.running
    num_slots = memory.tables["full"].num_slots[request.memory.row].astype(np.int64)
    twin = fork(memory, request.memory.row)
    before = kv.store.arena.clone()
    monkeypatch.setattr(memory, "fits", lambda pages: not sum(pages.values()))

    with pytest.raises(OutOfPages):
        evictor.evict(request, num_slots - 2)

    assert kv.store.arena.equal(before)
    monkeypatch.undo()
    memory.release([twin])
    engine.check()


POSITIONS = np.array([[*range(20), -1]], dtype=np.int32)


@pytest.mark.parametrize(
    ("window", "when", "every", "piece_tokens", "expected"),
    [
        ((0, 8), DECODE, 3, 1, range(12, 15)),  # at 23 tokens 15 is the oldest in the window
        ((0, 8), DECODE, 8, 1, range(12, 20)),
        ((0, 8), DECODE, 3, 4, range(12, 18)),  # three more may leave
        ((0, 8), PREFILL_END, 3, 1, range(12, 20)),  # there is no next eviction
        ((6, 17), DECODE, 5, 1, range(6, 8)),  # from 3 on, except sinks
        ((6, 30), DECODE, 5, 1, range(0)),  # the window starts before the first token
        ((6, 30), PREFILL_END, 5, 1, range(6, 20)),
    ],
)
def test_leaving_window_selects_tokens_that_leave_before_the_next_eviction(
    window, when, every, piece_tokens, expected
):
    """The request has 20 processed tokens."""
    sinks, recent = window
    tokens = FullPrecisionTokens(sinks=sinks, residual=recent, recent=recent)
    spec = EvictionSpec(cap=16, every=every, when=when)

    found = leaving_window(tokens, Eviction(spec=spec, piece_tokens=piece_tokens), POSITIONS, 20)

    assert POSITIONS[found].tolist() == list(expected)
