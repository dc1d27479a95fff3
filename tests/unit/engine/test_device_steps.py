"""Steps on a device: the CPU waits for nothing but the sampled tokens."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire import GenerationRequest, SamplingParams, ScheduleConfig
from quire.engine.core import Engine
from quire.eviction import decisions
from quire.kernels import device_copies
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import load_library
from quire.kernels.triton.hardware import why_no_triton
from quire.sampling.sampler import Sampler
from quire.scheduler.lanes import LaneCapacities
from support import engines
from support.engines import make_prompts
from support.host_waits import DEVICE, dataless, recorded_waits
from support.interpreted import CPU, triton_backend
from support.kv_options import kv_config
from support.static_attention import use_graphs

OPTIONS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "masks": SamplingParams(temperature=0, min_tokens=8, logit_bias={3: 1}, bad_token_ids=((4,),)),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(3, 4, 5)),
    "logprobs": SamplingParams(temperature=1.0, logprobs=3),
}


GREEDY_NUMBERS = 3
"""Numbers that are read of a greedy row."""


class Reads:
    """Stands for the copy of the results from the device; returns token 2 for every row.

    Attributes:
        rows: rows of each step; 0: read from the copy, of greedy rows.
        count: number of waits for a copy.
        begun: number of copies that have begun.
    """

    def __init__(self):
        self.rows = self.count = self.begun = 0

    def __call__(self, numbers):
        self.begun += 1
        assert numbers.device.type == DEVICE.type

        def wait():
            self.count += 1
            found = np.zeros(numbers.shape)
            found[: self.rows or len(found) // GREEDY_NUMBERS] = 2
            return found

        return wait


def decoding_engine(architecture, reads, options, **kv):
    """An engine on the device whose requests have been prefilled."""
    model = dataless(architecture)
    config = kv_config(memory="4MiB", page_tokens=4, **kv)
    engine = Engine(model, config, ScheduleConfig(max_num_seqs=64, max_num_batched_tokens=1024))
    engine.sampling_step.sampler = Sampler(model.spec.vocab_size, (1,), read=reads)
    reads.rows = 0 if "evict" in kv else len(options)
    prompts = make_prompts(len(options), 9, seed=3)
    if "evict" in kv:  # rows that evict in the same step
        prompts = [[3 + row % 90] * 9 for row in range(len(options))]
    for prompt, params in zip(prompts, options, strict=True):
        engine.submit(GenerationRequest(prompt, params))
    while {request.num_uncomputed for request in engine.scheduler.running} != {1}:
        engine.step()
    reads.count = 0
    return engine


def check_waits(engine, reads, steps=6, rows=3):
    """Check that each step waits once, for its tokens; six steps cross a page."""
    with recorded_waits() as waits:
        for _ in range(steps):
            assert len(engine.step()) == rows

    assert waits == []
    assert reads.count == steps


@pytest.mark.parametrize("name", OPTIONS)
def test_decode_step_on_a_device_waits_once_for_its_tokens(name):
    reads = Reads()
    check_waits(decoding_engine("llama", reads, [OPTIONS[name]] * 3), reads)


RULES = {
    "recent": "recent:sinks=2",
    "sinks": "sinks:sinks=2",
    "average": "average:recent=2",
    "snapkv": "snapkv:window=2",
    "value_norm": "value_norm:base=h2o",
    "criticalkv": "criticalkv:base=h2o",
    **{name: f"{name}:" for name in ("h2o", "tova", "keydiff", "knorm", "random", "kvcrush")},
}


def with_cap(rule):
    return f"{rule}{'' if rule.endswith(':') else ','}cap=12,every=4"


def evicting_engine(rule, rows, reads, monkeypatch):
    """An engine on the device with rows that are at their cap."""
    monkeypatch.setattr(decisions, "start_read", lambda numbers: lambda: numbers_of(numbers))
    engine = decoding_engine("llama", reads, [OPTIONS["greedy"]] * rows, evict=with_cap(rule))

    while len(engine.step()) < rows:
        pass
    reads.count = 0
    return engine


def numbers_of(numbers):
    """What a rule without a breach evicts, in the shape of a tensor on the device."""
    return np.zeros(numbers.shape, dtype=bool if numbers.dtype == torch.bool else np.int64)


@pytest.mark.parametrize("name", RULES)
def test_step_that_evicts_waits_once_for_its_tokens(name, monkeypatch):
    reads = Reads()
    engine = evicting_engine(RULES[name], 3, reads, monkeypatch)
    check_waits(engine, reads, steps=10)
    assert engine.scheduler.capacities.num_evictions >= 3


class CountsOperations(TorchDispatchMode):
    """Counts tensor operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of_an_eviction(rule, rows, monkeypatch):
    """Tensor operations that evict from rows that reach their cap in the same step."""
    counts = []
    inner = LaneCapacities.evict_to_capacity

    def counted(self, requests):
        with CountsOperations() as operations:
            before = self.num_evictions
            found = inner(self, requests)
        if self.num_evictions - before == rows:
            counts.append(operations.count)
        return found

    monkeypatch.setattr(LaneCapacities, "evict_to_capacity", counted)
    engine = evicting_engine(rule, rows, Reads(), monkeypatch)
    while not counts:
        engine.step()
    return counts[0]


@pytest.mark.parametrize("name", RULES)
def test_operations_of_an_eviction_do_not_grow_with_the_rows(name, monkeypatch):
    counts = {operations_of_an_eviction(RULES[name], rows, monkeypatch) for rows in (1, 64)}
    assert len(counts) == 1, counts


