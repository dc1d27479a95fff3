"""Defaults of a model: end tokens and sampling parameters.

End tokens are those of generation_config.json, of config.json and of the tokenizer together:
fine-tuned chat models often name the token that ends a message in one of them only.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from quire.config.sampling_params import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from quire.errors import ModelError
from quire.layout.config import LARGEST_INTEGER, read_json_object, shown

logger = logging.getLogger(__name__)

_FILE = "generation_config.json"
_LARGEST = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """A model's own generation defaults. None: unset, the engine's default applies."""

    eos_token_ids: tuple[int, ...] = ()  # tokens that end a completion; empty if no file names one
    temperature: float | None = None  # 0 if the model requires greedy decoding (`do_sample` false)
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None  # fraction of the likeliest token's probability
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # new tokens of a completion

    def with_end_token(
        self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int
    ) -> "GenerationDefaults":
        token = None if tokenizer is None else tokenizer.eos_token
        if tokenizer is None or token is None:
            return self
        found = tokenizer.eos_token_id
        if found == tokenizer.unk_token_id and token != tokenizer.unk_token:
            return self  # the vocabulary does not have this text
        known = _token_ids("the tokenizer", found, vocab_size)
        return replace(self, eos_token_ids=tuple(dict.fromkeys(self.eos_token_ids + known)))


def read_generation_defaults(
    folder: Path, config: Mapping[str, object], vocab_size: int | None = None
) -> GenerationDefaults:
    """Read generation_config.json, and the end tokens of config.json and its `text_config`.

    As in Transformers, temperature and top-* depend on `do_sample`: true samples with them, false
    is greedy, and if it is missing they are ignored. An ignored value that is invalid, and an end
    token outside the vocabulary, is logged as a warning.

    Raises:
        ModelError: the file is not a JSON object, or a value has the wrong type or range.
    """
    path = folder / _FILE
    values = read_json_object(path) if path.is_file() else {}
    samples = _read(values, "do_sample")
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if not samples:
            try:
                _read(values, name)
            except ModelError as error:
                logger.warning("%s; ignored, since 'do_sample' is not true", error)
    text_config = config.get("text_config")
    named = [(_FILE, values), ("config.json", config)]
    if isinstance(text_config, Mapping):
        named.append(("config.json: text_config", text_config))
    ends = [i for file, of in named for i in _token_ids(file, of.get("eos_token_id"), vocab_size)]
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(ends)),
        repetition_penalty=_number(values, "repetition_penalty", neutral=1.0),
        max_tokens=_whole(values, "max_new_tokens"),
        temperature=_temperature(values, samples),
        top_k=_whole(values, "top_k", neutral=(0, -1)) if samples else None,
        top_p=_number(values, "top_p", neutral=1.0) if samples else None,
        min_p=_number(values, "min_p", neutral=0.0) if samples else None,
    )


@dataclass(frozen=True, slots=True)
class _Range:
    low: int | float
    high: int | float
    whole: bool = False
    above_low: bool = False

    def __contains__(self, value: object) -> bool:
        kinds = int if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        return self.low <= value <= self.high and not (self.above_low and value == self.low)

    def __str__(self) -> str:
        kind, above = "an integer" if self.whole else "a number", "above " * self.above_low
        low, high = (str(n) if self.whole else f"{n:g}" for n in (self.low, self.high))
        return f"{kind} from {above}{low} to {high}"


class _Flag:
    def __contains__(self, value: object) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "true or false"


_RANGES: Mapping[str, _Range | _Flag] = {
    "do_sample": _Flag(),
    "temperature": _Range(0.0, _LARGEST),
    "top_k": _Range(-1, LARGEST_INTEGER, whole=True),
    "top_p": _Range(0.0, 1.0, above_low=True),
    "min_p": _Range(0.0, 1.0),
    "repetition_penalty": _Range(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "max_new_tokens": _Range(1, LARGEST_INTEGER, whole=True),
}


def _read(values: Mapping[str, object], name: str) -> object:
    """A checked value; None if it is unset."""
    value = values.get(name)
    if value is not None and value not in _RANGES[name]:
        raise ModelError(f"{_FILE}: {name!r} is {shown(value)}, expected {_RANGES[name]}")
    return value


def _number(values: Mapping[str, object], name: str, *, neutral: float) -> float | None:
    """A checked number; None if it is unset or equals the neutral value."""
    value = _read(values, name)
    return float(value) if isinstance(value, int | float) and value != neutral else None


def _whole(values: Mapping[str, object], name: str, *, neutral: Collection[int] = ()) -> int | None:
    value = _read(values, name)
    return value if isinstance(value, int) and value not in neutral else None


def _temperature(values: Mapping[str, object], samples: object) -> float | None:
    if samples is None:
        return None
    if not samples:
        return 0.0
    value = _read(values, "temperature")
    return float(value) if isinstance(value, int | float) else 1.0


def _token_ids(file: str, value: object, vocab_size: int | None) -> tuple[int, ...]:
    if value is None:
        return ()
    found = value if isinstance(value, list) else [value]
    ids = [token for token in found if isinstance(token, int) and not isinstance(token, bool)]
    if len(ids) < len(found):
        raise ModelError(
            f"{file}: 'eos_token_id' is {shown(value)}, expected a token id or a list of them"
        )
    known = tuple(token for token in ids if 0 <= token < (vocab_size or LARGEST_INTEGER))
    if len(known) < len(ids):  # never generated; some models use -1 for "none"
        logger.warning(
            "%s: 'eos_token_id' is %s, expected ids from 0 to %d; other ids end no output",
            file,
            shown(value),
            (vocab_size or LARGEST_INTEGER) - 1,
        )
    return known
