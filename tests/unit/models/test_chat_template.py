"""Chat templates (forms of content, texts that vanish, continued messages), and tokenizers."""

import re
import string

import pytest
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from quire.errors import RequestError
from quire.models.chat_template import ChatTemplate
from quire.models.source import find_model
from quire.models.tokenizer import encode_prompt, load_tokenizer, undecodable_ids

DOC = 2  # <|doc|>
LOOP = "{% for m in messages %}<{{ m.role }}>BODY</{{ m.role }}>{% endfor %}"


def with_body(body: str) -> str:
    return LOOP.replace("BODY", body)


def with_parts(body: str, parts: str = "m.content") -> str:
    return with_body(f"{{% for p in {parts} %}}{body}{{% endfor %}}")


PARTS = {
    "loop": with_parts("{% if p.type == 'text' %}{{ p.text }}{% endif %}"),
    "subscripts": with_parts("{{ p['text'] }}", "m['content']"),
    "in": with_parts("{% if 'text' in p %}{{ p['text'] }}{% endif %}"),
    "filtered loop": with_parts("{{ p.text }}", "m.content if p.type == 'text'"),
    "first": with_body("{{ m.content[0].text }}"),
    "first subscripts": with_body("{{ m['content'][0]['text'] }}"),
    "first filter": with_body("{{ (m.content | first).text }}"),
    "first plus": with_body("{{ m.content[0]['text'] + '' }}"),
    "select": with_body(
        "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}"
    ),
    "map": with_body("{{ m.content | map(attribute='text') | join('') }}"),
    "variable": with_body("{% set c = m.content %}{% for p in c %}{{ p.text }}{% endfor %}"),
    "two variables": with_body(
        "{% set c = m['content'] %}{% set d = c | list %}{% for p in d %}{{ p.text }}{% endfor %}"
    ),
    "slice": with_parts("{{ p.text }}", "m.content[:]"),
    "macro": "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
    + with_body("{{ show(m.content) }}"),
    "namespace": with_body(
        "{% set ns = namespace(t='') %}{% for p in m.content %}{% set ns.t = ns.t + p.text %}"
        "{% endfor %}{{ ns.t }}"
    ),
    "variable of messages": "{% set all = messages %}"
    + with_parts("{{ p.text }}").replace("in messages", "in all"),
}
BOTH = {
    "is string": with_body(
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    ),
    "is not string": with_body(
        "{% if m.content is iterable and m.content is not string %}"
        "{% for p in m.content %}{{ p['text'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    ),
    "first part or string": with_body(
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    ),
}
STRINGS = {
    "plain": with_body("{{ m.content }}"),
    "trim": with_body("{{ m.content | trim }}"),
    "upper": with_body("{{ m['content'].upper() }}"),
    "escaped": with_body("{{ m.content | tojson }}"),
    "characters": with_body("{% for c in m.content %}{{ c }}{% endfor %}"),
    "digits": with_body("{{ m.content | replace('0', 'zero') | replace('1', 'one') }}"),
    "reasoning": with_body("{{ m.content.split('</think>')[-1] }}"),
    "strings only": with_body("{% if m.content is string %}{{ m.content }}{% endif %}"),
    "system as string": "{{ messages[0].content }}{% for m in messages[1:] %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
}
CHAT_OF_A = [{"role": "user", "content": "a"}]
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CHAT = [
    *(("system", "Be brief, please."), ("user", "hi"), ("assistant", "user")),
    ("user", 'A "quoted" line\nand a longer second line of text'),
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found = load_tokenizer(find_model("quire-tiny")[0])
    assert found is not None
    return found


@pytest.fixture
def render(tokenizer: PreTrainedTokenizerBase):
    def run(template, messages, content_format="auto", **options):
        tokenizer.chat_template = template
        return ChatTemplate(tokenizer, content_format).render(messages, **options)

    return run


def content_of(text, split):
    texts = [text] if split == 1 else [text[:2], text[2:]]
    return [{"type": "text", "text": one} for one in texts if one] if split else text


def messages_of(pairs, split):
    return [{"role": role, "content": content_of(text, split)} for role, text in pairs]


def squashed(text: str) -> str:
    return re.sub(r"\\n|\W", "", text.lower())


@pytest.mark.parametrize("split", [0, 1, 2])
@pytest.mark.parametrize("template", (PARTS | BOTH | STRINGS).values(), ids=PARTS | BOTH | STRINGS)
def test_template_gets_the_form_of_content_that_it_reads(render, template, split):
    pairs = [("system", "Be brief, please."), ("user", "hi"), ("assistant", "Yes."), ("user", "w?")]
    text = render(template, messages_of(pairs, split))
    assert "type" not in text
    for role, expected in pairs:
        assert squashed(expected) in squashed(text)
        assert f"<{role}></{role}>" not in text


@pytest.mark.parametrize("template", [PARTS["loop"], BOTH["is string"], STRINGS["escaped"]])
def test_text_that_occurs_in_the_template_is_not_taken_for_the_message(render, template):
    text = render(template, messages_of(CHAT, 0))
    assert f"<assistant>{'user'}</assistant>" in text.replace('"', "")


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}",
        "{% if m.content %}{{ m.content }}{% else %}CALLS{% endif %}",
        "{{ m.content[0]['text'] + '' }}CALLS",
        "{% for p in m.content %}{{ p.text }}{% endfor %}CALLS",
        "{{ m.content | trim }}CALLS",
    ],
)
@pytest.mark.parametrize("own", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_calls_without_content_are_written(render, content, own):
    function = {"name": "look", "arguments": '{"a": 1}'}
    calls = [{"id": i, "type": "function", "function": function} for i in ("1", "2")]
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": calls} | own,
        {"role": "tool", "tool_call_id": "1", "content": "four"},
    ]
    written = "{% for c in m.tool_calls %}{{ c.function.name }},{% endfor %}"

    text = render(with_body(content.replace("CALLS", written)), chat)

    assert text == "<user>hello</user><assistant>look,look,</assistant><tool>four</tool>"


