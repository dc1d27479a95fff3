"""Where the memory has no room: what a refusal says, and what becomes of those that cannot move."""

import re

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits, OutOfPages
from quire.scheduler.admission.need import Need
from quire.scheduler.forks import NEVER
from quire.scheduler.request_parts import RequestState
from quire.scheduler.sequence_memory import SequenceMemory
from support.engines import load
from support.kv_options import kv_config
from unit.scheduler.scheduler_load import SchedulerLoad, Setting

RULE = "h2o:cap=300,every=8"
NUMBERS = re.compile(r"need ([\d,]+) B of KV, the whole KV memory has ([\d,]+) B")


def test_a_refusal_counts_what_is_needed_and_what_there_is_in_the_same_unit():
    """Two page classes fill slabs that neither shares: their pages alone may be fewer bytes."""
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
def test_a_request_enters_without_its_cached_prefix_or_waits_where_statistics_lack_pages(
    others, monkeypatch
):
    pool = SchedulerLoad(Setting(cap=20, remembers=True, shares=True, pages=40))
    for _ in range(others):
        pool.submit(pool.request(9, 12))
    if others:
        pool.step()
    enter, promoted = SequenceMemory.allocate, []

    def without_pages(sequence_memory, request, lease):
        if not promoted:
            promoted.append(request)
            raise OutOfPages("too few free pages for the statistics of a cached prefix")
        enter(sequence_memory, request, lease)

    monkeypatch.setattr(SequenceMemory, "allocate", without_pages)
    request = pool.request(9, 5)
    pool.submit(request)
    pool.step()

    assert promoted == [request]
    assert (request.progress.state is RequestState.RUNNING) == (not others)
    pool.drain()
    assert len(request.output_token_ids) == 5


def test_a_request_that_cannot_move_in_all_of_the_memory_fails_and_the_others_go_on(monkeypatch):
    pool = SchedulerLoad(Setting(pages=40))
    stuck, other = pool.request(9, 5), pool.request(9, 5)
    for request in (stuck, other):
        pool.submit(request)
    can_grow = SequenceMemory.can_grow
    monkeypatch.setattr(
        SequenceMemory,
        "can_grow",
        lambda sequence_memory, requests, tokens: (
            stuck not in requests and can_grow(sequence_memory, requests, tokens)
        ),
    )

    while stuck.progress.state is not RequestState.FINISHED:
        pool.scheduler.schedule()
    [failure] = pool.scheduler.take_failures()
    del pool.requests[stuck.request_id]
    pool.drain()

    assert failure.request is stuck
    assert str(failure.error) == NEVER
    assert len(other.output_token_ids) == 5


def test_members_of_a_group_that_cannot_move_together_run_apart(monkeypatch):
    pool = SchedulerLoad(Setting(pages=40))
    members = [pool.request(9, 5) for _ in range(3)]
    pool.submit_group(list(members), atomic=False)
    can_grow = SequenceMemory.can_grow

    def together(sequence_memory, requests, tokens):
        running = [r for r in pool.scheduler.running if r.group is not None]
        return len(running) < 2 and can_grow(sequence_memory, requests, tokens)

    monkeypatch.setattr(SequenceMemory, "can_grow", together)
    pool.drain()

    assert [len(member.output_token_ids) for member in members] == [5, 5, 5]
    assert [member.split_from is not None for member in members] == [False, True, True]


RAISE = re.compile(r"(?:raise|give) (--[a-z-]+) (?:to|of) (\d+[KM]iB)")
OPTIONS = {"--kv-memory": "memory", "--kv-offload-memory": "offload_memory"}


def refused(name: str, memory: str | int, stream: str | int, prompt: list[int]) -> str:
    kv = kv_config(memory=memory, offload_memory=stream, offload_recompute="off")
    with pytest.raises(NeverFits) as refusal:
        Engine(load(name, times=3), kv).submit(
            GenerationRequest(prompt, SamplingParams(max_tokens=8))
        )
    return str(refusal.value)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "llama_mha"])
@pytest.mark.parametrize(
    ("memory", "stream"), [("56KiB", "4MiB"), ("64KiB", "32KiB"), ("96KiB", 0), (60_001, 0)]
)
def test_the_named_size_of_each_option_lets_the_request_run(name, memory, stream):
    prompt = [3 + i * i % 60 for i in range(330)]
    message = refused(name, memory, stream, prompt)

    named = RAISE.findall(message)
    assert "--kv-memory" in dict(named), message
    for option, size in named:
        sizes = {"memory": memory, "offload_memory": stream, OPTIONS[option]: size}
        engine = Engine(load(name, times=3), kv_config(**sizes, offload_recompute="off"))
        engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=8)))
        deltas = []
        while engine.has_work:
            deltas += engine.step()
        assert (deltas[-1].finish_reason, deltas[-1].error) == ("length", None)


def test_a_refusal_under_offload_says_which_memory_must_hold_what():
    """6 layers of 2 lanes: staging holds one layer, the rest of KV memory is the last chunk."""
    prompt = [3 + i * i % 60 for i in range(330)]
    roomy, full = (refused("qwen3", "24KiB", stream, prompt) for stream in ("4MiB", "32KiB"))
    numbers = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) B", roomy)]
    _, _, _, staging, rest, offloaded, offload = numbers

    assert "with KV offload the KV memory must hold" in roomy
    assert "B of staging (one layer of 336 offloaded tokens)" in roomy
    assert "(the last chunk)" in roomy
    assert offloaded == 6 * staging
    assert offload == 4 << 20
    assert "--kv-offload-memory to" not in roomy
    assert rest
    assert "(tokens that do not fit in the offload memory)" in full
    assert (
        "offload" not in refused("qwen3", "24KiB", 0, prompt).partition("; ")[2].partition(";")[0]
    )
