"""Full memory: texts of refusals, and requests that cannot proceed."""

import re

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits, OutOfPages
from quire.scheduler.batchers import BATCHERS
from quire.scheduler.forks import NEVER
from quire.scheduler.peaks import Need
from quire.scheduler.request import RequestState
from quire.scheduler.sequence_memory import SequenceMemory
from support.engines import load
from support.kv_options import kv_config
from support.scheduler_load import SchedulerLoad, Setting

RULE = "h2o:cap=300,every=8"
NUMBERS = re.compile(r"need ([\d,]+) B of KV, the whole KV memory has ([\d,]+) B")


def test_refusal_states_needed_and_total_bytes_in_the_same_unit():
    """Two page classes use separate slabs: the bytes of their pages alone may be fewer."""
    kv = KVConfig(memory=40_000, page_tokens=16, codec="int8+sinks=2+residual=8", evict=RULE)
    engine = Engine(load("llama"), kv)
    peaks, spec = engine.scheduler.peaks, engine.pool.eviction.spec

    with pytest.raises(NeverFits) as refusal:
        engine.submit(GenerationRequest([2] * 330, SamplingParams(max_tokens=1)))

    numbers = NUMBERS.search(str(refusal.value)).groups()
    needed, has = (int(number.replace(",", "")) for number in numbers)
    assert needed > has == engine.pool.kv.memory.total_bytes
    assert peaks.peak_bytes(Need(330, 330, spec)) < has


@pytest.mark.parametrize("others", [0, 2])
def test_cached_prefix_is_dropped_or_request_waits_if_statistics_lack_pages(others, monkeypatch):
    load = SchedulerLoad(Setting(cap=20, with_statistics=True, shares=True, pages=40))
    for _ in range(others):
        load.submit(load.request(9, 12))
    if others:
        load.step()
    allocate, refused_requests = SequenceMemory.allocate, []

    def without_pages(sequence_memory, request, lease):
        if not refused_requests:
            refused_requests.append(request)
            raise OutOfPages("too few free pages for the statistics of a cached prefix")
        allocate(sequence_memory, request, lease)

    monkeypatch.setattr(SequenceMemory, "allocate", without_pages)
    request = load.request(9, 5)
    load.submit(request)
    load.step()

    assert refused_requests == [request]
    assert (request.progress.state is RequestState.RUNNING) == (not others)
    load.drain()
    assert len(request.output_token_ids) == 5


def refuse_growth(monkeypatch, lacks_pages):
    """Let requests lack pages for their next tokens."""
    for name in ("can_grow", "try_grow"):
        grow = getattr(SequenceMemory, name)
        monkeypatch.setattr(
            SequenceMemory,
            name,
            lambda self, requests, tokens, grow=grow: (
                not lacks_pages(requests) and grow(self, requests, tokens)
            ),
        )


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

    def are_together(_requests):
        return len([r for r in load.scheduler.running if r.group is not None]) >= 2

    refuse_growth(monkeypatch, are_together)
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
    fork, refused_requests = SequenceMemory.fork, []

    def without_pages(sequence_memory, parent, child):
        if not refused_requests:
            refused_requests.append(child)
            raise OutOfPages("too few free pages for the statistics of a fork")
        fork(sequence_memory, parent, child)

    monkeypatch.setattr(SequenceMemory, "fork", without_pages)
    while not refused_requests:
        load.step()

    assert not load.scheduler.running
    assert {len(request.output_token_ids) for request in load.requests.values()} == {1}
    load.drain()


RAISE = re.compile(r"(?:raise|give) (--[a-z-]+) (?:to|of) (\d+[KM]iB)")
OPTIONS = {"--kv-memory": "memory", "--kv-offload-memory": "offload_memory"}


def refusal_text(name: str, memory: str | int, offload_memory: str | int, prompt: list[int]) -> str:
    kv = kv_config(memory=memory, offload_memory=offload_memory, offload_recompute="off")
    with pytest.raises(NeverFits) as refusal:
        Engine(load(name, times=3), kv).submit(
            GenerationRequest(prompt, SamplingParams(max_tokens=8))
        )
    return str(refusal.value)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama_mha"])
@pytest.mark.parametrize(
    ("memory", "offload_memory"), [("56KiB", "4MiB"), ("64KiB", "32KiB"), ("96KiB", 0), (60_001, 0)]
)
def test_request_runs_with_each_size_that_the_refusal_names(name, memory, offload_memory):
    prompt = [3 + i * i % 60 for i in range(330)]
    message = refusal_text(name, memory, offload_memory, prompt)

    named = RAISE.findall(message)
    assert "--kv-memory" in dict(named), message
    for option, size in named:
        sizes = {"memory": memory, "offload_memory": offload_memory, OPTIONS[option]: size}
        engine = Engine(load(name, times=3), kv_config(**sizes, offload_recompute="off"))
        engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=8)))
        deltas = []
        while engine.has_work:
            deltas += engine.step()
        assert (deltas[-1].finish_reason, deltas[-1].error) == ("length", None)


def test_refusal_with_kv_offload_states_the_needs_of_each_memory():
    """6 layers of 2 lanes: staging holds one layer, the rest of KV memory is the last chunk."""
    prompt = [3 + i * i % 60 for i in range(330)]
    ample, full = (
        refusal_text("qwen3", "24KiB", offload_memory, prompt)
        for offload_memory in ("4MiB", "32KiB")
    )
    numbers = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) B", ample)]
    _, _, staging, rest, offloaded, offload = numbers

    assert "with KV offload the KV memory must hold" in ample
    assert "B of staging (one layer of 336 offloaded tokens)" in ample
    assert "(the last chunk)" in ample
    assert offloaded == 6 * staging
    assert offload == 4 << 20
    assert "--kv-offload-memory to" not in ample
    assert rest
    assert "(tokens that do not fit in the offload memory)" in full
    assert (
        "offload"
        not in refusal_text("qwen3", "24KiB", 0, prompt).partition("; ")[2].partition(";")[0]
    )
