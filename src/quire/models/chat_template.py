"""Chat templates: renders messages to the text of a prompt.

A template reads the content of messages as text, as OpenAI's list of parts, or as both. A template
that gets the other form often writes an empty message. Therefore the form is found by rendering a
short chat in both forms, and a message whose text the prompt does not contain is refused.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, Unpack, get_args

from jinja2 import TemplateError
from jinja2.exceptions import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from quire.config.chat_messages import (
    Content,
    ContentFormat,
    Message,
    read_messages,
    text_part,
    texts_of,
)
from quire.errors import ConfigError, RequestError
from quire.models.loader import LoadedModel
from quire.models.tokenizer import check_unicode, encode_rendered

KWARGS_FIELD = "chat_template_kwargs"
"""The field of a request that holds further variables of the chat template."""

NO_KWARGS: Mapping[str, Any] = MappingProxyType({})

_RESERVED_NAMES = frozenset(
    {
        "messages",
        "conversations",
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    }
)
"""Arguments of `apply_chat_template` and of the call that renders a template."""

TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions of a template for messages or variables of an unexpected shape."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of OpenAI's API. A template may name others, such as ipython."""

_MARKS = re.compile(
    r"""(type["']\s*:\s*["']text["'],\s*["']text["']\s*:\s*["'])?"""
    r"""(zq[a-j]+x[a-j]+qz)(["'],\s*["']type["'])?"""
)
"""Marks in place of texts, with the rest of a part that was written as an object."""

_LETTERS = str.maketrans("0123456789", "abcdefghij")
_MAX_FILLER = 4096

_MIN_CHARACTERS = 16
"""A shorter text may be in a prompt by chance: as a part of a word or of the template."""

_MAX_SEARCHES = 32
"""Limit of the searches for one text in the whole prompt."""

_INLINE = ("{{", "{%")


