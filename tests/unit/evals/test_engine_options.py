"""Options of the engine by flat names."""

import pytest

from quire.errors import ConfigError, UnknownName
from quire.evals.lm_eval.requests import llm_options


def test_options_reach_their_configs():
    found = llm_options(
        {
            "dtype": "float32",
            "kv_memory": "2MiB",
            "kv_cache_dtype": "int8",
            "enable_prefix_caching": False,
            "max_num_seqs": 4,
        }
    )

    assert found["dtype"] == "float32"
    assert found["kv"].memory == 2 << 20
    assert found["kv"].codec == "int8"
    assert not found["kv"].prefix_cache.enabled
    assert found["schedule"].max_num_seqs == 4
    assert set(found) == {"dtype", "kv", "schedule"}


def test_unknown_option_and_invalid_value_are_refused():
    with pytest.raises(UnknownName, match=r"'kv_memry'.*did you mean kv_memory"):
        llm_options({"kv_memry": "2MiB"})
    with pytest.raises(ConfigError, match="kv-memory"):
        llm_options({"kv_memory": "much"})
