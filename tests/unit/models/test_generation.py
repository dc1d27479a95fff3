"""generation_config.json: end-of-sequence tokens and default sampling options."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quire.errors import ModelError
from quire.models.generation import GenerationDefaults, read_generation_defaults


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
