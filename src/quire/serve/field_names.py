"""Names of the fields at fault: those that the body uses for the options of the engine."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quire.errors import RequestError
from quire.serve.protocol import Body

_PROMPT = ("prompt", "messages", "tokens")
_BEAMS = ("beam_width", "best_of", "n", "use_beam_search")
_FIELDS_OF: Mapping[str, tuple[str, ...]] = {
    "prompt": _PROMPT,
    "max_tokens": ("max_completion_tokens", "max_tokens", *_PROMPT),
    "beam_width": _BEAMS,
    "evict": ("evict", *_PROMPT),
}
"""Fields that may set an option, the one that counts first."""


@contextmanager
def naming_fields_of(body: Body) -> Iterator[None]:
    """Let a refusal name the field that the body has: `messages` of a chat is the prompt.

    Raises:
        RequestError: the same one, with `param` and message changed.
    """
    try:
        yield
    except RequestError as error:
        param = _field_of(body, error.param)
        if param == "max_completion_tokens":
            error.args = (re.sub(r"\bmax_tokens\b", param, str(error)),)
        error.param = param
        raise


def _field_of(body: Body, param: str | None) -> str | None:
    if param is None or param in (body.model_extra or {}):
        return param
    declared = [name for name in _FIELDS_OF.get(param, ()) if name in type(body).model_fields]
    return next((name for name in declared if getattr(body, name) is not None), param)
