"""The activation gate: models whose activations are smaller than their KV."""

import pytest

from quire.layout.model import ModelSpec
from quire.offload.split import activation_gate
from support.model_specs import PUBLIC_SHAPES
from support.offload_shapes import (
    LLAMA_2_7B,
    LLAMA_3_2_1B,
    LLAMA_3_8B,
    OPT_13B,
    PHI_3_MINI,
    QWEN_2_5_0_5B,
    QWEN_3_0_6B,
    QWEN_3_1_7B,
)


@pytest.mark.parametrize(
    ("model", "ratio"),
    [
        (OPT_13B, 0.5),
        (LLAMA_2_7B, 0.5),
        (PHI_3_MINI, 0.5),
        (QWEN_3_0_6B, 0.5),
        (QWEN_3_1_7B, 1.0),
        (LLAMA_3_8B, 2.0),
        (LLAMA_3_2_1B, 2.0),
        (QWEN_2_5_0_5B, 3.5),
    ],
)
def test_gate_compares_activation_and_kv_bytes(model, ratio):
    gate = activation_gate(model)

    assert gate.x_ratio == ratio
    assert gate.pays == (ratio < 1)


def test_latents_are_smaller_than_activations():
    """DeepSeek V3 stores 512 + 64 numbers per token and layer, and has 7,168 of hidden states."""
    gate = activation_gate(ModelSpec.from_config(PUBLIC_SHAPES["deepseek-v3"]))

    assert gate.x_ratio == 7168 / 576
    assert not gate.pays


def test_gate_gives_its_reason():
    assert activation_gate(LLAMA_3_8B).reason == (
        "activations are 2.0x the KV of this model: KV alone is transferred"
    )
    assert activation_gate(OPT_13B).reason.startswith("activations are 0.5x the KV of this model")


def test_gate_accounts_for_codecs():
    assert not activation_gate(OPT_13B, kv_value_bytes=0.5625).pays  # 4-bit KV, plain activations
    assert activation_gate(OPT_13B, kv_value_bytes=0.5625, x_value_bytes=0.5625).pays
    assert activation_gate(LLAMA_3_8B, x_value_bytes=0.5625).pays
