"""Listings of registered policies and codecs; the CPU features that `doctor` reads."""

import json

import pytest
from typer.testing import CliRunner

from quire.cli.doctor import cpu_features
from quire.cli.listings import budget_rows, codec_rows, policy_rows
from quire.cli.main import app
from quire.layout.codec_names import CODECS
from quire.policies.registry import registered, registered_budgets


def output_of(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_registered_policy_is_listed_with_summary_and_source():
    rows = {row.name: row for row in policy_rows()}

    assert rows.keys() == {"full", *registered()}
    for row in rows.values():
        assert row.summary
        assert row.source
        assert row.cost
        assert row.scope in ("lane", "layer")


def test_every_registered_budget_is_listed_with_when_it_needs_statistics():
    rows = {row.name: row for row in budget_rows()}

    assert rows.keys() == registered_budgets().keys()
    assert all(row.summary and row.source for row in rows.values())
    assert {name for name, row in rows.items() if row.needs == "always"} == {"ada"}
    assert {name for name, row in rows.items() if row.needs == "once"} == {
        "squeeze",
        "lazy",
        "fastgen",
    }
    assert {name for name, row in rows.items() if not row.keeps_total} == {"lazy", "fastgen"}
    assert rows["squeeze"].statistics == ("residual_similarity",)


def test_policy_options_are_listed_with_defaults():
    rows = {row.name: row for row in policy_rows()}

    assert rows["recent"].options == {"sinks": 0}
    assert rows["value_norm"].options == {"base": "(h2o)", "power": 1.0, "epsilon": 0.0}
    assert rows["h2o"].statistics == ("attention_sum.mean",)
    shown = output_of("policies")
    assert "\n  options: sinks=0\n" in shown
    assert "\n  statistics: attention_sum.mean\n" in shown
    assert "\n  options: beta=20, rounding=largest_fractions\n" in shown
    assert "\n  total: not bounded: a lane may retain all tokens\n" in shown


def test_json_listing_has_policies_and_budgets():
    listing = json.loads(output_of("policies", "--json"))

    rules = {row["name"]: row for row in listing["policies"]}
    budgets = {row["name"]: row for row in listing["budgets"]}
    assert rules["tova"]["scope"] == "layer"
    assert rules["tova"]["statistics"] == ["query_ring.1"]
    assert budgets["pyramid"]["options"] == {"beta": 20, "rounding": "largest_fractions"}
    assert budgets["pyramid"]["needs"] == "never"


def test_every_codec_is_listed_with_its_bytes_per_vector():
    rows = {row["name"]: row for row in codec_rows()}

    assert rows.keys() == CODECS.keys()
    assert rows["float16"]["vector_bytes"] == 256
    assert rows["int8"]["vector_bytes"] == 128 + 2


@pytest.mark.parametrize(("command", "first"), [("policies", "full"), ("codecs", "float32")])
def test_json_listing_is_one_object(command: str, first: str):
    listing = json.loads(output_of(command, "--json"))

    assert listing["name"] == command
    assert listing[command][0]["name"] == first


def test_cpu_features_are_read_on_x86_and_arm():
    assert cpu_features("model name: x\nflags\t: fpu avx2 amx_tile avx512f\n") == [
        "avx2",
        "avx512f",
        "amx_tile",
    ]
    assert cpu_features("Features\t: fp asimd sve\n") == ["asimd", "sve"]
    assert cpu_features("") == []
