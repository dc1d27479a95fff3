"""Loading of model folders and generation_config.json: wrong files are one-line errors."""

import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedTokenizerFast

from quire import LLM, KVConfig, SamplingParams
from quire.cli.plan_report import plan_report
from quire.errors import ConfigError, ModelError, QuireError, UnknownName, UnsupportedModel
from quire.models import adapter, linear_weights, source, stored
from quire.models.generation import GenerationDefaults, read_generation_defaults
from quire.models.loader import load_model
from support import zoo
from support.byte_tokenizer import byte_tokenizer
from support.flat import flat_logits, plain_logits, sequences

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def test_saved_model_is_loaded_with_equal_logits(llama: Path) -> None:
    prompts = sequences(7, vocab_size=zoo.VOCAB_SIZE)

    loaded = load_model(str(llama), device="cpu")

    assert loaded.decoder.dtype == torch.float32
    assert loaded.name == llama.name
    assert loaded.tokenizer is None
    assert loaded.generation.eos_token_ids == (1,)
    assert loaded.weight_bytes >= 4 * loaded.spec.num_parameters
    actual = flat_logits(loaded.decoder, prompts, chunk_tokens=[4])
    expected = plain_logits(zoo.build("llama"), *prompts)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_end_tokens_are_those_of_the_configs_and_the_tokenizer(folder: Path) -> None:
    byte_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "~"}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')

    loaded = load_model(folder, device="cpu", verify=False)

    assert loaded.generation.eos_token_ids == (9, 1, ord("~"))


def test_weights_of_an_unsupported_dtype_are_refused_or_converted(tmp_path: Path) -> None:
    zoo.build("llama").double().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"float64; load it with dtype=float32"):
        load_model(tmp_path, device="cpu")
    assert load_model(tmp_path, device="cpu", dtype="float32").decoder.dtype == torch.float32


