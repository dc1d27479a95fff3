import json
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.config.sampling_params import SamplingParams
from quire.layout.eviction import KEEP_ALL
from quire.models.generation import GenerationDefaults
from quire.serve.errors import ReplicaLost, error_events
from serve.conftest import CHATS, COMPLETIONS, MESSAGES, PROMPT, RESPONSES, USER, ok


def python_output(llm, prompt=PROMPT, **options):
    return llm.generate(prompt, SamplingParams(**{"max_tokens": 4} | options))[0]


def python_chat(llm, **options):
    return python_output(llm, llm.encode_chat([USER]), **options)


# ---- completions ---------------------------------------------------------------------------------


def test_completion_has_the_openai_format_for_equivalent_prompts(complete, llm):
    body, output = complete(), python_output(llm)

    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "quire-tiny")
    choice = {"index": 0, "text": output.text, "logprobs": None, "finish_reason": "length"}
    assert body["choices"] == [choice | {"stop_reason": None}]
    assert body["usage"] == {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": 4,
        "total_tokens": len(output.prompt_token_ids) + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
        "kv_peak_bytes": output.usage.kv_peak_bytes,
        **dict.fromkeys(("evictions", "evicted_tokens", "recomputed_tokens"), 0),
    }

    ids = llm.encode(PROMPT)
    bodies = [complete(prompt=prompt) for prompt in (PROMPT, [PROMPT], ids, [ids])]
    assert {body["choices"][0]["text"] for body in bodies} == {python_output(llm).text}
    names = ("n", "stop", "temperature", "top_p", "logprobs", "seed", "echo", "stream")
    assert complete(**dict.fromkeys((*names, "logit_bias")))["choices"] == complete()["choices"]


def test_choices_are_ordered_by_prompt_and_index(complete, llm):
    prompts = ["<|doc|>The sea", "<|doc|>A king"]
    body = complete(prompt=prompts, n=2, temperature=1.0, seed=7)

    expected = [
        python_output(llm, prompt, temperature=1.0, seed=seed)
        for prompt in prompts
        for seed in (7, 8)
    ]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == [o.text for o in expected]
    usage = body["usage"]
    assert usage["prompt_tokens"] == sum(len(llm.encode(prompt)) for prompt in prompts)
    assert usage["completion_tokens"] == 16
    assert usage["kv_peak_bytes"] == sum(o.usage.kv_peak_bytes for o in expected)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"max_tokens": None, "ignore_eos": True}, 16),
        ({"max_tokens": None, "max_completion_tokens": 2}, 2),
        ({"max_tokens": 9, "max_completion_tokens": 2}, 2),
    ],
)
def test_number_of_tokens_follows_the_limits(complete, limits, count):
    assert complete(**limits)["usage"]["completion_tokens"] == count


def test_stop_string_or_token_ends_the_output_and_is_reported(complete, llm):
    text = python_output(llm).text
    stop = text[3:5]
    without = complete(stop=stop)["choices"][0]
    with_it = complete(stop=[stop], include_stop_str_in_output=True)["choices"][0]

    assert (without["finish_reason"], without["stop_reason"]) == ("stop", stop)
    assert without["text"] == text[: text.index(stop)]
    assert with_it["text"] == without["text"] + stop

    second = python_output(llm).token_ids[1]
    body = complete(stop_token_ids=[second])
    choice = body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", second)
    assert body["usage"]["completion_tokens"] == 2
    assert complete(stop_token_ids=[second], min_tokens=2)["usage"]["completion_tokens"] > 2


@pytest.mark.parametrize("options", [{"logit_bias": {"352": 100}}, {"allowed_token_ids": [352]}])
def test_logit_bias_and_allowed_tokens_select_the_output(complete, llm, options):
    assert complete(**options)["choices"][0]["text"] == llm.model.tokenizer.decode([352] * 4)


