"""Weight transfers: row-major and column-major passes, and the order of transfers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.plan.offload.resident import LayerWeights, Pass, faster_pass, run_pass, with_weights
from quire.plan.offload.split import OffloadRates
from support.offload_formulas import first_layer_seconds

SECONDS = st.floats(0.01, 10)
RATES = st.builds(
    OffloadRates, kv_s=SECONDS, x_s=SECONDS, recompute_s=SECONDS, other_s=st.floats(0, 50)
)


def column_layer_s(rates, weights_s, batches, tokens, x):
    link_s = weights_s + batches * (rates.kv_s * tokens - (rates.kv_s - rates.x_s) * x)
    return max(link_s, batches * (rates.recompute_s * x + rates.other_s))


@given(RATES, st.floats(0, 200), st.integers(1, 9), st.integers(1, 40))
def test_column_pass_uses_the_best_split_for_all_batches(rates, weights_s, batches, tokens):
    found = run_pass(
        rates,
        order="column",
        weights_s=weights_s,
        batches=batches,
        rows=3,
        tokens=tokens,
        num_layers=5,
    )

    best_s = min(column_layer_s(rates, weights_s, batches, tokens, x) for x in range(tokens + 1))
    assert found.tokens_per_s == pytest.approx(3 * batches / (5 * best_s))


@given(RATES, st.floats(0.1, 200), st.integers(1, 40))
def test_sharing_weights_never_reduces_throughput(rates, weights_s, tokens):
    options = {"weights_s": weights_s, "rows": 2, "tokens": tokens, "num_layers": 4}
    row = run_pass(rates, order="row", batches=8, **options)
    column = run_pass(rates, order="column", batches=8, **options)

    assert column.tokens_per_s >= row.tokens_per_s * (1 - 1e-12)
    assert column.x_tokens <= row.x_tokens  # the link has less to transfer
    assert row.batches == 1


def test_resident_weights_are_faster_than_a_column_pass():
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=1.0)
    shape = {"rows": 4, "tokens": 100, "num_layers": 2}
    resident = run_pass(rates, order="row", weights_s=0, batches=1, **shape)
    column = run_pass(rates, order="column", weights_s=50, batches=2, **shape)
    slow = Pass(order="row", batches=1, rows=1, x_tokens=0, tokens_per_s=0.001)

    assert faster_pass(column, resident) is resident
    assert faster_pass(slow, column) is column


@given(RATES, SECONDS, SECONDS, SECONDS, st.integers(0, 40), st.floats(0, 1))
def test_recompute_during_weight_transfer_is_never_slower(rates, kv_s, qo_s, mlp_s, tokens, share):
    weights = LayerWeights(kv_s=kv_s, qo_s=qo_s, mlp_s=mlp_s)
    fine, coarse = (
        first_layer_seconds(rates, weights, tokens, share * tokens, fine=fine)
        for fine in (True, False)
    )

    assert fine <= coarse <= fine + qo_s + 1e-9
    whole_s = first_layer_seconds(rates, weights, tokens, 0, fine=False)
    assert whole_s == pytest.approx(weights.total_s + rates.kv_s * tokens + rates.other_s)


def test_column_pass_without_batches_is_refused():
    with pytest.raises(ConfigError, match="1 batch or more"):
        with_weights(OffloadRates(kv_s=1.0, x_s=1.0, recompute_s=1.0), 1.0, 0)
