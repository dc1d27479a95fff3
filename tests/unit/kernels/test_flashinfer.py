"""The FlashInfer backend against the reference, with a stand-in for the package."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kernels import select
from quire.kernels.backend import AttentionMath, LaneSlots, StepShape
from quire.kernels.flashinfer import choice, package
from quire.kernels.flashinfer.backend import FlashInferAttention, unfit
from quire.kernels.flashinfer.choice import SampleSteps, TimedBackends, time_backends
from quire.kernels.flashinfer.package import unread, why_no_flashinfer
from quire.kernels.flashinfer.wrappers import Wrappers
from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.select import BackendChoice, select_backend
from quire.kernels.static_plan import StaticLanes
from support import flashinfer_double as double
from support.interpreted import CPU, Refusing
from support.lanes import Lanes

REFERENCE = ReferenceAttention()
OPTIONS = {"dtype": torch.bfloat16, "head_dim": 64, "scratch_bytes": 1 << 20}
ATOL = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def backend_of(other=None):
    return FlashInferAttention(Wrappers(double, CPU, 1024), other or Refusing())


def lanes_of(**change):
    """Two decode rows and a chunk."""
    shape = {
        "tokens": [1, 1, 5],
        "slots": [[40], [16], [33]],
        "heads": 2,
        "head_dim": 64,
        "page_tokens": 16,
        "dtype": torch.bfloat16,
    }
    return Lanes(**shape | change)


def check(lanes, group, *, softcap=None, scale=0.125, backend=None):
    query = lanes.query(group)
    math = AttentionMath(scale=scale, softcap=softcap)

    got = lanes.attend(backend or backend_of(), query, math)

    expected = lanes.attend(REFERENCE, query, math)
    torch.testing.assert_close(got, expected, atol=ATOL[lanes.dtype], rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (2, 4), (1, 7), (2, 16)])
def test_attention_equals_the_reference(dtype, kv_heads, group):
    check(lanes_of(dtype=dtype, heads=kv_heads), group)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_tokens", [8, 16, 32])
def test_head_dims_and_page_sizes_equal_the_reference(head_dim, page_tokens):
    check(lanes_of(head_dim=head_dim, page_tokens=page_tokens), 2, scale=head_dim**-0.5)


@pytest.mark.parametrize("window", [1, 7, 16, 17, 100])
def test_windows_equal_the_reference_and_read_no_freed_page(window):
    lanes = lanes_of(window=window)
    for side in (lanes.pages.key, lanes.pages.value):
        side.nan_to_num_(1e3)  # slots before the window, in pages that it reaches, have old tokens

    check(lanes, 2)


def test_softcap_and_scale_equal_the_reference():
    check(lanes_of(), 2, softcap=3.0, scale=0.5)


@pytest.mark.parametrize("tokens", [[1, 1, 1], [4, 2, 9]])
def test_steps_of_one_kind_equal_the_reference(tokens):
    check(lanes_of(tokens=tokens), 2)


def test_layers_of_a_step_share_a_plan_and_read_their_own_pages():
    backend, lanes = backend_of(), lanes_of()
    query, math = lanes.query(2), AttentionMath(scale=0.125)
    step, slots = StepShape.of(lanes.tokens), LaneSlots(lanes.slots, None)
    plan = backend.plan(step, slots, 16, 512)
    key = lanes.pages.key.flip(0)
    value = lanes.pages.value.flip(0)
    other = replace(lanes.pages, key=key, value=value, table=len(key) - 1 - lanes.table)
    num_made = len(double.BatchDecodeWithPagedKVCacheWrapper.made)

    first = backend.attend(plan, lanes.pages, math, query, lanes.fresh())
    second = backend.attend(plan, other, math, query, lanes.fresh())

    assert torch.equal(first, second)
    made = double.BatchDecodeWithPagedKVCacheWrapper.made[num_made:]
    assert [wrapper.num_plans for wrapper in made] == [1]


def test_wrappers_are_reused_once_their_step_is_over():
    backend, lanes = backend_of(), lanes_of()
    num_made = len(double.BatchPrefillWithPagedKVCacheWrapper.made)

    for _ in range(3):
        check(lanes, 2, backend=backend)
        gc.collect()

    made = double.BatchPrefillWithPagedKVCacheWrapper.made[num_made:]
    assert [wrapper.num_plans for wrapper in made] == [3]


def test_steps_in_flight_have_wrappers_of_their_own():
    backend, lanes = backend_of(), lanes_of()
    query, math = lanes.query(2), AttentionMath(scale=0.125)
    expected = lanes.attend(REFERENCE, query, math)
    step = StepShape.of(lanes.tokens)
    plans = [backend.plan(step, LaneSlots(lanes.slots, None), 16, 512) for _ in range(2)]
    shorter = backend.plan(step, LaneSlots(lanes.slots - 3, None), 16, 512)

    backend.attend(plans[0], lanes.pages, math, query, lanes.fresh())
    backend.attend(shorter, lanes.pages, math, query, lanes.fresh())
    got = backend.attend(plans[0], lanes.pages, math, query, lanes.fresh())

    torch.testing.assert_close(got, expected, atol=2e-2, rtol=0.02)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"slots": [[40, 30], [16, 9], [33, 20]], "heads": 1}, {}),  # heads have own pages
        ({"dtype": torch.float32}, {}),
        ({"head_dim": 80}, {}),
        ({}, {"sinks": torch.linspace(-1, 1, 4)}),
    ],
)
def test_other_layers_go_to_the_other_backend(change, options):
    lanes, other = lanes_of(**change), GatheredAttention(CPU)
    query = lanes.query(2)
    math = AttentionMath(scale=0.125, **options)

    assert unfit(lanes.pages, math, query) is not None
    got = lanes.attend(backend_of(other), query, math)

    expected = lanes.attend(REFERENCE, query, math)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=0.02)


def test_column_sums_go_to_the_other_backend():
    lanes = lanes_of()
    query, math = lanes.query(2), AttentionMath(scale=0.125)

    _, sums = lanes.attend_with_sums(backend_of(GatheredAttention(CPU)), query, math)

    _, expected = lanes.attend_with_sums(REFERENCE, query, math)
    torch.testing.assert_close(sums, expected, atol=2e-2, rtol=0.02)


def test_graphs_have_plans_of_the_other_backend():
    class Static(GatheredAttention):
        def static_plan(self, step, lanes, layers, slot_bytes):
            return "static"

        def refresh(self, plan, slots):
            return plan == "static"

    step = StepShape.of(np.ones(1, dtype=np.int32))
    lanes = StaticLanes(torch.ones(1, 1, dtype=torch.int32), 16, None)

    assert backend_of(GatheredAttention(CPU)).static_plan(step, lanes, [], 1) is None
    assert backend_of(Static(CPU)).static_plan(step, lanes, [], 1) == "static"
    assert backend_of(Static(CPU)).refresh("static", np.ones((1, 1), dtype=np.int32))


# ---- selection -----------------------------------------------------------------------------------


def test_flashinfer_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"attention=flashinfer cannot run here: .* on cpu; use"):
        select_backend("flashinfer", CPU, **OPTIONS)


def test_quantized_pages_are_refused():
    with pytest.raises(ConfigError, match="reads unquantized pages, and int8 is quantized"):
        select_backend("flashinfer", CPU, codec="int8", **OPTIONS)


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device of capability 9.0 with FlashInfer, as far as `why_no_flashinfer` sees."""
    monkeypatch.setattr(package, "flashinfer_version", lambda: "0.7.2.post1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(select, "GatheredAttention", lambda device, **_: GatheredAttention(CPU))
    return monkeypatch


CUDA = torch.device("cuda")


def test_new_gpus_with_the_package_can_run_it(cuda):
    assert why_no_flashinfer(CUDA, torch.bfloat16, 128) is None


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, r"not installed: pip install flashinfer-python"),
        ("0.6.9", r"expected flashinfer-python 0\.7 or higher, got 0\.6\.9"),
        ("of unknown version", r"got of unknown version"),
    ],
)
def test_missing_or_old_packages_are_not_used(cuda, version, reason):
    cuda.setattr(package, "flashinfer_version", lambda: version)

    with pytest.raises(ConfigError, match=reason):
        select_on_gpu()


