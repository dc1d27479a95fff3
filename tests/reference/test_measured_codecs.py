"""Codecs with calibrated constants in the engine: measured, stored with the model, loaded, used.

Constants differ from layer to layer and from head to head, so a wrong one is seen in the logits.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.eviction.calibration import errors_of, measure, read_vectors
from quire.kv.coded_layers import constants_path, read_constants, write_constants
from quire.kv.lane_reader import LaneReader
from quire.layout.codec_names import CODECS, codec_spec
from quire.layout.kv_format import fill_plain, read_format
from quire.scheduler.schedule_config import ScheduleConfig
from reference import test_eviction_engine
from reference.test_eviction import largest_difference
from reference.test_eviction_engine import Run, run
from support.engines import greedy, load
from support.exact_products import use_exact_products
from support.kv_options import kv_config

MODEL = "qwen3"
MEASURED = [name for name, codec in CODECS.items() if codec.constants]
HERE = [*MEASURED, "int4:equalise=1/int8", "kvquant4/int4+residual=5", "none/int8_channel"]
RULES = {
    "full": "full",
    "heads apart": "h2o:cap=24,every=6,recent=4",
    "ragged": "h2o:cap=24,every=6,recent=4,budget=ada",
    "statistics": "roco:cap=24,every=6",
    "by keys": "keydiff:cap=24,every=6",
    "by page": "h2o:cap=40,every=8,recent=4,granularity=page",
}
PROMPTS = {"a": [5, 9, 2, 7] * 11, "b": [3 + i * i % 60 for i in range(55)]}
LEARNT_FROM = [2 + (i * i + 3 * i) % 61 for i in range(400)]


@cache
def vectors_of(model: str):
    return read_vectors(load(model).decoder, LEARNT_FROM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Constants of all codecs of this file, for two models."""
    found = tmp_path_factory.mktemp("models")
    for model in (MODEL, "gemma2", "mimo_v2_flash", "deepseek_v3"):
        for text in HERE:
            form = read_format(fill_plain(text, "float32"))
            measured = measure(vectors_of(model), form)
            write_constants(found / model, form, measured, {"model": model})
    return found


@pytest.fixture(scope="module", autouse=True)
def _exact_products():
    with pytest.MonkeyPatch.context() as patch:
        use_exact_products(patch)
        yield


def answer(codec: str, rule: str, folder, model: str = MODEL, **options) -> Run:
    kv = {
        "codec": codec,
        "evict": RULES[rule],
        "evict_allow": "",
        "enable_prefix_caching": False,
        "constants": str(folder / model),
    }
    jobs = {name: (prompt, RULES[rule]) for name, prompt in PROMPTS.items()}
    return run(jobs, model=model, kv=kv | options.pop("kv", {}), **options)


@pytest.mark.parametrize(
    ("codec", "rule"),
    [
        pytest.param(codec, list(RULES)[(i + j) % 6], marks=marks)
        for i, codec in enumerate(HERE)
        for j, marks in ((0, []), (2, [pytest.mark.slow]))
    ],
)
def test_batching_and_preemption_change_no_logits(codec, rule, folder):
    expected = answer(codec, rule, folder, max_num_seqs=1)

    options = {
        "chunk_tokens": 7,
        "max_num_batched_tokens": 20,
        "preempts": 1,
        "preempt": "recompute",
    }
    other = answer(codec, rule, folder, **options)

    assert other.traces() == expected.traces()
    assert largest_difference(other.logits, expected.logits) <= 1e-4


@pytest.mark.parametrize(
    ("codec", "rule"),
    [
        pytest.param(codec, rule, marks=[] if i % 2 == j else [pytest.mark.slow])
        for i, codec in enumerate(HERE)
        for j, rule in enumerate(("heads apart", "full"))
    ],
)
def test_the_reference_backend_gives_equal_logits(codec, rule, folder):
    one, other = (
        answer(codec, rule, folder, kv={"attention": name}) for name in ("gathered", "reference")
    )

    # its products are not exact: where a number lies between two codes, another may be taken
    assert largest_difference(one.logits, other.logits) <= 0.05


@pytest.mark.parametrize("rule", ["heads apart", "full"])
@pytest.mark.parametrize("model", [MODEL, "gemma2", "mimo_v2_flash", "deepseek_v3"])
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


# ---- files ---------------------------------------------------------------------------------------


def start(codec: str, folder, **options) -> Engine:
    config = kv_config(memory="1MiB", codec=codec, constants=str(folder), **options)
    return Engine(test_eviction_engine.loaded(MODEL), config, ScheduleConfig())


@pytest.mark.parametrize("codec", ["int8_channel", "int4/kvquant4", "int4:equalise=1"])
def test_a_missing_calibration_file_is_an_error_that_names_the_command(codec, tmp_path):
    with pytest.raises(
        ConfigError, match=r"there is no .*safetensors; .*quire calibrate MODEL --kv-cod"
    ):
        start(codec, tmp_path)


def test_a_model_in_memory_has_no_folder():
    config = KVConfig(memory="1MiB", codec="int8_channel")
    with pytest.raises(ConfigError, match="the model has no folder"):
        Engine(test_eviction_engine.loaded(MODEL), config, ScheduleConfig())


def test_a_model_is_named_for_calibration_as_commands_take_it(tmp_path):
    made = test_eviction_engine.loaded(MODEL)
    (tmp_path / "stored.gguf").touch()

    assert made.argument == "MODEL"
    assert replace(made, folder=tmp_path).argument == str(tmp_path)
    assert replace(made, folder=tmp_path, name="smollm2").argument == "smollm2"
    assert replace(made, folder=tmp_path, name="stored").argument == f"{tmp_path}/stored.gguf"


def test_calibration_files_of_another_model_are_rejected(folder, tmp_path):
    spec = load(MODEL).spec
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
    spec, form = load(MODEL).spec, read_format("int4:equalise=1/kvquant3")
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
    roots = []
    for tokens in (300, 300, 400):
        form = read_format("int8_channel")
        measured = measure(read_vectors(load(MODEL).decoder, LEARNT_FROM[:tokens]), form)
        write_constants(tmp_path, form, measured, {})
        engine = start("int8_channel", tmp_path)
        engine.submit(GenerationRequest(PROMPTS["a"], greedy(2), request_id="r"))
        engine.step()
        [request] = engine.scheduler.running
        roots.append(engine.scheduler.sequence_memory.identities.of(request).root)

    assert roots[0] == roots[1] != roots[2]


# ---- errors --------------------------------------------------------------------------------------


def test_errors_are_measured_on_held_out_tokens():
    """None for plain codecs; larger for fewer bits; a text that is too short is rejected."""
    found = {}
    for text in ("float32", "int8", "int4", "int2"):
        form = read_format(text)
        errors = errors_of(vectors_of(MODEL), form, measure(vectors_of(MODEL), form))
        assert len(errors) == 2
        found[text] = errors[0]

    assert (found["float32"].product, found["float32"].value) == (0.0, 0.0)
    for better, worse in (("float32", "int8"), ("int8", "int4"), ("int4", "int2")):
        assert found[better].product < found[worse].product
        assert found[better].value < found[worse].value
    with pytest.raises(ConfigError, match="at least 64 tokens, got 9"):
        read_vectors(load(MODEL).decoder, [5] * 9)


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
    layers = read_vectors(load(MODEL).decoder, LEARNT_FROM[:64])
    for side, numbers in (("keys", "key"), ("values", "value")):
        made = torch.cat([getattr(layer, numbers) for layer in layers])
        torch.testing.assert_close(seen[side][:, :64], made, atol=1e-4, rtol=1e-4)
