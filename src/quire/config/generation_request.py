"""One request as its caller states it: the one object that every entry point passes on.

A new option of a request is a field of `GenerationRequest`, with its kinds in `OPTION_KINDS` and
its types in the two dictionaries for type checkers. LLM, AsyncLLM and `quire batch` take it then;
the server takes it as a field of `quire.serve.protocol.GenerationBody`. An option named in
`ECHOED_OPTIONS` is repeated in the responses of server and batch; every `RequestOutput` has its
request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import TypedDict, no_type_check

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError

Prompt = str | Sequence[int]
DEFAULT_TENANT = "default"


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt, how its tokens are sampled, and on which terms it is scheduled.

    Attributes:
        prompt: a text, or token ids; at least one token.
        sampling: sampling options; None takes the defaults.
        request_id: of the caller's choice; None lets the engine choose one.
        priority: lower goes first, within its tenant.
        deadline_s: seconds from now in which the output is wanted; the earliest goes first. None:
            there is no deadline.
        tenant: on whose account the request runs, see `ScheduleConfig.tenants`.
        cache_salt: only requests of the same tenant and salt share KV.
        evict: which tokens are retained, such as "h2o:cap=512"; None takes `KVConfig.evict`.
        record_evictions: record which tokens are evicted; None takes `KVConfig.record_evictions`.
        metadata: texts of the caller's own, repeated with the output and in responses: at most 16
            pairs, names up to 64 characters, values up to 512, as in OpenAI's API.
    """

    prompt: Prompt
    sampling: SamplingParams | None = None
    _: KW_ONLY
    request_id: str | None = None
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = DEFAULT_TENANT
    cache_salt: str = ""
    evict: str | None = None
    record_evictions: bool | None = None
    metadata: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in OPTION_KINDS:
            object.__setattr__(self, name, checked_option(name, getattr(self, name)))


class RequestOptions(TypedDict, total=False):
    """The options of one request; `GenerationRequest` explains them."""

    request_id: str | None
    priority: int
    deadline_s: float | None
    tenant: str
    cache_salt: str
    evict: str | None
    record_evictions: bool | None
    metadata: Mapping[str, str] | None


class OptionsOfMany(TypedDict, total=False):
    """The options of several requests: each one for all of them, or a list with one for each."""

    request_id: Sequence[str | None] | None
    priority: int | Sequence[int]
    deadline_s: float | Sequence[float | None] | None
    tenant: str | Sequence[str]
    cache_salt: str | Sequence[str]
    evict: str | Sequence[str | None] | None
    record_evictions: bool | Sequence[bool | None] | None
    metadata: Mapping[str, str] | Sequence[Mapping[str, str] | None] | None


OPTION_KINDS: Mapping[str, tuple[type, ...]] = {
    "request_id": (str, type(None)),
    "priority": (Integral,),
    "deadline_s": (Real, type(None)),
    "tenant": (str,),
    "cache_salt": (str,),
    "evict": (str, type(None)),
    "record_evictions": (bool, type(None)),
    "metadata": (Mapping, type(None)),
}
"""What each option may be. A truth value is no number."""

ECHOED_OPTIONS: tuple[str, ...] = ("metadata",)
"""Options that responses repeat."""

_NAMES = {
    Integral: "a whole number",
    Real: "a number",
    str: "a text",
    bool: "true or false",
    Mapping: "a dictionary",
}
_EXAMPLES = {"evict": " such as 'h2o:cap=512'"}
_MOST_PAIRS, _MOST_NAME, _MOST_VALUE = 16, 64, 512  # of metadata, in characters


def checked_option(name: str, value: object) -> object:
    """Refuse a value of another type; whole numbers become seconds as others are.

    Args:
        name: one of `OPTION_KINDS`.
        value: as the caller gave it.

    Raises:
        RequestError: with the name and what was expected.
    """
    kinds = OPTION_KINDS[name]
    if isinstance(value, Mapping) and Mapping in kinds:
        return _checked_metadata(value)
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return float(value) if Real in kinds and isinstance(value, int) else value
    expected = _NAMES[kinds[0]] + _EXAMPLES.get(name, "")
    raise RequestError(f"expected {name} to be {expected}, got {value!r}", param=name)


def _checked_metadata(given: Mapping[object, object]) -> dict[str, str]:
    """A copy of metadata; see `GenerationRequest`."""
    if len(given) > _MOST_PAIRS:
        raise RequestError(
            f"expected metadata of {_MOST_PAIRS} pairs at most, got {len(given)}", param="metadata"
        )
    found: dict[str, str] = {}
    for name, value in given.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise RequestError(
                f"expected metadata of texts, got {name!r}: {value!r}", param="metadata"
            )
        if len(name) > _MOST_NAME or len(value) > _MOST_VALUE:
            raise RequestError(
                f"expected metadata with names of {_MOST_NAME} and values of {_MOST_VALUE} "
                f"characters at most, got {len(name)} and {len(value)}",
                param="metadata",
            )
        found[name] = value
    return found


def echoed_options(options: Mapping[str, object]) -> dict[str, object]:
    """The options that a response repeats, as far as they are set."""
    found = {name: options.get(name) for name in ECHOED_OPTIONS}
    return {name: value for name, value in found.items() if value is not None}


def token_ids_of(request: GenerationRequest) -> tuple[int, ...]:
    """The token ids of a request whose prompt has been tokenized."""
    if isinstance(request.prompt, str):
        raise RequestError("expected a prompt of token ids, got a text: tokenize it first")
    return tuple(request.prompt)