def test_packaged_model_is_loaded_by_name() -> None:
    loaded = load_model("quire-tiny", device="cpu")
    assert loaded.name == "quire-tiny"
    assert loaded.decoder.dtype == torch.bfloat16
    assert loaded.generation.eos_token_ids == (1, 2)
    assert loaded.generation.temperature == 0.0
    assert loaded.tokenizer is not None
    assert loaded.spec.max_positions == 4096


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "gpt2"])
def test_sharded_weights_are_loaded(name: str, tmp_path: Path) -> None:
    zoo.save(name, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    whole = load_model(zoo.save(name, tmp_path / "whole"), device="cpu", verify=False)
    sharded = load_model(tmp_path, device="cpu", verify=False)

    prompts = sequences(5, vocab_size=zoo.VOCAB_SIZE)
    one, other = (flat_logits(x.decoder, prompts, chunk_tokens=[5])[0] for x in (sharded, whole))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("auto", torch.float32)],
)
def test_dtype_can_be_selected(llama, dtype, expected, monkeypatch):
    # a CPU with half-precision products and no C library: no layer is padded or widened
    monkeypatch.setattr(linear_weights, "multiplies", lambda dtype: True)
    monkeypatch.setattr(adapter, "fastest_products", lambda: None)
    loaded = load_model(llama, dtype=dtype, device="cpu")

    num_bytes = loaded.spec.num_parameters * expected.itemsize
    assert loaded.decoder.dtype == expected
    assert loaded.weight_bytes == pytest.approx(num_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "bfloat"}, UnknownName, "did you mean bfloat16"),
        ({"device": "gpu"}, ConfigError, "use auto, cpu or cuda"),
        ({"device": "cuda:x"}, ConfigError, "use auto, cpu or cuda"),
        pytest.param(
            *({"device": "cuda"}, ConfigError, "no CUDA device"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_unknown_dtype_or_device_is_refused(llama: Path, options, error, message) -> None:
    with pytest.raises(error, match=message):
        load_model(llama, **options)


@pytest.mark.gpu
def test_device_auto_selects_the_gpu(llama: Path) -> None:
    assert load_model(llama).decoder.device.type == "cuda"


def _change(name: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder / name)


def _remove(name: str) -> Callable[[Path], object]:
    return _change(name, Path.unlink)


def _write(name: str, text: str) -> Callable[[Path], object]:
    return _change(name, lambda path: path.write_text(text))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _edit(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def _edit_config(**changes: object) -> Callable[[Path], object]:
    return lambda folder: _edit(folder, **changes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove("config.json"), "no config.json"),
        (_write("config.json", "{"), "not valid JSON"),
        (_write("config.json", "{}"), "no 'model_type'"),
        (_remove("model.safetensors"), "has no weights"),
        (_change(WEIGHTS, _truncate), "model.safetensors is damaged"),
        (_write("model.safetensors", "not weights at all"), "model.safetensors is damaged"),
        (_write("model.safetensors.index.json", "{}"), "index.json is damaged"),
        (
            _write("model.safetensors.index.json", '{"weight_map": {"a": "model-1.safetensors"}}'),
            "no model-1.safetensors",
        ),
        (_change(WEIGHTS, lambda path: path.rename(path.with_suffix(".bin"))), "can run code"),
        (_edit_config(num_hidden_layers=3), "no weights of layer 2"),
        (
            _edit_config(intermediate_size=64),
            r"gate_proj.weight of shape \[48, 32\], but config.json requires \[64, 32\] "
            r"\(intermediate_size=64\)",
        ),
        (_edit_config(hidden_size="wide"), "'hidden_size' is 'wide', expected an integer"),
        (_edit_config(rms_norm_eps="small"), "config.json cannot be read"),
        (_write("generation_config.json", "[]"), "expected a JSON object"),
        (_write("tokenizer.json", "{"), "tokenizer in .* cannot be read"),
    ],
)
def test_damaged_folder_raises_a_model_error(folder, damage, message):
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_model(folder, device="cpu")


def test_remote_code_runs_only_with_trust_remote_code(folder: Path) -> None:
    _edit(folder, model_type="quantum")
    with pytest.raises(UnsupportedModel, match="does not know 'quantum'"):
        load_model(folder)
    _edit(folder, auto_map={"AutoConfig": "evil.EvilConfig"})
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")

    with pytest.raises(ConfigError, match="pass trust_remote_code=True"):
        load_model(folder)

    assert not (folder / "ran").exists()


@pytest.mark.parametrize("path", ["/no/such/folder", "./none", "a/b/c", Path("nowhere")])
def test_local_and_missing_folders_are_not_requested_from_the_hub(path, llama, monkeypatch):
    monkeypatch.setattr(source, "snapshot_download", pytest.fail)

    with pytest.raises(ModelError, match="no such folder"):
        load_model(path)
    with pytest.raises(ModelError, match=r"'\./smolm2' \(did you mean smollm2\?\): there is no"):
        load_model("./smolm2")
    monkeypatch.chdir(llama.parent)  # a local folder is used before the hub
    assert load_model(llama.name, device="cpu", verify=False).name == llama.name


def test_hub_model_is_downloaded_without_pickles_unless_the_hub_is_unreachable(monkeypatch, llama):
    def offline(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\ndetails")

    monkeypatch.setattr(source, "snapshot_download", offline)

    with pytest.raises(ModelError, match=r"'org/model'.*cannot reach the hub\); download it"):
        load_model("org/model")
    with pytest.raises(ModelError, match=r"no folder 'smolm2' \(did you mean smollm2\?\), and"):
        load_model("smolm2")

    patterns: dict[str, list[str]] = {}

    def download(name: str, *, allow_patterns: list[str], revision: None) -> str:
        patterns[name] = allow_patterns
        return str(llama)

    monkeypatch.setattr(source, "snapshot_download", download)

    assert load_model("org/model", device="cpu", verify=False).name == "org/model"
    assert "*.safetensors" in patterns["org/model"]
    assert not any(".bin" in pattern for pattern in patterns["org/model"])


ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 10**6}
UP = "model.layers.1.mlp.up_proj.weight"
FEWER = "weights contain 2 layers, of which 1 would be ignored"
VALUES: tuple[object, ...] = (
    *(0, -1, 1, 3, 10**6, 10**9, 10**30, 0.5, -1.5, float("inf"), float("nan"), True, False),
    *("nope", "", None, [], [1], ["nope"], {}, {"a": [{}]}),
)
STRAY_FIELDS = (  # read by Quire or by Transformers, and in few configs
    *("head_dim", "num_key_value_heads", "quantization_config", "text_config", "auto_map"),
    *("sliding_window", "num_experts", "layer_types", "rope_scaling", "dtype", "torch_dtype"),
    *("_attn_implementation", "attention_types", "sliding_window_pattern", "max_window_layers"),
)
FUZZED = ["llama", "gpt2", "opt", "gemma2", "mixtral", "gpt_oss", "qwen2_window", "phi3_longrope"]
MUTATIONS = 10  # of each architecture


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def _load(folder: Path, **options: Any) -> object:
    return load_model(folder, device="cpu", **options)


def _mutations(config: dict[str, Any], seed: str) -> Iterator[dict[str, Any]]:
    fields: list[tuple[str, str | None]] = [(name, None) for name in config]
    fields += [(name, None) for name in STRAY_FIELDS if name not in config]
    nested = {name: value for name, value in config.items() if isinstance(value, dict)}
    fields += [(name, inner) for name, value in nested.items() for inner in value]
    draw = random.Random(seed)
    for _ in range(MUTATIONS):
        name, inner = draw.choice(fields)
        value = draw.choice(VALUES)
        yield {**config, name: value if inner is None else {**config[name], inner: value}}


def _generate(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", kv=KVConfig(memory="1MiB"))
    llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("name", FUZZED)
def test_any_config_value_is_accepted_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    folder = zoo.save(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())

    for changed, attempt in product(_mutations(config, name), (_generate, plan_report)):
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            attempt(folder)
        except QuireError as error:
            assert "\n" not in str(error)  # noqa: PT017 - many values are accepted


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("num_hidden_layers", (3, 9_999, 1_000_000), "'num_hidden_layers' is"),
        ("vocab_size", (10**6,), r"config\.json describes .* parameters"),
        ("intermediate_size", (10**6,), r"config\.json describes .* parameters"),
        ("head_dim", (10**6,), r"config\.json describes .* parameters"),
    ],
)
def test_sizes_beyond_the_weights_are_refused_before_a_module_is_built(
    folder, field, values, message, monkeypatch
):
    monkeypatch.setattr(stored, "AutoModelForCausalLM", None)
    for value in values:
        with pytest.raises(ModelError, match=message):
            _load(_edit(folder, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, 0) for field in ("head_dim", "num_attention_heads", "num_key_value_heads")),
        *(("vocab_size", value) for value in (0, -1)),
    ],
)
def test_size_below_one_names_its_field(folder: Path, field: str, value: int) -> None:
    _edit(folder, **{field: value})
    for attempt in (_load, plan_report):
        with pytest.raises(ModelError, match=f"{field!r} is {value}, expected an integer from 1"):
            attempt(folder)


