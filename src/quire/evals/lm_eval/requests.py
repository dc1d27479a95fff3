"""Arguments of lm-evaluation-harness as options of the engine, and outputs as its results.

Model arguments have the names of the command line with underscores: kv_memory, kv_codec, evict,
max_num_seqs.
"""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import UnknownName
from quire.layout.options import OptionInfo, config_of
from quire.sampling.outputs import RequestOutput
from quire.scheduler.schedule_config import ScheduleConfig

_CONFIGS = {"kv": KVConfig, "schedule": ScheduleConfig}
_NOT_OPTIONS = ("self", "model", *_CONFIGS)
_Path = tuple[str, ...]
"""Names of the configs that hold an option, then of its field."""


def llm_options(given: Mapping[str, object]) -> dict[str, Any]:
    """Keyword arguments of `LLM` from options by their flat names."""
    places = _places()
    values: dict[tuple[str, ...], object] = {}
    for name, value in given.items():
        if name not in places:
            raise UnknownName("option of the engine", name, places)
        values[places[name]] = value
    built = {name: _build(config, (name,), values) for name, config in _CONFIGS.items()}
    return {path[0]: value for path, value in values.items() if len(path) == 1} | built


def _places() -> dict[str, _Path]:
    own = inspect.signature(LLM.__init__).parameters
    found: dict[str, _Path] = {name: (name,) for name in own if name not in _NOT_OPTIONS}
    for name, config in _CONFIGS.items():
        found |= _fields_of(config, (name,))
    return found


def _fields_of(config: Any, path: tuple[str, ...]) -> dict[str, _Path]:
    found: dict[str, _Path] = {}
    for field in fields(config):
        where, held = (*path, field.name), config_of(field.type)
        if held is not None:
            found |= _fields_of(held, where)
            continue
        info = field.metadata.get("option", OptionInfo())
        for flag in (info.flag or field.name, *info.synonyms):
            found[flag.replace("-", "_")] = where
    return found


def _build(config: Any, path: tuple[str, ...], values: Mapping[tuple[str, ...], object]) -> Any:
    made: dict[str, object] = {}
    for field in fields(config):
        where, held = (*path, field.name), config_of(field.type)
        if held is not None:
            made[field.name] = _build(held, where, values)
        elif where in values:
            made[field.name] = values[where]
    return config(**made)


_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_PENALTIES = ("presence_penalty", "frequency_penalty")


def sampling_params(given: Mapping[str, Any], default_max_tokens: int) -> SamplingParams:
    """Sampling options from the harness' `generation_kwargs`."""
    options = dict(given)
    until = options.pop("until", None) or []
    stop = [until] if isinstance(until, str) else list(until)
    lengths = [options.pop(name) for name in _LENGTHS if options.get(name) is not None]
    temperature = options.pop("temperature", None)
    if options.pop("do_sample", None) is False or temperature is None:
        temperature = 0.0
    known = ("top_p", "top_k", "min_p", "seed", "repetition_penalty", *_PENALTIES)
    for name in options.keys() - set(known):
        raise UnknownName("argument of generation_kwargs", name, known)
    return SamplingParams(
        max_tokens=lengths[0] if lengths else default_max_tokens,
        temperature=temperature,
        stop=tuple(text for text in stop if text),
        **options,
    )


def log_likelihood(output: RequestOutput, count: int) -> tuple[float, bool]:
    """Sum of log-probabilities of the last `count` tokens, and whether all are the likeliest."""
    assert output.logprobs is not None, "requested"
    scored = [(token.logprob, token.rank) for token in output.logprobs]
    if count > 1:
        assert output.prompt_logprobs is not None, "requested"
        before = output.prompt_logprobs[1 - count :]
        scored += [(token.logprob, token.rank) for token in before if token is not None]
    total = sum(logprob for logprob, _ in scored if logprob is not None)
    return total, all(rank == 1 for _, rank in scored)
