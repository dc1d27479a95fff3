"""Chat templates: forms of content, texts that vanish, and continued messages."""

import re

import pytest
from transformers import PreTrainedTokenizerBase

from quire.errors import RequestError
from quire.models.chat_template import ChatTemplate
from quire.models.source import find_model
from quire.models.tokenizer import encode_prompt, load_tokenizer

DOC = 2  # <|doc|>
LOOP = "{% for m in messages %}<{{ m.role }}>BODY</{{ m.role }}>{% endfor %}"


def with_body(body: str) -> str:
    return LOOP.replace("BODY", body)


PARTS = {
    "loop": with_body(
        "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    ),
    "subscripts": with_body("{% for p in m['content'] %}{{ p['text'] }}{% endfor %}"),
    "in": with_body(
        "{% for p in m.content %}{% if 'text' in p %}{{ p['text'] }}{% endif %}{% endfor %}"
    ),
    "filtered loop": with_body(
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
    ),
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
    "slice": with_body("{% for p in m.content[:] %}{{ p.text }}{% endfor %}"),
    "macro": "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
    + with_body("{{ show(m.content) }}"),
    "namespace": with_body(
        "{% set ns = namespace(t='') %}{% for p in m.content %}{% set ns.t = ns.t + p.text %}"
        "{% endfor %}{{ ns.t }}"
    ),
    "variable of messages": "{% set all = messages %}{% for m in all %}"
    "<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}</{{ m.role }}>{% endfor %}",
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
CHAT = [
    ("system", "Be brief, please."),
    ("user", "hi"),
    ("assistant", "user"),
    ("user", 'A "quoted" line\nand a longer second line of text'),
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found = load_tokenizer(find_model("quire-tiny")[0])
    assert found is not None
    return found


@pytest.fixture
def render(tokenizer: PreTrainedTokenizerBase):
    """Render messages with a template."""

    def run(template, messages, content_format="auto", **options):
        tokenizer.chat_template = template
        return ChatTemplate(tokenizer, content_format).render(messages, **options)

    return run


def messages_of(pairs, split):
    """Messages with contents as texts, or as lists of parts."""
    if not split:
        return [{"role": role, "content": text} for role, text in pairs]
    found = []
    for role, text in pairs:
        texts = [text] if split == 1 else [text[:2], text[2:]]
        parts = [{"type": "text", "text": one} for one in texts if one]
        found.append({"role": role, "content": parts})
    return found


def squashed(text: str) -> str:
    return re.sub(r"\\n|\W", "", text.lower())


# ---- forms of content ----------------------------------------------------------------------------


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


def test_template_that_reads_both_forms_gets_the_given_one(render):
    template = with_body("{{ 'text:' if m.content is string else 'parts:' }}") + BOTH["is string"]

    texts = [render(template, messages_of([("user", "hello")], split)) for split in (0, 1)]

    assert ["text:" in text for text in texts] == [True, False]


def test_result_of_a_tool_gets_the_form_that_the_template_reads(render):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "four"}]},
    ]
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content | trim }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )

    assert render(template, chat) == "hellofour"


@pytest.mark.parametrize(
    ("content_format", "split", "expected"), [("string", 2, "text:"), ("openai", 0, "parts:")]
)
def test_form_can_be_forced(render, content_format, split, expected):
    template = with_body("{{ 'text:' if m.content is string else 'parts:' }}") + BOTH["is string"]

    assert expected in render(template, messages_of([("user", "hello")], split), content_format)