def test_deeply_nested_json_is_refused(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text("[" * 100_000)
        with pytest.raises(ModelError, match="nested too deeply"):
            _load(folder)
        zoo.save("llama", folder)


def test_unknown_rope_type_is_one_error_without_warnings(folder, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    rope = {"rope_type": "nope", "rope_theta": 1e4}

    with pytest.raises(ModelError, match=r"'rope_type' is 'nope'.* expected one of .*yarn"):
        _load(_edit(folder, rope_parameters=rope))
    assert not caplog.records

    _load(_edit(folder, rope_parameters=rope | {"rope_type": "default", "stray": 1}))
    assert "stray" in caplog.text


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + "/b", "x\0y", "~no-such-user/x"])
def test_invalid_path_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **_: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("quire.models.source.snapshot_download", offline)

    with pytest.raises(ModelError, match=r"there is no") as refusal:
        load_model(name)
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_integer_weights_without_quantization_config_are_refused(name: str, tmp_path: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if tensor.ndim == 2 and "embed" not in key and "head" not in key:
                tensors[key] = (tensor * 40).round().to(torch.int8)

    folder = _rewrite(zoo.save(name, tmp_path), quantize)

    with pytest.raises(ModelError, match=r"as integers \(I8\).*'quantization_config'"):
        _load(folder, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama_mha", {"attention_bias": False}, r"k_proj.bias.* and 5 more.* no such parameters"),
        ("gpt_neox", {"rope_parameters": ROPE}, r"'rope_parameters.partial_rotary_factor' is 1000"),
        ("llama", {"hidden_act": "nope"}, r"'hidden_act' is 'nope'.* expected one of .*silu"),
        ("llama", {"rms_norm_eps": -1.0}, "NaN or inf from Transformers itself"),
        (
            *("llama", {"vocab_size": 130}),
            r"model.embed_tokens.weight of shape \[128, 32\].* \[130, 32\] \(vocab_size=130\)",
        ),
        *((name, {"num_hidden_layers": 1}, FEWER) for name in ("llama", "opt", "mixtral")),
        *(("gpt_neox", {"num_hidden_layers": 1}, FEWER), ("gpt2", {"n_layer": 1}, FEWER)),
    ],
)
def test_impossible_value_is_one_error(tmp_path, name, changes, message):
    with pytest.raises(ModelError, match=message):
        _load(_edit(zoo.save(name, tmp_path), **changes))


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("nan"), "auto", "weights contain NaN in "),
        (float("-inf"), "auto", "weights contain inf in "),
        (1e6, "float16", "inf in .*; .*dtype=bfloat16 or float32"),
    ],
)
def test_non_finite_weights_are_named(folder, value, dtype, message):
    _rewrite(folder, lambda tensors: tensors[UP].view(-1)[-1:].fill_(value))

    with pytest.raises(ModelError, match=message) as refusal:
        _load(folder, dtype=dtype)
    assert f"in {UP}" in str(refusal.value)
    if dtype == "float16":
        _load(folder, dtype="float32")


