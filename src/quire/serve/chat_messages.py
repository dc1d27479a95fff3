"""Messages of a chat in request bodies."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from quire.serve.fields import require_few, unknown_fields

MAX_MESSAGES = 16_384
"""Limit of the messages of a chat; the template takes time for every message."""


class TextPart(BaseModel):
    """A content part of a message."""

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, value: object) -> object:
        """Refuse other kinds of content parts with what is not supported."""
        if isinstance(value, str) and value != "text":
            shown = f"{value[:40]}..." if len(value) > 40 else value
            raise ValueError(
                f"expected text, got {shown}: images, audio and files are not supported"
            )
        return value


class Message(BaseModel):
    """One message of a chat; other fields are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: (
        str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None


def refuse_misspelled(messages: list[Message]) -> None:
    """Refuse fields of messages that are similar to `role` or `content`.

    Raises:
        RequestError: a similar name, or too many other fields.
    """
    first: dict[str, int] = {}  # index of the first message with a name
    for number, message in enumerate(messages):
        for name in message.model_extra or ():
            first.setdefault(name, number)
    require_few(first)
    for name, number in first.items():
        unknown_fields({name: True}, ("role", "content"), inside=f"messages.{number}.")
