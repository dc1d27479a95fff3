"""Codecs in the engine: batching and preemption change no logits; bytes are as counted.

Every codec x rules of eviction, pairwise, and codecs with calibrated constants, which differ from
layer to layer and from head to head. Products are exact (tests/support/exact_products.py).
"""

from dataclasses import replace
from functools import cache
from itertools import cycle, pairwise

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, UnknownName
from quire.eviction.calibration import errors_of, measure, read_vectors
from quire.kv.coded_layers import constants_path, read_constants, write_constants
from quire.kv.lane_reader import LaneReader
from quire.layout.codec_names import CODECS, codec_spec
from quire.layout.kv_format import fill_plain, read_format
from reference.test_eviction_engine import Run, loaded, run
from support import engines
from support.engines import greedy, largest_difference, load, make_prompts
from support.exact_products import use_exact_products
from support.kv_options import kv_config

MODEL = "qwen3"  # heads of 16 numbers
BY_TOKEN = [
    name
    for name, codec in CODECS.items()
    if not (codec.is_plain or codec.constants or codec.per_page)
]
PLAIN_BYTES = [*BY_TOKEN, "int8/int4:group=8", "none/int4_outliers", "int4_hadamard/none"]
KEEPING = ["int4+sinks=2+residual=6", "int2_page/int2", "int4_page/int4+sinks=1+residual=9"]
CODECS_HERE = [*PLAIN_BYTES, *KEEPING]
RULES = {
    "full": "full",
    "recent": "recent:cap=24,every=6,sinks=2",
    "h2o": "h2o:cap=24,every=6,recent=4",
    "keydiff": "keydiff:cap=24,every=6",
    "statistics": "roco:cap=24,every=6",
    "ragged": "h2o:cap=24,every=6,recent=4,budget=ada",
    "in order": "h2o:cap=24,every=6,recent=4,granularity=chunk,chunk_tokens=2",
    "by page": "h2o:cap=40,every=8,recent=4,granularity=page",
    "once": "snapkv:cap=24,window=6,when=prefill_end",
}
PROMPTS = [make_prompts(1, 60, seed=3)[0], [3 + i * i % 60 for i in range(60)]]


def covering() -> list[tuple[str, str]]:
    """Each codec with a rule, and each rule with a codec."""
    rules, pairs = list(RULES), []
    for i, codec in enumerate(CODECS_HERE):
        own = ["full", "by page"] if "_page" in codec else rules
        pairs.append((codec, own[(3 * i + 1) % len(own)]))
    usual = cycle(("int8", "int4+sinks=2+residual=6", "int4_outliers"))
    return list(dict.fromkeys([*pairs, *zip(usual, rules, strict=False)]))


@pytest.fixture(scope="module", autouse=True)
def _exact_products():
    with pytest.MonkeyPatch.context() as patch:
        use_exact_products(patch)
        yield


def answer(codec: str, rule: str, model: str = MODEL, prompts=PROMPTS, **options) -> Run:
    jobs = {f"r{i}": (prompt, RULES[rule]) for i, prompt in enumerate(prompts)}
    kv = {"codec": codec, "evict": RULES[rule], "evict_allow": "", "enable_prefix_caching": False}
    return run(jobs, model=model, kv=kv | options.pop("kv", {}), **options)


@cache
def undisturbed(codec: str, rule: str, model: str = MODEL) -> Run:
    return answer(codec, rule, model, max_num_seqs=1)


def assert_undisturbed(codec: str, rule: str, other: Run) -> None:
    expected = undisturbed(codec, rule)
    assert other.traces() == expected.traces()
    assert largest_difference(other.logits, expected.logits) <= 1e-4


@pytest.mark.parametrize(("codec", "rule"), covering())
def test_batches_and_chunks_change_no_logits(codec, rule):
    assert_undisturbed(codec, rule, answer(codec, rule, chunk_tokens=7, max_num_batched_tokens=20))


def preempted() -> list:
    """Every second pair is preempted in both ways; one of them is fast."""
    return [
        pytest.param(codec, rule, preempt, marks=[pytest.mark.slow] * (turn != number % 2))
        for number, (codec, rule) in enumerate(covering()[::2])
        for turn, preempt in enumerate(("swap", "recompute"))
    ]


