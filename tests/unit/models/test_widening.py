"""On CPUs without half-precision products, layers multiply in float32 and round once."""

import logging

import psutil
import pytest
import torch
from torch import nn

from quire.models import linear_weights
from quire.models.linear_weights import WidenedLinear, widen_linears
from quire.models.own_attention import latent_heads
from quire.models.weights import weight_bytes
from support import zoo
from support.zoo import tiny_llama


@pytest.fixture(autouse=True)
def _no_half_precision(monkeypatch):
    """Treat the CPU as one without half-precision products."""
    monkeypatch.setattr(linear_weights, "multiplies", lambda dtype: dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_widened_layer_rounds_the_exact_product_once(dtype, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 80, bias=bias, dtype=dtype))
    linear, inputs = model[0], torch.randn(2, 7, 96).to(dtype)
    exact = nn.functional.linear(
        inputs.double(), linear.weight.double(), linear.bias.double() if bias else None
    )

    widen_linears(model)
    with torch.inference_mode():
        out = model(inputs)

    assert isinstance(model[0], WidenedLinear)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_widened_model_has_close_logits_and_counts_its_weight_bytes(tied):
    plain, widened_model = tiny_llama(tied=tied), tiny_llama(tied=tied)
    widen_linears(widened_model)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            widened_model(ids).logits, plain(ids).logits, atol=0.02, rtol=0.02
        )

    layers = [m for m in widened_model.modules() if isinstance(m, WidenedLinear)]
    biases = [m.bias.numel() for m in layers if m.bias is not None]
    numbers = sum(m.weight.numel() for m in layers[:-1]) + sum(biases)
    head = layers[-1].weight.numel() * (4 if tied else 2)  # the embedding is not widened
    assert len(layers) == 2 * 7 + 1
    assert widened_model.dtype == plain.dtype == torch.bfloat16
    assert weight_bytes(widened_model) == weight_bytes(plain) + 2 * numbers + head


def test_queries_are_folded_by_widened_projections_of_latents():
    model = zoo.build("deepseek_v2", dtype=torch.bfloat16)
    heads = latent_heads(model)[0]
    query, out = torch.randn(3, 4, 20).bfloat16(), torch.randn(3, 4, 16).bfloat16()
    plain = heads.fold(query), heads.unfold(out)
    widen_linears(model)

    assert isinstance(model.model.layers[0].self_attn.kv_b_proj, WidenedLinear)
    for found, expected in zip((heads.fold(query), heads.unfold(out)), plain, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected)


def test_layers_that_share_a_weight_share_the_widened_weight():
    first, second = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.bfloat16)
    second.weight = first.weight
    model = nn.Sequential(first, second, first)

    widen_linears(model)

    assert model[0] is model[2]
    assert model[0].weight is model[1].weight


def test_hooked_and_float32_layers_are_not_widened():
    hooked = nn.Linear(8, 8, dtype=torch.bfloat16)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(hooked, nn.Linear(8, 8))

    widen_linears(model)

    assert not any(isinstance(module, WidenedLinear) for module in model)


def test_layers_are_not_widened_without_memory_and_a_warning_is_logged(monkeypatch, caplog):
    short = psutil.virtual_memory()._replace(available=100)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: short)
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16))

    with caplog.at_level(logging.WARNING):
        widen_linears(model)

    assert type(model[0]) is nn.Linear
    assert "ten times as long" in caplog.text