def test_result_of_a_tool_gets_the_form_that_the_template_reads(render):
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "four"}]},
    ]
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content | trim }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )

    assert render(template, chat) == "hellofour"


@pytest.mark.parametrize(
    ("content_format", "split", "expected"),
    [("auto", 0, "text:"), ("auto", 1, "parts:"), ("string", 2, "text:"), ("openai", 0, "parts:")],
)
def test_template_that_reads_both_forms_gets_the_given_or_forced_one(
    render, content_format, split, expected
):
    template = with_body("{{ 'text:' if m.content is string else 'parts:' }}") + BOTH["is string"]

    messages = messages_of([("user", "hello")], split)
    assert expected in render(template, messages, content_format)
    for form, other in (("string", PARTS["loop"]), ("openai", STRINGS["plain"])):
        with pytest.raises(RequestError, match=rf"\(now {form}\)"):
            render(other, messages_of([("user", "hello")], 0), form)


@pytest.mark.parametrize(
    ("template", "number"),
    [
        (with_body(""), 0),
        (with_body("{% if m.role != 'system' %}{{ m.content }}{% endif %}"), 0),
        (with_body("{% if not loop.last %}{{ m.content }}{% endif %}"), 3),
        (with_body("{% if m.role != 'assistant' %}{{ m.content }}{% endif %}"), 2),
        ("{{ messages[-1].content }}{{ messages[0].role }}{{ messages[1].role }}", 0),
        *((with_body("{{ m.text }}"), 0), (with_body("{{ m.content | length }}"), 0)),
        *(("{{ '' }}", 0), (with_body("{{ m.content[:20] }}"), 3)),
        (with_body("{{ m.content.split('\n')[0] }}"), 3),
        (with_body("{{ m.content | truncate(30) }}"), 3),
    ],
)
@pytest.mark.parametrize("split", [0, 1, 2])
def test_message_whose_text_vanishes_is_refused(render, template, number, split):
    with pytest.raises(RequestError, match="--chat-template-content-format") as refused:
        render(template, messages_of(CHAT, split))
    assert refused.value.param == f"messages.{number}"
    assert CHAT[number][0] in str(refused.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (STRINGS["plain"], {"role": "user", "content": ""}),
        (STRINGS["trim"], {"role": "user", "content": " \n"}),
        (with_body("{{ m.content.split('\n')[0] }}"), {"role": "user", "content": "one line\n"}),
        (with_body("{{ m.content[:80] }}"), {"role": "user", "content": "a text of eighty" * 5}),
        (PARTS["first plus"], {"role": "user", "content": ""}),
        (PARTS["first plus"], {"role": "user", "content": []}),
        (STRINGS["reasoning"], {"role": "assistant", "content": "<think>a long thought</think>"}),
        (
            with_body("{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
            {"role": "assistant", "content": "I call it.", "tool_calls": CALLS},
        ),
        (
            with_body("{{ m.content | replace('/no_think', '') }}"),
            {"role": "user", "content": "/no_think"},
        ),
        (
            with_body("{{ 1 if m.content in ('yes', 'no') else raise_exception('x') }}"),
            {"role": "user", "content": "no"},
        ),
    ],
)
def test_text_that_the_template_leaves_out_on_purpose_is_accepted(render, template, message):
    assert render(template, [message]) is not None