@pytest.mark.parametrize(("codec", "rule", "preempt"), preempted())
def test_preemption_changes_no_logits(codec, rule, preempt):
    """Codes are swapped in unchanged, or recomputed from equal keys and values."""
    host = "4MiB" if preempt == "swap" else 0
    often = answer(codec, rule, host=host, preempt=preempt, preempts=2)

    assert_undisturbed(codec, rule, often)
    if rule != "full":  # preempted after evictions
        assert sum(usage.preemptions for usage in often.usages.values()) >= 2


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(codec, marks=[pytest.mark.slow] * (i % 2))
        for i, codec in enumerate(CODECS_HERE)
    ],
)
def test_a_shared_prefix_gives_the_logits_of_an_own_one(codec):
    jobs = {f"r{i}": ([*PROMPTS[-1][:40], 5 + i], "full") for i in range(3)}
    kv = {"codec": codec, "evict_allow": ""}
    alone = run(jobs, model=MODEL, kv=kv | {"enable_prefix_caching": False})
    shared = run(jobs, model=MODEL, kv=kv | {"enable_prefix_caching": True}, max_num_seqs=1)

    assert sum(usage.cached_tokens for usage in shared.usages.values()) == 2 * 40
    assert largest_difference(shared.logits, alone.logits) <= 1e-4
    cached = shared.engine.ledger()["prefix_cache"]
    assert "approximate" in {extent["exactness"] for extent in cached}


@pytest.mark.parametrize(
    "codec", ["int4", "int8+plain_layers=1", "int4_page/int4+sinks=1+residual=3"]
)
def test_quantized_kv_with_a_window_and_logit_soft_caps(codec):
    """Four layers, alternating sliding window and full attention, as in Gemma 2."""
    chunked = answer(codec, "full", "gemma2", chunk_tokens=7, max_num_batched_tokens=20)

    expected = undisturbed(codec, "full", "gemma2")
    assert largest_difference(chunked.logits, expected.logits) <= 1e-4


def test_outputs_of_one_prompt_share_codes():
    """Forks: each output equals that of a separate request with the same seed."""
    params = SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=4, ignore_eos=True)
    found = []
    for caching in (False, True):
        kv = {"page_tokens": 4, "codec": "int4", "enable_prefix_caching": caching}
        engine = engine_of(memory="4MiB", **kv)
        found.append(
            engines.answer(engine, [GenerationRequest(PROMPTS[-1], params, request_id="r")]).tokens
        )

    assert found[0] == found[1]
    assert len(set(map(tuple, found[0].values()))) > 1


def engine_of(memory="1MiB", **kv) -> Engine:
    return Engine(loaded(MODEL), kv_config(memory=memory, **kv))


