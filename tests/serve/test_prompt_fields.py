"""Fields that change the prompt or are tokenized with it; bounds of texts; rules."""

import asyncio
import copy
import json
import math
import re
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.sampling.detokenizer import REPLACEMENT
from quire.sampling.outputs import OutputDelta
from quire.sampling.sampler import SampledToken
from quire.serve.app import create_app
from quire.serve.config import ServerConfig
from quire.serve.errors import FieldError
from quire.serve.logprobs import TokenPieces
from quire.serve.protocol import Message
from quire.serve.responses import CompletionWriter
from quire.serve.tenant_keys import TenantFile, read_tenant_keys
from quire.serve.text import (
    LONG_TEXT_CHARACTERS,
    FairPool,
    Texts,
    Turn,
    sequences_of_words,
    text_length,
    with_budget,
)
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


def test_truncated_prompts_are_the_end_and_scores_those_of_an_echo(complete, chat, llm, post):
    tokenizer = llm.model.tokenizer
    whole = complete(prompt=tokenizer.encode(LONG)[-20:], max_tokens=6)
    cut = complete(prompt=LONG, truncate_prompt_tokens=20, max_tokens=6)

    assert cut["usage"]["prompt_tokens"] == 20
    assert cut["choices"][0]["text"] == whole["choices"][0]["text"]
    echoed = complete(truncate_prompt_tokens=2, echo=True, max_tokens=1)["choices"][0]["text"]
    assert echoed.startswith(tokenizer.decode(tokenizer.encode(PROMPT)[-2:]))
    # a chat is truncated after the template
    assert chat(truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3

    too_long = {"prompt": LONG * 200, "max_tokens": 1}
    assert "characters" in refused(post(COMPLETIONS, **too_long), "prompt")
    assert complete(**too_long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] > 500
    echoed = complete(echo=True, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    scored = complete(prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    for expected, entry in zip(echoed["token_logprobs"][1:-1], scored[1:], strict=True):
        [found] = entry.values()
        assert math.isclose(found["logprob"], expected, abs_tol=1e-5)


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


def test_rules_of_tenants_are_defaults_and_budgets_keep_other_options(evicting, tmp_path, llm):
    assert with_budget("h2o:recent=4,cap=64", "25%") == "h2o:recent=4,cap=25%"
    assert with_budget("recent:cap=64", 0.5) == "recent:cap=0.5"

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


# ---- the lower bound of the number of tokens of a text -------------------------------------------

BYTES = {letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}


def make_tokenizer(normalizer=None, model=None, vocab=BYTES, added=()):
    tokenizer = Tokenizer(model or models.BPE(vocab, []))
    tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def characters_per_token(tokenizer):
    return getattr(text_length(tokenizer), "characters_per_token", None)


def test_bound_of_texts_is_the_longest_entry_or_none(llm):
    width = characters_per_token(llm.model.tokenizer)
    assert width == len("Ġunderstand")
    assert characters_per_token(make_tokenizer()) == 1
    for text in ("understand " * 100, "particular" * 50, "\n" * 999, "x" * 999, "é你😀" * 333):
        assert len(llm.encode(text)) * width >= len(text)
    token = AddedToken("<mask>", lstrip=True, normalized=True)
    words = models.WordLevel({"<unk>": 0, "Hi": 1}, unk_token="<unk>")
    assert text_length(make_tokenizer(normalizers.NFKC(), added=[token])) is None
    assert text_length(make_tokenizer(added=[token])).stripping == ("<mask>",)
    assert characters_per_token(make_tokenizer(model=words)) is None


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        (normalizers.NFC(), 4),
        (normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("_")]), 4),
        (normalizers.Replace(" ", "_"), 1),
        (normalizers.Replace("  ", " "), None),
        (normalizers.Strip(), None),
        (normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()]), None),
    ],
)
def test_shortening_normalizer_widens_or_removes_the_bound(normalizer, expected):
    assert characters_per_token(make_tokenizer(normalizer)) == expected


