"""Options that have no effect are rejected with advice."""

import numpy as np
import pytest

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.kv.tables import LaneTable, refuse_too_many_rows, table_bytes
from quire.layout.layout import layout_for
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines
from support.kv_options import kv_config


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


@pytest.mark.parametrize(
    ("kv", "schedule", "message"),
    [
        ({"scratch": "0"}, {}, "--scratch above 0, got 0: .* give a size such as 1MiB"),
        ({"constants": "/nonexistent"}, {}, "--kv-constants /nonexistent has no effect: .*'none'"),
        ({"constants": "/tmp", "codec": "int8"}, {}, "--kv-constants /tmp has no effect: .*'int8'"),
        ({"constants": "/nonexistent", "codec": "int8_channel"}, {}, "there is no /nonexistent/"),
        ({"state_checkpoint_interval": 16}, {}, "-interval has no effect: the model has no rec"),
        ({"state_checkpoint_memory": 1}, {}, "-checkpoint-memory has no effect: the model has no"),
        (
            {"codec": "int8+states=int8"},
            {},
            "states=int8 has no effect: the model has no r",
        ),
        ({}, {"max_num_seqs": 10**11}, r"page tables of 100,000,000,000 .* lower --max-num-seqs"),
    ],
)
def test_option_without_effect_is_rejected(model, kv, schedule, message):
    with pytest.raises(ConfigError, match=message):
        LLM(model, kv=kv_config(memory="256KiB", **kv), schedule=ScheduleConfig(**schedule))


def test_option_with_an_effect_is_accepted(model):
    llm = LLM(model, kv=KVConfig(memory="256KiB", scratch=1))

    assert llm.generate([[3, 4]], engines.greedy(2))[0].token_ids


def test_page_table_bytes_are_checked_before_allocation(model, monkeypatch):
    layout = layout_for(model.spec, codec="float32", page_tokens=16)
    for group in layout.groups:
        arrays = [a for a in vars(LaneTable(group, 7)).values() if isinstance(a, np.ndarray)]
        assert sum(array.nbytes for array in arrays) == table_bytes(group, 7)
    monkeypatch.setattr("quire.kv.tables.free_host_bytes", lambda: 1 << 20)

    refuse_too_many_rows(layout.groups, 100)
    with pytest.raises(ConfigError, match=r"of which 1\.00 MiB are free; lower --max-num-seqs"):
        refuse_too_many_rows(layout.groups, 100_000)
