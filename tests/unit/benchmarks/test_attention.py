"""Rates of attention over pages: ratios are computed by round, and the command runs."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.attention import bench
from benchmarks.attention.bench import Rate, claims
from quire.errors import ConfigError
from quire.kernels.native.library import NotLoaded, load_library

LIBRARY = load_library()
pytestmark = pytest.mark.skipif(
    isinstance(LIBRARY, NotLoaded), reason="the C extension is not built"
)


def rate(codec, kv_bytes, call_s):
    return Rate(
        instruction_set="avx2",
        codec=codec,
        rows=1,
        new_tokens=1,
        context=64,
        kv_bytes=kv_bytes,
        flops=0,
        call_s=call_s,
        limits=(100.0, 50.0, 100.0),
    )


def test_ratios_are_medians_over_rounds():
    found = [rate("bfloat16", 40, (1.0, 1.0, 4.0)), rate("int8", 20, (0.5, 1.0, 1.0))]

    assert claims(found) == {
        "avx2_bfloat16_decode_1x64_over_limit": 0.4,
        "avx2_int8_decode_1x64_over_limit": 0.4,
        "avx2_int8_decode_1x64_speedup": 2.0,
    }


def test_instruction_set_that_the_machine_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "load_library", lambda: replace(LIBRARY, path=1))

    with pytest.raises(ConfigError, match="expected instruction sets up to avx2"):
        bench.libraries(("avx2", "avx512_bf16"))
    assert set(bench.libraries(())) == {"avx2"}


def test_command_measures_decode_and_prefill():
    result = CliRunner().invoke(app, ["attention", "--quick", "--threads", "1", "--json"])
    run = json.loads(result.output.splitlines()[-1])

    assert result.exit_code == 0
    assert run["claims"] == {}
    assert {found["new_tokens"] for found in run["arms"]["rates"]} == {1, 32}
