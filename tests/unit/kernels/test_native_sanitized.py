"""The C source under the address and undefined-behaviour sanitizers, called from a C program."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import quire.kernels.native

SOURCE = Path(quire.kernels.native.__file__).parent
HARNESSES = Path(__file__).parents[2] / "native"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize(
    "sources",
    [(HARNESSES / "harness.c",), (HARNESSES / "linear_harness.c", SOURCE / "attention.c")],
    ids=lambda sources: sources[0].stem,
)
def test_c_kernels_access_no_memory_out_of_bounds(sources, tmp_path):
    program = tmp_path / "harness"
    flags = ["-O1", "-std=c11", "-Wall", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    build = ["gcc", *flags, f"-I{SOURCE}", *map(str, sources), "-o", str(program), "-lm"]
    built = subprocess.run(build, capture_output=True, text=True)
    if "cannot find" in built.stderr and "CI" not in os.environ:
        pytest.skip("gcc has no sanitizer libraries here")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
