"""`python -m benchmarks disaggregation`: both stores give equal outputs, and skip the prefill."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.disaggregation.config import QUICK
from benchmarks.disaggregation.run import run_disaggregation
from quire.errors import ConfigError
from support.redis_servers import requires_redis


@pytest.mark.slow
def test_prompts_are_not_recomputed_by_the_engine_that_decodes():
    result = run_disaggregation(replace(QUICK, store="file"))

    [table] = result.tables
    assert [row[0] for row in table.rows] == [
        *("together, 1 thread", "together, 2 threads", "separate, 1 thread each")
    ]
    assert result.claims["disaggregation_not_recomputed"] > 0.9
    assert all(row[2] >= row[1] > 0 for row in table.rows)


def test_an_unknown_store_is_refused(tmp_path):
    config = replace(QUICK, store="none", files=str(tmp_path))

    with pytest.raises(ConfigError, match="expected --store to be one of redis, file, got none"):
        run_disaggregation(config)


@pytest.mark.slow
@requires_redis
def test_command_prints_one_json_object(tmp_path):
    ran = CliRunner().invoke(app, ["disaggregation", "--quick", "--json", "--out", str(tmp_path)])

    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["quick_figures"]["disaggregation_not_recomputed"] > 0.9
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".csv"}
