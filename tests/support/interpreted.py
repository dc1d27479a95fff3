import importlib
import subprocess
from types import SimpleNamespace

import pytest
import torch

from quire.kernels.gathered import GatheredAttention
from quire.kernels.triton.hardware import Hardware, why_no_triton

CPU = torch.device("cpu")
FAILURES = (
    RuntimeError("Triton Error [CUDA]: out of memory"),
    subprocess.CalledProcessError(1, "gcc"),  # no Python headers
    PermissionError("cannot write to the cache"),
    ImportError("no module triton.errors"),
    AttributeError("no attribute static_range"),
    TypeError("unexpected keyword do_not_specialize_on_alignment"),
)
"""Errors of a machine on which Triton cannot compile or launch kernels."""


def interpreted(name):
    """Import a module of `quire.kernels.triton`, or skip the tests where it is not interpreted."""
    reason = why_no_triton(CPU)
    if reason is not None:
        pytest.skip(f"no interpreter of Triton: {reason}", allow_module_level=True)
    make_interpreter_faster()
    return importlib.import_module(f"quire.kernels.triton.{name}")


def make_interpreter_faster():
    """Let Triton patch each module once, not at every call in a kernel: half of a launch's time."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "quire_patched"):
        return
    patch = interpreter._patch_lang
    patched = interpreter.quire_patched = set()

    def patch_new(function):
        module = function.__module__
        if module not in patched:
            patched.add(module)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    vars(interpreter).update(_patch_lang=patch_new)  # Triton has no setting for this
    # the check of every integer operation for an overflow takes a third of the time
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options


class Refusing(GatheredAttention):
    """Fails if attention or writes fall back to torch."""

    def __init__(self):
        super().__init__(CPU)

    def attend(self, plan, pages, math, query, fresh, *, column_sums=None):
        raise AssertionError("attention fell back to torch")

    def write(self, slots, key, value):
        raise AssertionError("a write fell back to torch")

    def move(self, moves):
        raise AssertionError("a move fell back to torch")

    def tally(self, statistic, rows, column_sums):
        raise AssertionError("statistics fell back to torch")


def triton_backend(gathered=None, *, multiprocessors=2):
    """The backend with a number of multiprocessors, which decides on splits."""
    from quire.kernels.triton.backend import TritonAttention

    hardware = Hardware("interpreter", multiprocessors, 1, large_tiles=False, interpreted=True)
    return TritonAttention(CPU, gathered or Refusing(), hardware)
