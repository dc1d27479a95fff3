"""`python -m benchmarks device`: all arms compute equal hidden states on every device."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common import link_codecs as codecs_of_links
from benchmarks.common.host_bytes import HostBytes
from benchmarks.common.link_codecs import LinkCodecs, activations_pay, coders, link_sizes
from benchmarks.common.models import llama_of, random_model
from benchmarks.common.offloaded_step import OffloadedStep, Staging
from benchmarks.common.target import Target
from benchmarks.device.bench import DeviceBench
from benchmarks.device.busy_link import ThrottledHalf
from benchmarks.device.concurrent_calls import call_seconds, matching_times, run_calls
from benchmarks.device.config import QUICK_DEVICE, DeviceBenchConfig
from benchmarks.device.link_part import host_kinds
from benchmarks.device.parts import PARTS
from benchmarks.device.refit_part import at, settling_steps
from benchmarks.device.shapes import SPECS, DecodeCase
from benchmarks.device.step_harness import StepHarness, expected_seconds, whole_rows
from benchmarks.device.swap_part import (
    LengthTimes,
    fitted,
    lengths_that_fit,
    measured_hybrid,
)
from benchmarks.device.sweep_part import turns
from benchmarks.memory.swapping import swap_space_for
from benchmarks.offload.arms import ARMS, BY_NAME, step_work
from benchmarks.offload.machines import MACHINES, speeds_of
from benchmarks.offload_schedule.threads import Pace, ThreadExecutor
from benchmarks.offload_schedule.timelines import copied_bytes
from quire.errors import ConfigError, UnknownName
from quire.kv.store import store_of
from quire.offload.schedule.executor import VirtualClock
from quire.offload.schedule.planner import plan_step
from quire.offload.schedule.work import BatchTokens, Rules
from quire.offload.timeline import IN, Kind, Operation, Schedule
from quire.plan.rates import CopyRate
from quire.scheduler.preemption import swapper

CPU = Target(torch.device("cpu"))
MIB = 1 << 20
CASE = DecodeCase(model="toy", rows=4, context=12, dtype="float32")
GROUPED = replace(CASE, model="toy-grouped")
POOL = HostBytes(8 * MIB, CPU)
RULES = st.sampled_from(
    [Rules(), Rules(prefetch=False), Rules(x_chunks=5, x_ring=2), Rules(slots=3, x_chunks=1)]
)


def harness(case=CASE, link_codecs=None, **options):
    """A harness on the virtual clock, which calls the work in the order of start times."""
    options.setdefault("executor", VirtualClock())
    return StepHarness(case, CPU, POOL, link_codecs, poison=True, **options)


@pytest.fixture(scope="module")
def toy():
    return harness()


def run(on: StepHarness, batch: BatchTokens, rules: Rules, executor, change=lambda s: s) -> float:
    """Run one step with its own staging; return its error."""
    speeds = speeds_of(MACHINES["h200"], on.case.spec, on.sizes)
    layers = on.case.spec.num_layers
    schedule = change(plan_step(step_work(batch, layers, on.sizes, speeds), rules))
    step = OffloadedStep(on.model, Staging(CPU), batch, rules, poison=True)
    executor.run(schedule, step.work)
    return on.model.off(step.hidden)


@settings(max_examples=25)
@given(
    st.integers(0, 48), st.integers(0, 3), RULES, st.booleans(), st.randoms(use_true_random=False)
)
def test_any_split_computes_equal_hidden_states(toy, x, host_rows, rules, threads, draw):
    host = host_rows * CASE.context
    batch = whole_rows(CASE, BatchTokens(rows=4, x=x, kv=48 - x, host=host))
    executor = VirtualClock(lambda _: draw.random())
    if threads:
        lanes = ("in", "out", "device", "host")
        executor = ThreadExecutor({n: Pace(lambda _: draw.random() * 1e-3) for n in lanes})

    assert batch.x + batch.kv + batch.host == 48
    assert run(toy, batch, rules, executor) < 1e-5


@pytest.mark.parametrize("case", [CASE, GROUPED], ids=["multi-head", "grouped"])
@pytest.mark.parametrize("host", [1, 11, 15, 47])
def test_row_split_between_cpu_and_device_is_merged(case, host):
    batch = BatchTokens(rows=4, kv=case.tokens - host, host=host)

    assert run(harness(case), batch, Rules(), VirtualClock()) < 1e-5


def test_attention_before_its_dependencies_reads_poison(toy):
    """The test above detects errors: without the dependencies of attention it fails."""

    def without_dependencies(schedule: Schedule) -> Schedule:
        operations = schedule.operations
        return Schedule(
            tuple(replace(op, needs=()) if op.kind == Kind.ATTEND else op for op in operations)
        )

    batch = BatchTokens(rows=4, kv=48)
    run(toy, batch, Rules(), VirtualClock())

    assert math.isnan(
        run(toy, batch, Rules(), VirtualClock(lambda op: op.lane == IN), without_dependencies)
    )


@pytest.mark.parametrize("case", [CASE, GROUPED], ids=["multi-head", "grouped"])
def test_all_arms_compute_equal_hidden_states(case):
    found = harness(case, host=True)

    layouts = {arm.name: found.layout(arm) for arm in ARMS if not arm.coded}
    layouts["resident"] = found.resident_layout()
    layouts["all"] = found.split_layout(case.tokens if found.model.with_x else 0)
    steps = found.rounds(layouts, 1)

    assert {name: run[0].error < 1e-5 for name, run in steps.items()} == dict.fromkeys(steps, True)
    assert layouts["all_host"].batch.host == case.tokens
    assert layouts["lB"].batch.x == 0 or case is CASE
    assert copied_bytes(steps["resident"][0].timeline.schedule, Kind.KV_IN, Kind.X_IN) == 0
    prefetched = copied_bytes(steps["prefetch"][0].timeline.schedule, Kind.KV_IN)
    assert prefetched == case.kv_bytes


@pytest.mark.parametrize(
    ("link_codecs", "most"),
    [
        (LinkCodecs("int8", "int8"), 0.03),
        (LinkCodecs("int4", "int4"), 0.3),
        (LinkCodecs("plain", "int8"), 0.03),
    ],
)
def test_codecs_copy_the_counted_bytes_with_small_errors(link_codecs, most, monkeypatch):
    monkeypatch.setattr(
        codecs_of_links, "MOST_FLOAT_BYTES", 4 * CASE.kv_width * 5
    )  # five tokens at a time
    found = harness(CASE, link_codecs)
    model, sizes = found.model, found.sizes

    steps = [found.run(found.split_layout(x)) for x in (0, 20, 48)]

    assert sum(plane.nbytes for plane in model.kv(0)) == CASE.tokens * sizes.kv_bytes
    assert sum(plane.nbytes for plane in model.x(0)) == CASE.tokens * sizes.x_bytes
    copied = copied_bytes(steps[1].timeline.schedule, Kind.KV_IN, Kind.X_IN)
    layers = CASE.spec.num_layers  # the first one's activations are here
    assert copied == layers * 28 * sizes.kv_bytes + (layers - 1) * 20 * sizes.x_bytes
    assert all(0 < step.error < most for step in steps if link_codecs.kv != "plain")
    assert steps[2].error < most


def test_codecs_decide_whether_recompute_pays():
    assert activations_pay(CASE, LinkCodecs())
    assert not activations_pay(GROUPED, LinkCodecs())
    assert not activations_pay(CASE, LinkCodecs("int4", "plain"))
    half = replace(CASE, dtype="bfloat16")
    kv, x = coders(half, LinkCodecs("int8", "plain"))
    assert (kv.value_bytes, x.value_bytes) == (1 + 2 / 16, 2)
    assert link_sizes(half, LinkCodecs()).kv_bytes == half.kv_width * 2


def test_cpu_attention_requires_plain_kv():
    found = harness(CASE, LinkCodecs("int8", "int8"))

    with pytest.raises(ConfigError, match="plain KV"):
        found.run(found.layout(BY_NAME["all_host"], replace(found.speeds, host_token_s=1e-9)))
    with pytest.raises(ConfigError, match="equally many tokens in each of 4 rows"):
        OffloadedStep(found.model, Staging(CPU), BatchTokens(rows=4, kv=47), Rules())


# ---- memory limits -----------------------------------------------------------------------------


def test_layers_beyond_memory_share_data():
    small = HostBytes(96 << 10, CPU)  # a layer takes 36 KiB, new tokens 9 KiB

    found = StepHarness(CASE, CPU, small, executor=VirtualClock(), poison=True)

    assert found.model.distinct == 1
    assert found.run(found.split_layout(20)).error < 1e-5


def test_rows_are_halved_until_they_fit_and_one_row_too_large_raises():
    config = replace(QUICK_DEVICE, device="cpu", pinned_bytes=MIB)
    bench = DeviceBench.of(config)

    assert bench.fitting(replace(CASE, rows=16, context=256)).rows == 4
    with pytest.raises(ConfigError, match=r"raise --pinned, or lower --rows"):
        bench.fitting(replace(CASE, context=4096))


def test_insufficient_memory_raises_before_allocation(monkeypatch):
    monkeypatch.setattr("benchmarks.common.host_bytes.free_host_bytes", lambda: 10_000)
    monkeypatch.setattr("benchmarks.common.target.free_device_bytes", lambda _: 10_000)

    with pytest.raises(ConfigError, match=r"needs 20,000 B .* 10,000 B are free.*lower --pinned"):
        HostBytes(20_000, CPU)
    with pytest.raises(
        ConfigError, match=r"a step needs 10,001 B on cpu, but only 10,000 B are free; wait"
    ):
        CPU.require(10_001, "a step", "wait")
    with pytest.raises(ConfigError, match="staging for KV"):
        Staging(CPU).take("KV", (10_001,), torch.uint8)
    with pytest.raises(ConfigError, match="--pinned of 4096"):
        HostBytes(10, CPU)


def test_pool_allocates_bytes_once():
    pool = HostBytes(3 * 4096, CPU)

    first, second = (pool.take((5, 2), torch.float32) for _ in range(2))
    first.fill_(1)
    second.fill_(2)

    assert first.sum() == 10
    assert pool.free_bytes == 4096
    with pytest.raises(ConfigError, match="raise --pinned"):
        pool.take((4097,), torch.uint8)
    pool.clear()
    assert pool.take((3 * 4096,), torch.uint8).numel() == 3 * 4096


def test_staging_is_reused_and_grows():
    staging = Staging(CPU)
    large = staging.take("KV", (4, 4), torch.float32)

    assert staging.take("KV", (2, 2), torch.float32).data_ptr() == large.data_ptr()
    assert staging.take("KV", (5, 5), torch.float32).shape == (5, 5)


# ---- expectations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "rows", "context", "milliseconds"),
    [
        ("OPT-6.7B", 64, 1024, (625, 393, 312)),
        ("OPT-13B", 64, 1024, (976, 636, 488)),
        ("OPT-30B", 32, 1024, (820, 565, 466)),
        ("Llama-3-8B", 64, 4096, (625, 625, 625)),
    ],
)
def test_expected_seconds_match_the_formulas(model, rows, context, milliseconds):
    """An H200 at 55 GB/s and 650 TFLOP/s; l_A pipelined; the first layer does not overlap."""
    case = DecodeCase(model=model, rows=rows, context=context)

    found = [1e3 * expected_seconds(case, BY_NAME[n], "h200") for n in ("prefetch", "lA", "lB")]

    assert found == pytest.approx(milliseconds, rel=0.06)


def test_turns_of_a_v_is_one():
    assert turns([5.0, 4.0, 3.0, 4.0, 5.0]) == 1
    assert turns([5.0, 4.0, 3.0]) == 0
    assert turns([3.0, 4.0]) == 0
    assert turns([5.0, 4.0, 4.05, 4.0, 3.0]) == 0
    assert turns([5.0, 4.0, 5.0, 4.0, 5.0]) == 2


def test_settling_steps_count_until_all_later_splits_are_good():
    assert settling_steps([1.3, 1.0, 1.2, 1.01, 1.0]) == 3
    assert settling_steps([1.0, 1.04]) == 0
    assert settling_steps([1.0, 1.3]) == 2
    assert at([(10, 2.0), (0, 1.0)], 5) == 1.5


def test_fitted_prefill_rates_recover_the_given_rates():
    times = [
        LengthTimes(tokens=n, swap_s=1.0, recompute_s=1e-5 * n + 2e-9 * n**2)
        for n in (100, 1000, 4000, 9000)
    ]

    prefill = fitted(times)

    assert prefill.token_s == pytest.approx(1e-5, rel=1e-3)
    assert prefill.square_s == pytest.approx(2e-9, rel=1e-3)


# ---- devices -----------------------------------------------------------------------------------


def test_unknown_devices_raise(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert Target.named("auto") == CPU
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        Target.named("cuda")
    with pytest.raises(ConfigError, match="expected --device auto"):
        Target.named("gpu")
    with pytest.raises(UnknownName, match="OPT-13B"):
        DecodeCase(model="OPT-13", rows=1, context=1)


def test_calls_of_two_lanes_run_concurrently():
    done: list[str] = []
    calls = {
        Kind.KV_IN: (lambda: done.append("copy"), 3),
        Kind.PROJECT: (lambda: done.append("product"), 5),
    }

    timeline = run_calls(VirtualClock(lambda op: 3.0 - op.part if op.lane == IN else 1.0), calls)

    assert sorted(done) == ["copy"] * 3 + ["product"] * 5
    assert call_seconds(timeline, Kind.KV_IN) == 2.0
    assert call_seconds(timeline, Kind.KV_IN, Kind.PROJECT) == 2.5  # the first two
    assert call_seconds(timeline, Kind.PROJECT, Kind.KV_IN) == 1.0
    assert matching_times((1.0, 4.0), 5) == (20, 5)
    assert matching_times((1.0, 1e-9), 5) == (5, 500)


def test_busy_link_halves_the_rate():
    link = ThrottledHalf(CopyRate(bytes_per_s=1e6))
    copy = Operation(index=0, kind=Kind.KV_IN, lane=IN, layer=0, num_bytes=2000)
    times = []

    for change in (lambda: None, link.begin, link.end, link.end):
        change()
        times.append(link.link.seconds(copy))

    assert times == [2e-3, 4e-3, 2e-3, 2e-3]


def hybrid(tokens=64):
    """A preempted request of a toy model; its swap space holds half of the KV."""
    config = replace(QUICK_DEVICE, device="cpu", repeats=1)
    model = random_model(llama_of(SPECS["toy"], tokens), dtype=torch.bfloat16)
    return measured_hybrid(DeviceBench.of(config), model, tokens)


def test_half_swapped_request_restores_its_kv():
    found = hybrid()

    assert found.recomputed_tokens == 32
    assert found.seconds > 0
    assert found.error == 0


def test_wrong_tail_after_swap_in_is_an_error(monkeypatch):
    """The test above detects errors: with zeroed pages of the tail it fails."""
    append = swapper.append_tail

    def zeroed(memory, row, swapped):
        append(memory, row, swapped)
        for table in memory.tables.values():
            views = store_of(memory).views(table.group.page_class)
            views.whole[torch.from_numpy(table.pages[row][:, 2:4].reshape(-1))] = 0

    monkeypatch.setattr(swapper, "append_tail", zeroed)

    assert hybrid().error > 0.5


def test_lengths_above_pinnable_swap_space_are_omitted():
    config = replace(QUICK_DEVICE, device="cpu")
    sizes = {n: swap_space_for(SPECS["toy"], n, 2) for n in (32, 64)}
    bench = DeviceBench.of(replace(config, pinned_bytes=sizes[64] - 1))
    bench.pool.take((1,), torch.uint8)

    assert lengths_that_fit(bench) == [32]
    assert bench.facts()["pinned_bytes"] == 0  # the engine pins its own memory
    with pytest.raises(ConfigError, match="raise --pinned"):
        lengths_that_fit(DeviceBench.of(replace(config, pinned_bytes=sizes[32] - 1)))


# ---- parts -------------------------------------------------------------------------------------

CLAIMS = {
    "link": {"h2d_pageable_gb_per_s", "duplex_gb_per_s", "h2d_call_us"},
    "products": {"recompute_token_ns_toy", "product_large_tflops"},
    "together": {"slowdown_product", "slowdown_attention"},
    "step": {"toy_lB_ms", "toy-grouped_gain_lB_over_prefetch", "toy_resident_ms"},
    "sweep": {"sweep_lB_over_least", "sweep_turns"},
    "codes": {"codes_gain_int8_int8", "codes_error_int8_int8"},
    "swap": {"swap_token_us", "swap_breakeven_tokens", "swap_pages_out_gb_per_s"},
    "host": {"host_gain", "host_gain_formula", "host_attention_sdpa_gb_per_s"},
    "refit": {"refit_steps", "refit_loss", "refit_link_left"},
    "accuracy": {"accuracy_remade", "accuracy_modules_key", "disk_read_gb_per_s"},
}


def check(name: str, config: DeviceBenchConfig, kinds: set[str]) -> None:
    """Check relations of a part that hold for any times and devices."""
    bench = DeviceBench.of(config)
    result = PARTS[name](bench)
    claims = result.claims

    assert CLAIMS[name] <= set(claims)
    assert all(table.rows for table in result.tables)
    assert all(len(row) == len(table.columns) for table in result.tables for row in table.rows)
    json.dumps(result.to_json())
    if name == "link":
        assert {row[0] for row in result.tables[0].rows} == kinds
        assert claims["duplex_copied_bytes"] == 24 * (max(config.copy_bytes) // 2)
    if name == "step":
        assert max(claims["toy_output_error"], claims["toy-grouped_output_error"]) < 0.02
    if name == "sweep":
        assert {0.0, 1.0} <= {row[1] for row in result.tables[0].rows}
        assert claims["sweep_lB_over_least"] >= 1
    if name == "codes":
        case = config.cases[0]
        plain, coded = (
            link_sizes(case, LinkCodecs(*pair)).kv_bytes
            for pair in (("plain", "plain"), ("int8",) * 2)
        )
        assert plain == 2 * case.kv_width
        assert coded / plain == pytest.approx((1 + 2 / 16) / 2)
        assert claims["codes_copied_bytes_plain_plain"] <= case.kv_bytes
        assert claims["codes_error_plain_plain"] < 0.02 < 0.2
        assert 0 < claims["codes_error_int8_int8"] < 0.1
    if name == "swap":
        assert claims["swap_restored_error"] == 0
    if name == "host":
        assert claims["host_output_error"] < 0.02
        assert claims["host_gain_formula"] > 1
    if name == "refit":
        assert len(result.tables[0].rows) == 2 * config.refit_steps
        assert 0 <= claims["refit_steps"] <= config.refit_steps
    if name == "accuracy":
        assert claims["accuracy_remade"] <= 4e-3
        assert 0 < claims["accuracy_stored"] <= 4e-3
        assert claims["accuracy_modules_key"] < 2**-7
    assert bench.facts()["on_gpu"] == (kinds != {"pageable"})


@pytest.mark.parametrize("name", PARTS)
def test_part_runs_on_cpu(name):
    check(name, replace(QUICK_DEVICE, device="cpu", repeats=1), {"pageable"})


@pytest.fixture
def cuda() -> Target:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Target.named("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARTS)
def test_part_runs_on_gpu(name, cuda):
    config = replace(QUICK_DEVICE, device=str(cuda.device))

    check(name, config, {"pinned", "registered", "pageable"})


@pytest.mark.gpu
@pytest.mark.parametrize(
    "link_codecs", [LinkCodecs(), LinkCodecs("int8", "int8")], ids=["plain", "codes"]
)
def test_streams_compute_the_expected_hidden_states(link_codecs, cuda):
    case = DecodeCase(model="toy", rows=16, context=512, dtype="float32")
    pool = HostBytes(64 * MIB, cuda)
    found = StepHarness(case, cuda, pool, link_codecs, poison=True)
    names = ["no_overlap", "prefetch", "serial", "lA", "lB"]
    names += ["host_share", "all_host"] if link_codecs == LinkCodecs() else []
    layouts = {name: found.layout(BY_NAME[name]) for name in names}
    layouts["half"] = found.split_layout(case.tokens // 2)
    layouts["resident"] = found.resident_layout()

    steps = found.rounds(layouts, 3)

    most = 1e-3 if link_codecs == LinkCodecs() else 0.05
    assert max(step.error for run in steps.values() for step in run) < most


@pytest.mark.gpu
def test_host_memory_kinds_are_pinned_or_pageable(cuda):
    bench = DeviceBench(QUICK_DEVICE, cuda)
    made = {kind: make(MIB) for kind, make in host_kinds(bench).items()}

    assert {kind: memory.is_pinned() for kind, memory in made.items()} == {
        "pinned": True,
        "registered": True,
        "pageable": False,
    }
    for memory in made.values():
        memory.fill_(7)
        there = memory.to(cuda.device, non_blocking=True)
        assert int(there.sum()) == 7 * MIB