class ChatOptions(TypedDict, total=False):
    """How a chat becomes a prompt.

    Attributes:
        add_generation_prompt: end with the prefix of the assistant's message. Default: True.
        continue_final_message: end with the text of the last message, which the output continues;
            not with `add_generation_prompt`.
        tools: definitions of tools for the template, in OpenAI's format.
        template_kwargs: further variables of the template, such as `enable_thinking`.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any]


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, content_format: str = "auto") -> None:
        self.tokenizer, self.content_format = tokenizer, content_format
        self._forms: dict[tuple[str, str], frozenset[ContentFormat]] = {}

    def reads(self, name: str) -> bool:
        template = self.tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else (template or "",)
        return any(name in _words(text) for text in texts)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Token ids of a chat; the template writes all special tokens, the tokenizer adds none."""
        return encode_rendered(self.tokenizer, self.render(messages, **options))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = NO_KWARGS,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render a chat to text."""
        if not self.tokenizer.chat_template:
            raise RequestError(
                "this model has no chat template, so messages cannot be converted to a prompt; "
                "send a plain prompt, or add a chat_template.jinja to the model's folder",
                param="messages",
            )
        chat = read_messages(messages)
        for number, message in enumerate(chat):
            self._check_role(message["role"], f"messages.{number}.role")
        _check_template_kwargs(template_kwargs)
        if continue_final_message:
            _check_continued(chat[-1], add_generation_prompt=add_generation_prompt)
        definitions = None if tools is None else [dict(tool) for tool in tools]
        apply = partial(
            self._apply,
            tools=definitions,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        source = self._source(definitions)
        choices = [self._contents(message, source) for message in chat]
        missing: list[int] = []
        while not any(len(choices[number]) == 1 for number in missing):
            for number in missing:
                del choices[number][0]
            shown = [m | {"content": own[0]} for m, own in zip(chat, choices, strict=True)]
            render = partial(apply, shown)
            try:
                text = render(**template_kwargs)
            except TEMPLATE_ERRORS as error:
                if continue_final_message and len(choices[-1]) > 1:
                    missing = [len(chat) - 1]  # the template may write its first part only
                    continue
                if missing and not continue_final_message:
                    break
                raise _refused_by_template(render, template_kwargs, error) from error
            missing = _missing(text, shown, partial(apply, **template_kwargs))
            if not missing:
                return text
        raise self._vanished(missing[0], chat[missing[0]]["role"])

    def _check_role(self, role: str, where: str) -> None:
        if role not in _ROLES and not self.reads(role):
            raise RequestError(
                f"{where}: expected {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, got {role[:40]!r}",
                param=where,
            )

    def _apply(self, messages: Sequence[Message], **options: Any) -> str:
        text = str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        check_unicode(text)
        return text

    # ---- content -------------------------------------------------------------------------------

    def _contents(self, message: Message, source: str) -> list[Content]:
        texts, given = texts_of(message), message["content"]
        text = "".join(texts)
        parts = [text_part(one) for one in texts] or [text_part("")]
        whole = [text_part(text)]  # for templates that read the first part only
        if self.content_format == "string":
            return [text]
        if self.content_format == "openai":
            return [parts, whole] if len(texts) > 1 else [parts]
        forms = self._forms_of(message["role"], source)
        found: list[Content] = (
            [text, parts, whole] if "string" in forms or not forms else [parts, whole]
        )
        if len(forms) > 1:
            found.insert(0, given)
        return [one for index, one in enumerate(found) if one not in found[:index]]

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        """The template; a model may have another one for tools."""
        try:
            return self.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise RequestError(f"no chat template for these messages: {error}") from error

    def _forms_of(self, role: str, source: str) -> frozenset[ContentFormat]:
        """Forms in which the template writes the content of a role; empty if unknown."""
        role = role if role in _ROLES else "user"
        if (source, role) not in self._forms:
            forms: tuple[tuple[ContentFormat, Any], ...] = (
                ("string", _mark(0, 0)),
                ("openai", [text_part(_mark(0, 0))]),
            )
            found = [form for form, mark in forms if self._writes(role, mark, source)]
            self._forms[source, role] = frozenset(found)
        return self._forms[source, role]

    def _writes(self, role: str, content: Content, source: str) -> bool:
        for messages in self._short_chats({"role": role, "content": content}, source):
            try:
                text = self._apply(messages, chat_template=source, add_generation_prompt=True)
            except TEMPLATE_ERRORS:
                continue
            if _mark(0, 0) in _written(text):
                return True
        return False

    def _short_chats(self, message: Message, source: str) -> Iterator[list[Message]]:
        if message["role"] == "user":
            yield [message]
            return
        takes_parts = self._forms_of("user", source) == {"openai"}
        user = {"role": "user", "content": [text_part("a")] if takes_parts else "a"}
        function = {"name": "f", "arguments": {"a": 1}}
        call = {"id": "a12345678", "type": "function", "function": function}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": "f", "tool_call_id": call["id"]}
        yield from ([message, user], [user, message], [user, message, user])
        yield [user, calling, result | message]

    def _vanished(self, number: int, role: str) -> RequestError:
        others = [form for form in get_args(ContentFormat) if form != self.content_format]
        return RequestError(
            f"the text of messages.{number} (role {role[:40]!r}) does not appear in the prompt "
            "that the model's chat template writes: leave the message out, use a template for this "
            "role (--chat-template), or set --chat-template-content-format to "
            f"{' or '.join(others)} (now {self.content_format})",
            param=f"messages.{number}",
        )


def _missing(text: str, messages: Sequence[Message], apply: Callable[..., str]) -> list[int]:
    """Indices of messages whose text a prompt does not contain.

    Templates may change a text: they trim it, escape it or remove its reasoning. Therefore the chat
    is rendered again with a mark in the place of each text.
    """
    marks: dict[int, set[str]] = {}
    marked = list(messages)
    for number, message in enumerate(messages):
        if message.get("tool_calls"):  # templates may leave out the text beside them
            continue
        shown = [
            _marked(number, index, one) if one.strip() else one
            for index, one in enumerate(texts_of(message))
        ]
        marks[number] = {mark for one in shown for _, mark, _ in _MARKS.findall(one)}
        parts = [text_part(one) for one in shown]
        content = shown[0] if isinstance(message["content"], str) else parts
        marked[number] = message | {"content": content}
    # some templates write the system message only if the chat ends with a message of the user
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    written: set[str] = set()
    missing = [number for number, own in marks.items() if own]
    for end in dict.fromkeys((len(messages), users[-1] + 1 if users else 0)):
        if not (missing and end):
            break
        try:
            written |= _written(apply(marked[:end]))
        except TEMPLATE_ERRORS:
            if end == len(messages):  # it accepts only some texts: their effect is unknown
                return []
            break
        missing = [number for number in missing if not marks[number] <= written]
    literal = [n for n in missing[:_MAX_SEARCHES] if _contains(text, messages[n]["content"])]
    return [number for number in missing if number not in literal]


def _contains(text: str, content: Content) -> bool:
    """Whether a prompt contains a text that is too long to be there by chance."""
    found = isinstance(content, str) and len(content.strip()) >= _MIN_CHARACTERS
    return found and str(content).strip() in text


def _mark(message: int, part: int) -> str:
    return f"zq{message}x{part}qz".translate(_LETTERS)  # templates may replace digits


def _marked(message: int, part: int, text: str) -> str:
    """A text of the same shape with a mark at its start, and one at its end if it is longer.

    A template may write the first line or the first characters only.
    """
    start, end = _mark(message, 2 * part), _mark(message, 2 * part + 1)
    if len(text.strip()) <= len(start):
        return start
    between = "\n" if "\n" in text.strip() else " "
    filled = min(len(text.strip()), _MAX_FILLER) - len(start + between + end)
    return start + between + "word " * (filled // len("word ")) + end


def _written(text: str) -> set[str]:
    """Marks that a prompt contains, without those in parts that are written as objects."""
    return {mark for before, mark, after in _MARKS.findall(text.lower()) if not before + after}


@lru_cache(maxsize=16)
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


def _check_template_kwargs(template_kwargs: Mapping[str, Any]) -> None:
    """Refuse reserved names: `chat_template`, for example, would replace the template."""
    for name in template_kwargs:
        if name in _RESERVED_NAMES:
            raise RequestError(
                f"{KWARGS_FIELD} cannot contain {name!r}: the name is reserved, not a variable of "
                "the model's template; remove it",
                param=KWARGS_FIELD,
            )


def _check_continued(message: Message, *, add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise RequestError(
            "`continue_final_message` needs `add_generation_prompt` to be false: the prompt ends "
            "either in the last message or in the start of a new one",
            param="continue_final_message",
        )
    if message.get("tool_calls"):
        raise RequestError(
            "the last message has `tool_calls`, so its text cannot be continued: add a message "
            "with their results, or leave out `continue_final_message`",
            param="continue_final_message",
        )


def _refused_by_template(
    render: Callable[..., object], template_kwargs: Mapping[str, Any], error: BaseException
) -> RequestError:
    """Refuse the variables if the template accepts the messages without them, else the messages."""
    what, param = "these messages", "messages"
    if template_kwargs and _renders(render):
        what, param = f"these {KWARGS_FIELD}", KWARGS_FIELD
    elif isinstance(error, RequestError):
        return error
    reason = str(error) or type(error).__name__
    return RequestError(f"the model's chat template refuses {what}: {reason}", param=param)


def _renders(render: Callable[[], object]) -> bool:
    try:
        render()
    except TEMPLATE_ERRORS:
        return False
    return True


# ---- the option ----------------------------------------------------------------------------------


def with_chat_template(model: LoadedModel, option: str | None) -> LoadedModel:
    """The model with the chat template of `--chat-template`."""
    if option is None:
        return model
    if model.tokenizer is None:
        raise ConfigError(
            f"--chat-template has no effect: {model.name} has no tokenizer; leave it out, or use a "
            "model folder with a tokenizer"
        )
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.chat_template = _read_template(option)
    _check_syntax(tokenizer, option)
    return replace(model, tokenizer=tokenizer)


def _read_template(option: str) -> str:
    if any(mark in option for mark in _INLINE):
        return option
    try:
        return Path(option).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(
            f"cannot read --chat-template {option}: {reason}; expected a file with a Jinja "
            "template, or a template with {{ }} or {% %}"
        ) from None


def _check_syntax(tokenizer: PreTrainedTokenizerBase, option: str) -> None:
    """Compile the template, in the sandbox of Transformers."""
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        name = "its text" if any(mark in option for mark in _INLINE) else option
        raise ConfigError(
            f"--chat-template: {name}, line {error.lineno}: {error.message}"
        ) from None
    except TEMPLATE_ERRORS:  # it refuses this chat; others get the same message as an error
        return
