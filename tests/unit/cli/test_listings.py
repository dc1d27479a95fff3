"""Policies and codecs come from their registries; doctor's reading of /proc/cpuinfo."""

import json

import pytest
from typer.testing import CliRunner

from quire.cli.doctor import cpu_features
from quire.cli.listings import codec_rows, policy_rows
from quire.cli.main import app
from quire.policies.registry import registered
from quire.spec.pages import CODECS


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_registered_policy_is_listed_with_what_it_does_and_its_source():
    rows = {row.name: row for row in policy_rows()}

    assert rows.keys() == {"full", *registered()}
    for row in rows.values():
        assert row.summary
        assert row.source


def test_options_of_a_policy_are_listed_with_their_defaults():
    (recent,) = [row for row in policy_rows() if row.name == "recent"]

    assert recent.options == {"sinks": 0}
    assert "sinks=0" in output_of("policies")


def test_every_codec_is_listed_with_its_bytes():
    rows = {row["name"]: row for row in codec_rows()}

    assert rows.keys() == CODECS.keys()
    assert rows["float16"]["vector_bytes"] == 256
    assert rows["int8"]["vector_bytes"] == 128 + 2


@pytest.mark.parametrize(("command", "first"), [("policies", "full"), ("codecs", "float32")])
def test_lists_are_one_json_object_when_asked(command: str, first: str):
    answer = json.loads(output_of(command, "--json"))

    assert answer["name"] == command
    assert answer[command][0]["name"] == first


def test_cpu_features_are_read_from_either_kind_of_machine():
    assert cpu_features("model name: x\nflags\t: fpu avx2 amx_tile avx512f\n") == [
        "avx2",
        "avx512f",
        "amx_tile",
    ]
    assert cpu_features("Features\t: fp asimd sve\n") == ["asimd", "sve"]
    assert cpu_features("") == []
