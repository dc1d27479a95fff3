"""Responses in /openapi.json: formats of errors, and the format of streams."""

from typing import Any

from pydantic import BaseModel

Responses = dict[int | str, dict[str, Any]]


class ErrorObject(BaseModel):
    """An error in OpenAI's format; `param` is the name of the invalid field."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """The body of a response to a refused or failed request."""

    error: ErrorObject


class MessagesErrorObject(BaseModel):
    """An error in Anthropic's format."""

    type: str
    message: str


class MessagesErrorBody(BaseModel):
    """The body of a response to a refused or failed request for messages."""

    type: str
    error: MessagesErrorObject


def _errors(model: type[BaseModel]) -> Responses:
    refused = "The request is refused: its error names the field and what to change."
    failed = "The server is busy, shuts down or has failed."
    return {
        "4XX": {"description": refused, "model": model},
        "5XX": {"description": failed, "model": model},
    }


ERRORS = _errors(ErrorBody)
"""Responses of all paths."""

MESSAGES_ERRORS = _errors(MessagesErrorBody)
"""Responses of the paths of Anthropic's API."""

STREAM: Responses = {200: {"content": {"text/event-stream": {}}}}
"""Response of a path whose requests may have `stream`."""

PROBE: Responses = {
    "5XX": {"description": "The server accepts no requests. The body is empty.", "content": {}}
}
"""Responses of the probes."""
