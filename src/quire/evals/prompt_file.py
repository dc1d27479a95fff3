"""Prompts of a user: one JSON object on each line.

prompt      a text or a list of token ids; or `messages`, a chat in OpenAI's format
answer      optional: a text that a correct output contains
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError, RequestError
from quire.models.chat_template import ChatTemplate
from quire.models.loader import LoadedModel
from quire.models.tokenizer import encode_prompt
from quire.sim.traces.reading import TraceRow, json_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class UserPrompt:
    """One prompt."""

    token_ids: tuple[int, ...]
    answer: str = ""  # text that a correct output contains; empty if unknown

    def accepts(self, output: str) -> bool:
        return " ".join(self.answer.split()) in " ".join(output.split())


def read_prompts(
    path: Path, model: LoadedModel, *, limit: int | None = None, content_format: str = "auto"
) -> tuple[UserPrompt, ...]:
    """Read the first prompts of a file, in its order."""
    found: list[UserPrompt] = []
    chat = None if model.tokenizer is None else ChatTemplate(model.tokenizer, content_format)
    for row in json_rows(path):
        if limit is not None and len(found) == limit:
            break
        found.append(_prompt(row, model, chat))
    if not found:
        raise ConfigError(f"{path} has no prompts: expected one JSON object on each line")
    return tuple(found)


def _prompt(row: TraceRow, model: LoadedModel, chat: ChatTemplate | None) -> UserPrompt:
    answer = row.values.get("answer", "")
    if not isinstance(answer, str):
        raise row.error("an answer that is a text", answer)
    try:
        ids = _token_ids(row, model, chat)
    except RequestError as error:
        raise row.error("a prompt for this model", str(error)) from error
    if not ids:
        raise row.error("a prompt with at least one token", row.values.get("prompt"))
    return UserPrompt(token_ids=tuple(ids), answer=answer)


def _token_ids(row: TraceRow, model: LoadedModel, chat: ChatTemplate | None) -> list[int]:
    prompt, messages = row.values.get("prompt"), row.values.get("messages")
    if isinstance(prompt, list) and all(type(one) is int for one in prompt):
        most = model.spec.vocab_size
        wrong = next((one for one in prompt if not 0 <= one < most), None)
        if wrong is not None:
            raise row.error(f"token ids from 0 to {most - 1}", wrong)
        return prompt
    is_chat = isinstance(messages, list) and all(isinstance(one, Mapping) for one in messages)
    if not is_chat and not isinstance(prompt, str):
        got = sorted(row.values)[:4] if prompt is messages is None else prompt or messages
        raise row.error("a prompt (a text or token ids), or messages", got)
    if model.tokenizer is None or chat is None:
        raise row.error(f"token ids, since {model.name} has no tokenizer", prompt or messages)
    return (
        chat.encode(messages)
        if isinstance(messages, list) and is_chat
        else encode_prompt(model.tokenizer, str(prompt))
    )
