"""Fused layers of GPUs, in Triton's interpreter: equal to Transformers, alone and in engines."""

import pytest
import torch
from torch import nn

from quire import GenerationRequest, ScheduleConfig
from quire.engine.core import Engine
from quire.engine.decode_graphs import why_no_graphs
from quire.errors import ConfigError, UnsupportedModel
from quire.kernels.gathered import GatheredAttention
from quire.layout.statistics import ResidualSimilarity
from quire.models import loader
from quire.models.adapter import TransformersDecoder
from quire.models.native.layers import gpu_refusal
from quire.models.verify import DenseAttention, compare_with_transformers
from quire.models.weights import weight_bytes
from support import engines, zoo
from support.engines import greedy, loaded, make_prompts
from support.flat import Recorder, distance, flat_logits, plain_logits, sequences
from support.interpreted import CPU, interpreted, triton_backend
from support.kv_options import kv_config
from support.static_attention import RepeatedCalls
from unit.engine import test_decode_graphs as graphs

interpreted("backend")

from quire.models.native.gpu_decoder import GpuDecoder  # noqa: E402 - imports Triton


@pytest.fixture(autouse=True)
def plain_linears(monkeypatch):
    """Linear layers of torch, as on a GPU."""
    monkeypatch.setattr("quire.models.adapter.prepare_linears", lambda *_: None)


def decoder_of(name, **options):
    return GpuDecoder(zoo.build(name, **options))


@pytest.mark.parametrize("name", zoo.NATIVE)
def test_ragged_chunked_batches_give_transformers_logits(name):
    prompts = sequences(21, 13, 1, vocab_size=zoo.VOCAB_SIZE)
    ours = flat_logits(decoder_of(name), prompts, chunk_tokens=[6, 5, 1, 1, 64])
    expected = plain_logits(zoo.build(name), *prompts)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_to_float32_as_transformers(dtype):
    (prompt,) = sequences(20, vocab_size=zoo.VOCAB_SIZE)
    (ours,) = flat_logits(decoder_of("wide_qwen3", dtype=dtype), [prompt], chunk_tokens=[7])
    model = zoo.build("wide_qwen3", dtype=dtype)
    (theirs,), (expected,) = plain_logits(model, prompt), plain_logits(model.float(), prompt)
    assert ours.dtype == dtype
    assert distance(ours, expected) < max(0.01, 1.1 * distance(theirs, expected))


@pytest.mark.parametrize("name", ["wide_llama_tied", "wide_qwen2", "wide_phi3"])
def test_modules_share_the_joint_weights(name):
    """The comparison at load runs the modules; weights are stored once, and names are kept."""
    model = zoo.build(name)
    before, names = weight_bytes(model), {n: p.clone() for n, p in model.named_parameters()}

    decoder = GpuDecoder(model)

    compare_with_transformers(decoder)
    assert weight_bytes(model) == before
    assert all(torch.equal(p, names[n]) for n, p in model.named_parameters())
    layer, fused = model.model.layers[0], decoder._fused.layers[0]
    with torch.no_grad():
        fused.qkv.weight.zero_()
        fused.gate_up.weight.zero_()
    for parent in (layer.self_attn, layer.mlp):
        outputs = (parent.o_proj if parent is layer.self_attn else parent.down_proj).weight
        for own in parent.parameters():
            if own.ndim == 2 and own is not outputs:
                assert not own.any()


def test_empty_batches_and_sampled_rows():
    decoder, (prompt,) = decoder_of("wide_llama"), sequences(8, vocab_size=zoo.VOCAB_SIZE)

    def forward(tokens, rows):
        positions = torch.arange(len(tokens))
        dense = DenseAttention().batch([0] * len(tokens), positions.tolist())
        return decoder.forward(tokens, positions, torch.tensor(rows, dtype=torch.int64), dense)

    every = forward(prompt, list(range(8)))
    torch.testing.assert_close(forward(prompt, [5, 0, 5]), every[[5, 0, 5]])
    assert forward(prompt, []).shape == (0, zoo.VOCAB_SIZE)
    assert forward(prompt[:0], []).shape == (0, zoo.VOCAB_SIZE)


class Noting(Recorder):
    hidden_rows = torch.tensor([2, 0])

    def note_hidden_states(self, states):
        self.states = states


def noted(decoder, prompt):
    positions = torch.arange(len(prompt))
    noting = Noting(positions.tolist())
    assert decoder.prepare(ResidualSimilarity()) is None
    assert decoder.prepare_hidden_states() is None
    assert decoder.prepare_recomputation() is None
    decoder.forward(prompt, positions, positions, noting)
    return noting