# ---- texts that vanish ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "number"),
    [
        (with_body(""), 0),
        (with_body("{% if m.role != 'system' %}{{ m.content }}{% endif %}"), 0),
        (with_body("{% if not loop.last %}{{ m.content }}{% endif %}"), 3),
        (with_body("{% if m.role != 'assistant' %}{{ m.content }}{% endif %}"), 2),
        ("{{ messages[-1].content }}{{ messages[0].role }}{{ messages[1].role }}", 0),
        (with_body("{{ m.text }}"), 0),
        (with_body("{{ m.content | length }}"), 0),
        ("{{ '' }}", 0),
        (with_body("{{ m.content[:20] }}"), 3),
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
    ("content_format", "template"), [("string", PARTS["loop"]), ("openai", STRINGS["plain"])]
)
def test_forced_form_that_the_template_does_not_read_is_refused(render, content_format, template):
    with pytest.raises(RequestError, match=rf"\(now {content_format}\)"):
        render(template, messages_of([("user", "hello")], 0), content_format)


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
            {
                "role": "assistant",
                "content": "I call it.",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}],
            },
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


# ---- continued messages --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1, 2,", "user", "e", "</assistant>", "two\nlines"])
@pytest.mark.parametrize(
    "template",
    [
        *(PARTS["loop"], PARTS["first"], BOTH["is string"], BOTH["first part or string"]),
        STRINGS["plain"],
    ],
)
@pytest.mark.parametrize("split", [0, 1, 2])
def test_prompt_ends_in_the_continued_message(render, template, text, split):
    chat = messages_of([("user", "count"), ("assistant", text)], split)

    prompt = render(template, chat, add_generation_prompt=False, continue_final_message=True)

    assert prompt == f"<user>count</user><assistant>{text}"


@pytest.mark.parametrize(
    ("message", "options", "expected"),
    [
        ({}, {}, "needs `add_generation_prompt` to be false"),
        (
            {"tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {"add_generation_prompt": False},
            "`tool_calls`",
        ),
    ],
)
def test_message_that_cannot_be_continued_is_refused(render, message, options, expected):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"} | message]

    with pytest.raises(RequestError, match=expected):
        render(STRINGS["plain"], chat, continue_final_message=True, **options)


# ---- the packaged template, and refusals ---------------------------------------------------------


def test_chat_with_the_packaged_model_is_one_document(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [
        {"role": "system", "content": "Facts. "},
        {"role": "user", "content": "The key is\n"},
    ]
    template = ChatTemplate(tokenizer)

    assert template.render(messages) == "<|doc|>Facts. The key is\n"
    assert template.encode(messages) == [DOC, *encode_prompt(tokenizer, "Facts. The key is\n")]


def test_later_turn_starts_with_the_earlier_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    first = [{"role": "user", "content": "one "}]
    later = [*first, {"role": "assistant", "content": "two "}, {"role": "user", "content": "x"}]
    template = ChatTemplate(tokenizer)

    assert template.render(later).startswith(template.render(first) + "two ")


def test_template_with_bos_does_not_duplicate_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    tokenizer.chat_template = "<s>{{ messages[0]['content'] }}"

    assert ChatTemplate(tokenizer).encode([{"role": "user", "content": "a"}]).count(0) == 1


def test_template_for_tools_has_its_own_form(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = {"default": STRINGS["plain"], "tool_use": PARTS["first"]}
    template, chat = ChatTemplate(tokenizer), messages_of([("user", "hello")], 0)

    texts = [template.render(chat, tools=tools) for tools in (None, [{"type": "function"}])]

    assert texts == ["<user>hello</user>"] * 2


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [{"role": "user", "content": "hello"}], "no chat template"),
        (
            "{{ raise_exception('roles must alternate') }}",
            [{"role": "user", "content": ""}],
            "must alternate",
        ),
        ("{{ messages[0]['content'] + 1 }}", [{"role": "user", "content": "a"}], "refuses"),
        ({"other": "a"}, [{"role": "user", "content": "a"}], "no chat template for these"),
        ("{{ x }}", [], "at least one message"),
        ("{{ '' }}", [{"role": "user", "content": ""}], "at least one token"),
    ],
)
def test_messages_refused_by_the_template_raise_a_request_error(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    messages: list[dict[str, str]],
    message: str,
) -> None:
    tokenizer.chat_template = template

    with pytest.raises(RequestError, match=message):
        ChatTemplate(tokenizer).encode(messages)
