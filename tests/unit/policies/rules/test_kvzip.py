"""KVzip: the tokens of its scoring pass, the slots they need, and the retained tokens."""

from dataclasses import replace

import pytest
import torch

from quire.errors import ConfigError, UnsoundCombination
from quire.layout.statistics import AttentionMax, ScoringPass
from quire.policies.eviction import LaneShape, make_eviction
from quire.policies.kvzip import KVzip
from quire.policies.view import KVView

PASS = ScoringPass(name="ab", first="AAA", later="BB", end="C", chunk_tokens=4, overlap=2)


def encode(text: str) -> list[int]:
    """One token for each letter: 100 for A, 101 for B, 102 for C."""
    return [ord(letter) - ord("A") + 100 for letter in text]


def test_a_prompt_is_repeated_in_chunks_after_a_text():
    """From the second chunk on, the text names the last tokens of the chunk before."""
    assert PASS.token_ids(range(9), encode) == (
        [100, 100, 100, 0, 1, 2, 3],
        [101, 101, 2, 3, 102, 4, 5, 6, 7],
        [101, 101, 6, 7, 102, 8],
    )
    assert PASS.token_ids(range(3), encode) == ([100, 100, 100, 0, 1, 2],)
    assert PASS.token_ids(range(5), lambda text: []) == ([0, 1, 2, 3], [2, 3, 4])


def test_slots_are_those_of_the_longest_chunk_with_a_token_per_byte():
    """One chunk: 3 bytes and 4 more. Several: 2 + 2 + 1 and twice 4."""
    assert [PASS.slots(tokens) for tokens in (1, 4, 5, 900)] == [1 + 7, 4 + 7, 4 + 13, 4 + 13]
    assert [PASS.tokens(tokens) for tokens in (4, 5, 9)] == [4 + 7, 5 + 2 * 13, 9 + 3 * 13]


def test_texts_are_encoded_once():
    encoded: list[str] = []
    PASS.token_ids(range(40), lambda text: encoded.append(text) or [])

    assert encoded == ["AAA", "BB", "C"]


@pytest.mark.parametrize(
    ("chunk", "prompt_tokens", "left", "found"),
    [
        (2048, 3000, 5192, 2048),
        (2048, 3000, 2061, 2048),  # 2048 and 13 of texts
        (2048, 3000, 2060, 2047),
        (2048, 900, 907, 2048),  # one chunk: 900 and 7
        (2048, 900, 906, 893),
        (2048, 3000, 77, 64),
        (2048, 3000, 76, r"64 tokens or more .* leave 76 of the context of 3076; shorten"),
        (2048, 3000, 0, "leave 0 of the context of 3000"),
        (64, 8000, 8000, 64),
        (63, 8000, 8000, r"chunk=63 divides .* 8000 .* into 127 parts; raise it to 64 or more"),
        (1, 8000, 8000, "into 8000 parts"),
        (1, 16, 100, 1),
        (1, 17, 100, r"into 17 parts; raise it to 2 or more"),
        (3, 40, 100, 3),
    ],
)
def test_chunks_fit_the_context_and_are_few_or_long(chunk, prompt_tokens, left, found):
    own = replace(PASS, chunk_tokens=chunk)
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            own.within(prompt_tokens, prompt_tokens + left)
    else:
        fitted = own.within(prompt_tokens, prompt_tokens + left)
        assert fitted == replace(PASS, chunk_tokens=found)
        assert fitted.slots(prompt_tokens) <= left


def test_a_text_with_more_tokens_than_bytes_is_refused():
    with pytest.raises(ConfigError, match="as 9 tokens, expected at most 7"):
        PASS.token_ids([1], lambda text: [0] * 3 * len(text))


def test_sinks_and_the_largest_weights_are_retained():
    """Of weights .1 .9 .3 .9 .2 and .8, three tokens after a sink are kept, the lower tie first."""
    rule = KVzip(sinks=1)
    weights = torch.tensor([[0.1, 0.9, 0.3, 0.9, 0.2, 0.8]])
    view = KVView(
        positions=torch.arange(6)[None],
        next_position=6,
        statistics={rule.statistics[0].name: weights},
    )
    retained = [rule.select(view, torch.tensor([n]))[0].nonzero()[:, 0].tolist() for n in (2, 4)]

    assert retained == [[0, 1], [0, 1, 3, 5]]


def test_a_rule_with_a_scoring_pass_evicts_once_after_prefill():
    lanes = LaneShape(num_layers=2, heads=2, page_tokens=4, page_bytes=256)
    spec = make_eviction("kvzip:cap=50%,chunk=100").for_request(300, lanes).spec

    assert (spec.when, spec.cap) == ("prefill_end", 150)
    assert spec.scoring == KVzip(chunk=100).statistics[0].scoring
    assert spec.scoring_slots(150) == 0  # the prompt is not evicted
    assert spec.scoring_slots(300) == 100 + len(spec.scoring.later) + 8 + len(":") + 2 * 4
    wrapped = make_eviction("value_norm:base=(kvzip:chunk=100),cap=50%").for_request(300, lanes)
    assert wrapped.spec.scoring == spec.scoring
    for when in ("decode", "prefill_and_decode", "pressure"):
        with pytest.raises(UnsoundCombination, match=f"with when={when} tokens are evicted"):
            make_eviction(f"kvzip:cap=50%,when={when}")


def test_statistics_of_passes_with_other_chunks_share_a_group():
    names = [
        AttentionMax(heads, of=KVzip(chunk=n).statistics[0].of).name
        for heads in ("max", "mean")
        for n in (8, 9)
    ]
    assert names == ["attention_max.max.repeat"] * 2 + ["attention_max.mean.repeat"] * 2
