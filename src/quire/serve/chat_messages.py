"""Messages of a chat in request bodies: their types. `read_messages` reads them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from quire.config.chat_messages import text_part

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

    def as_dict(self) -> dict[str, Any]:
        """The message for `read_messages`."""
        fields = dict(self)
        if isinstance(self.content, list):
            fields["content"] = [text_part(part.text) for part in self.content]
        return fields
