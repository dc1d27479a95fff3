"""When the Triton backend and its kernels for rows are used, their self-tests, and the rows."""

import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quire.cli import doctor
from quire.errors import ConfigError
from quire.kernels import select
from quire.kernels.backend import CosSin
from quire.kernels.gathered import GatheredAttention
from quire.kernels.select import select_backend
from quire.kernels.triton import hardware
from quire.kernels.triton.coding import BITS_CODES, FP8, INT8, PLAIN
from quire.kernels.triton.hardware import Hardware, RowShape
from support.interpreted import CPU, FAILURES, interpreted, triton_backend

self_test = interpreted("self_test")
TritonError = importlib.import_module("triton.errors").TritonError

CUDA = torch.device("cuda")
OPTIONS = {"dtype": torch.float32, "head_dim": 64, "scratch_bytes": 1 << 20}

IMPORTS = """
import sys

class Importers:
    names = set()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            self.names.add(frame.f_globals["__name__"].partition(".")[0])

sys.meta_path.insert(0, Importers())
from quire import LLM, SamplingParams
LLM("quire-tiny").generate(["Hello"], SamplingParams(max_tokens=2))
print("quire" in Importers.names, [n for n in sys.modules if n.startswith("quire.kernels.triton.")])
"""


def run_without_interpreter(source):
    """Run a program without TRITON_INTERPRET, as users do."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
    ran = subprocess.run([sys.executable, "-c", source], check=True, **options)
    return ran.stdout.splitlines()[-1]


@pytest.mark.slow
def test_an_engine_on_a_cpu_imports_nothing_of_triton():
    """PyTorch's compiler imports Triton if it is installed; Quire does not."""
    assert run_without_interpreter(IMPORTS) == "False ['quire.kernels.triton.hardware']"


def test_triton_on_a_cpu_is_not_chosen_and_refused_outside_of_the_interpreter(monkeypatch):
    assert select_backend("auto", CPU, **OPTIONS).backend.name in ("native", "gathered")
    monkeypatch.delenv("TRITON_INTERPRET")
    expected = (
        "attention=triton cannot run here: Triton's kernels run on NVIDIA GPUs, the pages are on "
        "the CPU; use auto"
    )
    with pytest.raises(ConfigError, match=expected):
        select_backend("triton", CPU, **OPTIONS)
    found = {finding.name: finding for finding in doctor._attention()}["attention triton"]
    assert (found.ok, found.mark) == (True, "--")
    assert "Triton's kernels run on NVIDIA GPUs" in found.value
    assert "run on NVIDIA GPUs" in hardware.why_no_rows(CPU, torch.float32, SHAPES[0])


@pytest.mark.slow
def test_triton_is_selected_in_the_interpreter_and_doctor_reports_it():
    choice = select_backend("triton", CPU, **OPTIONS)
    assert choice.backend.name == "triton"
    assert choice.reason.startswith("Triton ")
    assert choice.reason.endswith("attention directly from the pages on Triton's interpreter")
    findings = {finding.name: finding for finding in doctor._attention()}
    assert findings["attention triton"].value == "available: --attention triton"
    assert findings["attention auto"].value.startswith(("native", "gathered"))


UNREAD = [
    ({"codec": "kvquant4"}, "they do not decode kvquant4"),
    ({"codec": "int4_hadamard:equalise=1"}, "rotated vectors with equalised channels"),
    ({"codec": "int3_hadamard:equalise=1"}, "rotated vectors with equalised channels"),
    ({"codec": "kivi4+sinks=4+residual=32"}, "tokens in full precision next to codes"),
    ({"dtype": torch.float64}, r"no kernels for torch\.float64; use auto"),
    ({"rotated": False}, "attention=triton needs keys stored after RoPE"),
]


