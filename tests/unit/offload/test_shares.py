"""Division of KV between transfer, recompute and CPU attention, compared with all divisions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.kvpr import offload_rates
from quire.errors import ConfigError
from quire.offload.split import OffloadRates, best_shares
from support.offload_shapes import LLAMA_3_8B, OPT_6_7B

SECONDS = st.floats(1e-2, 1e2)


def division_s(rates, x, t, a, *, waits):
    host_s = rates.host_s * a + (rates.other_s if waits and a else 0.0)
    link_s = rates.link_s + rates.x_s * x + rates.kv_s * t
    return max(link_s, rates.recompute_s * x + rates.other_s, host_s)


@given(
    st.builds(
        OffloadRates,
        kv_s=SECONDS,
        x_s=SECONDS,
        recompute_s=SECONDS,
        host_s=SECONDS,
        other_s=st.floats(0, 300),
        link_s=st.just(0.0) | st.floats(0, 300),
    ),
    st.integers(0, 24),
    st.booleans(),
)
def test_best_shares_are_not_slower_than_any_integer_division(rates, tokens, waits):
    found = best_shares(rates, tokens, waits=waits)

    tokens_by_share = (found.x_tokens, found.kv_tokens, found.host_tokens)
    assert sum(tokens_by_share) == pytest.approx(tokens, abs=1e-6)
    assert min(tokens_by_share) >= 0
    assert division_s(rates, *tokens_by_share, waits=waits) <= found.seconds * (1 + 1e-6) + 1e-9
    best_s = min(
        division_s(rates, x, tokens - x - a, a, waits=waits)
        for a in range(tokens + 1)
        for x in range(tokens - a + 1)
    )
    assert found.seconds <= best_s * (1 + 1e-9)
    token_s = max(rates.kv_s, rates.x_s) + rates.recompute_s + rates.host_s
    assert found.seconds >= best_s - 2 * token_s - 1e-9  # rounding to whole tokens


@given(SECONDS, SECONDS, st.floats(1, 5), st.integers(1, 500))
def test_rates_of_transfer_and_cpu_attention_add_without_activations(kv_s, host_s, xi, tokens):
    rates = OffloadRates(kv_s=kv_s, x_s=xi * kv_s, recompute_s=1.0, host_s=host_s)

    found = best_shares(rates, tokens)

    assert found.seconds == pytest.approx(tokens / (1 / kv_s + 1 / host_s))
    assert found.x_tokens == 0


def test_interior_solution_follows_the_formula():
    """T = [S - g + (c / r)(1 - xi)] / [(1 - xi) / r + 1 / k + 1 / u], where another batch hides c.

    k = 1, x = 0.5, r = 2, u = 4, c = 10, S - g = 100: (100 + 5 * 0.5) / (0.25 + 1 + 0.25) = 68.33.
    """
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=2.0, host_s=4.0, other_s=10.0)

    found = best_shares(rates, 120, 20, waits=False)

    assert found.seconds == pytest.approx(102.5 / 1.5)
    assert found.x_tokens == pytest.approx((found.seconds - 10) / 2)
    assert found.host_tokens == pytest.approx(found.seconds / 4)


@pytest.mark.parametrize(
    ("model", "gains"),
    [(OPT_6_7B, (3.1, 3.8, 5.6, 8.3)), (LLAMA_3_8B, (2.1, 2.8, 4.6, 7.3))],
    ids=["opt-6.7b", "llama-3-8b"],
)
def test_gains_of_cpu_attention_on_an_h200(model, gains):
    for host, gain in zip((60e9, 100e9, 200e9, 350e9), gains, strict=True):
        rates = offload_rates(
            model, link_bytes_per_s=55e9, flops_per_s=650e12, host_bytes_per_s=host
        )

        found = best_shares(rates, 1000)

        assert rates.kv_s * 1000 / found.seconds == pytest.approx(gain, abs=0.1)


def test_without_cpu_attention_the_host_share_is_zero():
    found = best_shares(OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=1.0), 90)

    assert found.host_tokens == 0
    assert found.seconds == pytest.approx(60)
    with pytest.raises(ConfigError, match="0 to 5 resident"):
        best_shares(OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=1.0), 5, 6)
