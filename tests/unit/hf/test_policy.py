"""A policy, a budget and a schedule of a `QuireCache` form one policy text."""

import pytest

from quire.errors import ConfigError, UnknownName
from quire.hf.evicting import make_rule


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
def test_budget_and_schedule_become_policy_options(given, text) -> None:
    assert make_rule(*given).text == text


@pytest.mark.parametrize(
    ("policy", "ratio", "text"),
    [
        ("snapkv", 0.5, "snapkv:cap=50%"),
        ("h2o:recent=4", 0.9, "h2o:recent=4,cap=10%"),
        ("recent", 1 / 3, "recent:cap=66.666666667%"),
        ("recent", 0.99999, "recent:cap=0.001%"),
        ("recent", 0.0, "full"),
        ("full", 0.0, "full"),
    ],
)
def test_compression_ratio_is_the_evicted_fraction_of_the_prompt(policy, ratio, text) -> None:
    assert make_rule(policy, None, None, None, ratio).text == text


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.7, 0.9])
def test_compression_ratio_keeps_exact_token_counts(ratio) -> None:
    cap = make_rule("recent", None, None, None, ratio).cap
    sizes = {"page_tokens": 16, "page_bytes": 1, "fixed_bytes": 0}

    assert cap.resolve(300, **sizes) == round(300 * (1 - ratio))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("recent", None, None, None, 1.0), ConfigError, "at least 0 and below 1, got 1.0"),
        (("recent", None, None, None, -0.1), ConfigError, "below 1, got -0.1"),
        (("recent", None, None, None, float("nan")), ConfigError, "below 1, got nan"),
        (("recent", 64, None, None, 0.5), ConfigError, "either budget=64 or compression_ratio"),
        (("recent:cap=64", None, None, None, 0.0), ConfigError, "either cap= in policy="),
        (("full", None, None, None, 0.5), ConfigError, "use an eviction policy"),
        (("full", None, "decode", None, 0.0), ConfigError, "when has no effect"),
        (("recnt", None, None, None, 0.0), UnknownName, "did you mean recent"),
    ],
)
def test_invalid_compression_ratio_is_refused(given, error, message) -> None:
    with pytest.raises(error, match=message):
        make_rule(*given)


def test_full_needs_no_budget() -> None:
    assert not make_rule("full", None, None, None).evicts


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (("recnt", 512, None, None), UnknownName, "did you mean recent"),
        (("recent", 512, "now", None), UnknownName, "schedule 'now'"),
        (("recent:sink=4", 512, None, None), ConfigError, "sinks"),
        (("recent:cap=5", 512, None, None), ConfigError, "is repeated"),
        (("recent", None, None, None), ConfigError, "needs a cap"),
        (("full", 512, None, None), ConfigError, "full"),
        (("full", None, "decode", None), ConfigError, "when has no effect"),
        (("recent:sinks=70", 80, None, None), ConfigError, "needs 71"),
        (("recent", 64, None, 64), ConfigError, "1 <= every < cap"),
        ((7, 64, None, None), ConfigError, "expected policy to be a text such as"),
    ],
)
def test_invalid_options_are_refused_by_name(given, error, message) -> None:
    with pytest.raises(error, match=message):
        make_rule(*given)
