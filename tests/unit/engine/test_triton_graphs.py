"""Decode steps as graphs with attention in Triton, interpreted on the CPU."""

import pytest

from quire.engine.decode_graphs import why_no_graphs
from support import engines
from support.engines import make_prompts
from support.interpreted import interpreted, triton_backend
from support.static_attention import RepeatedCalls
from unit.engine import test_decode_graphs as graphs

interpreted("backend")

LENGTHS = (2, 6, 4, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv",
    [{}, {"codec": "int8"}, *({"evict": f"{rule}:cap=8"} for rule in ("recent", "h2o", "tova"))],
    ids=str,
)
def test_graphs_with_triton_give_the_tokens_of_gathered_pages(kv, monkeypatch):
    monkeypatch.setattr(graphs, "LENGTHS", LENGTHS)
    model, prompts = engines.load("llama", impl="transformers"), make_prompts(4, 10, seed=4)
    expected = graphs.outputs(graphs.engine_of(model, **kv), prompts)
    monkeypatch.setattr(graphs, "StaticGathered", lambda _: triton_backend(multiprocessors=8))
    engine = graphs.engine_of(model, RepeatedCalls(), **kv)

    found = graphs.outputs(engine, prompts)

    assert found == expected
    assert sum(map(len, found)) == sum(LENGTHS)
    assert engine.pool.kv.backend.name == "triton"
    assert why_no_graphs(engine.pool.kv) is None
    stats = engine.stats().graphs
    assert stats.off is None
    assert stats.replayed > 4
    assert (engine.stats().num_evictions > 0) == ("evict" in kv)
