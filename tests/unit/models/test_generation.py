"""generation_config.json: end tokens and the sampling of a model's authors."""

import json
from pathlib import Path

import pytest

from quire.errors import ModelError
from quire.models.generation import GenerationDefaults, read_generation_defaults


def read(folder: Path, **values: object) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return read_generation_defaults(folder, {"eos_token_id": 7})


def test_several_end_tokens_are_kept(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=[1, 2]).eos_token_ids == (1, 2)
    assert read(tmp_path, eos_token_id=3).eos_token_ids == (3,)


def test_the_config_says_where_to_stop_when_nothing_else_does(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path, {"eos_token_id": 7}).eos_token_ids == (7,)
    assert read_generation_defaults(tmp_path, {}).eos_token_ids == ()


def test_greedy_is_temperature_zero(tmp_path: Path) -> None:
    assert read(tmp_path, do_sample=False, temperature=0.7, top_k=9) == GenerationDefaults(
        eos_token_ids=(7,), temperature=0.0
    )


def test_sampling_brings_its_values(tmp_path: Path) -> None:
    defaults = read(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)

    assert defaults == GenerationDefaults(
        eos_token_ids=(7,), temperature=0.6, top_k=20, top_p=0.95, min_p=0.1
    )


def test_sampling_without_a_temperature_is_plain_sampling(tmp_path: Path) -> None:
    assert read(tmp_path, do_sample=True).temperature == 1.0


def test_values_that_change_nothing_are_none(tmp_path: Path) -> None:
    assert read(
        tmp_path, do_sample=True, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0
    ) == GenerationDefaults(eos_token_ids=(7,), temperature=1.0)


def test_a_temperature_without_do_sample_is_ignored_as_transformers_does(tmp_path: Path) -> None:
    assert read(tmp_path, temperature=0.9, top_p=0.6) == GenerationDefaults(eos_token_ids=(7,))


def test_penalty_and_length_hold_for_greedy_too(tmp_path: Path) -> None:
    defaults = read(tmp_path, do_sample=False, repetition_penalty=1.1, max_new_tokens=300)

    assert (defaults.repetition_penalty, defaults.max_tokens) == (1.1, 300)


@pytest.mark.parametrize(
    "values",
    [{"eos_token_id": "</s>"}, {"eos_token_id": [1, True]}, {"repetition_penalty": "high"}],
)
def test_a_value_of_another_kind_is_an_error(tmp_path: Path, values: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=next(iter(values))):
        read(tmp_path, **values)