class CountsLaunches(CountsOperations):
    """Counts calls of kernels, and torch operations that are neither views nor allocations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        makes = func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty)
        self.count += not (func.is_view or makes)
        return func(*args, **(kwargs or {}))

    def of(self, launch, number):
        """A function that counts as this number, with what it does."""

        def counted(*args):
            self.count += number
            with torch._C._DisableTorchDispatch():
                return launch(*args)

        return counted


SELECTORS = {"native": lambda: NativeAttention(load_library(), GatheredAttention(CPU))}
if why_no_triton(CPU) is None:
    SELECTORS["triton"] = triton_backend
LAUNCHING = {
    **dict.fromkeys(("order_lanes", "select_lanes", "move_lanes", "move"), 1),
    **dict.fromkeys(("window_sums", "mean_cosines"), 2),
}
"""Each is one call of the C library, and this number of launches with Triton."""
MAX_LAUNCHES = 12


def launches_of_an_eviction(form, rule, rows, monkeypatch):
    """Launches that evict from rows that reach their cap in the same step."""
    found, launches, inner = [], CountsLaunches(), LaneCapacities.evict_to_capacity
    config = kv_config(memory="8MiB", page_tokens=4, evict=with_cap(rule))
    schedule = ScheduleConfig(max_num_seqs=64, max_num_batched_tokens=1024)
    engine = Engine(engines.load("qwen3"), config, schedule)
    attending, evicting = engine.pool.kv.backend, SELECTORS[form]()
    for name, number in LAUNCHING.items():
        counted = launches.of(getattr(evicting, name), number if form == "triton" else 1)
        monkeypatch.setattr(evicting, name, counted)

    def evict_to_capacity(self, requests):
        before, launches.count, engine.pool.kv.backend = self.num_evictions, 0, evicting
        with launches, monkeypatch.context() as patch:
            if form == "triton":  # as on a GPU
                patch.setattr(device_copies, "reads_freely", lambda device: False)
            evicted = inner(self, requests)
        engine.pool.kv.backend = attending
        if self.num_evictions - before == rows:
            found.append(launches.count)
        return evicted

    monkeypatch.setattr(LaneCapacities, "evict_to_capacity", evict_to_capacity)
    options = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for row in range(rows):
        engine.submit(GenerationRequest([3 + row % 90] * 9, options))
    while not found:
        engine.step()
    return found[0]


@pytest.mark.parametrize(
    ("form", "rows"), [("native", (1, 64)), pytest.param("triton", (1, 8), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["recent", "sinks", "h2o", "average", "keydiff", "snapkv", "tova"])
def test_evictions_of_any_number_of_rows_take_few_launches(form, rows, name, monkeypatch):
    if form not in SELECTORS:
        pytest.skip("no interpreter of Triton")
    counts = [launches_of_an_eviction(form, RULES[name], number, monkeypatch) for number in rows]
    assert counts[0] == counts[1] <= MAX_LAUNCHES


def test_decode_step_of_rows_with_different_options_waits_once():
    reads, options = Reads(), list(OPTIONS.values())[:8]
    check_waits(decoding_engine("llama", reads, options), reads, steps=1, rows=8)


@pytest.mark.parametrize(
    "architecture", ["llama_mqa", "mistral", "qwen2_window", "qwen3", "gemma2", "gpt2", "opt"]
)
def test_decode_step_of_any_architecture_waits_once(architecture):
    reads = Reads()
    check_waits(decoding_engine(architecture, reads, [OPTIONS["greedy"]] * 3), reads)


@pytest.mark.parametrize("codec", ["int8", "int4", "fp8"])
def test_decode_step_over_coded_pages_waits_once(codec):
    reads = Reads()
    check_waits(decoding_engine("llama", reads, [OPTIONS["greedy"]] * 3, codec=codec), reads)


def test_steps_that_reallocate_page_tables_wait_once():
    reads = Reads()
    options = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    engine = decoding_engine("llama", reads, [options] * 3)
    tables = engine.pool.kv.tables.values()
    before = [table.current().shape[2] for table in tables]

    check_waits(engine, reads, steps=60)  # more than 16 pages of 4 tokens

    assert all(t.current().shape[2] > width for t, width in zip(tables, before, strict=True))


def test_decode_step_with_static_inputs_waits_once():
    reads = Reads()
    engine = decoding_engine("llama", reads, [OPTIONS["greedy"]] * 3)
    graphs = use_graphs(engine, 8, DEVICE)
    check_waits(engine, reads)
    assert graphs.stats.replayed == 6


def test_reads_and_blocking_copies_are_recorded():
    numbers = torch.zeros(4, device=DEVICE)

    with recorded_waits() as waits:
        for read in (numbers.tolist, numbers.cpu, numbers.nonzero, numbers[0].item):
            with pytest.raises((RuntimeError, NotImplementedError)):
                read()
        with pytest.raises((RuntimeError, NotImplementedError)):
            bool((numbers > 0).all())

    scalar = "aten._local_scalar_dense.default"
    assert waits == ["aten.nonzero.default", scalar, scalar]
    with recorded_waits() as waits:
        torch.from_numpy(np.zeros(4)).to(DEVICE)
        torch.zeros(4, device=DEVICE).copy_(torch.zeros(4))
    assert waits == ["aten._to_copy.default between devices", "aten.copy_.default between devices"]
