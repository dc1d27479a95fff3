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
from support.flat import flat_logits, sequences

CUDA = torch.cuda.is_available()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def test_saved_model_is_loaded_with_equal_logits(llama: Path) -> None:
    prompts = sequences(7, vocab_size=zoo.VOCAB_SIZE)
    with torch.inference_mode():
        expected = zoo.build("llama")(prompts[0].unsqueeze(0)).logits[0]

    loaded = load_model(str(llama), device="cpu")

    assert loaded.decoder.dtype == torch.float32
    assert loaded.name == llama.name
    assert loaded.tokenizer is None
    assert loaded.generation.eos_token_ids == (1,)
    assert loaded.weight_bytes >= 4 * loaded.spec.num_parameters
    (actual,) = flat_logits(loaded.decoder, prompts, chunk_tokens=[4])
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
    assert torch.equal(
        flat_logits(sharded.decoder, prompts, chunk_tokens=[5])[0],
        flat_logits(whole.decoder, prompts, chunk_tokens=[5])[0],
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("auto", torch.float32)],
)
def test_dtype_can_be_selected(
    llama: Path, dtype: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a CPU with half-precision products and no C library: no layer is padded or widened
    monkeypatch.setattr(linear_weights, "multiplies", lambda dtype: True)
    monkeypatch.setattr(adapter, "fastest_products", lambda: None)
    loaded = load_model(llama, dtype=dtype, device="cpu")

    assert loaded.decoder.dtype == expected
    assert loaded.weight_bytes == pytest.approx(
        loaded.spec.num_parameters * expected.itemsize, rel=0.01
    )


@pytest.mark.skipif(not CUDA, reason="no CUDA device here")
@pytest.mark.gpu
def test_device_auto_selects_the_gpu(llama: Path) -> None:
    assert load_model(llama).decoder.device.type == "cuda"


def test_unknown_dtype_suggests_the_nearest(llama: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean bfloat16"):
        load_model(llama, dtype="bfloat")


@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_unknown_device_is_refused(llama: Path, device: str) -> None:
    with pytest.raises(ConfigError, match="use auto, cpu or cuda"):
        load_model(llama, device=device)


@pytest.mark.skipif(CUDA, reason="there is a CUDA device here")
def test_cuda_without_a_gpu_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        load_model(llama, device="cuda")


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _rename_to_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove("config.json"), "no config.json"),
        (_write("config.json", "{"), "not valid JSON"),
        (_write("config.json", "{}"), "no 'model_type'"),
        (_remove("model.safetensors"), "has no weights"),
        (_truncate, "model.safetensors is damaged"),
        (_write("model.safetensors", "not weights at all"), "model.safetensors is damaged"),
        (_write("model.safetensors.index.json", "{}"), "index.json is damaged"),
        (
            _write("model.safetensors.index.json", '{"weight_map": {"a": "model-1.safetensors"}}'),
            "no model-1.safetensors",
        ),
        (_rename_to_pickle, "can run code"),
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
def test_damaged_folder_raises_a_model_error(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)

    with pytest.raises(ModelError, match=message):
        load_model(folder, device="cpu")


def test_unknown_model_type_is_unsupported(folder: Path) -> None:
    _edit_config(model_type="quantum")(folder)

    with pytest.raises(UnsupportedModel, match="does not know 'quantum'"):
        load_model(folder)


def test_remote_code_runs_only_with_trust_remote_code(folder: Path) -> None:
    _edit_config(model_type="quantum", auto_map={"AutoConfig": "evil.EvilConfig"})(folder)
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")

    with pytest.raises(ConfigError, match="pass trust_remote_code=True"):
        load_model(folder)

    assert not (folder / "ran").exists()


@pytest.mark.parametrize("path", ["/no/such/folder", "./none", "a/b/c", Path("nowhere")])
def test_missing_folder_is_not_requested_from_the_hub(
    path: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "snapshot_download", pytest.fail)

    with pytest.raises(ModelError, match="no such folder"):
        load_model(path)
    with pytest.raises(ModelError, match=r"'\./smolm2' \(did you mean smollm2\?\): there is no"):
        load_model("./smolm2")


def test_unreachable_hub_raises_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub\ndetails")

    monkeypatch.setattr(source, "snapshot_download", offline)

    with pytest.raises(ModelError, match=r"'org/model'.*cannot reach the hub\); download it"):
        load_model("org/model")
    with pytest.raises(ModelError, match=r"no folder 'smolm2' \(did you mean smollm2\?\), and"):
        load_model("smolm2")


def test_hub_model_is_downloaded_without_pickles(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: dict[str, list[str]] = {}

    def download(name: str, *, allow_patterns: list[str], revision: None) -> str:
        patterns[name] = allow_patterns
        return str(llama)

    monkeypatch.setattr(source, "snapshot_download", download)

    assert load_model("org/model", device="cpu", verify=False).name == "org/model"
    assert "*.safetensors" in patterns["org/model"]
    assert not any(".bin" in pattern for pattern in patterns["org/model"])


def test_local_folder_is_used_before_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(source, "snapshot_download", pytest.fail)

    assert load_model("model", device="cpu", verify=False).name == "model"