def whole(codec: str, model: str = MODEL, prompt=PROMPTS[-1], page_tokens=4) -> tuple:
    """A run without eviction: its layout, peak bytes and pages of a lane."""
    kv = {"codec": codec, "evict_allow": ""}
    done = run({"r": (prompt, "full")}, model=model, kv=kv, page_tokens=page_tokens)
    tokens = len(prompt) + len(done.logits["r"]) - 1
    layout = done.engine.pool.kv.memory.layout
    return layout, done.usages["r"].kv_peak_bytes, -(-tokens // page_tokens)


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", PLAIN_BYTES)
def test_a_request_uses_the_bytes_of_its_codecs(codec):
    """Key and value of 16 elements, two heads, two layers; pages are rounded up to 64 bytes."""
    _, peak_bytes, pages = whole(codec)
    form = read_format(fill_plain(codec, "float32"))
    slot_bytes = sum(side.vector_bytes(16, 4) for side in (form.key, form.value))
    assert peak_bytes == 2 * pages * -(-4 * 2 * slot_bytes // 64) * 64


@pytest.mark.parametrize(
    ("codec", "key_bytes", "value_bytes"),
    [("none", 48 * 4, 32 * 4), ("int8", 48 + 2, 32 + 2), ("int4", 24 + 4, 16 + 4)],
)
def test_keys_and_values_of_unequal_width_are_not_padded(codec, key_bytes, value_bytes):
    """Keys of 48 elements, values of 32: 2 KV heads with full attention, 4 in windows of 8.

    int8 has a scale of 2 bytes for each vector, int4 a scale and a zero.
    """
    layout, peak_bytes, pages = whole(codec, "mimo_v2_flash", page_tokens=32)
    page_bytes = 32 * (key_bytes + value_bytes)
    assert [g.page_class.page_bytes for g in layout.groups] == [2 * page_bytes, 4 * page_bytes]
    assert peak_bytes == (2 * pages + 4 * 2) * page_bytes


@pytest.mark.parametrize(
    ("codec", "token_bytes"),
    [
        *(("none", 4 * (16 + 8)), ("int8/int8", (16 + 2) + (8 + 2))),
        *(("none/int8", (16 + 2) + 4 * 8), ("int4/int4", (8 + 4) + (4 + 4))),
    ],
)
def test_latents_are_stored_once_for_all_heads(codec, token_bytes):
    """16 numbers of a latent and 8 of the rotated part, in each of two layers of four heads."""
    layout, peak_bytes, pages = whole(codec, "deepseek_v3", page_tokens=32)
    assert [group.page_class.page_bytes for group in layout.groups] == [32 * token_bytes]
    assert peak_bytes == 2 * pages * 32 * token_bytes


def test_full_precision_tokens_are_counted_and_named_in_the_ledger():
    """2 sinks and 6 newest tokens, or a page minus one: key and value of 16 floats, two heads."""
    for codec, records in (("int4+sinks=2+residual=6", 8), ("int4_page/int4", 3)):
        layout, peak_bytes, pages = whole(codec, prompt=[5, 6, 7])
        coded, kept = (group.page_class.page_bytes for group in layout.groups)

        assert kept == records * 2 * 2 * 16 * 4
        assert peak_bytes == 2 * (pages * coded + kept)

    engine = engine_of(codec="int8/int4")
    engine.submit(GenerationRequest([3, 4, 5], greedy(), request_id="r"))
    engine.step()
    ledger = engine.ledger()

    assert ledger["used_bytes"] + ledger["free_bytes"] == ledger["total_bytes"]
    assert list(ledger["axes"]["codec"]) == ["int8/int4"]
    assert not ledger["requests"][0]["exact"]
    assert "int8/int4" in engine.pool.explanation
    assert "C extension" in engine.pool.reason


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "error", "message"),
    [
        ("int5", UnknownName, "unknown codec 'int5': did you mean"),
        ("int4:group=5", ConfigError, "groups of 5 do not divide head_dim 16; choose group=8"),
        ("int8/float16", ConfigError, "the model computes in float32, .* --dtype float16"),
        ("kivi4", ConfigError, "groups of 32 do not divide head_dim 16"),
        ("int8_channel", ConfigError, "needs constants that are measured .* or use int8"),
        ("int4+sink=3", UnknownName, "unknown option of a KV codec 'sink': did you mean sinks"),
        ("int4+residual=few", ConfigError, "expected residual to be an integer.*, got 'few'"),
        ("none+sinks=4", ConfigError, "is unquantized: remove sinks"),
        ("int4+plain=float16", ConfigError, "the model computes in float32, .* --dtype float16"),
    ],
)
def test_an_invalid_codec_is_rejected_at_start(codec, error, message):
    with pytest.raises(error, match=message):
        engine_of(codec=codec)


def test_codecs_that_cannot_run_here_are_rejected_at_start(monkeypatch):
    with pytest.raises(ConfigError, match="attention=native cannot run here"):
        engine_of(codec="int3_hadamard", attention="native")
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(ConfigError, match="'fp8' cannot run on cpu: this build of torch has no"):
        engine_of(codec="fp8")


# ---- calibrated constants ------------------------------------------------------------------------

MEASURED = [name for name, codec in CODECS.items() if codec.constants]
MEASURED += ["int4:equalise=1/int8", "kvquant4/int4+residual=5", "none/int8_channel"]
MEASURED_RULES = ("full", "h2o", "ragged", "statistics", "keydiff", "by page")
OTHER_PROMPTS = [[5, 9, 2, 7] * 11, [3 + i * i % 60 for i in range(55)]]
LEARNT_FROM = [2 + (i * i + 3 * i) % 61 for i in range(400)]
MODELS = (MODEL, "gemma2", "mimo_v2_flash", "deepseek_v3")


