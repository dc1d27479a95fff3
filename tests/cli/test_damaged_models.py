"""`quire generate` and `quire plan` on damaged copies of quire-tiny: exit code 2 and one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.models.source import find_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return Path(shutil.copytree(find_model("quire-tiny")[0], tmp_path / "tiny"))


def _assert_one_error_line(result, message: str) -> None:
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "of which 5 would be ignored"),
        ({"num_hidden_layers": 1_000_000}, "'num_hidden_layers' is 1000000, expected 10000"),
        ({"head_dim": 0}, "'head_dim' is 0, expected an integer from 1"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0, expected an integer from 1"),
        ({"num_key_value_heads": 0}, "'num_key_value_heads' is 0, expected an integer from 1"),
        ({"vocab_size": -1}, "'vocab_size' is -1, expected an integer from 1"),
        ({"hidden_act": "nope"}, "'hidden_act' is 'nope', which Transformers does not know"),
    ],
)
def test_invalid_config_is_refused(quire, tiny: Path, changes: dict, message: str):
    path = tiny / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    _assert_one_error_line(quire("generate", tiny, "-p", "x"), message)


def test_invalid_generation_config_is_refused_and_another_eos_token_id_ignored(quire, tiny):
    temperature = {"do_sample": True, "temperature": "hot"}
    for values, message in (
        (temperature, "'temperature' is 'hot', expected a number"),
        ({"eos_token_id": ["a"]}, "'eos_token_id' is ['a'], expected a token id"),
        ({"max_new_tokens": "x"}, "'max_new_tokens' is 'x', expected an integer from 1"),
    ):
        (tiny / "generation_config.json").write_text(json.dumps(values))
        result = quire("generate", tiny, "-p", "x")
        _assert_one_error_line(result, f"generation_config.json: {message}")
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": 10**9}))
    result = quire("generate", tiny, "-p", "x", "--max-tokens", "4", "--min-tokens", "2")

    assert result.exit_code == 0
    assert result.stdout


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_nested_config_and_model_name_of_300_characters_are_refused(
    quire, tiny, monkeypatch, command
):
    def offline(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr("quire.models.source.snapshot_download", offline)
    (tiny / "config.json").write_text("[" * 100_000)
    prompt = ("-p", "x") if command == "generate" else ()

    _assert_one_error_line(quire(command, tiny, *prompt), "nested too deeply")
    _assert_one_error_line(quire(command, "a" * 300, *prompt), "there is no folder 'aaa")


def test_nan_weight_is_refused(quire, tiny: Path):
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(tiny / "model.safetensors")
    tensors[name].view(-1)[7] = torch.nan
    save_file(tensors, tiny / "model.safetensors", metadata={"format": "pt"})

    _assert_one_error_line(quire("generate", tiny, "-p", "x"), f"weights contain NaN in {name}")