@pytest.mark.parametrize("sides", [{"lstrip": True}, {"rstrip": True}, {}])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Replace(" ", "_")])
def test_spaces_stripped_by_an_added_token_are_not_counted(sides, special, normalizer):
    token = AddedToken("<mask>", special=special, normalized=False, **sides)
    tokenizer = make_tokenizer(normalizer, added=[token])
    length = text_length(tokenizer)
    spaces = " \n\t\u00a0\u3000\u2029" * 500

    for text in (spaces, f"<mask>{spaces}", f"{spaces}<mask>", f"a{spaces}<mask>{spaces}b" * 3):
        num_tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
        assert length.min_tokens(text) <= num_tokens
    assert length.min_tokens("x" * 6000) >= 6000 // (4 * len("<mask>"))
    assert length.min_tokens(spaces) >= len(spaces) // (4 * len("<mask>"))
    assert length.stripping == (("<mask>",) if sides else ())


# ---- texts, bytes and positions of single tokens, for all kinds of tokenizers --------------------


@pytest.fixture(scope="module")
def sentence_pieces():
    """A tokenizer like SentencePiece: tokens include leading spaces, with byte fallback."""
    names = ["<unk>", "▁Hello", "▁world", "s", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    found.add_special_tokens({"bos_token": "<s>"})  # its id is 8
    return found


def test_text_of_tokens_and_their_exact_bytes(sentence_pieces, llm):
    pieces = TokenPieces(sentence_pieces)
    assert sentence_pieces.decode([2]) == "world"
    assert [pieces.text(token) for token in (1, 2, 3)] == [" Hello", " world", "s"]
    assert pieces.raw(2) == b" world"
    assert b"".join(pieces.raw(token) for token in (4, 5, 6, 7)).decode() == "😀"
    pieces, text = TokenPieces(llm.model.tokenizer), "naïve 你好 😀 \x00\n\t~"
    assert b"".join(pieces.raw(token) for token in llm.encode(text)) == text.encode()
    raws = [pieces.raw(token) for token in range(2048)]
    assert len({raw for raw in raws if len(raw) == 1}) == 256

    pieces = TokenPieces(None)
    assert (pieces.text(17), pieces.raw(17)) == ("token_id:17", b"token_id:17")
    assert positions(pieces, [3, 4], "") == [("token_id:3", 0), ("token_id:4", 0)]


def positions(pieces, token_ids, text):
    """Text and position of each token of a prompt."""
    return pieces.placed(token_ids, pieces.prompt_offsets(token_ids, text), text)


@pytest.mark.parametrize(
    ("token_ids", "text", "expected"),
    [
        ([1, 2, 3], "Hello worlds", [("Hello", 0), (" world", 5), ("s", 11)]),
        ([8, 1, 2], "Hello world", [("<s>", 0), ("Hello", 0), (" world", 5)]),
        ([8, 1, 2], "<s> Hello world", [("<s>", 0), (" Hello", 3), (" world", 9)]),
        ([1, 4, 5, 6, 7, 3], "Hello😀s", [0, 5, 5, 5, 5, 6]),
        ([1, 4, 5], "Hello\N{REPLACEMENT CHARACTER}", [0, 5, 5]),
        ([1, 2], "Hello", [("Hello", 0), (" world", 5)]),  # a stop text cut the rest
        ([1, 2, 3], "Hello wo", [("Hello", 0), (" world", 5), ("s", 8)]),
        ([1, 2], "hello   World", [(" Hello", 0), (" world", 5)]),  # normalized
        ([4, 1, 2], "\N{REPLACEMENT CHARACTER} Hello world", [0, 1, 7]),
        ([], "", []),
    ],
)
def test_tokens_have_their_position_in_the_text(sentence_pieces, token_ids, text, expected):
    found = positions(TokenPieces(sentence_pieces), token_ids, text)
    if expected and isinstance(expected[0], int):
        found = [offset for _, offset in found]
    assert found == expected


@given(ids=st.lists(st.integers(0, 2047), max_size=30))
def test_positions_in_decoded_prompts_are_those_of_the_tokens(llm, ids):
    pieces, text = TokenPieces(llm.model.tokenizer), llm.model.tokenizer.decode(ids)
    for piece, offset in positions(pieces, ids, text):
        assert offset <= len(text)
        if REPLACEMENT not in piece:
            assert text[offset:].startswith(piece)


@pytest.mark.parametrize(
    ("texts", "chunks"),
    [
        # "#" may begin a stop text: its token is sent with its text, or at the end
        ([("a", 0, "a"), ("#", 1, ""), ("b", 2, "#b")], [[("a", 0)], [("#", 1), ("b", 2)]]),
        ([("a", 0, "a"), ("#", 1, ""), ("#", 2, "")], [[("a", 0)], [("#", 1), ("#", 1)]]),
        ([("a", 0, ""), ("#", 1, "a"), ("b", 2, "#b")], [[("a", 0)], [("#", 1), ("b", 2)]]),
    ],
)
def test_streamed_tokens_have_positions_within_the_sent_text(llm, texts, chunks):
    writer = CompletionWriter(index=0, pieces=TokenPieces(llm.model.tokenizer), wants_logprobs=True)
    reasons, sent = [None] * (len(texts) - 1) + ["stop"], []
    for (token, offset, text), reason in zip(texts, reasons, strict=True):
        sampled = SampledToken(llm.encode(token)[0], -1.0, (), 1, text_offset=offset)
        delta = OutputDelta(request_id="r", text=text, logprobs=(sampled,), finish_reason=reason)
        sent += [choice["logprobs"] for choice in writer.chunks(delta)]
    assert [list(zip(one["tokens"], one["text_offset"], strict=True)) for one in sent] == chunks


# ---- a thread pool with round-robin scheduling between tenants -----------------------------------


def run(main, threads):
    async def with_pool():
        pool = FairPool(threads, "test")
        try:
            return await main(pool)
        finally:
            pool.close()

    return asyncio.run(asyncio.wait_for(with_pool(), 20))


def test_work_runs_in_one_thread_round_robin_and_survives_exceptions():
    async def main(pool):
        with pytest.raises(ZeroDivisionError):
            await pool.run("a", lambda: 1 / 0)
        return await pool.run("a", lambda: threading.current_thread().name)

    assert run(main, 1).startswith("test")

    jobs, order = ["a0", "a1", "a2", "a3", "b0", "b1", "c0"], []

    async def main(pool):
        await asyncio.gather(*(pool.run(job[0], partial(order.append, job)) for job in jobs))

    run(main, 1)
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]

    async def main(pool):
        await asyncio.gather(*(pool.run(str(n), int) for n in range(50)))
        return pool._tenants

    assert run(main, 3) == {}