def test_statistics_and_long_rope_variants_equal_those_of_the_modules():
    (prompt,) = sequences(5, vocab_size=zoo.VOCAB_SIZE)
    ours = noted(decoder_of("wide_mistral"), prompt)
    theirs = noted(TransformersDecoder(zoo.build("wide_mistral")), prompt)

    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(ours.inputs, theirs.inputs, **close)
    torch.testing.assert_close(ours.cosines, theirs.cosines, **close)
    torch.testing.assert_close(ours.states, theirs.states, **close)
    assert all(call.rope is None for call in ours.calls.values())
    assert all(call.rotary is not None for call in ours.calls.values())

    (prompt,) = sequences(9, vocab_size=zoo.VOCAB_SIZE)
    ours, theirs = decoder_of("wide_phi3"), TransformersDecoder(zoo.build("wide_phi3"))
    for variant in range(ours.num_rope_variants):
        (found,), (expected,) = (
            flat_logits(decoder, [prompt], chunk_tokens=[4], rope_variant=variant)
            for decoder in (ours, theirs)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "kv",
    [
        *({}, {"codec": "int8"}, {"evict": "recent:cap=8"}),
        *({"codec": "int8+residual=4"}, {"evict": "h2o:cap=8"}),  # without graphs
    ],
    ids=str,
)
def test_engines_give_the_tokens_of_the_modules(kv, monkeypatch):
    """Steps with prompts, and decode steps with padding rows."""
    monkeypatch.setattr(graphs, "LENGTHS", (2, 6, 4, 5))
    prompts = make_prompts(3, 10, seed=4)
    modules = loaded(TransformersDecoder(zoo.build("wide_qwen3")))
    expected = graphs.outputs(graphs.engine_of(modules, **kv), prompts)
    capture = None if "residual" in kv.get("codec", "") else RepeatedCalls()
    other = None if capture else GatheredAttention(CPU)  # Triton reads no full-precision tokens
    monkeypatch.setattr(
        graphs, "StaticGathered", lambda _: triton_backend(other, multiprocessors=8)
    )
    engine = graphs.engine_of(loaded(decoder_of("wide_qwen3")), capture, **kv)

    assert graphs.outputs(engine, prompts) == expected

    if capture is not None:
        stats = engine.stats().graphs
        assert stats.off is None
        assert stats.replayed > 2 or "h2o" in kv.get("evict", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv",
    [
        {"evict": "streaming:cap=12,sinks=2"},
        {"evict": "expected_attention:cap=16"},
        {"evict": "snapkv:cap=16,window=4,when=prefill_end"},
        {"offload_memory": "1MiB", "offload_recompute": "1", "memory": "42KiB"},
        {"offload_memory": "1MiB", "offload_cpu_attention": "0.5", "memory": "42KiB"},
    ],
    ids=str,
)
def test_other_backends_rotate_by_torch(kv):
    """Keys before RoPE, query statistics, and KV offload with recompute and CPU attention."""
    # KV is offloaded by layers, of which a tiny model has too few
    times, lengths = (3, (28, 24)) if "offload_memory" in kv else (1, (20, 6))
    expected, found = (
        tokens_of(decoder, lengths, **kv)
        for decoder in (
            TransformersDecoder(zoo.build("wide_qwen3", times=times)),
            decoder_of("wide_qwen3", times=times),
        )
    )
    assert found == expected


def tokens_of(decoder, lengths, *, memory="4MiB", **kv):
    config = kv_config(memory=memory, page_tokens=4, enable_prefix_caching=False, **kv)
    engine = Engine(loaded(decoder), config, ScheduleConfig(max_num_seqs=2, chunk_tokens=16))
    ids = [
        engine.submit(GenerationRequest(prompt.tolist(), greedy(5)))
        for prompt in sequences(*lengths, vocab_size=zoo.VOCAB_SIZE)
    ]
    found = {name: [] for name in ids}
    while engine.has_work:
        for delta in engine.step():
            assert delta.finish_reason is None or delta.finish_reason == "length"
            found[delta.request_id] += delta.token_ids
    assert bool(engine.events.newest(["offloaded"])) == ("offload_memory" in kv)
    assert bool(engine.stats().num_evictions) == ("evict" in kv)
    return [found[name] for name in ids]


