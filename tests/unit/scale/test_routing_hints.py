"""What a router learns from bodies: common beginnings of prompts are common blocks."""

import json

from hypothesis import given
from hypothesis import strategies as st

from quire.scale.http_call import HttpCall, routed_request

BLOCK_WORDS = 2
BLOCK_BYTES = 4 * BLOCK_WORDS


def hints(body, *, tenant="default", headers=(), method="POST"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    call = HttpCall(
        method=method,
        path="/v1/completions",
        raw_path=b"/v1/completions",
        query_string=b"",
        scheme="http",
        headers=tuple(headers),
        body=content,
    )
    return routed_request(call, tenant, BLOCK_WORDS)


def common(one, other):
    pairs = zip(one.prompt_blocks, other.prompt_blocks, strict=False)
    return sum(1 for a, b in pairs if a == b)


@given(st.binary(max_size=64), st.binary(max_size=64), st.binary(max_size=64))
def test_texts_share_the_blocks_of_their_common_beginning(beginning, one, other):
    shared, left, right = (text.hex() for text in (beginning, one, other))
    texts = shared + left, shared + right
    equal = next(
        (n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts))
    )

    found = [hints({"prompt": text}) for text in texts]

    assert common(*found) == equal // BLOCK_BYTES
    assert found[0].prompt_tokens == -(-len(texts[0]) // 4)


@given(
    st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=9),
    st.lists(st.integers(0, 9), max_size=9),
)
def test_token_ids_are_words(ids, more):
    one, other = hints({"prompt": ids}), hints({"prompt": ids + more})

    assert common(one, other) == len(ids) // BLOCK_WORDS
    assert (one.prompt_tokens, other.prompt_tokens) == (len(ids), len(ids) + len(more))


def test_a_body_that_no_replica_takes_has_no_hints():
    deep = b'{"messages": ' + b"[" * 600 + b"]" * 600 + b"}"

    for body in (b"{", deep, {"prompt": "a", "user": "\ud800"}, {"prompt": [1.5, float("nan")]}):
        found = hints(body)

        assert (found.prompt_tokens, found.session) == (0, None)


def test_a_longer_chat_shares_the_blocks_of_its_first_turns():
    turns = [{"role": "system", "content": "s" * 40}, {"role": "user", "content": "u" * 40}]
    tools = [{"type": "function", "function": {"name": "f"}}]

    first = hints({"messages": turns, "tools": tools})
    second = hints({"messages": [*turns, {"role": "user", "content": "more"}], "tools": tools})

    assert common(first, second) == len(first.prompt_blocks) > 10
    assert common(first, hints({"messages": turns})) == 0


def test_salt_tenant_and_model_separate_prompts():
    body = {"prompt": "x" * 64}
    plain = hints(body)

    assert common(plain, hints(body)) == 8
    for other in (
        hints(body | {"cache_salt": "s"}),
        hints(body | {"model": "m"}),
        hints(body, tenant="b"),
    ):
        assert common(plain, other) == 0


def test_the_session_is_named_by_header_or_body():
    header = [(b"x-session-id", b"h")]

    assert hints({"user": "u"}, headers=header).session == "h"
    assert hints({"user": "u"}).session == "u"
    assert hints({"user": "u", "prompt_cache_key": "k"}).session == "k"
    assert hints({"user": 3}).session is None


@given(
    st.one_of(
        st.binary(max_size=20),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["prompt", "messages", "user", "a"]), inner)
            ),
            max_leaves=6,
        ),
    )
)
def test_any_body_is_accepted(body):
    found = hints(body if isinstance(body, bytes) else json.dumps(body).encode())

    assert len(found.prompt_blocks) == found.prompt_tokens // BLOCK_WORDS


def test_other_methods_have_no_prompt():
    assert hints({"prompt": "x" * 64}, method="GET").prompt_tokens == 0
