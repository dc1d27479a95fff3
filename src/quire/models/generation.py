"""What a model's generation_config.json says: where to stop, and how its authors sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ModelError
from quire.spec.config import read_json_object, shown

_LARGEST = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """A model's own defaults. None where the model says nothing, so that the engine's stand.

    Attributes:
        eos_token_ids: tokens that end an answer; empty when the model names none.
        temperature: 0 where the model asks for greedy decoding (`do_sample` false).
        top_k: keep this many of the likeliest tokens.
        top_p: keep the likeliest tokens that sum up to this probability.
        min_p: keep tokens with at least this share of the likeliest token's probability.
        repetition_penalty: divides the logits of tokens seen before; applies to greedy as well.
        max_tokens: the most new tokens of one answer.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


def read_generation_defaults(folder: Path, config: Mapping[str, object]) -> GenerationDefaults:
    """Read generation_config.json; without it, take the end tokens of config.json.

    As in Transformers, temperature and top-* mean something only where `do_sample` is written:
    true samples with them, false is greedy, and without it they are ignored.

    Args:
        folder: the model's folder.
        config: its parsed config.json.

    Raises:
        ModelError: the file is not a JSON object, or a value has the wrong type.
    """
    path = folder / "generation_config.json"
    values = read_json_object(path) if path.is_file() else {}
    eos = values.get("eos_token_id", config.get("eos_token_id"))
    return GenerationDefaults(
        eos_token_ids=_token_ids(eos),
        repetition_penalty=_meaningful(values, "repetition_penalty", neutral=1.0),
        max_tokens=_whole(_meaningful(values, "max_new_tokens", neutral=0.0)),
        temperature=_temperature(values),
        top_k=_whole(_when_sampling(values, "top_k", neutral=0.0)),
        top_p=_when_sampling(values, "top_p", neutral=1.0),
        min_p=_when_sampling(values, "min_p", neutral=0.0),
    )


def _temperature(values: Mapping[str, object]) -> float | None:
    if values.get("do_sample") is None:
        return None
    temperature = _number(values, "temperature") if values["do_sample"] else 0.0
    return 1.0 if temperature is None else temperature


def _when_sampling(values: Mapping[str, object], name: str, *, neutral: float) -> float | None:
    return _meaningful(values, name, neutral=neutral) if values.get("do_sample") else None


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"eos_token_id is {shown(value)}, expected a token id or a list of them")
    return tuple(ids)


def _number(values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    raise ModelError(
        f"generation_config.json: {name!r} is {shown(value)}, expected a number of at most "
        f"{_LARGEST:.0e}"
    )


def _meaningful(values: Mapping[str, object], name: str, *, neutral: float) -> float | None:
    # None where the value changes nothing
    value = _number(values, name)
    return None if value == neutral else value


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
