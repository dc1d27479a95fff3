"""Assessment of workloads; the scenarios of the article are in tests/papers."""

import pytest

from quire.errors import ConfigError
from quire.layout.layout import layout_for
from quire.layout.model import LayerSpec, ModelSpec
from quire.plan.capacity import (
    CapacityVerdict,
    MemoryLayout,
    Workload,
    assess,
    decode_share,
    sequence_bytes,
)

MODEL = ModelSpec(
    architecture="llama",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_positions=8192,
    tied_embeddings=False,
    gated_mlp=True,
    layers=(LayerSpec(),) * 32,
)
LAYOUT = layout_for(MODEL, page_tokens=16, codec="float16")


def assess_workload(
    kv_bytes: int, input_tokens: int, output_tokens: int, batch: int
) -> CapacityVerdict:
    memory = MemoryLayout(
        total_bytes=kv_bytes + MODEL.weight_bytes(2),
        weights_bytes=MODEL.weight_bytes(2),
        activation_peak_bytes=0,
        headroom_bytes=0,
        kv_bytes=kv_bytes,
    )
    return assess(MODEL, memory, input_tokens, output_tokens, batch)


def test_kv_bytes_are_those_of_whole_pages():
    one_bytes = sequence_bytes(LAYOUT, 1000)
    verdict = assess_workload(100 * one_bytes, 500, 500, 20)

    assert verdict.kv_bytes == 20 * one_bytes == 20 * 1008 * 131_072
    assert verdict.kv_share == 0.2
    assert verdict.sequences == 100
    assert any("20.0% of the KV memory; 100 of them fit" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("fitting", "batch", "impact"),
    [
        (1000, 50, "low"),
        (1000, 60, "low-medium"),
        (1000, 159, "low-medium"),
        (1000, 160, "high"),
        (1000, 479, "high"),
        (1000, 480, "very high"),
        (1000, 1000, "critical"),
        (60, 9, "low-medium"),
        (60, 10, "critical"),
    ],
)
def test_impact_increases_with_the_memory_share_and_with_scarcity(
    fitting: int, batch: int, impact: str
):
    """Levels at 0.32 * (1/6, 1/2, 3/2) and 1; below 150 / 2 fitting sequences memory is scarce."""
    verdict = assess_workload(fitting * sequence_bytes(LAYOUT, 1000), 500, 500, batch)

    assert verdict.impact == impact
    assert verdict.pays == (impact not in ("low", "low-medium"))


def test_request_that_never_fits_is_critical():
    verdict = assess_workload(sequence_bytes(LAYOUT, 4000), 5000, 1, 1)

    assert verdict.sequences == 0
    assert verdict.impact == "critical"


def test_requests_beyond_the_context_are_reported_as_refused():
    verdict = assess_workload(10**12, 8192, 1, 1)

    assert any("exceed the model's context of 8,192" in reason for reason in verdict.reasons)


def test_decode_share_increases_with_output_and_decreases_with_input():
    def share(input_tokens: int, output_tokens: int) -> float:
        return decode_share(
            MODEL,
            Workload(input_tokens=input_tokens, output_tokens=output_tokens, batch=16),
            weight_bytes_per_value=2,
            kv_bytes_per_value=2,
            flops_per_byte=150,
        )

    assert share(2000, 5) < 0.1 < share(2000, 500) < share(200, 500) < 1


def test_decode_share_follows_its_formula():
    """One request of 100 in, 10 out: prefill 100 * 2 P / F; decode 10 * (2 P_read + KV(105))."""
    parameters = MODEL.num_parameters
    prefill = 100 * 2 * parameters / 150
    decode = 10 * (2 * (parameters - MODEL.lookup_parameters) + 105 * 131_072)

    assert decode_share(
        MODEL,
        Workload(input_tokens=100, output_tokens=10, batch=1),
        weight_bytes_per_value=2,
        kv_bytes_per_value=2,
        flops_per_byte=150,
    ) == pytest.approx(decode / (prefill + decode))


@pytest.mark.parametrize("workload", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_empty_workloads_are_refused(workload: tuple[int, int, int]):
    with pytest.raises(ConfigError, match=f"workload {','.join(map(str, workload))}"):
        assess_workload(10**9, *workload)


def test_no_kv_memory_is_refused():
    with pytest.raises(ConfigError, match="kv_memory=0 B"):
        assess_workload(0, 1, 1, 1)