@pytest.mark.parametrize("last", [[], [{"role": "assistant", "content": "well"}]])
def test_system_message_that_is_written_with_the_last_message_of_the_user_is_accepted(render, last):
    template = (
        "{% for m in messages[1:] %}{% if loop.last and m.role == 'user' %}"
        "{{ messages[0].content }}{% endif %}{{ m.content }}{% endfor %}"
    )
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}, *last]

    text = render(template, chat)

    assert ("Be brief." in text) == (not last)


@pytest.mark.parametrize("text", ["1, 2,", "user", "e", "</assistant>", "two\nlines"])
@pytest.mark.parametrize(
    "template",
    [PARTS["loop"], PARTS["first"], *list(BOTH.values())[::2], STRINGS["plain"]],
)
@pytest.mark.parametrize("split", [0, 1, 2])
def test_prompt_ends_in_the_continued_message(render, template, text, split):
    chat = messages_of([("user", "count"), ("assistant", text)], split)
    prompt = render(template, chat, add_generation_prompt=False, continue_final_message=True)
    assert prompt == f"<user>count</user><assistant>{text}"


def test_message_that_cannot_be_continued_is_refused(render):
    for message, options, expected in (
        ({}, {}, "needs `add_generation_prompt` to be false"),
        ({"tool_calls": CALLS}, {"add_generation_prompt": False}, "`tool_calls`"),
    ):
        chat = [*CHAT_OF_A, {"role": "assistant", "content": "b"} | message]
        with pytest.raises(RequestError, match=expected):
            render(STRINGS["plain"], chat, continue_final_message=True, **options)


def test_chats_are_one_document_and_tools_have_their_own_form(tokenizer):
    messages = messages_of([("system", "Facts. "), ("user", "The key is\n")], 0)
    template = ChatTemplate(tokenizer)

    later = messages_of([("user", "one "), ("assistant", "two "), ("user", "x")], 0)
    assert template.render(later).startswith(template.render(later[:1]) + "two ")
    assert template.render(messages) == "<|doc|>Facts. The key is\n"
    assert template.encode(messages) == [DOC, *encode_prompt(tokenizer, "Facts. The key is\n")]

    token_ids = encode_prompt(tokenizer, "The key is 42.")

    assert DOC not in token_ids
    assert tokenizer.decode(token_ids) == "The key is 42."
    assert encode_prompt(tokenizer, "<|doc|>The key is 42.") == [DOC, *token_ids]
    assert len(encode_prompt(tokenizer, "7" * 5000)) == 5000  # longer than the context
    with pytest.raises(RequestError, match="at least one token"):
        encode_prompt(tokenizer, "")

    tokenizer.chat_template = {"default": STRINGS["plain"], "tool_use": PARTS["first"]}
    template, chat = ChatTemplate(tokenizer), messages_of([("user", "hello")], 0)

    texts = [template.render(chat, tools=tools) for tools in (None, [{"type": "function"}])]

    assert texts == ["<user>hello</user>"] * 2
    tokenizer.chat_template = "<s>{{ messages[0]['content'] }}"
    assert ChatTemplate(tokenizer).encode(CHAT_OF_A).count(0) == 1  # one token of the beginning


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CHAT_OF_A, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", CHAT_OF_A, "must alternate"),
        ("{{ messages[0]['content'] + 1 }}", CHAT_OF_A, "refuses"),
        ({"other": "a"}, CHAT_OF_A, "no chat template for these"),
        ("{{ x }}", [], "at least one message"),
        ("{{ '' }}", [{"role": "user", "content": ""}], "at least one token"),
    ],
)
def test_messages_refused_by_the_template_raise_a_request_error(
    tokenizer, template, messages, message
):
    tokenizer.chat_template = template
    with pytest.raises(RequestError, match=message):
        ChatTemplate(tokenizer).encode(messages)