def test_buffers_of_old_checkpoints_and_names_without_a_prefix_are_loaded(tmp_path):
    def add_tables(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.layers.1.self_attn.rotary_emb.cos_cached"] = torch.ones(4)
        tensors["score.weight"] = torch.ones(2, 32)  # a head of another task

    _load(_rewrite(zoo.save("llama", tmp_path), add_tables))

    def as_published(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in (0, 1):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    _load(_rewrite(zoo.save("gpt2", tmp_path), as_published))

    with pytest.raises(ModelError, match="the weights contain 2 layers"):
        _load(_edit(tmp_path, n_layer=1))


def test_layers_declared_ignorable_by_the_model_class_are_ignored(tmp_path: Path) -> None:
    config = Glm4MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Glm4MoeForCausalLM(config).float().save_pretrained(tmp_path)

    for layer, fits in (
        (46, nullcontext()),
        (2, pytest.raises(ModelError, match="1 would be i")),
    ):
        weight = {f"model.layers.{layer}.mlp.up_proj.weight": torch.ones(48, 32)}
        _rewrite(tmp_path, lambda tensors, weight=weight: tensors.update(weight))
        with fits:
            _load(tmp_path)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
{at_import}
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        {at_init}
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **options):
        {at_forward}
        return super().forward(input_ids=input_ids, position_ids=position_ids, **options)
"""


@pytest.mark.parametrize("fault", ["raise RuntimeError('first\\nsecond')", "1 / 0", "exit(3)"])
@pytest.mark.parametrize("hook", ["at_import", "at_init", "at_forward"])
def test_exception_in_remote_code_is_a_one_line_error(folder, hook, fault):
    code = {"at_import": "", "at_init": "pass", "at_forward": "pass"} | {hook: fault}
    (folder / "own.py").write_text(CODE.format(**code))
    _edit(
        folder,
        model_type="own",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )

    with pytest.raises((ModelError, UnsupportedModel)) as refusal:
        _load(folder, trust_remote_code=True)
    assert "\n" not in str(refusal.value)


# ---- generation_config.json ----------------------------------------------------------------------


def read(folder: Path, **values: object) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_generation_defaults(folder, {"eos_token_id": 7})


@pytest.mark.parametrize(
    ("named", "config", "end_tokens"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 7}, (1, 2, 7)),
        ({"eos_token_id": 3}, {"eos_token_id": [7, 3]}, (3, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        ({"eos_token_id": 3}, {}, (3,)),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": [8, 9]}}, (8, 9)),
        ({}, {"text_config": None}, ()),
    ],
)
def test_end_tokens_are_those_of_all_configs(tmp_path, named, config, end_tokens):
    (tmp_path / "generation_config.json").write_text(json.dumps(named))
    assert read_generation_defaults(tmp_path, config).eos_token_ids == end_tokens


@pytest.mark.parametrize(
    ("vocab", "special", "end_tokens"),
    [
        ({"a": 0, "</s>": 3}, {"eos_token": "</s>"}, (7, 3)),
        ({"a": 0, "</s>": 7}, {"eos_token": "</s>"}, (7,)),
        ({"a": 0}, {}, (7,)),
        ({"a": 0, "</s>": 200}, {"eos_token": "</s>"}, (7,)),  # the model has 128 tokens
    ],
)
def test_eos_token_of_the_tokenizer_is_an_end_token(vocab, special, end_tokens):
    model = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="a", **special)
    found = GenerationDefaults(eos_token_ids=(7,)).with_end_token(tokenizer, 128)
    assert found.eos_token_ids == end_tokens


SAMPLED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
CASES = {
    "greedy": ({"do_sample": False, "temperature": 0.7, "top_k": 9}, {"temperature": 0.0}),
    "sampling": ({"do_sample": True} | SAMPLED, SAMPLED),
    "sampling without temperature": ({"do_sample": True}, {"temperature": 1.0}),
    "neutral values": ({"do_sample": True} | NEUTRAL, {"temperature": 1.0}),
    "ignored as in Transformers": ({"temperature": 0.9, "top_p": 0.6}, {}),
    "greedy with a penalty and a length": (
        {"do_sample": False, "repetition_penalty": 1.1, "max_new_tokens": 300},
        {"temperature": 0.0, "repetition_penalty": 1.1, "max_tokens": 300},
    ),
}


def test_sampling_options_are_read(tmp_path: Path) -> None:
    for case, (values, expected) in CASES.items():
        found = read(tmp_path, **values)
        assert found == GenerationDefaults(eos_token_ids=(7,), **expected), case


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("eos_token_id", v, "a token id or a list of them") for v in ("</s>", [1, True], ["a"])),
        *(("repetition_penalty", v, "a number from 1e-06 to 1e+06") for v in ("high", 0)),
        *(("temperature", v, "a number from 0 to 1e+30") for v in ("hot", -0.5, float("nan"))),
        *(("top_k", v, "an integer from -1 to 2147483647") for v in (2.5, ["40"])),
        ("top_p", 7, "a number from above 0 to 1"),
        ("min_p", {}, "a number from 0 to 1"),
        ("max_new_tokens", "many", "an integer from 1 to 2147483647"),
        ("do_sample", "yes", "true or false"),
    ],
)
def test_invalid_value_names_the_file_field_expected_and_given_value(
    tmp_path: Path, name: str, value: object, expected: str
) -> None:
    with pytest.raises(ModelError) as refusal:
        read(tmp_path, **({"do_sample": True} | {name: value}))

    message = re.escape(f"generation_config.json: '{name}' is {value!r}, expected {expected}")
    assert re.fullmatch(message, str(refusal.value))
    with pytest.raises(ModelError, match=r"^config.json: 'eos_token_id' is 'x'"):
        read_generation_defaults(tmp_path / "none", {"eos_token_id": "x"})


@pytest.mark.parametrize("do_sample", [None, False])
def test_invalid_ignored_value_is_a_warning(tmp_path, do_sample, caplog):
    read(tmp_path, do_sample=do_sample, temperature="hot", top_k="many")
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "generation_config.json: 'temperature' is 'hot'",
        "generation_config.json: 'top_k' is 'many'",
    ]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_eos_token_ids_outside_the_vocabulary_are_ignored_with_a_warning(tmp_path, file, caplog):
    ids = {"eos_token_id": [3, 10**9, -1, 255, 256]}
    if file == "generation_config.json":
        (tmp_path / file).write_text(json.dumps(ids))
    config = ids if file == "config.json" else {}
    defaults = read_generation_defaults(tmp_path, config, 256)

    assert defaults.eos_token_ids == (3, 255)
    [record] = caplog.records
    assert record.getMessage().startswith(f"{file}: 'eos_token_id' is [3, 1000000000, -1, 255")
    assert "expected ids from 0 to 255" in record.getMessage()
