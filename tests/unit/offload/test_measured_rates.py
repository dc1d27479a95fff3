"""Rates of offload learned from the operations of steps."""

import math
import random

import pytest

from quire.offload.split import COPY, MeasuredRates, pipelined_seconds, pipelined_split
from quire.offload.step_log import ATTEND, HOST_ATTEND, KV_IN, LAYER, PROJECT, X_IN, Timed

LAYERS, TOKENS, KV_BYTES, X_BYTES = 8, 1000, 1_000_000, 500_000
MACHINE = {  # a link of 1 GB/s: k = 1 ms, x = 0.5 ms, r = 0.58 ms
    COPY: (1e-5, 1e-9),
    PROJECT: (1e-4, 0.58e-3),
    ATTEND: (1e-4, 1e-5),
    LAYER: (2.4e-3, 0.0),
}


def measured(prior, **options):
    return MeasuredRates(prior, **{"kv_bytes": KV_BYTES, "x_bytes": X_BYTES} | options)


def step(x, machine, noise, draw):
    """The operations of a step, which take the times of a machine."""

    def timed(kind, tokens, num_bytes):
        call_s, unit_s = machine.get(kind, machine[COPY])
        seconds = (call_s + unit_s * (num_bytes or tokens)) * draw.lognormvariate(0, noise)
        return Timed(kind, 0, tokens, num_bytes, 1.0, 1.0 + seconds)

    return [
        timed(kind, tokens, num_bytes)
        for _ in range(LAYERS)
        for kind, tokens, num_bytes in (
            (X_IN, x, x * X_BYTES),
            (KV_IN, TOKENS - x, (TOKENS - x) * KV_BYTES),
            (PROJECT, x, 0),
            (ATTEND, TOKENS, 0),
            (LAYER, 1, 0),
        )
    ]


def split_of(rates):
    return pipelined_split(rates.layer(TOKENS), TOKENS)


@pytest.mark.parametrize("seed", range(6))
def test_wrong_initial_rates_are_corrected_within_a_few_steps(seed):
    wrong = MACHINE | {COPY: (1e-5, 3e-10), PROJECT: (1e-4, 2e-3), LAYER: (1e-4, 0.0)}
    rates, draw = measured(wrong), random.Random(seed)

    for _ in range(4):
        rates.learn(step(split_of(rates), MACHINE, 0.05, draw))

    assert split_of(rates) == pytest.approx(split_of(measured(MACHINE)), rel=0.05)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2, 4])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_split_follows_a_link_speed_change_within_ten_steps(factor, noise):
    changed = MACHINE | {COPY: (1e-5, 1e-9 / factor)}
    rates, draw = measured(MACHINE), random.Random(1)

    for machine in [MACHINE] * 12 + [changed] * 10:
        rates.learn(step(split_of(rates), machine, noise, draw))

    true = measured(changed).layer(TOKENS)
    best_s, found_s = (
        pipelined_seconds(true, TOKENS, x) for x in (pipelined_split(true, TOKENS), split_of(rates))
    )
    assert found_s <= best_s * (1.05 + noise / 2)


def test_rates_of_a_layer_have_its_weights_and_the_fixed_times_of_chunks():
    rates = measured(MACHINE, weight_bytes=6e6)
    plain, chunked = (rates.layer(100, batches=3, chunks=chunks) for chunks in (0, 4))

    assert plain.host_s == math.inf
    assert (plain.kv_s, plain.x_s) == pytest.approx((1e-3, 5e-4))
    assert plain.other_s == pytest.approx(1e-4 + 1e-3 + 2.4e-3)
    assert plain.link_s == pytest.approx(2e-3)
    assert chunked.link_s - plain.link_s == pytest.approx(4e-5)
    assert chunked.other_s - plain.other_s == pytest.approx(4e-4)
    assert measured(MACHINE | {HOST_ATTEND: (0.0, 2e-3)}).layer(100).host_s == 2e-3
