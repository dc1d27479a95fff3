"""An eviction that finds no pages for private copies changes nothing."""

import numpy as np
import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import OutOfPages
from quire.eviction.eviction import PolicyEvictor
from quire.kv.sharing import fork
from support import engines

CRUSHED = "kvcrush:cap=16,every=4,base=(h2o:recent=4),signatures=stored,share=0.5"


def test_what_a_rule_notes_is_not_written_where_slots_cannot_move(monkeypatch):
    """The eviction is tried again later, when the rule would note something else."""
    engine = Engine(engines.load("llama"), KVConfig(memory="2MiB", page_tokens=4, evict=CRUSHED))
    memory, kv = engine.pool.kv.memory, engine.pool.kv
    evictor = PolicyEvictor(kv, engine.pool.rules, 1 << 20, engine.model.decoder.rotations)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.submit(GenerationRequest(list(range(3, 15)), params))
    engine.step()
    [request] = engine.scheduler.running
    held = memory.tables["full"].num_slots[request.memory.row].astype(np.int64)
    twin = fork(memory, request.memory.row)
    before = kv.store.arena.clone()
    monkeypatch.setattr(memory, "fits", lambda pages: not sum(pages.values()))

    with pytest.raises(OutOfPages):
        evictor.evict(request, held - 2)

    assert kv.store.arena.equal(before)
    monkeypatch.undo()
    memory.release([twin])
    engine.check()
