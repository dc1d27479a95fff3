"""The codec benchmark, part by part, at tiny sizes and with given values."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.common.attention import AttentionBench, AttentionShape
from benchmarks.quant.attention import AttentionTimes, measure_length
from benchmarks.quant.attention import claims as attention_claims
from benchmarks.quant.capacity import codes_bytes, run_capacity, sequence_bytes
from benchmarks.quant.config import (
    QUICK_QUANT,
    CapacityConfig,
    QuantAttentionConfig,
    QuantBenchConfig,
)
from benchmarks.quant.throughput import CodecRate, measure_rates
from benchmarks.quant.throughput import claims as rate_claims
from quire.errors import ConfigError
from quire.kernels.native.library import NativeLibrary, load_library

needs_library = pytest.mark.skipif(
    not isinstance(load_library(), NativeLibrary), reason="the C extension is not built"
)


# ---- bytes ---------------------------------------------------------------------------------------


def test_codec_bytes_match_hand_computation():
    """128 channels: 16 bits; 8 bits and a scale; 4 bits and two groups' scales and zeros."""
    config = CapacityConfig()

    assert codes_bytes(config, "bfloat16") == 2 * 256
    assert codes_bytes(config, "int8") == 2 * (128 + 2)
    assert codes_bytes(config, "int4") == 2 * (64 + 2 * (2 + 2))
    assert codes_bytes(config, "int4_outliers") == 2 * (64 + 2 * (2 + 2) + 2 * (1 + 2))


def test_sequence_bytes_match_hand_computation():
    """A page of 16 slots and 2 heads of 4 channels: keys and values, and its page table entry."""
    config = CapacityConfig(head_dim=4, num_kv_heads=2, tokens=40)
    page = 2 * 16 * 2 * 4 * 2 + 4

    assert sequence_bytes(config, "bfloat16") == 3 * page
    assert sequence_bytes(config, "int8") == 3 * (2 * 16 * 2 * (4 + 2) + 4)
    full_precision = 192 + 4  # 5 records of 2 * 2 * 4 numbers of 2 bytes, in whole lines of 64
    assert sequence_bytes(config, "int8+sinks=1+residual=4") == 3 * 388 + full_precision


def test_capacity_ratios_reach_the_claims():
    claims = run_capacity(CapacityConfig()).claims

    assert claims["int8_capacity_ratio"] == pytest.approx(256 / 130)
    assert claims["int4_capacity_ratio"] == pytest.approx(256 / 72)
    assert claims["int4_outliers_capacity_ratio"] == pytest.approx(256 / 78)
    for codec in ("int8", "int4", "int4_outliers", "kivi4"):
        codes, net, full_precision = (
            claims[f"{codec}_{kind}capacity_ratio"] for kind in ("", "net_", "kept_")
        )
        assert codes >= net > full_precision > 1


# ---- attention -----------------------------------------------------------------------------------


def test_ratios_are_computed_within_rounds():
    """The machine is twice as fast in the second round; ratios do not change."""
    times = AttentionTimes(
        tokens=4096,
        read_bytes_per_s=(100.0, 200.0, 100.0),
        kv_bytes={"bfloat16": 160, "int8": 80},
        step_s={"bfloat16": (4.0, 2.0, 4.0), "int8": (2.0, 1.0, 2.0)},
    )
    claims = attention_claims(QuantAttentionConfig(codecs=("int8",)), [times])

    assert claims["int8_attention_speedup"] == 2
    assert claims["int8_over_read_ceiling"] == pytest.approx(0.4)
    assert claims["bfloat16_over_read_ceiling"] == pytest.approx(0.4)


@needs_library
def test_all_codecs_are_measured_in_every_round():
    config = QUICK_QUANT.attention
    found = measure_length(config, 64)

    assert set(found.step_s) == {"bfloat16", "int8", "int4"}
    assert all(len(times) == config.repeats for times in found.step_s.values())
    assert found.kv_bytes["int8"] < 0.6 * found.kv_bytes["bfloat16"]


@needs_library
@pytest.mark.parametrize("codec", ["int8", "int4_outliers"])
def test_both_backends_compute_equal_attention_over_codecs(codec):
    shape = AttentionShape(batch=3, tokens=70, num_heads=4, num_kv_heads=2, head_dim=64)
    bench = AttentionBench(shape, codec)
    found = [bench.paged(name)().float() for name in ("native", "gathered")]

    assert (found[0] - found[1]).abs().max() <= 2e-2
    assert found[0].abs().max() > 0


def test_unmeasured_claimed_length_raises():
    with pytest.raises(ConfigError, match="4096 among"):
        QuantAttentionConfig(lengths=(2_048,))


# ---- throughput ----------------------------------------------------------------------------------


def test_gains_are_relative_to_plain_kv():
    plain = CodecRate(codec="none", rows=4, attention="native", step_s=(1.0, 2.0, 1.0))
    coded = CodecRate(codec="int8", rows=8, attention="native", step_s=(1.6, 3.2, 1.6))
    claims = rate_claims([plain, coded])

    assert claims["int8_gain_max_batch"] == pytest.approx(1.25)
    assert claims["int8_max_batch_ratio"] == 2
    assert claims["plain_tokens_per_s"] == 4


def test_quantized_kv_fits_more_rows():
    config = replace(QUICK_QUANT.throughput, repeats=1)
    plain, int8, int4 = measure_rates(config)

    assert (plain.rows, plain.codec) == (config.rows, "none")
    assert int4.rows > int8.rows > plain.rows  # of float32
    assert all(len(one.step_s) == 1 for one in (plain, int8, int4))


def test_full_size_config_matches_the_claims():
    config = QuantBenchConfig()
    shape = config.attention.shape

    assert (shape.batch, shape.tokens, shape.num_kv_heads, shape.head_dim) == (32, 4096, 8, 128)
    assert config.attention.repeats >= 5


# ---- the command ---------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(
    ("arguments", "parts", "claims"),
    [
        (
            (),
            ["capacity", "attention", "throughput"],
            {"int8_attention_speedup", "int4_capacity_ratio", "int8_gain_max_batch"},
        ),
        (
            ("--parts", "attention", "--codecs", "int8/int4", "--batch", "1"),
            ["attention"],
            {"int8_int4_attention_speedup"},
        ),
    ],
)
def test_command_prints_claims_of_the_selected_parts(arguments, parts, claims):
    line = ["quant", "--quick", "--json", *arguments]
    result = CliRunner().invoke(app, line, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout.splitlines()[-1])
    assert (run["name"], list(run["arms"])) == ("bench quant", parts)
    assert claims <= set(run["quick_figures"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--codecs", "int5"), "int4"),
        (("--parts", "speed"), "throughput"),
        (("--dtype", "bfloat17"), "bfloat16"),
    ],
)
def test_invalid_options_raise_before_a_run(arguments: tuple[str, ...], message: str):
    result = CliRunner().invoke(app, ["quant", *arguments])

    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
