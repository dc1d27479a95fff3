"""A policy, a budget and a schedule beside a model make one policy text."""

import pytest

from quire.errors import ConfigError, UnknownName, UnsoundCombination
from quire.hf.policy import make_rule, refuse_renumbering


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("recent", 512, None, None), "recent:cap=512"),
        (("recent:sinks=4", "25%", None, None), "recent:sinks=4,cap=25%"),
        (("recent", "2MiB", "decode", 8), "recent:cap=2MiB,when=decode,every=8"),
        (("recent:cap=100", None, None, 9), "recent:cap=100,every=9"),
        (("recent:cap=100", None, None, None), "recent:cap=100"),
    ],
)
def test_the_parts_become_options(given, text) -> None:
    assert make_rule(*given).text == text


def test_full_needs_no_budget() -> None:
    assert not make_rule("full", None, None, None).evicts


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (("recnt", 512, None, None), UnknownName, "did you mean recent"),
        (("recent", 512, "now", None), UnknownName, "schedule 'now'"),
        (("recent:sink=4", 512, None, None), ConfigError, "sinks"),
        (("recent:cap=5", 512, None, None), ConfigError, "twice"),
        (("recent", None, None, None), ConfigError, "needs a cap"),
        (("full", 512, None, None), ConfigError, "full"),
        (("full", None, "decode", None), ConfigError, "when would change nothing"),
        (("recent:sinks=70", 134, None, None), ConfigError, "needs 71"),
        (("recent", 64, None, None), ConfigError, "1 <= every < cap"),
        ((7, 64, None, None), ConfigError, "expected policy to be a text such as"),
    ],
)
def test_mistakes_are_refused_by_name(given, error, says) -> None:
    with pytest.raises(error, match=says):
        make_rule(*given)


def test_streams_are_not_for_transformers_which_turns_keys_itself() -> None:
    refuse_renumbering(make_rule("sinks", 100, None, None))
    refuse_renumbering(make_rule("full", None, None, None))
    with pytest.raises(UnsoundCombination, match=r"keys before RoPE.*quire.LLM, or 'sinks'"):
        refuse_renumbering(make_rule("streaming", 100, None, None))