@cache
def vectors_of(model: str, tokens: int = 400):
    return read_vectors(loaded(model).decoder, LEARNT_FROM[:tokens])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Constants of all codecs with constants, for all models."""
    found = tmp_path_factory.mktemp("models")
    for model in MODELS:
        for text in MEASURED:
            form = read_format(fill_plain(text, "float32"))
            measured = measure(vectors_of(model), form)
            write_constants(found / model, form, measured, {"model": model})
    return found


def measured_answer(codec: str, rule: str, folder, attention="auto", **options) -> Run:
    kv = {"constants": str(folder / MODEL), "attention": attention}
    return answer(codec, rule, prompts=OTHER_PROMPTS, kv=kv, **options)


@pytest.mark.parametrize(
    ("codec", "rule"),
    [
        pytest.param(codec, MEASURED_RULES[(i + j) % 6], marks=[pytest.mark.slow] * (j > 0))
        for i, codec in enumerate(MEASURED)
        for j in (0, 2)
    ],
)
def test_batching_and_preemption_change_no_logits_of_measured_codecs(codec, rule, folder):
    expected = measured_answer(codec, rule, folder, max_num_seqs=1)
    options = {"chunk_tokens": 7, "max_num_batched_tokens": 20, "preempt": "recompute"}
    other = measured_answer(codec, rule, folder, preempts=1, **options)
    assert other.traces() == expected.traces()
    assert largest_difference(other.logits, expected.logits) <= 1e-4


@pytest.mark.parametrize(
    ("codec", "rule"),
    [
        pytest.param(codec, rule, marks=[pytest.mark.slow] * (i % 2 != j))
        for i, codec in enumerate(MEASURED)
        for j, rule in enumerate(("h2o", "full"))
    ],
)
def test_the_reference_backend_gives_equal_logits(codec, rule, folder):
    one, other = (measured_answer(codec, rule, folder, name) for name in ("gathered", "reference"))
    # its products are not exact: where a number lies between two codes, another may be taken
    assert largest_difference(one.logits, other.logits) <= 0.05


@pytest.mark.parametrize("rule", ["h2o", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_each_head_of_each_layer_is_decoded_with_its_own_constants(rule, model, folder):
    """Keys of the first layer equal the measured ones; later layers attended to codes before."""
    found: dict[int, torch.Tensor] = {}

    def note(engine: Engine) -> None:
        for request in engine.scheduler.running:
            if request.progress.num_computed == len(prompt):
                kv = engine.pool.kv
                groups = kv.memory.layout.groups
                full = [g for g in groups if not g.private and g.window is None]
                for group in full:
                    keys = LaneReader(kv, group.name, request.memory.row).keys()
                    found.update(zip(group.layers, keys.chunk(len(group.layers)), strict=True))

    prompt, wide = LEARNT_FROM[:40], RULES[rule].replace("cap=24", "cap=99")
    kv = {"codec": "int8_channel", "evict": wide, "evict_allow": "", "enable_prefix_caching": False}
    constants = {"constants": str(folder / model)}
    run({"r": (prompt, wide)}, model=model, kv=kv | constants, before_step=note)

    spec, form = load(model).spec, read_format("int8_channel")
    measured = read_constants(folder / model, form, spec)
    assert found.keys() == {i for i, one in enumerate(spec.layers) if one.window is None}
    for layer, decoded in found.items():
        made, scale = vectors_of(model)[layer].key[:, :40], measured.layers[layer, "key"]["scale"]
        decoded = decoded[..., -made.shape[2] :]  # of latents, the part beside the value
        inside = made.abs() <= 127 * scale
        assert ((decoded - made).abs() / scale)[inside].max() <= (0.5001 if layer == 0 else 30)


@pytest.mark.parametrize("codec", ["int8_channel", "int4/kvquant4", "int4:equalise=1"])
def test_a_missing_calibration_file_is_an_error_that_names_the_command(codec, tmp_path):
    command = r"there is no .*safetensors; .*quire calibrate MODEL --kv-cod"
    with pytest.raises(ConfigError, match=command):
        engine_of(codec=codec, constants=str(tmp_path))


def test_a_model_is_named_for_calibration_as_commands_take_it(tmp_path):
    made = loaded(MODEL)
    (tmp_path / "stored.gguf").touch()
    with pytest.raises(ConfigError, match="the model has no folder"):
        engine_of(codec="int8_channel")
    assert made.argument == "MODEL"
    assert replace(made, folder=tmp_path).argument == str(tmp_path)
    assert replace(made, folder=tmp_path, name="smollm2").argument == "smollm2"
    assert replace(made, folder=tmp_path, name="stored").argument == f"{tmp_path}/stored.gguf"


def test_calibration_files_of_another_model_are_rejected(folder, tmp_path):
    spec = loaded(MODEL).spec
    form = read_format("int8_channel")
    more_layers = replace(spec, num_layers=5, layers=(spec.layers[0],) * 5)

    with pytest.raises(ConfigError, match=r"has no scale of layer 2: it was measured for another"):
        read_constants(folder / MODEL, form, more_layers)
    with pytest.raises(ConfigError, match=r"expected constants \[2, 1, 32\], got \[2, 1, 16\]"):
        read_constants(folder / MODEL, form, replace(spec, head_dim=32))
    path = constants_path(tmp_path, "key", codec_spec("int8_channel"))
    path.parent.mkdir()
    path.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_constants(tmp_path, form, spec)


def test_constants_are_read_back_bit_for_bit(tmp_path):
    spec, form = loaded(MODEL).spec, read_format("int4:equalise=1/kvquant3")
    measured = measure(vectors_of(MODEL), form)

    paths = write_constants(tmp_path, form, measured, {})

    names = ["key.int4_equalise_1.safetensors", "value.kvquant3.safetensors"]
    assert [path.name for path in paths] == names
    again = read_constants(tmp_path, form, spec)
    assert again.digest == measured.digest
    assert all(
        torch.equal(numbers, again.layers[place][name])
        for place, constants in measured.layers.items()
        for name, numbers in constants.items()
    )


def test_prefix_keys_depend_on_the_constants(tmp_path):
    roots, form = [], read_format("int8_channel")
    for tokens in (300, 300, 400):
        write_constants(tmp_path, form, measure(vectors_of(MODEL, tokens), form), {})
        engine = engine_of(codec="int8_channel", constants=str(tmp_path))
        engine.submit(GenerationRequest(OTHER_PROMPTS[0], greedy(2), request_id="r"))
        engine.step()
        [request] = engine.scheduler.running
        roots.append(engine.scheduler.sequence_memory.identities.of(request).root)
    assert roots[0] == roots[1] != roots[2]


def test_errors_are_measured_on_held_out_tokens():
    """None for plain codecs; larger for fewer bits; a text that is too short is rejected."""
    found = []
    for text in ("float32", "int8", "int4", "int2"):
        form = read_format(text)
        errors = errors_of(vectors_of(MODEL), form, measure(vectors_of(MODEL), form))
        assert len(errors) == 2
        found.append(errors[0])

    assert (found[0].product, found[0].value) == (0.0, 0.0)
    for better, worse in pairwise(found):
        assert better.product < worse.product
        assert better.value < worse.value
    with pytest.raises(ConfigError, match="at least 64 tokens, got 9"):
        read_vectors(loaded(MODEL).decoder, [5] * 9)


def test_calibration_vectors_equal_those_the_engine_stores():
    """The first layer's keys and values of a prompt, in plain pages."""
    seen = {}

    def note(engine: Engine) -> None:
        for request in engine.scheduler.running:
            if request.progress.num_computed >= 64:
                reader = LaneReader(engine.pool.kv, "full", request.memory.row)
                seen["keys"], seen["values"] = reader.keys(), reader.values()

    kv = {"evict_allow": "", "enable_prefix_caching": False}
    run({"r": (LEARNT_FROM[:64], "full")}, model=MODEL, kv=kv, before_step=note)
    layers = vectors_of(MODEL, 64)
    for side, numbers in (("keys", "key"), ("values", "value")):
        made = torch.cat([getattr(layer, numbers) for layer in layers])
        torch.testing.assert_close(seen[side][:, :64], made, atol=1e-4, rtol=1e-4)
