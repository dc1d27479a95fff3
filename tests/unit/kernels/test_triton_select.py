"""When the Triton backend is selected, and what is imported before."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

from quire.cli import doctor
from quire.errors import ConfigError
from quire.kernels import select
from quire.kernels.backend import CosSin
from quire.kernels.gathered import GatheredAttention
from quire.kernels.select import select_backend
from quire.kernels.triton.coding import BITS_CODES, FP8, INT8, PLAIN
from quire.kernels.triton.hardware import Hardware
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
    return subprocess.run(
        [sys.executable, "-c", source],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.splitlines()[-1]


@pytest.mark.slow
def test_an_engine_on_a_cpu_imports_nothing_of_triton():
    """PyTorch's compiler imports Triton if it is installed; Quire does not."""
    assert run_without_interpreter(IMPORTS) == "False ['quire.kernels.triton.hardware']"


def test_auto_on_a_cpu_is_not_triton():
    assert select_backend("auto", CPU, **OPTIONS).backend.name in ("native", "gathered")


def test_triton_on_a_cpu_is_refused_outside_of_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    expected = (
        "attention=triton cannot run here: Triton's kernels run on NVIDIA GPUs, the pages are on "
        "the CPU; use auto"
    )
    with pytest.raises(ConfigError, match=expected):
        select_backend("triton", CPU, **OPTIONS)


@pytest.mark.slow
def test_triton_is_selected_in_the_interpreter():
    choice = select_backend("triton", CPU, **OPTIONS)

    assert choice.backend.name == "triton"
    assert choice.reason.startswith("Triton ")
    assert choice.reason.endswith("attention directly from the pages on Triton's interpreter")


@pytest.mark.parametrize(
    ("codec", "reason"),
    [
        ("kvquant4", "they do not decode kvquant4"),
        ("int4_hadamard:equalise=1", "rotated vectors with equalised channels"),
        ("int3_hadamard:equalise=1", "rotated vectors with equalised channels"),
        ("kivi4+sinks=4+residual=32", "tokens in full precision next to codes"),
    ],
)
def test_codecs_that_the_kernels_do_not_decode_are_refused(codec, reason):
    with pytest.raises(ConfigError, match=f"attention=triton cannot run here: .*{reason}"):
        select_backend("triton", CPU, codec=codec, **OPTIONS)


def test_types_without_kernels_are_refused():
    with pytest.raises(ConfigError, match=r"no kernels for torch\.float64; use auto"):
        select_backend("triton", CPU, **OPTIONS | {"dtype": torch.float64})