def test_rope_is_applied_in_the_write(monkeypatch):
    """Decode steps launch one kernel for RoPE and the write of a layer."""
    backend, seen = triton_backend(multiprocessors=8), []
    write, fused = backend.write, backend.rotate_and_write
    monkeypatch.setattr(backend, "write", lambda *args: (seen.append("write"), write(*args)))
    monkeypatch.setattr(
        backend, "rotate_and_write", lambda *args: seen.append("fused") or fused(*args)
    )
    monkeypatch.setattr(graphs, "StaticGathered", lambda _: backend)
    monkeypatch.setattr(graphs, "LENGTHS", (3, 2))
    engine = graphs.engine_of(loaded(decoder_of("wide_llama")), RepeatedCalls())

    graphs.outputs(engine, make_prompts(2, 6, seed=4))

    assert set(seen) == {"fused"}


def test_a_model_on_a_gpu_has_fused_layers_if_their_kernels_run(monkeypatch):
    model = zoo.build("wide_llama").to("meta")
    monkeypatch.setattr(loader, "gpu_refusal", lambda _: None)
    reasons = []
    monkeypatch.setattr(loader, "why_no_rows", lambda *_: reasons[-1])

    reasons.append(None)
    chosen = loader.choose_implementation(model, None, "auto")
    assert chosen.text == "native (LlamaForCausalLM has fused layers for this GPU)"

    assert isinstance(loader.make_decoder(model, None, impl="auto", codec="auto"), GpuDecoder)
    model = zoo.build("wide_llama").to("meta")
    with monkeypatch.context() as patch:
        patch.setattr(loader, "why_no_rows", None)  # no kernel runs if they are not wanted
        chosen = loader.choose_implementation(model, None, "transformers")
        assert chosen.text == "transformers (as requested)"
        decoder = loader.make_decoder(model, None, impl="transformers", codec="auto")
        assert type(decoder) is TransformersDecoder
    model = zoo.build("wide_llama").to("meta")

    reasons.append("no Triton")
    chosen = loader.choose_implementation(model, None, "auto")
    assert chosen.text == "transformers (not native: no Triton)"
    with pytest.raises(ConfigError, match="not possible: no Triton; use model_impl=auto"):
        loader.make_decoder(model, None, impl="native", codec="auto")


def with_activation(model):
    model.config.hidden_act = "gelu"


def with_hook(model):
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: None)


def with_pre_hook(model):
    model.model.norm.register_forward_pre_hook(lambda *_: None)


def derived(model, name="model.layers.1.mlp.down_proj"):
    model.set_submodule(name, type("Other", (nn.Linear,), {})(4, 4))


REFUSED = {
    "mlp.down_proj is a Other, not a plain linear layer": derived,
    "lm_head is a Other": lambda model: derived(model, "lm_head"),
    "its activation is 'gelu'": with_activation,
    "self_attn.o_proj has hooks": with_hook,
    "norm has hooks": with_pre_hook,
    "several types: torch.float16, torch.float32": lambda model: model.model.norm.half(),
    "torch.float64": lambda model: model.double(),
}


def test_refusal_states_the_reason():
    with pytest.raises(UnsupportedModel, match="not among the fused architectures"):
        decoder_of("gpt2")
    for reason, change in REFUSED.items():
        model = zoo.build("wide_llama")
        change(model)
        assert reason in gpu_refusal(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv",
    [{}, {"codec": "int8"}, *({"evict": f"{rule}:cap=8"} for rule in ("recent", "h2o", "tova"))],
    ids=str,
)
def test_graphs_with_triton_give_the_tokens_of_gathered_pages(kv, monkeypatch):
    monkeypatch.setattr(graphs, "LENGTHS", lengths := (2, 6, 4, 5))
    model, prompts = engines.load("llama", impl="transformers"), make_prompts(4, 10, seed=4)
    expected = graphs.outputs(graphs.engine_of(model, **kv), prompts)
    monkeypatch.setattr(graphs, "StaticGathered", lambda _: triton_backend(multiprocessors=8))
    engine = graphs.engine_of(model, RepeatedCalls(), **kv)

    found = graphs.outputs(engine, prompts)

    assert found == expected
    assert sum(map(len, found)) == sum(lengths)
    assert engine.pool.kv.backend.name == "triton"
    assert why_no_graphs(engine.pool.kv) is None
    stats = engine.stats().graphs
    assert stats.off is None
    assert stats.replayed > 4
    assert (engine.stats().num_evictions > 0) == ("evict" in kv)