def select_on_gpu(name="flashinfer"):
    return select_backend(name, CUDA, **OPTIONS)


def test_old_gpus_are_not_used(cuda):
    cuda.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    assert why_no_flashinfer(CUDA, torch.bfloat16, 128).startswith("expected compute capability 8")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (torch.float32, 64, "expected float16 or bfloat16 pages, got float32"),
        (torch.float16, 80, "expected head_dim 64, 128, 256, got 80"),
        (torch.float16, 64, None),
    ],
)
def test_types_and_head_dims_without_kernels_are_named(dtype, head_dim, reason):
    assert unread(dtype, head_dim) == reason


@pytest.fixture
def both(monkeypatch):
    """Triton and FlashInfer can run; FlashInfer's time is set by the test."""
    monkeypatch.setattr(select, "why_no_flashinfer", lambda *args: None)
    monkeypatch.setattr(select, "GatheredAttention", lambda device, **_: GatheredAttention(CPU))
    triton = GatheredAttention(CPU)
    triton.name = "triton"
    chosen = BackendChoice(triton, "Triton")
    monkeypatch.setattr(select, "usable_triton", lambda *args: chosen)
    found = FlashInferAttention(Wrappers(double, CPU, 1024), triton)
    monkeypatch.setattr(choice, "usable_flashinfer", lambda *args: found)
    monkeypatch.setattr(choice, "TIMED", {})
    return monkeypatch


