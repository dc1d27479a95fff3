"""Encoding of prompts and chats with the packaged tokenizer."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from quire.errors import RequestError
from quire.models.source import find_model
from quire.models.tokenizer import encode_chat, encode_prompt, load_tokenizer, render_chat

DOC = 2  # <|doc|>


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found = load_tokenizer(find_model("quire-tiny")[0])
    assert found is not None
    return found


def test_prompt_is_encoded_without_extra_special_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    token_ids = encode_prompt(tokenizer, "The key is 42.")

    assert DOC not in token_ids
    assert tokenizer.decode(token_ids) == "The key is 42."
    assert encode_prompt(tokenizer, "<|doc|>The key is 42.") == [DOC, *token_ids]


def test_prompt_longer_than_the_context_is_encoded(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert len(encode_prompt(tokenizer, "7" * 5000)) == 5000


def test_an_empty_prompt_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(RequestError, match="at least one token"):
        encode_prompt(tokenizer, "")


def test_chat_with_the_packaged_model_is_one_document(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [
        {"role": "system", "content": "Facts. "},
        {"role": "user", "content": "The key is\n"},
    ]

    assert render_chat(tokenizer, messages) == "<|doc|>Facts. The key is\n"
    assert encode_chat(tokenizer, messages) == [
        DOC,
        *encode_prompt(tokenizer, "Facts. The key is\n"),
    ]


def test_later_turn_starts_with_the_earlier_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    first = [{"role": "user", "content": "one "}]
    later = [*first, {"role": "assistant", "content": "two "}, {"role": "user", "content": "x"}]

    assert render_chat(tokenizer, later).startswith(render_chat(tokenizer, first) + "two ")


def test_template_with_bos_does_not_duplicate_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = "<s>{{ messages[0]['content'] }}"

    assert encode_chat(tokenizer, [{"role": "user", "content": "a"}]).count(0) == 1


def test_chat_without_a_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None

    with pytest.raises(RequestError, match="no chat template"):
        render_chat(tokenizer, [{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user"}], "must alternate"),
        ("{{ messages[0]['content'] + 1 }}", [{"role": "user", "content": "a"}], "refuses"),
        ("{{ x }}", [], "at least one message"),
        ("{{ '' }}", [{"role": "user", "content": "a"}], "at least one token"),
    ],
)
def test_messages_refused_by_the_template_raise_a_request_error(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: list[dict[str, str]],
    message: str,
) -> None:
    tokenizer.chat_template = template

    with pytest.raises(RequestError, match=message):
        encode_chat(tokenizer, messages)


def test_missing_tokenizer_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
