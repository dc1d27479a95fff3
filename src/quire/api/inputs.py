"""Type checks of arguments of the Python API, with errors that name the argument.

The functions take `object`, because the types of the arguments are what they check.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from quire.config.generation_request import OPTION_KINDS, GenerationRequest, checked_option
from quire.config.sampling_params import SamplingParams
from quire.config.structured_outputs import StructuredOutputs
from quire.errors import RequestError


def as_prompts(prompts: object) -> list[object]:
    """Return one or several prompts as a list; `as_token_ids` refuses invalid ones later."""
    if isinstance(prompts, str | bytes | Mapping | GenerationRequest) or not isinstance(
        prompts, Iterable
    ):
        return [prompts]
    many = list(prompts)
    return [many] if many and isinstance(many[0], Integral) else many


def as_token_ids(prompt: object) -> list[int]:
    """Return a prompt of token ids as a list.

    Raises:
        RequestError: the prompt is not a sequence. Its elements are checked at submission.
    """
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise RequestError(
            f"expected a prompt (a text or a list of token ids), got {type(prompt).__name__}"
            + _hint(prompt)
        )
    if any(isinstance(part, str) for part in prompt[:1]):
        raise RequestError(
            "expected one prompt (a text or a list of token ids), got a list of texts; only "
            "LLM.generate takes several prompts"
        )
    return list(prompt)


def as_options(sampling: object, count: int) -> list[SamplingParams | None]:
    """Return sampling options for each of `count` prompts; None if unset.

    Raises:
        RequestError: neither one SamplingParams nor a list of `count` of them.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    given = sampling if isinstance(sampling, Sequence) else [sampling]
    options: list[SamplingParams | None] = []
    for params in given:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"expected SamplingParams, got {type(params).__name__}; "
                "write SamplingParams(max_tokens=16)"
            )
        options.append(params)
    if len(options) != count:
        raise RequestError(f"expected one SamplingParams or {count} of them, got {len(options)}")
    return options


def as_requests(
    prompts: object, sampling: object, options: Mapping[str, object]
) -> list[GenerationRequest]:
    """Create one request per prompt.

    Args:
        prompts: one or several texts, token id lists, or requests (with their own options).
        sampling: one for all prompts, or a list with one per prompt.
        options: options by name, each one value or a list with one per prompt; see
            `GenerationRequest`.

    Raises:
        RequestError: an unknown option, a value of the wrong type, a list of the wrong length, or
            options in addition to a `GenerationRequest`.
    """
    many = as_prompts(prompts)
    params = as_options(sampling, len(many))
    spread = {name: _one_for_each(name, value, len(many)) for name, value in options.items()}
    return [
        _as_request(prompt, own, {name: values[i] for name, values in spread.items()})
        for i, (prompt, own) in enumerate(zip(many, params, strict=True))
    ]


def structures_of(requests: Iterable[GenerationRequest]) -> set[StructuredOutputs]:
    """The structured outputs of requests, each once."""
    options = (request.sampling for request in requests if request.sampling is not None)
    found = (sampling.structured_outputs for sampling in options)
    return {structure for structure in found if structure is not None}


def _as_request(
    prompt: Any, sampling: SamplingParams | None, options: dict[str, Any]
) -> GenerationRequest:
    if not isinstance(prompt, GenerationRequest):
        # an invalid prompt is refused when it is encoded
        return GenerationRequest(prompt, sampling, **options)
    if sampling is not None or options:
        given = ", ".join(["sampling"] * (sampling is not None) + list(options))
        raise RequestError(
            f"a GenerationRequest has its own options, got {given} in addition: set them in the "
            "request"
        )
    return prompt


def _one_for_each(name: str, given: object, count: int) -> list[object]:
    if name not in OPTION_KINDS:
        raise RequestError(
            f"unknown request option {name!r}: expected one of {', '.join(OPTION_KINDS)}"
        )
    many = [given] * count
    if isinstance(given, Sequence) and not isinstance(given, str):
        many = list(given)
    if len(many) != count:
        raise RequestError(f"expected one {name} or {count} of them, got {len(many)}", param=name)
    return [checked_option(name, value) for value in many]


def _hint(prompt: object) -> str:
    if isinstance(prompt, bytes | bytearray):
        return "; decode it"
    return "; pass prompt.tolist()" if hasattr(prompt, "tolist") else ""
