"""Loading of model folders: missing or damaged files are reported before allocation."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.errors
import pytest
import torch

from quire.errors import ConfigError, ModelError, UnknownName, UnsupportedModel
from quire.models import adapter, linear_weights, source
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


def _change(name: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: change(folder / name)


def _remove(name: str) -> Callable[[Path], object]:
    return _change(name, Path.unlink)


def _write(name: str, text: str) -> Callable[[Path], object]:
    return _change(name, lambda path: path.write_text(text))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _edit_config(**changes: object) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return _change("config.json", edit)


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
    _edit_config(model_type="quantum")(folder)
    with pytest.raises(UnsupportedModel, match="does not know 'quantum'"):
        load_model(folder)
    _edit_config(auto_map={"AutoConfig": "evil.EvilConfig"})(folder)
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


def test_unreachable_hub_raises_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\ndetails")

    monkeypatch.setattr(source, "snapshot_download", offline)

    with pytest.raises(ModelError, match=r"'org/model'.*cannot reach the hub\); download it"):
        load_model("org/model")
    with pytest.raises(ModelError, match=r"no folder 'smolm2' \(did you mean smollm2\?\), and"):
        load_model("smolm2")


def test_hub_model_is_downloaded_without_pickles(llama, monkeypatch):
    patterns: dict[str, list[str]] = {}

    def download(name: str, *, allow_patterns: list[str], revision: None) -> str:
        patterns[name] = allow_patterns
        return str(llama)

    monkeypatch.setattr(source, "snapshot_download", download)

    assert load_model("org/model", device="cpu", verify=False).name == "org/model"
    assert "*.safetensors" in patterns["org/model"]
    assert not any(".bin" in pattern for pattern in patterns["org/model"])
