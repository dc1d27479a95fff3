"""Policies on positions: recent, sinks, streaming, random."""

import pytest

from quire.errors import ConfigError
from quire.policies.random import Random
from quire.policies.recent import Recent
from quire.policies.registry import registered
from quire.policies.sinks import Sinks
from quire.policies.streaming import Streaming
from quire.policies.value_norm import ValueNorm
from support.histories import best, keep_of, make_history, retained_positions

WORD = (1 << 64) - 1


@pytest.mark.parametrize(
    ("policy", "sinks"),
    [(Recent(), 0), (Recent(sinks=2), 2), (Sinks(), 4), (Streaming(), 4), (Streaming(sinks=1), 1)],
)
def test_sinks_and_newest_tokens_are_retained(policy, sinks):
    history = make_history(ragged=False, fixed=1)
    view = history.view()
    keep = keep_of(view, 0.5)

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        cached = history.cached[lane]
        first = [t for t in cached if t < sinks]
        newest = [t for t in cached if t not in first][len(first) - int(keep[lane]) :]
        assert tokens == [*first, *newest]


def test_only_streaming_and_rules_based_on_it_rerotate_keys():
    assert {name for name, rule in registered().items() if rule().rerotates_keys} == {"streaming"}
    assert ValueNorm(base=Streaming()).rerotates_keys
    assert not ValueNorm(base=Sinks()).rerotates_keys


def splitmix64(number: int) -> int:
    """SplitMix64 on Python's integers."""
    number = (number + 0x9E3779B97F4A7C15) & WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & WORD
    return number ^ (number >> 31)


def test_hash_is_splitmix64():
    """The first outputs of the published generator with state 0."""
    assert [hex(splitmix64(i * 0x9E3779B97F4A7C15 & WORD)) for i in range(3)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


@pytest.mark.parametrize("seed", [0, 7, 1 << 62])
def test_random_retains_by_a_hash_of_seed_layer_and_position(seed):
    history = make_history(ragged=False, layers=(3, 8))
    policy = Random(seed=seed)
    view = history.view()
    keep = keep_of(view, 0.5)

    retained = retained_positions(view, policy.select(view, keep))

    for lane, tokens in enumerate(retained):
        of_layer = splitmix64((splitmix64(seed) + (3, 8)[lane // 2]) & WORD)
        draws = {t: float(splitmix64((of_layer + t) & WORD) >> 11) for t in history.cached[lane]}
        assert tokens == best(draws, (), int(keep[lane]))


def test_random_with_scope_lane_draws_other_tokens_for_each_head():
    view = make_history(tokens=40, evictions=0, layers=(3,), heads=2).view()

    one, other = Random().score(view)
    first, second = Random(scope="lane").score(view)

    assert (one == other).all()
    assert (one == first).all()
    assert (first != second).all()
    with pytest.raises(ConfigError, match="scope of a retained set"):
        Random(scope="head")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recent(sinks=-1), "expected sinks >= 0, got -1"),
        (lambda: Random(recent=-2), "expected recent >= 0, got -2"),
    ],
)
def test_options_below_zero_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
