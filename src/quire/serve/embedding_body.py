"""Body of POST /v1/embeddings."""

from typing import Literal

from pydantic import Field, field_validator

from quire.config.sampling_params import Pooling
from quire.serve.prompt_lists import checked_prompts
from quire.serve.protocol import PromptBody, Prompts


class EmbeddingBody(PromptBody):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    pooling: Pooling | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None

    @field_validator("input", mode="plain")
    @classmethod
    def _input(cls, value: object) -> object:
        return checked_prompts(value)
