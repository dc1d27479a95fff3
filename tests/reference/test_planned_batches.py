"""The batch that `quire plan --maximize-batch` names is the one that an engine admits."""

import pytest

from benchmarks.batch_max.speed import rows_that_fit
from quire.cli.plan_maximize import BatchQuestion, batch_report
from quire.plan.ceilings import NotUsable
from support.engines import load
from support.kv_options import kv_config


@pytest.mark.parametrize(
    "evict",
    ["h2o:cap=60,every=8", "expected_attention:cap=400"],  # the second is never passed
)
def test_planned_batches_equal_the_batches_an_engine_admits(evict):
    model = load("llama")
    question = BatchQuestion(
        prompt_tokens=100, new_tokens=20, kv_bytes=256 << 10, kv_codec="float32", evict=evict
    )

    report = batch_report(model.spec, question, lambda rule: NotUsable("not measured"))

    for arm in report.arms:
        kv = kv_config(memory="256KiB", evict=arm.evict, enable_prefix_caching=False)
        assert arm.rows == rows_that_fit(model, kv, 100, 20)
