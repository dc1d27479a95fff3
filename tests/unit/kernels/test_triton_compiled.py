"""Triton compiles the kernels for a GPU, on a machine without one."""

import os
import subprocess
import sys

import pytest

from support.interpreted import interpreted

interpreted("backend")


@pytest.mark.slow
def test_kernels_compile_for_an_h100_and_fit_its_shared_memory(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.compiled"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "kernels compiled for compute capability 9.0" in lines[-1]
    assert all("  0 tensor-core" not in line for line in lines if "decode_splits" in line)
