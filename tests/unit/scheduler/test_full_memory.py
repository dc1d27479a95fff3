import re
from dataclasses import replace

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits, OutOfPages
from quire.kv.memory import KVMemory
from quire.layout.eviction import (
    DECODE,
    KEEP_ALL,
    PREFILL_AND_DECODE,
    PREFILL_END,
    PRESSURE,
    EvictionSpec,
)
from quire.layout.layout import layout_for
from quire.layout.statistics import AttentionMax, ScoringPass
from quire.scheduler.batchers import BATCHERS
from quire.scheduler.forks import NEVER
from quire.scheduler.peaks import Need, Peaks, possible_changes
from quire.scheduler.request import RequestGroup, RequestState
from quire.scheduler.sequence_memory import SequenceMemory
from support.engines import load
from support.kv_options import kv_config
from support.model_specs import small_spec
from support.scheduler_load import SchedulerLoad, Setting

PROMPT = [3 + i * i % 60 for i in range(330)]


def bytes_in(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) B", text)]


def test_refusal_states_needed_and_total_bytes_in_the_same_unit():
    """Two page classes use separate slabs: the bytes of their pages alone may be fewer."""
    options = {"codec": "int8+sinks=2+residual=8", "evict": "h2o:cap=300,every=8"}
    engine = Engine(load("llama"), KVConfig(memory=40_000, page_tokens=16, **options))
    with pytest.raises(NeverFits, match="B of KV, the whole KV memory has") as refusal:
        engine.submit(GenerationRequest([2] * 330, SamplingParams(max_tokens=1)))

    needed, has = bytes_in(str(refusal.value))[:2]
    assert needed > has == engine.pool.kv.memory.total_bytes
    assert engine.scheduler.peaks.peak_bytes(Need(330, 330, engine.pool.eviction.spec)) < has


def lack_pages_once(monkeypatch, method):
    """The first call raises; returns the request of each call that raised."""
    call, refused = getattr(SequenceMemory, method), []

    def without_pages(sequence_memory, *arguments):
        if not refused:
            refused.append(arguments[0])
            raise OutOfPages("too few free pages for statistics")
        call(sequence_memory, *arguments)

    monkeypatch.setattr(SequenceMemory, method, without_pages)
    return refused


@pytest.mark.parametrize("others", [0, 2])
def test_cached_prefix_is_dropped_or_request_waits_if_statistics_lack_pages(others, monkeypatch):
    load = SchedulerLoad(Setting(cap=20, with_statistics=True, shares=True, pages=40))
    for _ in range(others):
        load.submit(load.request(9, 12))
    if others:
        load.step()
    refused = lack_pages_once(monkeypatch, "allocate")
    request = load.request(9, 5)
    load.submit(request)
    load.step()

    assert refused == [request]
    assert (request.progress.state is RequestState.RUNNING) == (not others)
    load.drain()
    assert len(request.output_token_ids) == 5


def refuse_growth(monkeypatch, lacks_pages):
    for name in ("can_grow", "try_grow"):
        grow = getattr(SequenceMemory, name)

        def grown(self, requests, tokens, grow=grow):
            return not lacks_pages(requests) and grow(self, requests, tokens)

        monkeypatch.setattr(SequenceMemory, name, grown)


def test_request_that_never_gets_pages_fails_and_others_continue(monkeypatch):
    load = SchedulerLoad(Setting(pages=40))
    stuck, other = load.request(9, 5), load.request(9, 5)
    for request in (stuck, other):
        load.submit(request)
    refuse_growth(monkeypatch, lambda requests: stuck in requests)

    while stuck.progress.state is not RequestState.FINISHED:
        load.scheduler.schedule()
    [failure] = load.scheduler.take_failures()
    del load.requests[stuck.request_id]
    load.drain()

    assert failure.request is stuck
    assert str(failure.error) == NEVER
    assert len(other.output_token_ids) == 5