SENTENCES = "The gull cries above the harbour wall, and 17 boats sail over the quiet water.\n"
TEXTS = {
    "sentences": SENTENCES * 900,
    "one character": "a" * 67_001,
    "period of seven": "abcabca" * 10_000,
    "odd number of pairs": "ab" * 33_501,
    "odd number of pairs before a word": "ab" * 33_501 + "the",
    "spaces": " " * 250_000 + "end" + " \n" * 2000,
    "no spaces": "".join(chr(97 + i * i % 26) for i in range(70_000)),
    "other scripts": "日本語のテキスト、😀 naïve e\u0301 " * 2500,
    "special tokens": ("<|doc|>a text " * 5_000),
}


def sentence_piece() -> PreTrainedTokenizerBase:
    """A tokenizer without pre-tokenization, which begins and ends each text with a token."""
    words = ["▁the", "▁boat", "aa", "aaaa", "ab", "abab", "abc", "▁▁", "▁▁▁▁"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for symbol in [*dict.fromkeys("▁" + string.printable), *words]:
        vocab.setdefault(symbol, len(vocab))
    merges = [("a", "a"), ("aa", "aa"), ("a", "b"), ("ab", "c"), ("ab", "ab")]
    merges += [("▁", "▁"), ("▁▁", "▁▁")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("keep", [1, 300])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ["byte level", "sentence piece"])
def test_last_tokens_of_a_text_are_those_of_the_whole_text(kind, name, keep, tokenizer) -> None:
    tokenizer = tokenizer if kind == "byte level" else sentence_piece()
    whole = encode_prompt(tokenizer, TEXTS[name])
    assert encode_prompt(tokenizer, TEXTS[name], keep=keep) == whole[-keep:]
    assert encode_prompt(tokenizer, "a b", keep=keep) == encode_prompt(tokenizer, "a b")[-keep:]


@pytest.mark.parametrize(
    ("text", "longest_token", "max_characters"),
    [
        (SENTENCES * 10_000, 11, 60_000),
        (SENTENCES * 900, 256, 2 * len(SENTENCES) * 900),
        (" " * 200_000, 256, 2 * 200_000),
    ],
)
def test_last_tokens_of_a_long_text_are_found_from_few_characters(
    tokenizer, text, longest_token, max_characters
) -> None:
    lengths: list[int] = []

    class Counted(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, **options: object) -> object:
            lengths.append(len(text))
            return super().__call__(text, **options)

        def get_vocab(self) -> dict[str, int]:
            return super().get_vocab() | {"a" * longest_token: 0}

    tokenizer.__class__ = Counted
    encode_prompt(tokenizer, text, keep=10)

    assert 0 < sum(lengths) <= max_characters


def test_ids_without_a_token_are_undecodable_and_equal_texts_are_not(tokenizer, tmp_path):
    assert undecodable_ids(tokenizer, len(tokenizer)) == []
    assert load_tokenizer(tmp_path) is None
    vocab = {"a": 0, "b": 1, "c": 4}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="a")
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    added = tokenizer.convert_tokens_to_ids("</s>")

    assert added == 3  # the number of tokens before
    assert undecodable_ids(tokenizer, 8) == [2, 5, 6, 7]
    assert undecodable_ids(tokenizer, 3) == [2]
    assert undecodable_ids(None, 8) == []

    tokens = [("<unk>", 0.0), ("a", -1.0), ("a", -2.0), ("b", -1.0)]
    plain = Tokenizer(models.Unigram(tokens, unk_id=0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")
    assert len(set(tokenizer.get_vocab().values())) == 3
    assert undecodable_ids(tokenizer, 6) == [4, 5]
