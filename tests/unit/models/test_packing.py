"""Packed linear layers give the bits of plain ones; only those that own their weight are packed."""

import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from quire.models.linear_weights import PackedLinear, can_pack, pack_linears
from quire.models.weights import weight_bytes

pytestmark = pytest.mark.skipif(
    not can_pack(), reason="this torch or CPU packs no bfloat16 weights"
)


def tiny_llama(*, tied: bool, dtype: torch.dtype = torch.bfloat16):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def packed_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33, 300])
def test_a_packed_layer_gives_the_same_bits(rows, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16)
    given = torch.randn(2, rows, 96).bfloat16()
    with torch.inference_mode():
        assert torch.equal(PackedLinear(linear)(given), linear(given))


def test_the_plain_weight_can_be_looked_at():
    linear = nn.Linear(96, 80, dtype=torch.bfloat16)

    assert torch.equal(PackedLinear(linear).weight, linear.weight)


def test_a_packed_model_gives_the_same_logits_and_weighs_the_same():
    plain, packed = tiny_llama(tied=False), tiny_llama(tied=False)
    pack_linears(packed)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(packed(ids).logits, plain(ids).logits)
    assert len(packed_names(packed)) == 2 * 7 + 1
    assert weight_bytes(packed) == weight_bytes(plain)


def test_a_plain_weight_is_gone_before_the_next_is_packed(monkeypatch):
    model = nn.Sequential(*(nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    original = PackedLinear.__init__

    def counting(self, linear):
        original(self, linear)
        alive.append(sum(weight() is not None for weight in weights))

    monkeypatch.setattr(PackedLinear, "__init__", counting)
    pack_linears(model)

    assert alive == [4, 3, 2, 1]


def test_a_head_tied_to_the_embedding_stays_plain():
    model = tiny_llama(tied=True)
    before = weight_bytes(model)
    pack_linears(model)

    assert "lm_head" not in packed_names(model)
    assert len(packed_names(model)) == 2 * 7
    assert weight_bytes(model) == before


def test_float32_layers_derived_layers_and_layers_with_hooks_stay_plain():
    class Derived(nn.Linear):
        pass

    hooked = nn.Linear(32, 32, dtype=torch.bfloat16)
    hooked.register_forward_hook(lambda *_: None)
    layers = [nn.Linear(32, 32), Derived(32, 32, dtype=torch.bfloat16), hooked]
    model = nn.Sequential(*layers, nn.Linear(32, 32, dtype=torch.bfloat16))
    pack_linears(model)

    assert packed_names(model) == {"3"}


def test_a_layer_in_two_places_is_packed_once():
    shared = nn.Linear(32, 32, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    pack_linears(model)

    assert model[0][0] is model[1][0]
    assert isinstance(model[0][0], PackedLinear)