@pytest.mark.parametrize(
    "options",
    [
        *({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}, {"repetition_penalty": 1.3}),
        {"presence_penalty": 1.5, "frequency_penalty": 1.5},
    ],
)
def test_sampling_options_apply(complete, llm, options):
    base = {"temperature": 1.5, "seed": 3, "max_tokens": 8}
    expected = python_output(llm, **base, **options).text
    assert complete(**base, **options)["choices"][0]["text"] == expected
    plain = python_output(llm, **base).text
    assert expected != plain, "the option must matter for this prompt and seed"


def test_model_that_names_no_temperature_is_sampled_as_in_a_chat(complete, chat, llm, monkeypatch):
    monkeypatch.setattr(GenerationDefaults, "temperature", None)
    options = {"seed": 3, "max_tokens": 24}
    expected = python_output(llm, temperature=0.2, top_p=0.9, **options).text

    assert complete(**options)["choices"][0]["text"] == expected
    assert complete(temperature=1.0, **options)["choices"][0]["text"] != expected
    named = chat(temperature=0.2, top_p=0.9, **options)
    assert chat(**options)["choices"] == named["choices"]


def test_echo_includes_the_prompt_and_logprobs_have_four_columns(complete, llm):
    output = complete()["choices"][0]["text"]
    for prompt in (PROMPT, llm.encode(PROMPT)):
        assert complete(echo=True, prompt=prompt)["choices"][0]["text"] == PROMPT + output
    body = complete(echo=True, max_tokens=0)
    assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == (PROMPT, None)
    assert body["usage"]["completion_tokens"] == 0

    columns = complete(logprobs=2)["choices"][0]["logprobs"]

    output = python_output(llm, logprobs=2)
    pieces = [llm.model.tokenizer.decode([token]) for token in output.token_ids]
    assert columns["tokens"] == pieces
    assert columns["token_logprobs"] == pytest.approx([t.logprob for t in output.logprobs])
    assert columns["text_offset"] == [sum(map(len, pieces[:i])) for i in range(4)]
    tops = columns["top_logprobs"]
    for piece, logprob, top in zip(pieces, columns["token_logprobs"], tops, strict=True):
        assert top[piece] == logprob == max(top.values())
        assert len(top) == 2
    zero = complete(logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in zero["top_logprobs"]] == [[t] for t in zero["tokens"]]


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_logprobs_scores_the_prompt(complete, llm, max_tokens):
    choice = complete(echo=True, logprobs=1, max_tokens=max_tokens)["choices"][0]

    output = python_output(llm, max_tokens=max_tokens or 1, prompt_logprobs=1, logprobs=1)
    columns, num_prompt = choice["logprobs"], len(output.prompt_token_ids)
    assert "".join(columns["tokens"]) == choice["text"]
    assert columns["text_offset"][0] == 0
    assert len(columns["tokens"]) == num_prompt + max_tokens
    assert columns["token_logprobs"][0] is columns["top_logprobs"][0] is None
    scores = [s.logprob for s in output.prompt_logprobs[1:]]
    assert columns["token_logprobs"][1:num_prompt] == pytest.approx(scores, abs=1e-4)
    assert all(math.isfinite(value) for value in columns["token_logprobs"][1:])
    assert choice["finish_reason"] == "length"


def test_special_tokens_are_included_on_request(complete, llm):
    tokenizer = llm.model.tokenizer
    for options, text in (({}, ""), ({"skip_special_tokens": False}, tokenizer.bos_token * 4)):
        body = complete(allowed_token_ids=[tokenizer.bos_token_id], **options)
        assert body["choices"][0]["text"] == text


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 2.0, "n": 3},
        {"temperature": 2.0, "n": 3, "allowed_token_ids": list(range(140, 300))},  # with bytes
        {"temperature": 2.0, "skip_special_tokens": False, "include_stop_str_in_output": True},
        {"temperature": 1.0, "stop": [" the", "e"], "min_tokens": 5, "n": 2},
        {"use_beam_search": True, "n": 2, "beam_width": 4},
    ],
)
def test_text_offsets_are_positions_in_the_streamed_and_whole_text(complete, stream, options):
    options |= {"max_tokens": 40, "logprobs": 1, "seed": 7}
    chunks = stream(COMPLETIONS, prompt=PROMPT, **options)

    for choice in complete(**options)["choices"]:
        text, columns = choice["text"], choice["logprobs"]
        for piece, offset in zip(columns["tokens"], columns["text_offset"], strict=True):
            assert offset <= len(text)
            if "\N{REPLACEMENT CHARACTER}" not in piece and not piece.startswith("<|"):
                rest = text[offset:]
                assert rest.startswith(piece) or piece.startswith(rest)  # cut by a stop text
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        for column in ("tokens", "text_offset"):
            assert [v for c in own for v in c["logprobs"][column]] == columns[column]


