from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import OPTForCausalLM

from quire.engine.core import Engine
from quire.errors import UnsoundCombination
from quire.eviction.decisions import AllHeads
from quire.layout.statistics import ResidualSimilarity
from quire.models.adapter import TransformersDecoder
from quire.models.loader import load_model
from quire.models.observing import OutputProjections
from quire.policies.view import KVView, OutputProjection
from support import zoo
from support.exact_products import use_exact_products
from support.flat import Recorder, distance, sequences
from support.histories import Slots
from support.kv_options import kv_config
from support.ranks import on_ranks, rank_model
from support.streamed import load_streamed

TOKENS = 23
SCALED = {"phi3_longrope", "gpt_oss"}  # have a factor on cosines and sines, divided out of keys
FUSED = {"phi3", "phi3_longrope", "gpt2", "gpt_neox"}
COMPLEX = "deepseek_v2"
LATENT = (COMPLEX, "deepseek_v32", "glm_moe_dsa")
RECOMPUTED = [*(name for name in zoo.ARCHITECTURES if name not in ("llama4",)), *LATENT]


class Storing(Recorder):
    """Records keys, values and index keys, with the attention inputs of each layer."""

    _index = None

    def attend(self, call, query, key, value):
        assert call.layer in self.inputs
        out = super().attend(call, query, key, value)
        if call.index is not self._index:  # not that of an earlier layer
            self._index = call.index
            self.stored[call.layer] += (call.index.key.clone(),)
        return out

    def own(self, decoder):
        """What was stored, of the layers that have keys and values of their own."""
        layers = decoder.spec.layers
        return [(n, stored) for n, stored in self.stored.items() if layers[n].source is None]


def run(decoder, variant=0):
    """Prepare, and prefill a sequence; return its tokens and the recording attention."""
    assert decoder.prepare_recomputation() is None
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, zoo.VOCAB_SIZE, (TOKENS,), generator=generator)
    storing = Storing(range(TOKENS))
    last = torch.tensor([TOKENS - 1])
    decoder.forward(tokens, torch.arange(TOKENS), last, storing, rope_variant=variant)
    return tokens, storing


def post_norm_opt():
    """OPT with post-norm as in OPT-350m: X is the input of the layer."""
    config = zoo.ARCHITECTURES["opt"]()
    config.do_layer_norm_before = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OPTForCausalLM(config).eval()


@pytest.mark.parametrize("name", [*RECOMPUTED, "opt_post_norm"])
def test_recomputed_keys_and_values_are_the_stored_ones(name, monkeypatch):
    """Eleven tokens in reverse order with gaps; with exact products, their codes are equal too.

    Rounding by 1e-6 can give another code near its border.
    """
    exact = name not in (*SCALED, COMPLEX)
    if exact:
        use_exact_products(monkeypatch)
    decoder = TransformersDecoder(post_norm_opt() if name == "opt_post_norm" else zoo.build(name))
    tokens, storing = run(decoder)
    subset = torch.arange(TOKENS - 1, 0, -2)

    assert sorted(storing.stored) == list(range(decoder.spec.num_layers))
    found = {0: decoder.first_layer(tokens[subset], subset)}
    for layer, stored in storing.own(decoder):
        recomputed = decoder.keys_and_values(layer, storing.inputs[layer][subset], subset)
        recomputed = *recomputed, *found.get(layer, ())
        expected = stored * (2 if layer in found else 1)
        for vectors, numbers in zip(recomputed, expected, strict=True):
            torch.testing.assert_close(vectors, numbers[subset], atol=2e-5, rtol=1e-4)
            assert torch.equal(vectors, numbers[subset]) or not exact


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "opt"])
def test_recomputed_half_precision_differs_by_rounding_only(name):
    decoder = TransformersDecoder(zoo.build(name).bfloat16())
    _, storing = run(decoder)

    for layer, (key, value) in storing.stored.items():
        found = decoder.keys_and_values(layer, storing.inputs[layer], torch.arange(TOKENS))
        assert [x.dtype for x in found] == [torch.bfloat16] * 2
        for recomputed, stored in zip(found, (key, value), strict=True):
            assert distance(recomputed, stored.float()) < 2**-7


