"""An eviction without free pages for private copies leaves the KV unchanged."""

import numpy as np
import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import OutOfPages
from quire.eviction.eviction import PolicyEvictor
from quire.kv.sharing import fork
from quire.models.base import attention_math
from support import engines

CRUSHED = "kvcrush:cap=16,every=4,base=(h2o:recent=4),share=0.5"


def test_nothing_is_written_if_slots_cannot_be_moved(monkeypatch):
    engine = Engine(engines.load("llama"), KVConfig(memory="2MiB", page_tokens=4, evict=CRUSHED))
    memory, kv = engine.pool.kv.memory, engine.pool.kv
    decoder = engine.model.decoder
    math = attention_math(decoder)
    evictor = PolicyEvictor(kv, engine.pool.rules, 1 << 20, math, decoder.rotations)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.submit(GenerationRequest(list(range(3, 15)), params))
    engine.step()
    [request] = engine.scheduler.running
    num_slots = memory.tables["full"].num_slots[request.memory.row].astype(np.int64)
    twin = fork(memory, request.memory.row)
    before = kv.store.arena.clone()
    monkeypatch.setattr(memory, "fits", lambda pages: not sum(pages.values()))

    with pytest.raises(OutOfPages):
        evictor.evict(request, num_slots - 2)

    assert kv.store.arena.equal(before)
    monkeypatch.undo()
    memory.release([twin])
    engine.check()