@pytest.mark.parametrize("batcher", [*BATCHERS, "baton_pd:hold=host", "baton_pd:prefill=sync"])
def test_group_whose_members_cannot_proceed_together_is_dissolved(batcher, monkeypatch):
    load = SchedulerLoad(Setting(pages=40, max_num_seqs=3, batcher=batcher, host_pages=40))
    members = [load.request(9, 5) for _ in range(3)]
    load.submit_group(list(members), atomic=False)

    running = load.scheduler.running
    refuse_growth(monkeypatch, lambda _: sum(r.group is not None for r in running) >= 2)
    load.drain()

    assert [len(member.output_token_ids) for member in members] == [5, 5, 5]
    assert [member.split_from is not None for member in members] == [False, True, True]


@pytest.mark.parametrize("batcher", ["pd:ahead=5", "baton_pd", "baton_pd_best_fit"])
def test_first_beams_decode_outside_of_the_batch_when_no_row_of_it_can(batcher):
    """A request of lower priority fills the batch and the memory; the beams wait for its row."""
    load = SchedulerLoad(Setting(pages=10, max_num_seqs=3, batcher=batcher))
    load.submit(other := load.request(6, 20, priority=1))
    load.step()
    beams = [load.request(9, 3) for _ in range(3)]
    load.submit_group(beams, atomic=True)

    load.drain()  # fails if a request ends with an error

    assert other.progress.num_preemptions > 0
    assert len(other.output_token_ids) == 20


def test_beams_without_pages_for_a_fork_are_recomputed_with_their_sampled_tokens(monkeypatch):
    load = SchedulerLoad(Setting(pages=40, chunk_tokens=3))
    beams = [load.request(9, 5) for _ in range(3)]
    load.submit_group(beams, atomic=True)
    load.step()
    assert load.scheduler.preempt_one()
    refused = lack_pages_once(monkeypatch, "fork")
    while not refused:
        load.step()

    assert not load.scheduler.running
    assert {len(request.output_token_ids) for request in load.requests.values()} == {1}
    load.drain()


OPTIONS = {"--kv-memory": "memory", "--kv-offload-memory": "offload_memory"}


def submitted(name: str, prompt=PROMPT, **sizes) -> Engine:
    engine = Engine(load(name, times=3), kv_config(**sizes, offload_recompute="off"))
    engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=8)))
    return engine


def refusal_text(name: str, memory: str | int, offload_memory: str | int) -> str:
    with pytest.raises(NeverFits) as refusal:
        submitted(name, memory=memory, offload_memory=offload_memory)
    return str(refusal.value)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama_mha"])
@pytest.mark.parametrize(
    ("memory", "offload_memory"), [("56KiB", "4MiB"), ("64KiB", "32KiB"), ("96KiB", 0), (60_001, 0)]
)
def test_request_runs_with_each_size_that_the_refusal_names(name, memory, offload_memory):
    message = refusal_text(name, memory, offload_memory)
    named = re.compile(r"(?:raise|give) (--[a-z-]+) (?:to|of) (\d+[KM]iB)").findall(message)
    assert "--kv-memory" in dict(named), message
    for option, size in named:
        sizes = {"memory": memory, "offload_memory": offload_memory, OPTIONS[option]: size}
        engine, deltas = submitted(name, **sizes), []
        while engine.has_work:
            deltas += engine.step()
        assert (deltas[-1].finish_reason, deltas[-1].error) == ("length", None)


def test_refusal_with_kv_offload_states_the_needs_of_each_memory():
    """6 layers of 2 lanes: staging holds one layer, the rest of KV memory is the last chunk."""
    ample, full, without = (refusal_text("qwen3", "24KiB", size) for size in ("4MiB", "32KiB", 0))
    _, _, staging, rest, offloaded, offload = bytes_in(ample)

    assert "with KV offload the KV memory must hold" in ample
    assert "B of staging (one layer of 336 offloaded tokens)" in ample
    assert "(the last chunk)" in ample
    assert (offloaded, offload) == (6 * staging, 4 << 20)
    assert "--kv-offload-memory to" not in ample
    assert rest
    assert "(tokens that do not fit in the offload memory)" in full
    assert "offload" not in without.split(";")[1]


