"""Asynchronous scheduling against synchronous scheduling, on random requests and memory sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.async_runs import Work, model_with_text
from support.engines import make_prompts
from support.exact_products import use_exact_products

COMMON = {"max_tokens": 16}
PARAMS = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 1.2, "stop": ("a", "q", "7")},
    {"temperature": 1.0, "stop_token_ids": (3, 30, 33), "min_tokens": 4},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 1.0, "structured_outputs": {"regex": "[a-f]{2,9}"}},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": None, "use_beam_search": True, "beam_width": 2},
)
EVICT = ("full", "full", "sinks:cap=16,sinks=2,every=4", "h2o:cap=20,every=8")


@pytest.fixture(scope="module")
def exact_model():
    with pytest.MonkeyPatch.context() as patch:
        use_exact_products(patch)
        yield model_with_text("transformers")


@st.composite
def works(draw):
    """Requests and the options of an engine."""
    count = draw(st.integers(2, 8))
    chosen = draw(st.lists(st.sampled_from(PARAMS), min_size=1, max_size=count))
    kib = draw(st.sampled_from((20, 24, 32, 512)))
    return Work(
        prompts=make_prompts(count, 20, seed=draw(st.integers(0, 99))),
        params=[COMMON | params for params in chosen],
        kv={
            "memory": f"{kib}KiB",
            "attention": "gathered",
            "swap_space": draw(st.sampled_from((0, "256KiB"))),
            "evict": draw(st.sampled_from(EVICT)),
            "enable_prefix_caching": draw(st.booleans()),
        },
        schedule={
            "chunk_tokens": draw(st.sampled_from((4, 64))),
            "max_num_batched_tokens": draw(st.sampled_from((6, 64))),
        },
        wave=draw(st.integers(1, 4)),
        steps=draw(st.integers(1, 6)),
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    works(),
    st.dictionaries(st.integers(1, 40), st.integers(0, 7), max_size=2),
    st.sets(st.integers(1, 40), max_size=2),
)
def test_random_requests_have_equal_outputs(exact_model, work, cancelled, preempted):
    expected = work.run(work.engine(exact_model, asynchronous=False))
    engine = work.engine(exact_model, asynchronous=True)

    def disturb(step):
        if step in cancelled:
            engine.cancel(f"r{cancelled[step]}")
        if step in preempted and engine.scheduler.running:
            engine.scheduler.lifecycle.preempt(engine.scheduler.running[0], "for the test")

    found = work.run(engine, disturb)

    assert {name for name, _ in found} == {name for name, _ in expected}
    for key, output in found.items():
        if output.reason == "abort":
            assert int(key[0].removeprefix("r")) in cancelled.values()
            tokens = expected[key].tokens
            assert output.tokens == tokens[: len(output.tokens)]
        else:
            assert output == expected[key]
    assert not engine.has_work