def test_tenants_with_single_jobs_do_not_starve_a_queue():
    order = []

    async def one_at_a_time(pool, tenant):
        for _ in range(20):
            await pool.run(tenant, lambda: order.append(tenant))

    async def main(pool):
        queue = [pool.run("queue", lambda: order.append("queue")) for _ in range(10)]
        await asyncio.gather(*queue, one_at_a_time(pool, "a"), one_at_a_time(pool, "b"))

    run(main, 1)

    assert order[:30].count("queue") >= 9


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_one_tenant_leaves_a_thread_free(threads):
    running, counts = set(), []

    def work():
        name = threading.current_thread().name
        running.add(name)
        counts.append(len(running))
        time.sleep(0.01)
        running.remove(name)

    async def main(pool):
        await asyncio.gather(*(pool.run("a", work) for _ in range(20)))

    run(main, threads)
    assert max(counts) == max(1, threads - 1)


def test_cancelled_waiting_work_does_not_run():
    calls, release = [], threading.Event()

    async def main(pool):
        first = asyncio.create_task(pool.run("a", release.wait))
        await asyncio.sleep(0)
        second = asyncio.create_task(pool.run("a", lambda: calls.append(1)))
        await asyncio.sleep(0)
        second.cancel()
        release.set()
        await first
        return await pool.run("a", lambda: "next")

    assert run(main, 1) == "next"
    assert not calls
