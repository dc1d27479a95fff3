"""The C source under the address and undefined-behaviour sanitizers, called from a C program."""

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import quire.kernels.native

SOURCE = Path(quire.kernels.native.__file__).parent
HARNESSES = Path(__file__).parents[2] / "native"
SANITIZED = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover"]


def flags_of_the_library():
    """The flags in setup.py."""
    tree = ast.parse((Path(__file__).parents[3] / "setup.py").read_text(encoding="utf-8"))
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("FLAGS", "FLAGS_IF_KNOWN")
    }
    return [*lists["FLAGS"], *lists["FLAGS_IF_KNOWN"]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize(
    "sources",
    [
        (HARNESSES / "harness.c",),
        (HARNESSES / "linear_harness.c", SOURCE / "attention.c"),
        (HARNESSES / "select_harness.c",),
    ],
    ids=lambda sources: sources[0].stem,
)
def test_c_kernels_access_no_memory_out_of_bounds(sources, tmp_path):
    assert_agrees(sources, SANITIZED, tmp_path / "harness")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("flags", [flags_of_the_library(), ["-O1", "-fstack-reuse=none"]])
def test_c_kernels_agree_without_sanitizers(flags, tmp_path):
    """Sanitizers change the layout of the stack, where a compiler's fault was hidden."""
    assert_agrees((HARNESSES / "harness.c",), flags, tmp_path / "harness")


def assert_agrees(sources, flags, program):
    build = ["gcc", "-std=c11", "-Wall", *flags, f"-I{SOURCE}", *map(str, sources)]
    built = subprocess.run([*build, "-o", str(program), "-lm"], capture_output=True, text=True)
    if "cannot find" in built.stderr and "CI" not in os.environ:
        pytest.skip("gcc has no sanitizer libraries here")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
