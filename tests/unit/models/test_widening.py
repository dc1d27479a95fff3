"""Where a CPU cannot multiply half precision, layers multiply in float32 and round once."""

import logging

import psutil
import pytest
import torch
from torch import nn

from quire.models import linear_weights
from quire.models.linear_weights import WidenedLinear, widen_linears
from quire.models.weights import weight_bytes
from unit.models.test_packing import tiny_llama


@pytest.fixture(autouse=True)
def _no_half_precision(monkeypatch):
    """Any CPU is one without."""
    monkeypatch.setattr(linear_weights, "multiplies", lambda dtype: dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_widened_layer_rounds_the_exact_product_once(dtype, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 80, bias=bias, dtype=dtype))
    linear, given = model[0], torch.randn(2, 7, 96).to(dtype)
    exact = nn.functional.linear(
        given.double(), linear.weight.double(), linear.bias.double() if bias else None
    )

    widen_linears(model)
    with torch.inference_mode():
        out = model(given)

    assert isinstance(model[0], WidenedLinear)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_a_widened_model_answers_as_before_and_its_weight_says_so(tied):
    plain, wide = tiny_llama(tied=tied), tiny_llama(tied=tied)
    widen_linears(wide)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(wide(ids).logits, plain(ids).logits, atol=0.02, rtol=0.02)

    widened = [m for m in wide.modules() if isinstance(m, WidenedLinear)]
    biases = [m.bias.numel() for m in widened if m.bias is not None]
    numbers = sum(m.weight.numel() for m in widened[:-1]) + sum(biases)
    head = widened[-1].weight.numel() * (4 if tied else 2)  # the embedding stays where it was
    assert len(widened) == 2 * 7 + 1
    assert wide.dtype == plain.dtype == torch.bfloat16
    assert weight_bytes(wide) == weight_bytes(plain) + 2 * numbers + head


def test_layers_that_share_a_weight_share_the_wide_one():
    first, second = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.bfloat16)
    second.weight = first.weight
    model = nn.Sequential(first, second, first)

    widen_linears(model)

    assert model[0] is model[2]
    assert model[0].weight is model[1].weight


def test_layers_with_hooks_and_in_float32_are_left_alone():
    hooked = nn.Linear(8, 8, dtype=torch.bfloat16)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.Sequential(hooked, nn.Linear(8, 8))

    widen_linears(model)

    assert not any(isinstance(module, WidenedLinear) for module in model)


def test_without_memory_for_it_layers_stay_and_the_log_says_what_that_means(monkeypatch, caplog):
    short = psutil.virtual_memory()._replace(available=100)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: short)
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16))

    with caplog.at_level(logging.WARNING):
        widen_linears(model)

    assert type(model[0]) is nn.Linear
    assert "ten times as long" in caplog.text