@pytest.mark.parametrize(("own_s", "faster"), [(0.001, "flashinfer"), (0.004, "triton")])
def test_auto_selects_the_faster_backend_and_names_both_times(both, own_s, faster):
    times = TimedBackends((own_s, own_s), (0.002, 0.002))
    both.setattr(choice, "time_backends", lambda *args: times)

    found = select_on_gpu("auto")

    assert found.backend.name == faster
    assert f"took {own_s * 1e3:.2f} and" in found.reason
    assert found.reason.endswith("triton's 2.00 and 2.00 ms")


def test_auto_with_wrong_kernels_is_triton_with_the_reason(both):
    both.setattr(choice, "usable_flashinfer", lambda *args: "its kernels are not used: wrong")

    found = select_on_gpu("auto")

    assert found.backend.name == "triton"
    assert found.reason == "Triton; not FlashInfer: its kernels are not used: wrong"
    with pytest.raises(ConfigError, match="cannot run here: its kernels are not used: wrong"):
        select_on_gpu()


def test_auto_whose_sample_fails_is_triton(both):
    def fails(*args):
        raise torch.OutOfMemoryError("out of memory")

    both.setattr(choice, "time_backends", fails)

    assert select_on_gpu("auto").backend.name == "triton"


def test_named_backend_is_not_timed(both):
    both.setattr(choice, "time_backends", None)

    assert select_on_gpu().backend.name == "flashinfer"
    assert select_on_gpu("triton").backend.name == "triton"


SMALL = SampleSteps(rows=2, slots=40, chunk=4, kv_heads=2, group=2, layers=2, repeats=1)


def test_sample_steps_run_on_both_backends():
    timed = time_backends(backend_of(), GatheredAttention(CPU), CPU, torch.bfloat16, 64, SMALL)

    assert min(*timed.flashinfer, *timed.other) > 0


def usable(monkeypatch, module):
    monkeypatch.setattr(choice, "why_no_flashinfer", lambda *args: None)
    monkeypatch.setattr(choice, "import_flashinfer", module)
    monkeypatch.setattr(choice, "TESTED", {})
    monkeypatch.setattr(choice, "Wrappers", lambda found, device: Wrappers(found, device, 1024))
    return choice.usable_flashinfer(CPU, torch.bfloat16, 64, GatheredAttention(CPU))


def test_right_kernels_are_used(monkeypatch):
    assert isinstance(usable(monkeypatch, lambda: double), FlashInferAttention)


def test_wrong_kernels_are_not_used(monkeypatch, caplog):
    class Wrong(double.BatchDecodeWithPagedKVCacheWrapper):
        def run(self, q, paged_kv_cache, *, out):
            return super().run(q, paged_kv_cache, out=out).mul_(1.1)

    wrong = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrong,
        BatchPrefillWithPagedKVCacheWrapper=double.BatchPrefillWithPagedKVCacheWrapper,
    )

    reason = usable(monkeypatch, lambda: wrong)

    assert reason == "its kernels are not used: wrong numbers from pages of bfloat16"
    assert "please report it" in caplog.text


def test_kernels_with_windows_of_another_meaning_are_not_used(monkeypatch):
    class Wider(double.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *args, window_left, **options):
            super().plan(*args, window_left=window_left + (window_left >= 0), **options)

    wider = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wider,
        BatchPrefillWithPagedKVCacheWrapper=double.BatchPrefillWithPagedKVCacheWrapper,
    )

    reason = usable(monkeypatch, lambda: wider)

    assert reason == "its kernels are not used: wrong numbers from pages of bfloat16"


def test_package_that_cannot_compile_is_not_used(monkeypatch):
    def fails():
        raise RuntimeError("nvcc not found")

    assert "nvcc not found" in usable(monkeypatch, fails)