# ---- several choices: the same as in Python, ordered by prompt -----------------------------------

PROMPTS = [PROMPT, "<|doc|>The sea"]
BEST = {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 4}
BEAMS = {"n": 2, "beam_width": 3, "use_beam_search": True, "early_stopping": "never"}


@pytest.mark.parametrize("options", [BEST, BEAMS])
def test_ranked_choices_are_numbered_in_prompt_order(complete, stream, llm, options):
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=4, **options))
    texts = [choice.text for output in outputs for choice in output.choices]
    body = complete(prompt=PROMPTS, **options)
    chunks = stream(COMPLETIONS, prompt=PROMPTS, max_tokens=4, **options)

    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * options["n"]))
    choices = [chunk["choices"][0] for chunk in chunks]  # streamed after they have ended
    in_order = sorted(choices, key=lambda choice: choice["index"])
    assert [choice["text"] for choice in in_order] == texts
    assert all(choice["finish_reason"] in ("length", "stop") for choice in choices)


def test_usage_counts_the_prompt_once_and_beams_of_a_chat_are_choices(complete, chat):
    one, two, best = (complete(**options)["usage"] for options in ({}, {"n": 2}, BEST))
    assert two["prompt_tokens"] == one["prompt_tokens"] == best["prompt_tokens"]
    assert (two["completion_tokens"], best["completion_tokens"]) == (8, 16)
    first, second = chat(use_beam_search=True, n=2)["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert first["message"]["content"] != second["message"]["content"]


# ---- chats ---------------------------------------------------------------------------------------


def test_chat_has_the_openai_format_and_an_output_within_the_kv_memory(chat, llm):
    body, output = chat(), python_chat(llm)

    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    message = {"role": "assistant", "content": output.text, "refusal": None, "tool_calls": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    assert body["choices"] == [choice | {"stop_reason": None}]
    assert body["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    assert body["usage"]["kv_peak_bytes"] == output.usage.kv_peak_bytes > 0

    # 4 MiB hold fewer tokens than quire-tiny's context: the pool limits the output
    body = chat(messages=[USER | {"content": "word " * 480}], max_tokens=None, ignore_eos=True)
    longest = llm.engine.scheduler.peaks.longest_request(llm.model.spec.max_positions, KEEP_ALL)
    assert body["usage"]["total_tokens"] == longest < llm.model.spec.max_positions


def test_logprobs_list_tokens_with_their_bytes(chat, llm):
    content = chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]

    output = python_chat(llm, logprobs=2)
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == output.text
    logprobs = [token.logprob for token in output.logprobs]
    assert [entry["logprob"] for entry in content] == pytest.approx(logprobs)
    for entry in content:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    plain = chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[], [], [], []]


# ---- metadata of a body is repeated in the response, as in OpenAI's API --------------------------

METADATA = {"trace": "t-9"}


def test_response_and_chunks_include_the_metadata_of_the_request(complete, stream):
    assert complete(metadata=METADATA)["metadata"] == METADATA
    assert "metadata" not in complete()
    chunks = stream(CHATS, messages=[USER], max_tokens=2, metadata=METADATA)
    assert [chunk["metadata"] for chunk in chunks] == [METADATA] * len(chunks) != []


@pytest.mark.parametrize("metadata", [{"n": 1}, {"n": "v" * 513}, {str(i): "" for i in range(17)}])
def test_invalid_metadata_is_refused(post, metadata):
    response = post(COMPLETIONS, prompt="Once", max_tokens=1, metadata=metadata)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("metadata")


# ---- streams equal the responses without streaming -----------------------------------------------

CHAT = {"messages": [USER], "max_tokens": 6}
TEXT = {"prompt": PROMPT, "max_tokens": 6}


def joined(chunks, index=0):
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(choice["text"] for choice in choices), choices


def test_chunks_equal_the_whole_completion_or_chat(stream, complete, chat):
    whole = complete(**TEXT, logprobs=1)["choices"][0]
    chunks = stream(COMPLETIONS, **TEXT, logprobs=1)

    text, choices = joined(chunks)
    assert text == whole["text"]
    assert len(choices) > 1
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    for column in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [v for c in choices for v in c["logprobs"][column]] == whole["logprobs"][column]

    chunks = stream(CHATS, **CHAT)

    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    deltas = [choice["delta"] for choice in middle]
    assert all(set(delta) == {"content"} and delta["content"] for delta in deltas)
    text = "".join(delta["content"] for delta in deltas)
    assert text == chat(**CHAT)["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_choices_share_a_stream_whose_last_chunk_has_the_usage(stream, complete, chat):
    options = {"prompt": PROMPTS, "n": 2, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    chunks = stream(COMPLETIONS, **options, max_tokens=5)
    for choice in complete(**options, max_tokens=5)["choices"]:
        text, choices = joined(chunks, choice["index"])
        assert text == choice["text"]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]

    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(COMPLETIONS, prompt=PROMPT, max_tokens=5, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 5
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1

    long = {"prompt": PROMPT, "max_tokens": 1_000, "ignore_eos": True}
    for path, body, whole in (
        (COMPLETIONS, long, complete(**long)),
        (COMPLETIONS, TEXT, complete(**TEXT)),
        (CHATS, CHAT, chat(**CHAT)),
    ):
        *chunks, last = stream(path, **body, stream_options={"include_usage": True})
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert last["usage"].get("max_tokens_limit") == ("kv_memory" if body is long else None)
        assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("text", ["é", "你", "😀"])
def test_incomplete_characters_are_held_back_with_their_logprobs(stream, llm, text):
    """The bytes of a character are generated one by one: no chunk has an incomplete character."""
    ids = llm.encode(text)
    assert len(ids) > 1
    chunks = stream(CHATS, **CHAT | {"max_tokens": 4}, logprobs=True, allowed_token_ids=ids)

    choices = [chunk["choices"][0] for chunk in chunks]
    tokens = [token for c in choices if c["logprobs"] for token in c["logprobs"]["content"]]
    raw = b"".join(bytes(token["bytes"]) for token in tokens)
    assert len(tokens) == len(raw) == 4
    assert "".join(c["delta"].get("content", "") for c in choices) == raw.decode(errors="replace")


LINE_ENDS = "\u2028\u2029\x85\v\f\x1c\x1d\x1e\r\n"
"""Characters at which `str.splitlines` splits, and with it many clients of streams."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": f"<|doc|>a{LINE_ENDS}", "echo": True}),
        (CHATS, CHAT),
        (RESPONSES, {"input": "A", "metadata": {f"a{LINE_ENDS}": f"b{LINE_ENDS}"}}),
        (MESSAGES, CHAT),
    ],
)
def test_line_boundaries_of_unicode_do_not_split_events(post, path, body):
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    options = {"structured_outputs": {"choice": ["a\u2028\u2029\x85b"]}, limit: 40, "stream": True}
    response = post(path, **body | options)

    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line not in ("", "data: [DONE]")]
    events = [line for line in lines if not line.startswith("event: ")]
    assert all(json.loads(line.removeprefix("data: ")) for line in events)
    assert all(f"\\u{ord(end):04x}" in response.text for end in "\u2028\u2029\x85")
    error = error_events(ReplicaLost(f"a{LINE_ENDS}b"), path).decode()
    assert len(error.splitlines()) == len(error.split("\n")) - 1


def test_failed_output_ends_the_stream_with_an_error(stream, llm):
    """min_tokens masks the EOS tokens, which are the only allowed tokens."""
    eos = list(llm.model.generation.eos_token_ids)
    [chunk] = stream(COMPLETIONS, prompt=PROMPT, allowed_token_ids=eos, min_tokens=2)
    assert list(chunk) == ["error"]
    assert chunk["error"]["code"] == 400
    assert "leave no token to sample" in chunk["error"]["message"]


# ---- events of any request, read by a parser of the standard, in any pieces ----------------------

TEXTS = st.text(
    st.characters(codec="utf-8") | st.sampled_from("\r\n\u2028\u2029\x85\x0b\0:{}\"'\\"),
    min_size=1,
    max_size=24,
)
SHARED = [HealthCheck.function_scoped_fixture]  # every request has a new application


class EventParser:
    """Parser of `text/event-stream`, as in section 9.2.6 of the HTML standard."""

    def __init__(self):
        self.events, self._data, self._kind, self._rest = [], [], "", b""

    def feed(self, piece):
        self._rest += piece
        *whole, self._rest = self._rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            self._line(line.decode("utf-8"))

    def _line(self, line):
        if not line:
            if self._data:
                self.events.append((self._kind or "message", "\n".join(self._data)))
            self._data, self._kind = [], ""
            return
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._kind = value

    @property
    def is_complete(self):
        return not self._rest and not self._data


def events_of(content, seed):
    """Events of a body that arrives in pieces of random sizes."""
    rng, parser, start = random.Random(seed), EventParser(), 0
    while start < len(content):
        size = rng.choice((1, 2, 3, 7, 64, 4096))
        parser.feed(content[start : start + size])
        start += size
    assert parser.is_complete
    return parser.events


@settings(max_examples=15, suppress_health_check=SHARED)
@given(text=TEXTS, n=st.integers(1, 3), seed=st.integers(0, 99))
def test_streamed_echo_is_the_whole_text(post, text, n, seed):
    body = {"prompt": text, "max_tokens": 2, "temperature": 0, "echo": True, "n": n}
    whole = ok(post(COMPLETIONS, **body))
    *events, last = events_of(post(COMPLETIONS, **body, stream=True).content, seed)
    assert last == ("message", "[DONE]")
    chunks = [json.loads(data) for _, data in events]
    assert [joined(chunks, i)[0] for i in range(n)] == [c["text"] for c in whole["choices"]]


@settings(max_examples=10, suppress_health_check=SHARED)
@given(text=TEXTS, seed=st.integers(0, 99), logprobs=st.booleans(), usage=st.booleans())
def test_streamed_chat_is_the_whole_message(post, text, seed, logprobs, usage):
    body = {"messages": [USER | {"content": text}], "max_tokens": 3, "temperature": 0}
    whole = post(CHATS, **body).json()

    options = {"stream": True, "logprobs": logprobs, "stream_options": {"include_usage": usage}}
    *events, (_, last) = events_of(post(CHATS, **body, **options).content, seed)
    chunks = [json.loads(data) for _, data in events]
    deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert last == "[DONE]"
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]
    assert any("usage" in chunk and chunk["usage"] for chunk in chunks) == usage


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@settings(max_examples=6, suppress_health_check=SHARED)
@given(text=TEXTS, seed=st.integers(0, 99))
def test_named_events_agree_with_their_data(post, path, text, seed):
    body = {"messages": [USER | {"content": text}], "max_tokens": 3}
    if path == RESPONSES:
        body = {"input": text, "max_output_tokens": 3}
    response = post(path, **body, stream=True)

    assert response.status_code == 200, response.text
    events = events_of(response.content, seed)
    assert all(json.loads(data)["type"] == kind for kind, data in events)
    assert len(events) > 3
