"""How a chat or completion is written to the client: as itself, or in the format of another API."""

import json
from typing import Any, Protocol, runtime_checkable

JSON = dict[str, Any]

DONE = "data: [DONE]\n\n"

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

_ESCAPED = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029, *range(0xD800, 0xE000))}
"""Line boundaries of Unicode, at which many clients split a stream, and halves of surrogate pairs,
which the arguments of a model's tool call can have and UTF-8 cannot encode."""


def event(body: JSON, name: str | None = None) -> str:
    """A server-sent event.

    Args:
        body: its data.
        name: its type; None: no type.
    """
    first = "" if name is None else f"event: {name}\n"
    return f"{first}data: {one_line(body)}\n\n"


def one_line(value: object) -> str:
    """JSON that UTF-8 can encode, without line boundaries, not even those of Unicode.

    Raises:
        ValueError: a number that JSON does not have, such as NaN.
    """
    text = _encode(value)
    return text if text.isascii() else text.translate(_ESCAPED)


@runtime_checkable
class Format(Protocol):
    """Converts the bodies of one response. A stream gets its chunks in order."""

    id_prefix: str
    """Beginning of the ids of responses, which the access log and `/v1/kv/requests` show too."""

    needs_usage: bool
    """Whether a stream must contain the usage, for the last events."""

    needs_prompt_usage: bool
    """Whether each chunk must contain the tokens so far, for the first event."""

    def whole(self, body: JSON) -> JSON:
        """Convert the body of a response that is not streamed."""

    def chunk(self, body: JSON) -> list[str]:
        """Convert a chunk of a stream to events."""

    def error(self, body: JSON) -> list[str]:
        """Convert an error within a stream to events."""

    def end(self) -> list[str]:
        """Return the events at the end of a stream."""


class PlainFormat:
    """OpenAI's chats and completions, unchanged."""

    id_prefix = "chatcmpl-"
    needs_usage = needs_prompt_usage = False

    def whole(self, body: JSON) -> JSON:
        """Return the body."""
        return body

    def chunk(self, body: JSON) -> list[str]:
        """Return the chunk as an event."""
        return [event(body)]

    def error(self, body: JSON) -> list[str]:
        """Return the error as an event."""
        return [event(body)]

    def end(self) -> list[str]:
        """Return the event that ends a stream."""
        return [DONE]
