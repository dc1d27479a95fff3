"""What a router learns from an HTTP request: blocks of its prompt, session and tenant.

The prompt is read from the body without a tokenizer: a text becomes one word for four bytes, about
the length of a token. Two requests have equal leading words as far as their prompts are equal, so
their blocks match as those of tokens would. A list of token ids is used as it is.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.config.generation_request import DEFAULT_TENANT
from quire.layout.values import find_fault
from quire.scale.http_call import HttpCall
from quire.scale.routing.base import RoutedRequest
from quire.scale.routing.blocks import block_hashes

SESSION_HEADER = b"x-session-id"
_SESSION_FIELDS = ("prompt_cache_key", "user", "safety_identifier")
_WORD_BYTES = 4
_MOST_ID = 2**63
_MOST_SESSION_CHARACTERS = 256
_TEXT_FIELDS = ("tools", "instructions", "system", "messages", "input", "prompt")
"""Fields of the prompt, in the order in which chat templates write them."""


def routed_request(call: HttpCall, tenant: str, block_words: int) -> RoutedRequest:
    """What a router may know of a request; of one without a prompt only tenant and session.

    Args:
        call: the request; a body that its replica refuses, such as one that is not JSON, is
            ignored.
        tenant: its tenant.
        block_words: words of a block.
    """
    body = _json_object(call)
    words = list(_words(body))
    salt = json.dumps([tenant, body.get("cache_salt"), body.get("model")])
    return RoutedRequest(
        prompt_blocks=block_hashes(words, block_words, salt),
        prompt_tokens=len(words),
        session=_session(call, body),
        tenant=tenant or DEFAULT_TENANT,
    )


def _json_object(call: HttpCall) -> Mapping[str, Any]:
    if call.method != "POST" or not call.body:
        return {}
    try:
        body = json.loads(call.body)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) and find_fault(body) is None else {}


def _session(call: HttpCall, body: Mapping[str, Any]) -> str | None:
    named = [call.header(SESSION_HEADER), *(body.get(name) for name in _SESSION_FIELDS)]
    texts = (name[:_MOST_SESSION_CHARACTERS] for name in named if isinstance(name, str) and name)
    return next(texts, None)


def _words(body: Mapping[str, Any]) -> Iterator[int]:
    for name in _TEXT_FIELDS:
        value = body.get(name)
        if value is None:
            continue
        if _are_token_ids(value):
            yield from (abs(token_id) % _MOST_ID for token_id in value)
        else:
            yield from _words_of_text(_text(value))


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _text(value: Any) -> str:
    """The texts of a prompt in their order; roles and other strings are texts too."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\0".join(_text(inner) for inner in value.values())
    if isinstance(value, Sequence):
        return "\0".join(_text(inner) for inner in value)
    return json.dumps(value)


def _words_of_text(text: str) -> Iterator[int]:
    data = text.encode("utf-8", "surrogatepass")
    whole = len(data) - len(data) % _WORD_BYTES
    yield from memoryview(data[:whole]).cast("I")
    if whole < len(data):
        yield int.from_bytes(data[whole:], "little")
