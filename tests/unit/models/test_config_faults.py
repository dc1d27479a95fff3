"""Invalid config.json, and configs that contradict the weights: always a one-line error."""

import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from quire.api.llm import LLM
from quire.cli.plan_report import plan_report
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ModelError, QuireError, UnsupportedModel
from quire.models import stored
from quire.models.loader import load_model
from support import zoo

WEIGHTS = "model.safetensors"
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


def _edit(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    return folder


def _load(folder: Path, **options: Any) -> object:
    return load_model(folder, device="cpu", **options)


class NoModels:
    """Fails the test if a model is built."""

    @staticmethod
    def from_config(*_: object, **__: object) -> None:
        pytest.fail("a model was built")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return zoo.save("llama", tmp_path)


def _mutations(config: dict[str, Any], seed: str) -> Iterator[dict[str, Any]]:
    fields: list[tuple[str, str | None]] = [(name, None) for name in config]
    fields += [(name, None) for name in STRAY_FIELDS if name not in config]
    fields += [
        (name, inner)
        for name, value in config.items()
        if isinstance(value, dict)
        for inner in value
    ]
    draw = random.Random(seed)
    for _ in range(MUTATIONS):
        name, inner = draw.choice(fields)
        value = draw.choice(VALUES)
        yield {**config, name: value if inner is None else {**config[name], inner: value}}


@pytest.mark.parametrize("name", FUZZED)
def test_any_config_value_is_accepted_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    folder = zoo.save(name, tmp_path)
    config = json.loads((folder / "config.json").read_text())

    for changed in _mutations(config, name):
        (folder / "config.json").write_text(json.dumps(changed))
        for attempt in (_generate, plan_report):
            try:
                attempt(folder)
            except QuireError as error:
                assert "\n" not in str(error)  # noqa: PT017 - many values are accepted


def _generate(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", kv=KVConfig(memory="1MiB"))
    llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "mixtral", "gpt_neox"])
def test_fewer_layers_than_in_the_weights_are_refused(name: str, tmp_path: Path) -> None:
    folder = zoo.save(name, tmp_path)
    spelling = "n_layer" if name == "gpt2" else "num_hidden_layers"

    with pytest.raises(
        ModelError, match="the weights contain 2 layers, of which 1 would be ignored"
    ):
        _load(_edit(folder, **{spelling: 1}))


def test_too_many_layers_are_refused_before_a_module_is_built(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "AutoModelForCausalLM", NoModels)

    for num_layers in (3, 9_999, 1_000_000):
        with pytest.raises(ModelError, match="'num_hidden_layers' is"):
            _load(_edit(llama, num_hidden_layers=num_layers))


def test_sizes_much_larger_than_the_weights_are_refused_before_a_module_is_built(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "AutoModelForCausalLM", NoModels)

    for field in ("vocab_size", "intermediate_size", "head_dim"):
        with pytest.raises(ModelError, match=r"config\.json describes .* parameters"):
            _load(_edit(llama, **{field: 10**6}))
        zoo.save("llama", llama)


def test_shape_mismatch_names_the_tensor_and_the_field(llama: Path) -> None:
    with pytest.raises(
        ModelError,
        match=r"model.embed_tokens.weight of shape \[128, 32\].* \[130, 32\] \(vocab_size=130\)",
    ):
        _load(_edit(llama, vocab_size=130))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 0),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("vocab_size", 0),
        ("vocab_size", -1),
    ],
)
def test_size_below_one_names_its_field(llama: Path, field: str, value: int) -> None:
    _edit(llama, **{field: value})

    for attempt in (_load, plan_report):
        with pytest.raises(ModelError, match=f"{field!r} is {value}, expected an integer from 1"):
            attempt(llama)


def test_partial_rotary_factor_above_one_is_refused(tmp_path: Path) -> None:
    folder = zoo.save("gpt_neox", tmp_path)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]

    with pytest.raises(ModelError, match=r"'rope_parameters.partial_rotary_factor' is 1000000"):
        _load(_edit(folder, rope_parameters=rope | {"partial_rotary_factor": 10**6}))


