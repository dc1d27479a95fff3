"""Output projections of attention: lengths of projected values, for many architectures."""

import pytest
import torch
from torch import nn

from quire.engine.core import Engine
from quire.errors import UnsoundCombination
from quire.eviction.decisions import AllHeads
from quire.models.adapter import TransformersDecoder
from quire.models.observing import OutputProjections
from quire.policies.view import KVView, OutputProjection
from support import zoo
from support.histories import Slots
from support.kv_options import kv_config
from support.ranks import on_ranks, rank_model
from support.streamed import load_streamed

NAMES = {
    **dict.fromkeys(("llama", "llama_mqa", "qwen3"), "o_proj"),
    "gemma2": "o_proj",  # windows in every second layer; a norm follows
    "gemma3n": "o_proj",  # layers that share KV
    "gpt2": "c_proj",  # transposed, with a bias
    "opt": "out_proj",
    "lfm2": "out_proj",
    "gpt_neox": "dense",
    "falcon": "dense",
}


def projections_of(decoder) -> OutputProjections:
    found = decoder.output_projections()
    assert isinstance(found, OutputProjection)
    return found


def drawn(spec, layers=(0, 1), each=1) -> torch.Tensor:
    """Values of five slots of each lane."""
    heads = spec.heads[layers[0]]
    lanes = len(layers) * heads.kv_heads * each
    return torch.randn(lanes, 5, heads.value_dim, generator=torch.Generator().manual_seed(1))


def columns_of(model, name, spec, layer) -> list[torch.Tensor]:
    """Columns of each query head of a layer, by passing unit outputs of heads through it."""
    [projection] = [
        part
        for path, module in model.named_modules()
        if getattr(module, "layer_idx", None) == layer and "ttention" in type(module).__name__
        for part_name, part in module.named_children()
        if part_name == name
    ]
    width = spec.heads[layer].query_heads * spec.heads[layer].value_dim
    with torch.no_grad():
        rows = projection(torch.eye(width)) - projection(torch.zeros(width))
    return list(rows.split(spec.heads[layer].value_dim))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("apart", [False, True])
def test_lengths_are_those_of_the_layers_own_projection(name, apart):
    model = zoo.build(name)  # the decoder changes its model
    decoder = TransformersDecoder(zoo.build(name))
    spec, projections = decoder.spec, projections_of(decoder)
    for layer in (n for n, one in enumerate(spec.layers) if one.stores_all):
        heads = spec.heads[layer]
        readers = [layer, *(n for n, one in enumerate(spec.layers) if one.source == layer)]
        columns = [columns_of(model, NAMES[name], spec, reader) for reader in readers]
        group = heads.group * len(readers)
        values = drawn(spec, [layer], each=group if apart else 1)

        found = projections.lengths([layer], values)

        by_head = values.view(heads.kv_heads, -1, *values.shape[1:])
        for kv_head, of_lanes in enumerate(by_head):
            own = slice(kv_head * heads.group, (kv_head + 1) * heads.group)
            members = [matrix for of_reader in columns for matrix in of_reader[own]]
            lanes = of_lanes if apart else of_lanes.expand(group, -1, -1)
            lengths = [(v @ m).abs().sum(dim=1) for v, m in zip(lanes, members, strict=True)]
            expected = torch.stack(lengths)
            expected = expected if apart else expected.mean(dim=0, keepdim=True)
            got = found.view(*by_head.shape[:3])[kv_head]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_lengths_are_the_same_for_several_sequences_and_few_slots_at_a_time(monkeypatch):
    decoder = TransformersDecoder(zoo.build("llama"))
    values, projections = drawn(decoder.spec), projections_of(decoder)
    both = values, values.flip(1)

    together = projections.lengths((0, 1, 0, 1), torch.cat(both))

    apart = torch.cat([projections.lengths((0, 1), one) for one in both])
    torch.testing.assert_close(together, apart)
    monkeypatch.setattr("quire.policies.windows.SCRATCH_NUMBERS", 64)  # two slots
    torch.testing.assert_close(projections.lengths((0, 1, 0, 1), torch.cat(both)), together)


class Coded(nn.Module):
    """A layer that keeps its weight in codes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().char(), False)

    def forward(self, rows):
        return rows @ (self.weight.to(rows.dtype) * self.scale).T


@pytest.mark.parametrize("codec", ["int8", "coded"])
def test_weights_in_codes_are_read(codec):
    exact = projections_of(TransformersDecoder(zoo.build("wide_llama")))
    model = zoo.build("wide_llama")
    if codec == "coded":
        for layer in model.model.layers:
            layer.self_attn.o_proj = Coded(layer.self_attn.o_proj)
    decoder = TransformersDecoder(model, codec="int8" if codec == "int8" else None)
    values = drawn(decoder.spec)

    found = projections_of(decoder).lengths((0, 1), values)

    torch.testing.assert_close(found, exact.lengths((0, 1), values), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3_next", "diffllama"])
def test_a_gate_or_a_norm_before_the_projection_and_offloaded_weights_are_refused(name):
    decoder = TransformersDecoder(zoo.build(name))
    refused = decoder.output_projections()

    assert "changes the output of attention before projecting it" in refused
    assert type(decoder.model).__name__ in refused
    with pytest.raises(UnsoundCombination, match=r"are offloaded \(--weights-memory\); use value_"):
        Engine(load_streamed("llama"), kv_config(memory="1MiB", evict="criticalkv:cap=60,every=4"))


def test_ranks_measure_the_heads_that_they_have():
    values = drawn(TransformersDecoder(zoo.build("llama")).spec)
    whole = projections_of(TransformersDecoder(zoo.build("llama"))).lengths((0, 1), values)
    by_rank = values.view(2, 2, *values.shape[1:])

    def lengths(group):
        decoder = rank_model("llama", group).decoder
        own = by_rank[:, group.rank : group.rank + 1].flatten(0, 1)
        rows = {"next_position": 5, "layers": (0, 1), "slots": Slots(own, own)}
        view = KVView(torch.arange(5).expand(2, 5), **rows, projection=projections_of(decoder))
        return AllHeads(group, 2).view(view).projected_lengths()

    for found in on_ranks(2, lengths):
        torch.testing.assert_close(found, whole)