# ---- eviction under pressure ---------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [1, 8])
@pytest.mark.parametrize("prompt", [2, 20])
def test_full_lane_evicts_and_continues_without_free_pages(page_tokens, prompt):
    """A cap of 8 in a memory of 8 slots: the peak of 8 is admitted, and 8 more tokens follow.

    With pages of 8 tokens the eviction frees 2 slots and no page, which suffices for the next.
    """
    pages = 8 // page_tokens
    setting = Setting(page_tokens=page_tokens, cap=6, pages=pages, max_num_seqs=1, chunk_tokens=2)
    load = SchedulerLoad(setting)
    request = load.request(prompt, 14)
    request.eviction.spec = EvictionSpec(cap=8, every=2, when=PRESSURE)

    assert load.submit(request)
    load.drain()

    assert not load.requests
    assert len(request.output_token_ids) == 14
    assert request.eviction.num_evictions > 0


SMALL_STEPS = {"max_num_batched_tokens": 1, "max_num_seqs": 3, "chunk_tokens": 2}
CAPPED = {"page_tokens": 8, "cap": 6, "mixed": True, "high_watermark": 0.8, "burst": 50}
THREE_PAGES = Setting(pages=3, **SMALL_STEPS, **CAPPED)


@pytest.mark.parametrize(("when", "together"), [(PRESSURE, False), (PREFILL_AND_DECODE, True)])
def test_group_with_shared_pages_fits_without_eviction_or_is_dissolved(when, together):
    """Two outputs of a prompt of 30 tokens, 24 of which fill the memory.

    An eviction from one member allocates pages before it frees any: as a group the members would
    hold all of the memory, and neither could proceed.
    """
    load = SchedulerLoad(THREE_PAGES)
    members = [load.request(30, 20) for _ in range(2)]
    for member in members:
        member.eviction.spec = EvictionSpec(cap=8, every=2, when=when)

    load.submit_group(members, atomic=False)

    assert (members[0].group is not None) == together
    load.drain()
    assert not load.requests


def test_beams_that_do_not_fit_are_rejected_with_advice():
    load = SchedulerLoad(THREE_PAGES)
    first, spare = (load.request(30, 20) for _ in range(2))
    first.group = spare.group = RequestGroup("r", atomic=True)
    first.group.members, first.group.spare = [first], [spare]
    first.eviction.spec = spare.eviction.spec = EvictionSpec(cap=8, every=2, when=PRESSURE)
    with pytest.raises(NeverFits, match=r"in 2 beams .*set when=prefill_and_decode"):
        load.scheduler.submit(first)
    assert not load.scheduler.has_work


@pytest.mark.parametrize("atomic", [False, True])
def test_members_that_share_pages_are_not_evicted_from(atomic):
    """An eviction from one would copy its shared pages: the copies could exceed the memory."""
    load = SchedulerLoad(Setting(page_tokens=4, cap=20, with_statistics=True, pages=40))
    members = [load.request(16, 6) for _ in range(2)]
    for member in members:
        member.eviction.spec = replace(member.eviction.spec, cap=16, every=4, when=PRESSURE)
    load.submit_group(list(members), atomic=atomic)
    while len(load.scheduler.running) < 2:
        load.step()
    capacities, running = load.scheduler.capacities, load.scheduler.running

    assert not capacities.evict_under_pressure(running)
    assert not capacities.reuse_slots(running)
    assert [member.eviction.num_evictions for member in members] == [0, 0]
    load.drain()


# ---- advice --------------------------------------------------------------------------------------

FULL, WINDOW = None, 24
PAGE_TOKENS, CHUNK = 4, 64
COLUMN_BYTES = 2 * 8 * 2 * 4 * PAGE_TOKENS  # per layer: keys and values of two heads of 8 elements


def peaks_of(*windows, columns=32, offload_tokens=0, evicting=False):
    model = small_spec(*windows)
    layout = layout_for(model, codec="float32", page_tokens=PAGE_TOKENS, evicting=evicting)
    peaks = Peaks(KVMemory(layout, columns * COLUMN_BYTES, 4), CHUNK)
    peaks.offloaded_tokens = offload_tokens
    peaks.offload_bytes = offload_tokens * len(windows) * COLUMN_BYTES // PAGE_TOKENS
    return peaks


def need(prompt, generated, eviction=KEEP_ALL, *, may_offload=True):
    return Need(prompt + generated, prompt, eviction, may_offload)


