"""Variables of the chat template: those that a request sets, and those that have no effect."""

from typing import Any

from quire.models.tokenizer import KWARGS_FIELD
from quire.serve.protocol import Body, ChatBody, GenerationBody, TokenizeBody
from quire.serve.text import Texts

_EFFORT = "reasoning_effort"


def template_kwargs(body: ChatBody | TokenizeBody, texts: Texts) -> dict[str, Any]:
    """Variables for the chat template besides the messages.

    `reasoning_effort` is one of them where the template mentions it.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is not None and texts.reads(_EFFORT):
        kwargs.setdefault(_EFFORT, effort)
    return kwargs


def unread_kwargs(body: Body, texts: Texts) -> list[str]:
    """Variables that the body sets and the model's template does not mention."""
    if not isinstance(body, ChatBody | TokenizeBody):
        return []
    names = body.chat_template_kwargs or {}
    return [f"{KWARGS_FIELD}.{name}" for name in names if not texts.reads(name)]


def unread_fields(body: Body, texts: Texts) -> list[str]:
    """`reasoning_effort` where it has no effect: in a completion, or with this template."""
    if not isinstance(body, GenerationBody) or body.reasoning_effort is None:
        return []
    has_effect = isinstance(body, ChatBody) and texts.reads(_EFFORT)
    return [] if has_effect else [_EFFORT]