def test_keys_before_rope_are_refused():
    with pytest.raises(ConfigError, match="attention=triton needs keys stored after RoPE"):
        select_backend("triton", CPU, rotated=False, **OPTIONS)


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device, as far as the selection sees."""
    monkeypatch.setattr(select, "GatheredAttention", lambda device, **_: GatheredAttention(CPU))
    monkeypatch.setattr(select, "why_no_triton", lambda device: None)
    found = Hardware("NVIDIA H100", 132, 2, large_tiles=True, interpreted=False)
    monkeypatch.setattr(self_test, "tested_hardware", lambda *args: found)
    return monkeypatch


def test_auto_on_a_gpu_is_triton_with_the_reason(gpu):
    choice = select_backend("auto", CUDA, codec="int8", **OPTIONS)

    assert choice.backend.name == "triton"
    assert choice.reason.endswith("attention directly from the pages on NVIDIA H100")


def test_auto_on_a_gpu_is_gathered_for_other_codecs(gpu):
    choice = select_backend("auto", CUDA, codec="kvquant4", **OPTIONS)

    assert choice.backend.name == "gathered"
    assert choice.reason == (
        "runs on any device; not triton: the kernels cannot read these pages: they do not decode "
        "kvquant4"
    )


def test_auto_on_a_gpu_without_triton_is_gathered(gpu):
    gpu.setattr(select, "why_no_triton", lambda device: "Triton is not installed")
    choice = select_backend("auto", CUDA, **OPTIONS)

    assert choice.backend.name == "gathered"
    assert choice.reason == "runs on any device; not triton: Triton is not installed"


def test_auto_on_a_gpu_with_a_triton_that_cannot_be_imported_is_gathered(gpu):
    gpu.setitem(sys.modules, "quire.kernels.triton.backend", None)
    choice = select_backend("auto", CUDA, **OPTIONS)

    assert choice.backend.name == "gathered"
    assert "the kernels are not used: Triton cannot run them: " in choice.reason


def test_auto_on_a_gpu_with_wrong_kernels_is_gathered(gpu):
    refused = self_test.NoTriton("the kernels are not used on NVIDIA H100: wrong copies of slots")
    gpu.setattr(self_test, "tested_hardware", lambda *args: refused)

    assert select_backend("auto", CUDA, **OPTIONS).reason.endswith("wrong copies of slots")


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [(torch.float32, (24, 16)), (torch.bfloat16, (16, 16)), (torch.float16, (16, 40))],
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


def wrong_after(backend, name, change):
    """Change the result of a method of a backend."""
    method = getattr(backend, name)
    setattr(backend, name, lambda *args, **options: change(method(*args, **options)))
    return backend


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("attend", lambda out: out * 1.01, "wrong numbers from pages of float32"),
        ("attend", lambda out: out * torch.nan, "wrong numbers from pages of float32"),
    ],
)
def test_wrong_kernels_are_found(name, change, reason):
    backend = wrong_after(triton_backend(), name, change)

    assert self_test.first_wrong(backend, CPU, torch.float32, (16, 16)) == reason


@pytest.mark.parametrize("turns", [None, 2.0])
def test_wrong_rope_in_the_write_is_found(turns):
    """A kernel that writes nothing, and one that rotates too far."""
    backend = triton_backend()
    right = backend.rotate_and_write

    def wrong(slots, query, key, value, rope, source=None):
        own = CosSin(rope.cosine + 0.2, rope.sine)
        return turns is None or right(slots, query, key, value, own, source)

    backend.rotate_and_write = wrong
    assert self_test.first_wrong(backend, CPU, torch.float32, (16, 16)).startswith("wrong numbers")


def test_kernels_that_do_not_write_move_or_accumulate_are_found(monkeypatch):
    backend = triton_backend()
    backend.write = lambda *args: None
    assert self_test.first_wrong(backend, CPU, torch.float32, (16, 16)) is not None
    backend.tally = lambda *args: None
    assert (
        self_test.first_wrong(backend, CPU, torch.float32, (16, 16)) == "wrong statistics of slots"
    )
    backend.move = lambda moves: None
    assert self_test.first_wrong(backend, CPU, torch.float32, (16, 16)) == "wrong copies of slots"


@pytest.mark.parametrize(
    "error", [*FAILURES, TritonError("no ptxas")], ids=lambda error: type(error).__name__
)
def test_kernels_that_cannot_be_launched_are_not_used(monkeypatch, caplog, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(self_test, "first_wrong", fail)
    refused = self_test.tested_hardware.__wrapped__(CPU, torch.float32, 16, 16)

    assert str(error) in refused.reason
    assert refused.reason in caplog.text


@pytest.mark.slow
def test_doctor_reports_triton():
    findings = {finding.name: finding for finding in doctor._attention()}

    assert findings["attention triton"].value == "available: --attention triton"
    assert findings["attention auto"].value.startswith(("native", "gathered"))


def test_doctor_reports_why_triton_is_missing(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    findings = {finding.name: finding for finding in doctor._attention()}

    assert findings["attention triton"].ok
    assert findings["attention triton"].mark == "--"
    assert "Triton's kernels run on NVIDIA GPUs" in findings["attention triton"].value