def scores(chunk):
    return AttentionMax(of=ScoringPass("", "", "", "", chunk_tokens=chunk, overlap=0))


RULE = "evict tokens with --evict RULE:cap=TOKENS"
LARGE_CHUNKS = EvictionSpec(cap=8, when=PREFILL_END, statistics=(scores(100),))
STAGED, TWO_LAYERS = peaks_of(*4 * [FULL], offload_tokens=1000), peaks_of(FULL, FULL)
ADVICE = {
    "two layers cannot be offloaded and half of the request does not fit": (
        *(TWO_LAYERS, need(100, 100), "shorten the prompt and lower max_tokens, raise "),
        f"--kv-memory to 50KiB or {RULE}",
    ),
    "KV offload suffices": (
        *(peaks_of(*4 * [FULL]), need(100, 1), "shorten the prompt, raise --kv-memory to 52KiB, "),
        f"set --kv-offload-memory to 48KiB or {RULE}",
    ),
    "more offload memory suffices": (
        *(peaks_of(*4 * [FULL], offload_tokens=8), need(20, 60), "lower max_tokens, raise "),
        f"--kv-memory to 37KiB, raise --kv-offload-memory to 32KiB or {RULE}",
    ),
    "staging alone is too large": (
        *(STAGED, need(40, 300), "lower max_tokens, raise --kv-memory to 44KiB or "),
        RULE,
    ),
    "a lower cap suffices": (
        peaks_of(*4 * [FULL], evicting=True),
        need(100, 1, EvictionSpec(cap=80, every=4)),
        "shorten the prompt, raise --kv-memory to 45KiB, set --kv-offload-memory to 41KiB or ",
        "lower cap= of its eviction rule",
    ),
    "the prompt is prefilled whole": (
        peaks_of(*4 * [FULL], evicting=True),
        need(100, 1, EvictionSpec(cap=8, every=4, when=DECODE)),
        "shorten the prompt, raise --kv-memory to 57KiB or set when=prefill_and_decode and ",
        "a lower cap= in its eviction rule",
    ),
    "the scoring pass has large chunks": (
        *(peaks_of(*4 * [FULL], columns=90, evicting=True), need(200, 1, LARGE_CHUNKS)),
        "shorten the prompt, raise --kv-memory to 47KiB, lower cap= of its eviction rule or ",
        "lower chunk= of its eviction rule to 64",
    ),
}


def test_advice_is_what_admits_the_request_or_its_beams():
    for name, (peaks, requested, first, second) in ADVICE.items():
        assert not peaks.fits_alone(requested), name
        assert possible_changes(peaks, requested, 1) == first + second, name

    peaks = peaks_of(FULL, FULL, evicting=True)
    spec = EvictionSpec(cap=16, every=4, when=PRESSURE)
    assert possible_changes(peaks, need(20, 40, spec, may_offload=False), 2) == (
        "use fewer beams, lower max_tokens, raise --kv-memory to 29KiB or set "
        "when=prefill_and_decode in its eviction rule"
    )


def test_needs_are_counted_with_windows_and_the_largest_chunk():
    """24 tokens and a chunk of 64 are more than 32 pages of 4 layers; shorter chunks fit."""
    peaks, small = (peaks_of(*4 * [WINDOW], columns=columns) for columns in (32, 24))
    advice = "shorten the prompt or raise --kv-memory to 14KiB"
    assert peaks.fits_alone(need(100, 1))
    assert peaks.counts([need(100, 1)]).sum() <= 32
    assert not small.fits_alone(need(100, 1))
    assert possible_changes(small, need(100, 1), 1) == advice

    # 4 layers of 25 pages: 2 staging slots hold 24 of them in 48 pages, one in 24
    for columns, slots in ((56, 2), (30, 1)):
        peaks = peaks_of(*4 * [FULL], columns=columns, offload_tokens=1000)

        [pages] = peaks.counts([need(100, 1)])[0].tolist()

        assert slots * 24 < pages <= columns
    assert not peaks_of(*4 * [FULL], columns=27, offload_tokens=1000).fits_alone(need(100, 1))
