"""Triton compiles the kernels for a GPU, on a machine without one."""

import os
import subprocess
import sys

import pytest

from support.interpreted import interpreted

interpreted("backend")


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "capability"), [("H100", "9.0"), ("A100", "8.0"), ("L4", "8.9")])
def test_kernels_compile_for_a_gpu_and_fit_its_shared_memory(gpu, capability, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.compiled", gpu],
        env=environment
        | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"kernels compiled for compute capability {capability}" in lines[-1]
    half = [line for line in lines if " bf16 " in line or " fp16 " in line]
    assert {line.split()[0] for line in half} == {
        "decode_splits",
        "decode_sums",
        "prefill_blocks",
        "prefill_sums",
        "window_sums",
    }
    assert not [line for line in half if "  0 tensor-core products" in line]
