"""Whether eviction during block prefill increases throughput, and the compared eviction rules."""

import pytest

from quire.errors import ConfigError
from quire.plan.batch_verdict import ARMS, ArmBatch, arm_rules, judge_blocks


def verdict_of(rows, *, speeds=(None,) * 4, prompt=3_584, new=512, cap=896, batch=None):
    arms = [
        ArmBatch(arm=arm, rows=n, tokens_per_s=speed)
        for arm, n, speed in zip(ARMS, rows, speeds, strict=True)
    ]
    return judge_blocks(arms, cap=cap, prompt_tokens=prompt, new_tokens=new, batch=batch)


def test_block_eviction_pays_if_it_is_faster():
    verdict = verdict_of((2, 2, 2, 8), speeds=(30.0, 38.0, 42.0, 80.0))

    assert verdict.pays is True
    assert any("80 tokens/s" in reason and "1.90" in reason for reason in verdict.reasons)
    assert any("up to 2 rows" in reason for reason in verdict.reasons)


def test_a_larger_batch_that_is_slower_does_not_pay():
    assert verdict_of((2, 2, 2, 3), speeds=(30.0, 38.0, 42.0, 41.0)).pays is False


def test_verdict_is_unknown_without_measured_speeds():
    assert verdict_of((2, 2, 2, 8)).pays is None
    assert verdict_of((2, 2, 2, 8), speeds=(30.0, None, 42.0, 80.0)).pays is None


def test_equal_batch_does_not_pay():
    assert verdict_of((2, 4, 4, 4), speeds=(30.0, 38.0, 42.0, 80.0)).pays is False


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ((0, 0, 0, 0), "not one request fits, with or without eviction"),
        ((0, 0, 0, 3), "not one request fits with full KV or with eviction in decode only"),
        ((0, 2, 1, 3), "not one request fits with full KV, and up to 2 rows with eviction in dec"),
    ],
)
def test_verdict_says_that_not_one_request_fits(rows, reason):
    verdict = verdict_of(rows, speeds=(None, None, None, 9.0))

    assert reason in " ".join(verdict.reasons)
    assert "0 rows" not in verdict.reasons[-1]


def test_arms_without_rows_need_no_measured_speed():
    """No other arm holds a row, so no other arm has a measured speed."""
    assert verdict_of((0, 0, 0, 3), speeds=(None, None, None, 9.0)).pays is True


@pytest.mark.parametrize(
    ("batch", "pays", "reason"),
    [
        (2, False, "memory suffices"),
        (3, False, "the whole prompts of the fixed batch of 3 rows fit"),
        (8, True, "3 rows only"),
        (9, False, "no variant fits 9 rows"),
    ],
)
def test_fixed_batch_pays_only_if_whole_prompts_do_not_fit(batch, pays, reason):
    verdict = verdict_of((2, 3, 3, 8), batch=batch)

    assert verdict.pays is pays
    assert reason in verdict.reasons[0]


@pytest.mark.parametrize(
    ("prompt", "new", "reason"), [(896, 512, "is within the cap"), (385, 512, "nothing is evicted")]
)
def test_prompt_within_the_cap_does_not_pay(prompt, new, reason):
    """385 + 512 - 1 = 896 tokens: exactly the cap."""
    verdict = verdict_of((9, 9, 9, 12), prompt=prompt, new=new, speeds=(1.0, 1.0, 1.0, 9.0))

    assert verdict.pays is False
    assert reason in verdict.reasons[0]


def test_arm_rules_are_full_extreme_and_the_given_rule_with_two_schedules():
    assert arm_rules("h2o:recent=8,cap=64,every=4,when=pressure") == {
        "full": "full",
        "decode": "h2o:recent=8,cap=64,every=4,when=decode",
        "decode_extreme": "recent:cap=2,every=1,when=decode",
        "prefill_and_decode": "h2o:recent=8,cap=64,every=4,when=prefill_and_decode",
    }


def test_cap_alone_selects_average_and_overrides_the_cap_of_a_rule():
    assert arm_rules(cap="25%")["decode"] == "average:cap=25%,when=decode"
    assert arm_rules("tova:cap=9,every=2", cap="7", every=3)["decode"] == (
        "tova:cap=7,every=3,when=decode"
    )


def test_default_cap_is_a_fraction_of_the_prompt_at_any_length():
    assert arm_rules()["decode"] == "average:cap=25%,when=decode"
    assert arm_rules("tova:every=2")["decode"] == "tova:every=2,cap=25%,when=decode"


def test_full_is_refused_as_the_rule():
    with pytest.raises(ConfigError, match="such as average:cap=25%"):
        arm_rules("full")