def test_pages_that_the_kernels_do_not_read_are_refused():
    for options, reason in UNREAD:
        expected = (
            reason if "rotated" in options else f"attention=triton cannot run here: .*{reason}"
        )
        with pytest.raises(ConfigError, match=expected):
            select_backend("triton", CPU, **OPTIONS | options)


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device, as far as the selection sees."""
    monkeypatch.setattr(select, "GatheredAttention", lambda device, **_: GatheredAttention(CPU))
    monkeypatch.setattr(select, "why_no_triton", lambda device: None)
    found = Hardware("NVIDIA H100", 132, 2, large_tiles=True, interpreted=False)
    monkeypatch.setattr(self_test, "tested_hardware", lambda *args: found)
    return monkeypatch


def test_auto_on_a_gpu_is_triton_or_gathered_with_the_reason(gpu):
    def selected(codec="int8"):
        choice = select_backend("auto", CUDA, codec=codec, **OPTIONS)
        return choice.backend.name, choice.reason.rpartition("; not triton: ")[2]

    name, reason = selected()
    assert name == "triton"
    assert reason.endswith("attention directly from the pages on NVIDIA H100")
    reason = "the kernels cannot read these pages: they do not decode kvquant4"
    assert selected("kvquant4") == ("gathered", reason)
    with gpu.context() as patch:
        patch.setitem(sys.modules, "quire.kernels.triton.backend", None)
        name, reason = selected()
        assert name == "gathered"
        assert "the kernels are not used: Triton cannot run them: " in reason
    refused = self_test.NoTriton("the kernels are not used on NVIDIA H100: wrong copies of slots")
    gpu.setattr(self_test, "tested_hardware", lambda *args: refused)
    assert selected() == ("gathered", refused.reason)
    gpu.setattr(select, "why_no_triton", lambda device: "Triton is not installed")
    assert selected() == ("gathered", "Triton is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        (torch.float32, (24, 16)),
        pytest.param(torch.bfloat16, (16, 16), marks=pytest.mark.slow),
        pytest.param(torch.float16, (16, 40), marks=pytest.mark.slow),
    ],
)
def test_right_kernels_pass_their_test(dtype, dims):
    assert self_test.first_wrong(triton_backend(), CPU, dtype, dims) is None


@pytest.mark.slow
def test_the_test_of_the_kernels_runs_whole_and_split_rows(monkeypatch):
    """With and without softcap and sinks; rows have several tiles up to 128 elements."""
    calls = []
    launch = interpreted("launch")
    attend, merge = launch.attend_decode, launch.merge_decode

    def attended(call):
        calls.append((call.key.kind, call.math.softcap is not None, call.math.sinks is not None, 1))
        return attend(call)

    def merged(call, partial, partial_lse, splits):
        calls[-1] = (*calls[-1][:3], splits)
        merge(call, partial, partial_lse, splits)

    monkeypatch.setattr(interpreted("backend"), "attend_decode", attended)
    monkeypatch.setattr(launch, "merge_decode", merged)
    found = self_test.tested_hardware.__wrapped__(CPU, torch.bfloat16, 40, 24)

    assert found == Hardware.of(CPU)
    splits = (1, 3)  # 300 slots in tiles of 128
    plain = {(PLAIN, extras, extras, n) for extras in (False, True) for n in splits}
    assert {call for call in calls if call[0] == PLAIN} == plain
    coded = {(kind, False, False, n) for kind in (INT8, FP8, BITS_CODES) for n in splits}
    assert {call for call in calls if call[0] != PLAIN} == coded


def test_kernels_that_merge_wrongly_are_not_used(monkeypatch):
    launch = interpreted("launch")
    merge = launch.merge_decode

    def merged(call, partial, partial_lse, splits):
        """The last split of each row and head is lost."""
        partial_lse.view(-1, splits)[:, -1] = -torch.inf
        merge(call, partial, partial_lse, splits)

    monkeypatch.setattr(launch, "merge_decode", merged)
    refused = self_test.tested_hardware.__wrapped__(CPU, torch.float32, 16, 16)

    assert "wrong numbers from pages of float32" in refused.reason


def first_wrong(backend):
    return self_test.first_wrong(backend, CPU, torch.float32, (16, 16))


@pytest.mark.parametrize("turns", [None, 2.0])
def test_wrong_rope_in_the_write_is_found(turns):
    """A kernel that writes nothing, and one that rotates too far."""
    backend = triton_backend()
    right = backend.rotate_and_write

    def wrong(slots, query, key, value, rope, source=None):
        own = CosSin(rope.cosine + 0.2, rope.sine)
        return turns is None or right(slots, query, key, value, own, source)

    backend.rotate_and_write = wrong
    assert first_wrong(backend).startswith("wrong numbers")


def test_wrong_attention_and_kernels_that_do_not_write_move_or_accumulate_are_found():
    backend = triton_backend()
    attend = backend.attend
    for factor in (1.01, torch.nan):
        backend.attend = lambda *args, factor=factor, **more: attend(*args, **more) * factor
        assert first_wrong(backend) == "wrong numbers from pages of float32"
    backend = triton_backend()
    backend.write = lambda *args: None
    assert first_wrong(backend) is not None
    backend.tally = lambda *args: None
    assert first_wrong(backend) == "wrong statistics of slots"
    backend.move = lambda moves: None
    assert first_wrong(backend) == "wrong copies of slots"


@pytest.mark.parametrize(
    "error", [*FAILURES, TritonError("no ptxas")], ids=lambda error: type(error).__name__
)
def test_kernels_that_cannot_be_launched_are_not_used(monkeypatch, caplog, error):
    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(self_test, "first_wrong", fail)
        patch.setattr(self_test, "wrong_kernels", fail)
        refused = self_test.tested_hardware.__wrapped__(CPU, torch.float32, 16, 16)
        assert str(error)[:20] in hardware.why_no_rows(CPU, torch.float32, SHAPES[0])
    assert str(error) in refused.reason
    assert refused.reason in caplog.text
    assert hardware.why_no_rows(CPU, torch.float32, SHAPES[0]) is None


row_calls = interpreted("launch")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


SHAPES = [RowShape(320, 32, 32), RowShape(96, 80, 32), RowShape(48, 16, 8)]


@pytest.fixture(autouse=True)
def fresh_results():
    """No results of other tests."""
    hardware._wrong_kernels.cache_clear()
    yield
    hardware._wrong_kernels.cache_clear()


def rows_of(count, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, width, generator=generator) * 4).to(dtype)


def norm_of(width, dtype):
    norm = LlamaRMSNorm(width, EPS).to(dtype)
    norm.weight.data = rows_of(1, width, dtype, seed=9)[0]
    return norm


def assert_near(found, expected):
    """Equal up to one rounding: sums are in another order."""
    assert found.dtype == expected.dtype
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, atol=eps / 4, rtol=2 * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 48, 256, 1000])
@torch.inference_mode()
def test_norm_with_the_residual_sum(dtype, width):
    (stream, delta), norm = (rows_of(3, width, dtype, n) for n in range(2)), norm_of(width, dtype)
    summed = stream + delta

    found = row_calls.normed(stream, delta, norm.weight, EPS)

    assert torch.equal(stream, summed)
    assert_near(found, norm(summed))
    assert_near(row_calls.normed(stream, None, norm.weight, EPS), norm(summed))
    assert torch.equal(stream, summed)  # the norm alone leaves it


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80])
@torch.inference_mode()
def test_norms_of_heads_leave_values(dtype, head_dim):
    norms = norm_of(head_dim, dtype), LlamaRMSNorm(head_dim, EPS).to(dtype)
    joint = rows_of(4, 9 * head_dim, dtype)
    heads = joint.view(4, 9, head_dim)
    expected = norms[0](heads[:, :5]), norms[1](heads[:, 5:7]), heads[:, 7:].clone()

    row_calls.norm_query_and_key(joint, (5, 2), (norms[0].weight, norms[1].weight), EPS)

    assert_near(heads[:, :5], expected[0])
    assert_near(heads[:, 5:7], expected[1])
    assert torch.equal(heads[:, 7:], expected[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 1024, 1500])
def test_gated_silu(dtype, width):
    both = rows_of(3, 2 * width, dtype)
    both[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = both.chunk(2, dim=1)

    assert_near(row_calls.gated(both), F.silu(gate) * up)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_kernels_are_used(dtype, shape):
    assert hardware.why_no_rows(CPU, dtype, shape) is None


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("normed", "RMSNorm"),
        ("norm_query_and_key", "the norms of heads"),
        ("gated", "the gated activation"),
        ("rotate", "RoPE"),
    ],
)
def test_wrong_kernels_are_not_used(monkeypatch, caplog, name, kernel):
    right = getattr(row_calls, name)

    def wrong(rows, *args):
        out = right(rows, *args)
        (rows if out is None else out)[0, 0] += 30
        return out

    monkeypatch.setattr(row_calls, name, wrong)
    reason = hardware.why_no_rows(CPU, torch.bfloat16, SHAPES[0])
    assert f"{reason}; please report it" in caplog.text
    assert reason == f"wrong results of {kernel} on cpu"
