"""Requests of lm-evaluation-harness as options of the engine, and outputs as its results."""

from collections.abc import Mapping
from typing import Any

from quire.config.sampling_params import SamplingParams
from quire.errors import UnknownName
from quire.sampling.outputs import RequestOutput

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("top_p", "top_k", "min_p", "seed", "repetition_penalty")
_PENALTIES = ("presence_penalty", "frequency_penalty")


def sampling_params(given: Mapping[str, Any], default_max_tokens: int) -> SamplingParams:
    """Sampling options from the harness' `generation_kwargs`.

    Raises:
        UnknownName: an argument that Quire does not have.
        RequestError: an invalid value.
    """
    options = dict(given)
    until = options.pop("until", None) or []
    stop = [until] if isinstance(until, str) else list(until)
    lengths = [options.pop(name) for name in _LENGTHS if options.get(name) is not None]
    temperature = options.pop("temperature", None)
    if options.pop("do_sample", None) is False or temperature is None:
        temperature = 0.0
    known = (*_SAMPLING, *_PENALTIES)
    for name in options.keys() - set(known):
        raise UnknownName("argument of generation_kwargs", name, known)
    return SamplingParams(
        max_tokens=lengths[0] if lengths else default_max_tokens,
        temperature=temperature,
        stop=tuple(text for text in stop if text),
        **options,
    )


def log_likelihood(output: RequestOutput, count: int) -> tuple[float, bool]:
    """Sum of the log-probabilities of the last `count` tokens, and whether all are the likeliest.

    Args:
        output: output of a request of `_scoring`.
        count: tokens of the continuation.
    """
    assert output.logprobs is not None, "requested"
    scored = [(token.logprob, token.rank) for token in output.logprobs]
    if count > 1:
        assert output.prompt_logprobs is not None, "requested"
        before = output.prompt_logprobs[1 - count :]
        scored += [(token.logprob, token.rank) for token in before if token is not None]
    total = sum(logprob for logprob, _ in scored if logprob is not None)
    return total, all(rank == 1 for _, rank in scored)