@pytest.mark.parametrize("variant", [0, 1])
def test_recomputed_keys_use_the_rope_variant_of_their_request(variant):
    decoder = TransformersDecoder(zoo.build("phi3_longrope"))
    _, storing = run(decoder, variant)
    inputs, positions = storing.inputs[1], torch.arange(TOKENS)

    same = decoder.keys_and_values(1, inputs, positions, rope_variant=variant)[0]
    other = decoder.keys_and_values(1, inputs, positions, rope_variant=1 - variant)[0]

    torch.testing.assert_close(same, storing.stored[1][0], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(other, same, atol=1e-3)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recompute_skips_separate_query_projections(name):
    model = zoo.build(name)
    decoder = TransformersDecoder(model)
    _, storing = run(decoder)
    decoder.keys_and_values(1, storing.inputs[1], torch.arange(TOKENS))
    projected, forwards = [], []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for part, module in model.named_modules():
        if part.endswith(("q_proj", "q_b_proj", "wq_b")):
            module.register_forward_hook(lambda *_: projected.append(1))

    decoder.keys_and_values(1, storing.inputs[1], torch.arange(TOKENS))

    assert not projected
    assert not forwards  # of the whole model
    assert decoder._observing.recomputation.leaves_queries_out == (name not in FUSED)
    run(decoder)
    assert bool(projected) == (name not in FUSED)


def test_inputs_are_recorded_only_if_attention_wants_them():
    decoder = TransformersDecoder(zoo.build("llama"))
    decoder.prepare_recomputation()
    decoder.prepare_recomputation()
    recorder = Recorder(range(3), wants=False)

    decoder.forward(torch.tensor([5, 6, 7]), torch.arange(3), torch.tensor([2]), recorder)

    assert recorder.inputs == {}


def test_preparing_recomputation_holds_the_forward_lock():
    """During preparation the layers end at a bridge of no request."""
    model = zoo.build("llama")
    decoder = TransformersDecoder(model)
    could_run = []

    def try_to_run() -> bool:
        got = decoder._forward_lock._lock.acquire(blocking=False)
        if got:
            decoder._forward_lock._lock.release()
        return got

    def try_in_thread(*_) -> None:
        with ThreadPoolExecutor(1) as other:
            could_run.append(other.submit(try_to_run).result())

    handles = [
        module.register_forward_hook(try_in_thread)
        for part, module in model.named_modules()
        if part.endswith("k_proj")
    ]
    decoder.prepare_recomputation()
    for handle in handles:
        handle.remove()

    assert could_run
    assert not any(could_run)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(try_to_run).result()


NEXT_MODULE = {
    **dict.fromkeys(("llama", "phi3", "granite", "mixtral", "llama4"), "post_attention_layernorm"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma4"), "pre_feedforward_layernorm"),
    "gpt_oss": "post_attention_layernorm",
    "olmo2": "mlp",
    "gpt2": "ln_2",
    "opt": "final_layer_norm",
}


def blocks(model):
    base = model.base_model
    base = getattr(base, "model", base)
    return getattr(base, "layers", None) or getattr(base, "h", None) or base.decoder.layers


def logits_and_cosines(decoder, *, wants=True):
    (tokens,), recorder = sequences(11, vocab_size=zoo.VOCAB_SIZE), Recorder(range(11), wants=wants)
    logits = decoder.forward(tokens, torch.arange(11), torch.tensor([10]), recorder)
    return logits, recorder.cosines


@pytest.mark.parametrize("name", NEXT_MODULE)
def test_residual_similarity_compares_the_stream_before_and_after_attention(name):
    model = zoo.build(name)
    decoder, before, after = TransformersDecoder(model), {}, {}
    assert decoder.prepare(ResidualSimilarity()) is None

    def record(number, into, module, args, kwargs):
        into[number] = (args[0] if args else kwargs["hidden_states"]).reshape(11, -1)

    for number, block in enumerate(blocks(model)):
        for module, into in ((block, before), (block.get_submodule(NEXT_MODULE[name]), after)):
            module.register_forward_pre_hook(partial(record, number, into), with_kwargs=True)
    _, cosines = logits_and_cosines(decoder)

    assert list(cosines) == list(range(decoder.spec.num_layers))
    for layer, found in cosines.items():
        expected = F.cosine_similarity(before[layer], after[layer], dim=-1)
        torch.testing.assert_close(found, expected)
        assert found.max() < 0.999  # attention changes the stream


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_recording_does_not_change_logits_and_is_done_only_if_wanted(name):
    plain, watched = (TransformersDecoder(zoo.build(name)) for _ in range(2))
    watched.prepare(ResidualSimilarity())
    assert torch.equal(logits_and_cosines(plain)[0], logits_and_cosines(watched)[0])
    assert logits_and_cosines(watched, wants=False)[1] == {}


def test_parallel_attention_and_mlp_is_refused_by_name():
    decoder = TransformersDecoder(zoo.build("gpt_neox"))

    refused = decoder.prepare(ResidualSimilarity())
    assert "GPTNeoXForCausalLM does not add the output of attention" in refused
    assert logits_and_cosines(decoder)[1] == {}
    # in the packaged model the stream after attention is close to the attention output
    model = load_model("quire-tiny", dtype="float32")
    assert model.decoder.prepare(ResidualSimilarity()) is None


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
