"""Reordered linear layers equal plain ones bit for bit; shared weights are not reordered."""

import weakref

import pytest
import torch
from torch import nn

from quire.models.linear_weights import ReorderedLinear, can_reorder, reorder_linears
from quire.models.weights import weight_bytes
from support.zoo import tiny_llama

pytestmark = pytest.mark.skipif(
    not can_reorder(), reason="this torch or CPU reorders no bfloat16 weights"
)


def reordered_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, ReorderedLinear)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33, 300])
def test_reordered_layer_is_bitwise_equal_to_the_plain_layer(rows, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(2, rows, 96).bfloat16()
    with torch.inference_mode():
        assert torch.equal(ReorderedLinear(linear)(inputs), linear(inputs))


def test_reordered_layer_exposes_its_plain_weight():
    linear = nn.Linear(96, 80, dtype=torch.bfloat16)

    assert torch.equal(ReorderedLinear(linear).weight, linear.weight)


def test_reordered_model_has_equal_logits_and_weight_bytes():
    plain, reordered = tiny_llama(tied=False), tiny_llama(tied=False)
    reorder_linears(reordered)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(reordered(ids).logits, plain(ids).logits)
    assert len(reordered_names(reordered)) == 2 * 7 + 1
    assert weight_bytes(reordered) == weight_bytes(plain)


def test_plain_weight_is_freed_before_the_next_layer_is_reordered(monkeypatch):
    model = nn.Sequential(*(nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    original = ReorderedLinear.__init__

    def counting(self, linear):
        original(self, linear)
        alive.append(sum(weight() is not None for weight in weights))

    monkeypatch.setattr(ReorderedLinear, "__init__", counting)
    reorder_linears(model)

    assert alive == [4, 3, 2, 1]


def test_head_tied_to_the_embedding_is_not_reordered():
    model = tiny_llama(tied=True)
    before = weight_bytes(model)
    reorder_linears(model)

    assert "lm_head" not in reordered_names(model)
    assert len(reordered_names(model)) == 2 * 7
    assert weight_bytes(model) == before


def test_float32_derived_and_hooked_layers_are_not_reordered():
    class Derived(nn.Linear):
        pass

    hooked = nn.Linear(32, 32, dtype=torch.bfloat16)
    hooked.register_forward_hook(lambda *_: None)
    layers = [nn.Linear(32, 32), Derived(32, 32, dtype=torch.bfloat16), hooked]
    model = nn.Sequential(*layers, nn.Linear(32, 32, dtype=torch.bfloat16))
    reorder_linears(model)

    assert reordered_names(model) == {"3"}


def test_shared_layer_is_reordered_once():
    shared = nn.Linear(32, 32, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    reorder_linears(model)

    assert model[0][0] is model[1][0]
    assert isinstance(model[0][0], ReorderedLinear)