def test_deeply_nested_json_is_refused(llama: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (llama / name).write_text("[" * 100_000)
        with pytest.raises(ModelError, match="nested too deeply"):
            _load(llama)
        zoo.save("llama", llama)


def test_unknown_activation_names_its_field_and_the_choices(llama: Path) -> None:
    with pytest.raises(ModelError, match=r"'hidden_act' is 'nope'.* expected one of .*silu"):
        _load(_edit(llama, hidden_act="nope"))


def test_unknown_rope_type_is_one_error_without_warnings(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    handler = Handler()
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    rope = {"rope_type": "nope", "rope_theta": 1e4}

    with pytest.raises(ModelError, match=r"'rope_type' is 'nope'.* expected one of .*yarn"):
        _load(_edit(llama, rope_parameters=rope))
    assert logged == []

    _load(_edit(llama, rope_parameters=rope | {"rope_type": "default", "stray": 1}))
    assert any("stray" in message for message in logged)


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + "/b", "x\0y", "~no-such-user/x"])
def test_invalid_path_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.models.source.snapshot_download", _offline)

    with pytest.raises(ModelError, match=r"there is no") as refusal:
        load_model(name)
    assert len(str(refusal.value)) < 400


def _offline(name: str, **_: object) -> str:
    raise OSError("no network")


# --- weights that do not match the config


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_integer_weights_without_quantization_config_are_refused(name: str, tmp_path: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if tensor.ndim == 2 and "embed" not in key and "head" not in key:
                tensors[key] = (tensor * 40).round().to(torch.int8)

    folder = _rewrite(zoo.save(name, tmp_path), quantize)

    with pytest.raises(ModelError, match=r"as integers \(I8\).*'quantization_config'"):
        _load(folder, dtype="bfloat16")


def test_bias_missing_in_the_config_is_refused(tmp_path: Path) -> None:
    folder = _edit(zoo.save("llama_mha", tmp_path), attention_bias=False)

    with pytest.raises(ModelError, match=r"k_proj.bias.* and 5 more.* no such parameters"):
        _load(folder)


@pytest.mark.parametrize(("value", "found"), [(float("nan"), "NaN"), (float("-inf"), "inf")])
def test_non_finite_weights_are_named(llama: Path, value: float, found: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    _rewrite(llama, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))

    with pytest.raises(ModelError, match=f"weights contain {found} in {name}"):
        _load(llama)


def test_weights_beyond_float16_suggest_another_dtype(llama: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    _rewrite(llama, lambda tensors: tensors[name].view(-1)[-1:].fill_(1e6))

    with pytest.raises(ModelError, match=f"inf in {name}; .*dtype=bfloat16 or float32"):
        _load(llama, dtype="float16")
    _load(llama, dtype="float32")


def test_non_finite_reference_logits_are_a_model_error(llama: Path) -> None:
    with pytest.raises(ModelError, match="NaN or inf from Transformers itself"):
        _load(_edit(llama, rms_norm_eps=-1.0))


# --- unusual folders that load


def test_rotary_tables_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    def add_tables(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.layers.1.self_attn.rotary_emb.cos_cached"] = torch.ones(4)

    _load(_rewrite(zoo.save("llama", tmp_path), add_tables))


def test_weight_names_without_the_base_model_prefix_are_loaded(tmp_path: Path) -> None:
    def as_published(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in (0, 1):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    _load(_rewrite(zoo.save("gpt2", tmp_path), as_published))

    with pytest.raises(ModelError, match="the weights contain 2 layers"):
        _load(_edit(tmp_path, n_layer=1))


def test_head_of_another_task_is_ignored(llama: Path) -> None:
    _load(_rewrite(llama, lambda tensors: tensors.update({"score.weight": torch.ones(2, 32)})))


def test_layers_declared_ignorable_by_the_model_class_are_ignored(tmp_path: Path) -> None:
    config = Glm4MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Glm4MoeForCausalLM(config).float().save_pretrained(tmp_path)

    def add_layer(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.46.mlp.up_proj.weight"] = torch.ones(48, 32)

    _load(_rewrite(tmp_path, add_layer))

    _rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.2.a.weight": torch.ones(2)}))
    with pytest.raises(ModelError, match="of which 1 would be ignored"):
        _load(tmp_path)


# --- code of a model folder

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
def test_exception_in_remote_code_is_a_one_line_error(
    llama: Path, hook: str, fault: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    code = {"at_import": "", "at_init": "pass", "at_forward": "pass"} | {hook: fault}
    (llama / "own.py").write_text(CODE.format(**code))
    _edit(
        llama,
        model_type="own",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )

    with pytest.raises((ModelError, UnsupportedModel)) as refusal:
        _load(llama, trust_remote_code=True)
    assert "\n" not in str(refusal.value)
