"""Fields that change the prompt or are tokenized with it, rules of requests and tenants."""

import asyncio
import copy
import json
import math
import re
import sys
import threading
from dataclasses import replace

import pytest

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.serve.app import create_app
from quire.serve.config import ServerConfig
from quire.serve.errors import FieldError
from quire.serve.logprobs import TokenPieces
from quire.serve.protocol import Message
from quire.serve.tenant_keys import TenantFile, read_tenant_keys
from quire.serve.text import LONG_TEXT_CHARACTERS, Texts, Turn, sequences_of_words, with_budget
from serve.conftest import (
    CHATS,
    COMPLETIONS,
    PATIENCE_S,
    PROMPT,
    RESPONSES,
    USER,
    ok,
    post_to,
    refused,
)

BODIES = {COMPLETIONS: {"prompt": PROMPT}, CHATS: {"messages": [USER]}}
LONG = "<|doc|>Once upon a time there was a king who had three sons and a daughter. " * 8


# ---- truncate_prompt_tokens ----------------------------------------------------------------------


def test_truncated_prompt_is_the_end_of_the_prompt(complete, chat, llm):
    tokenizer = llm.model.tokenizer
    whole = complete(prompt=tokenizer.encode(LONG)[-20:], max_tokens=6)
    cut = complete(prompt=LONG, truncate_prompt_tokens=20, max_tokens=6)

    assert cut["usage"]["prompt_tokens"] == 20
    assert cut["choices"][0]["text"] == whole["choices"][0]["text"]
    echoed = complete(truncate_prompt_tokens=2, echo=True, max_tokens=1)["choices"][0]["text"]
    assert echoed.startswith(tokenizer.decode(tokenizer.encode(PROMPT)[-2:]))
    # a chat is truncated after the template
    assert chat(truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3


def test_prompt_over_the_longest_sequence_is_accepted_with_truncation(post, complete):
    too_long = {"prompt": LONG * 200, "max_tokens": 1}
    assert "characters" in refused(post(COMPLETIONS, **too_long), "prompt")
    assert complete(**too_long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] > 500


@pytest.mark.parametrize("value", [0, -2, "all", 1.5, True])
def test_wrong_number_of_prompt_tokens_is_refused(post, value):
    refused(post(COMPLETIONS, prompt="a", truncate_prompt_tokens=value), "truncate_prompt_tokens")


@pytest.fixture(scope="module")
def short():
    """An engine whose longest sequence has 64 tokens."""
    kv = KVConfig(memory="4MiB")
    opened = LLM("quire-tiny", dtype="float32", kv=kv, max_model_len=64, verify=False)
    yield opened
    opened.close()


IDS = list(range(300, 428))
WORDS = "word " * 200
WORDY = {"messages": [{"role": "user", "content": WORDS}]}
ROOM = [  # path, body, tokens of the prompt, tokens of the output
    (COMPLETIONS, {"prompt": IDS, "max_tokens": 20}, 44, 20),
    (COMPLETIONS, {"prompt": [IDS, IDS[:9]], "max_tokens": 20}, 53, 40),
    (COMPLETIONS, {"prompt": IDS, "max_tokens": 20, "n": 2}, 44, 40),
    (COMPLETIONS, {"prompt": WORDS, "max_tokens": 20}, 44, 20),
    (COMPLETIONS, {"prompt": WORDS, "max_tokens": 20, "echo": True}, 44, 20),
    (COMPLETIONS, {"prompt": IDS}, 48, 16),
    (COMPLETIONS, {"prompt": IDS[:44], "max_tokens": 20}, 44, 20),
    (COMPLETIONS, {"prompt": IDS[:45], "max_tokens": 20}, 44, 20),
    (COMPLETIONS, {"prompt": IDS[:10], "max_tokens": 1000}, 10, 54),
    (COMPLETIONS, {"prompt": IDS, "max_tokens": 1000}, 48, 16),
    (COMPLETIONS, {"prompt": IDS[:64], "max_tokens": 0, "echo": True, "logprobs": 0}, 64, 0),
    (COMPLETIONS, {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 0}, 64, 0),
    (CHATS, WORDY | {"max_tokens": 20}, 44, 20),
    (CHATS, WORDY | {"max_completion_tokens": 9}, 55, 9),
    (CHATS, WORDY, 32, 32),
    (CHATS, WORDY | {"max_tokens": 64}, 32, 32),
    (RESPONSES, {"input": WORDS, "max_output_tokens": 20}, 44, 20),
    ("/v1/embeddings", {"input": IDS[:64]}, 64, 0),
    ("/v1/embeddings", {"input": IDS, "pooling": "mean"}, 64, 0),
]


STREAMED = [row for row in ROOM if row[0] != "/v1/embeddings" and "logprobs" not in row[1]]


@pytest.mark.parametrize(
    ("path", "body", "prompt_tokens", "output_tokens", "stream"),
    [*((*row, False) for row in ROOM), *((*row, True) for row in STREAMED)],
)
def test_automatic_truncation_leaves_room_for_the_output(
    short, path, body, prompt_tokens, output_tokens, stream
):
    if path == RESPONSES:
        body = body | {"truncation": "auto", "stream": stream}
    else:
        body = body | {"truncate_prompt_tokens": -1, "stream": stream}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
    body |= {} if path == "/v1/embeddings" else {"ignore_eos": True}
    response = post_to(short, path, body)

    assert response.status_code == 200, response.text
    [usage] = re.findall(r'"usage": ?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})', response.text)[-1:]
    counts = json.loads(usage)
    assert counts.get("prompt_tokens", counts.get("input_tokens")) == prompt_tokens
    assert counts.get("completion_tokens", counts.get("output_tokens", 0)) == output_tokens


def test_long_texts_do_not_hold_the_threads_of_short_ones(llm):
    """A tokenizer is held within a long text until a short one of the same tenant has ended."""
    release = threading.Event()
    tokenizer = llm.model.tokenizer

    class Held(type(tokenizer)):
        def __call__(self, text, **options):
            if len(text) > LONG_TEXT_CHARACTERS:
                assert release.wait(PATIENCE_S)
            return super().__call__(text, **options)

    held = copy.copy(tokenizer)
    held.__class__ = Held
    held.chat_template = "{% if tools %}{{ tools[0].text }}{% endif %}{{ messages[0].content }}"
    long_text, message = "a " * 100_001, Message(role="user", content="a b")

    async def main():
        texts = Texts(replace(llm.model, tokenizer=held), TokenPieces(tokenizer), threads=1)
        turn = Turn("someone", None)
        try:
            long = [
                asyncio.create_task(texts.prompts([long_text], turn)),
                asyncio.create_task(texts.chat([message], turn, tools=[{"text": long_text}])),
            ]
            await asyncio.sleep(0)
            short = [
                await asyncio.wait_for(texts.prompts(["a b"], turn), PATIENCE_S),
                [await asyncio.wait_for(texts.chat([message], turn), PATIENCE_S)],
            ]
            assert not any(task.done() for task in long)
            release.set()
            return short, await asyncio.gather(*long)
        finally:
            release.set()
            texts.close()

    short, long = asyncio.run(main())

    assert [prompt.token_ids for [prompt] in short] == [llm.encode("a b")] * 2
    assert long[0][0].token_ids == llm.encode(long_text)
    assert long[1].token_ids == llm.encode(long_text + "a b")


# ---- bad_words -----------------------------------------------------------------------------------


def test_bad_word_is_not_generated(complete, llm):
    def text(**options):
        return complete(temperature=0, **options)["choices"][0]["text"]

    plain = text(max_tokens=12)
    word = plain.split()[1]
    assert word in plain
    assert word not in text(max_tokens=12, bad_words=[word]).split()

    first = text(max_tokens=1)
    second_id = llm.model.tokenizer.encode(text(max_tokens=1, bad_words=[first]))[-1]
    both = text(max_tokens=1, bad_words=[first], bad_token_ids=[[second_id]])
    assert both != first
    assert llm.model.tokenizer.encode(both)[-1] != second_id


@pytest.mark.parametrize("value", [[""], ["a" * 300], "a", [5], ["a"] * 2000])
def test_wrong_bad_words_are_refused(post, value):
    response = post(COMPLETIONS, prompt="a", bad_words=value)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("bad_words")


def test_sequences_of_a_word(llm):
    tokenizer = llm.model.tokenizer
    found = sequences_of_words(tokenizer, ["king", "king"])

    assert tokenizer.encode("king", add_special_tokens=False) in [list(ids) for ids in found]
    assert len(set(found)) == len(found)
    assert {tokenizer.decode(list(ids)).strip() for ids in found} == {"king"}
    with pytest.raises(FieldError, match="expected words with tokens"):
        sequences_of_words(tokenizer, [" "])


# ---- prompt_logprobs -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_scores_of_the_prompt(post, path):
    body = ok(post(path, **BODIES[path], max_tokens=2, prompt_logprobs=2))
    first, *scores = (body["choices"][0] if path == COMPLETIONS else body)["prompt_logprobs"]

    assert first is None
    assert len(scores) == body["usage"]["prompt_tokens"] - 1
    for score in scores:
        assert 2 <= len(score) <= 3
        assert sorted(entry["rank"] for entry in score.values())[:2] == [1, 2]
        assert all(entry["logprob"] <= 0 for entry in score.values())
        assert all(isinstance(entry["decoded_token"], str) for entry in score.values())
    streamed = post(path, **BODIES[path], prompt_logprobs=0, stream=True)
    assert "cannot be streamed" in refused(streamed, "prompt_logprobs")
    assert "prompt_logprobs" not in post(path, **BODIES[path], max_tokens=1).text


def test_scores_equal_those_of_an_echo(complete):
    echoed = complete(echo=True, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    scored = complete(prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    for expected, entry in zip(echoed["token_logprobs"][1:-1], scored[1:], strict=True):
        [found] = entry.values()
        assert math.isclose(found["logprob"], expected, abs_tol=1e-5)


# ---- kv_budget and rules -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evicting():
    kv = KVConfig(memory="8MiB", evict_allow="all")
    return LLM("quire-tiny", dtype="float32", kv=kv, verify=False)


def test_budget_limits_the_kv_of_a_request(evicting):
    body = {"prompt": LONG, "max_tokens": 4, "evict": "recent:cap=128,every=8,sinks=2"}
    wide, narrow, share = (
        post_to(evicting, COMPLETIONS, body | {"kv_budget": budget}).json()["usage"]
        for budget in (128, 32, "25%")
    )

    assert narrow["kv_peak_bytes"] < wide["kv_peak_bytes"]
    assert narrow["evicted_tokens"] > wide["evicted_tokens"]
    assert share["evicted_tokens"] > 0


@pytest.mark.parametrize("budget", [0, -3, "much", 1.5, "2%%", True])
def test_wrong_budget_is_refused(evicting, post, budget):
    body = {"prompt": "a", "evict": "h2o:cap=64", "kv_budget": budget}
    response = post_to(evicting, COMPLETIONS, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("kv_budget")
    # without a rule, with an example
    assert "recent:cap=64" in refused(post(COMPLETIONS, prompt="a", kv_budget=64), "kv_budget")


def test_budget_keeps_the_other_options_of_a_rule():
    assert with_budget("h2o:recent=4,cap=64", "25%") == "h2o:recent=4,cap=25%"
    assert with_budget("recent:cap=64", 0.5) == "recent:cap=0.5"


def test_rule_of_a_tenant_is_the_default_of_its_requests(evicting, tmp_path, llm):
    path = tmp_path / "tenants.toml"
    path.write_text('[default]\nevict = "recent:cap=32,every=8,sinks=2"\n')
    body, tenants = {"prompt": LONG, "max_tokens": 4}, read_tenant_keys(path)
    own, full = (
        post_to(evicting, COMPLETIONS, body | rule, tenants=tenants).json()["usage"]
        for rule in ({}, {"evict": "full"})
    )

    assert own["evicted_tokens"] > 0 == full["evicted_tokens"]
    with pytest.raises(ConfigError, match=r"tenant 'a', evict: .*h2o"):
        create_app(llm, tenants=TenantFile(evict={"a": "h2o:cap=64"}))


# ---- chat templates ------------------------------------------------------------------------------

TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


def test_chat_template_of_the_option_is_used(send, llm, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    own = llm.model.tokenizer.chat_template
    body = {"messages": [{"role": "user", "content": "Hi"}], "return_token_strs": True}

    for option in (str(path), TEMPLATE):
        [response] = send(("POST", "/tokenize", {"json": body}), chat_template=option)
        assert "".join(response.json()["token_strs"]) == "[user] Hi\n"
    assert llm.model.tokenizer.chat_template == own


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("no such file.jinja", "cannot read --chat-template"),
        ("{% for a in b %}", "its text, line 1"),
        ("{{ a.b( }}", "its text, line 1"),
    ],
)
def test_wrong_template_is_refused_at_start(llm, template, message):
    with pytest.raises(ConfigError, match=message):
        create_app(llm, ServerConfig(chat_template=template))


# ---- rules of requests and default rules ---------------------------------------------------------


def test_request_sets_its_policy_and_usage_reports_evicted_tokens(evicting, monkeypatch):
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
    full, capped = (
        post_to(evicting, COMPLETIONS, body | rule).json()["usage"]
        for rule in ({}, {"evict": "h2o:cap=16,every=4"})
    )

    assert full["evicted_tokens"] == 0
    assert capped["evicted_tokens"] > 20
    assert full["evictions"] == 0 < capped["evictions"] <= 10
    assert capped["completion_tokens"] == 40
    monkeypatch.setitem(sys.modules, "scipy", None)
    response = post_to(evicting, COMPLETIONS, {"prompt": "Once", "evict": "kmeans:cap=64"})
    assert "kmeans needs scipy" in refused(response, "evict")


@pytest.fixture(scope="module")
def percent_llm():
    kv = KVConfig(memory="8MiB", evict="snapkv:cap=50%,when=prefill_end")
    return LLM("quire-tiny", dtype="float32", kv=kv, verify=False)


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [300]}),
        (COMPLETIONS, {"prompt": [[300], [300] * 66], "n": 2}),
        (COMPLETIONS, {"prompt": [300] * 40, "stream": True}),
        (COMPLETIONS, {"prompt": [300], "kv_budget": "1%"}),
        (COMPLETIONS, {"prompt": [300], "evict": "snapkv:cap=0.01"}),
        (CHATS, {"messages": HI}),
        ("/v1/messages", {"model": "quire-tiny", "messages": HI}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": ["hello", "<|doc|>"]}),
    ],
)
def test_short_prompt_is_served_by_a_default_rule_with_a_cap_in_percent(percent_llm, path, body):
    response = post_to(percent_llm, path, body | ({} if "input" in body else {"max_tokens": 4}))
    assert response.status_code == 200, response.text
    assert '"error":{' not in response.text
