"""A sample of the matrix, and the agreement of registry, results and page.

The whole matrix is `python -m tests.composition` (docs/composition.md).
"""

import json
from dataclasses import replace
from itertools import combinations

import pytest

from composition.cell import REFUSED, WORKS, run_cell
from composition.command import RESULTS, chosen, main, pairs, read, triples, with_triples
from composition.features import FEATURES
from support.snippets import ROOT

SAMPLED = 131  # every so many pairs
MIN_SHARE = 0.965
"""Of pairs that work. None is inert, none fails."""

KNOWN = json.loads((ROOT / RESULTS).read_text())


def _known(names) -> str:
    """The committed result of a combination."""
    others = {tuple(cell["features"]): cell["result"] for cell in KNOWN["others"]}
    return others.get(tuple(names), WORKS)


@pytest.mark.parametrize("names", pairs()[::SAMPLED], ids=" + ".join)
def test_pair_has_the_committed_result(names):
    cell = run_cell(chosen(names))
    assert cell.result == _known(names), cell.why


def test_results_have_the_features_of_the_registry_all_pairs_and_the_share_that_works():
    shown = [(f.name, f.group, f.option, f.alone_in) for f in FEATURES]
    assert shown == [tuple(f.values()) for f in KNOWN["features"]]
    assert len({name for name, *_ in shown}) == len(FEATURES)

    counted = KNOWN["pairs"]
    assert counted["cells"] == len(pairs())
    assert counted["works_share"] >= MIN_SHARE
    assert counted.keys().isdisjoint({"inert", "failed"})
    assert counted["works"] + sum(len(c["features"]) == 2 for c in KNOWN["others"]) == len(pairs())


def test_every_refusal_states_a_reason_and_triples_have_no_two_values_of_one_option():
    for cell in KNOWN["others"]:
        assert cell["result"] != REFUSED or len(cell["why"]) > 40

    for names in triples(50):
        for one, other in combinations(chosen(names), 2):
            assert not one.excludes(other)


def test_feature_that_does_not_act_makes_a_cell_inert():
    [feature] = chosen(["swap"])
    cell = run_cell([replace(feature, acted=lambda ran: False)])
    assert (cell.result, cell.why) == ("inert", "swap")


def test_command_continues_where_it_stopped(tmp_path, capsys):
    out = tmp_path / "cells.jsonl"
    arguments = ["--size", "1", "--only", "tova;int8", "--out", str(out)]

    assert main(arguments) == 0
    first = out.read_text()
    assert main(arguments) == 0
    assert out.read_text() == first
    assert read(out).keys() == {("tova",), ("int8",)}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["works_share"] == 1.0


def test_triples_of_a_run_replace_those_of_the_results():
    names, why = ("swap", "int8", "tova"), "a reason"
    cell = {"features": list(names), "result": REFUSED, "why": why, "worst": 0.0}

    once = with_triples(KNOWN, {names: cell})
    again = with_triples(once, {names: {**cell, "result": WORKS, "worst": 1.0}})

    assert once["triples"] == {"cells": 1, REFUSED: 1, "works_share": 0.0}
    assert once["others"][-1] == {"features": list(names), "result": REFUSED, "why": why}
    assert [c for c in again["others"] if len(c["features"]) == 3] == []
    assert again["worst_difference"] == 1.0
    assert again["pairs"] == KNOWN["pairs"]


# ---- pairs that gave other outputs, broke an account or were refused before they were mended -----

MENDED = (
    "tova + prefixes on disk",  # the attention scale was unknown before the first step
    "snapkv + prefixes in Redis",
    "expected_attention + prefixes on disk",
    "mixed precision + prefixes on disk",  # records of promoted tokens did not begin
    "hybrid + prompt_logprobs",  # scores of a swapped tail were lost
    "hybrid + n=2",
    "hybrid + beam search",
    "rules of requests + batch-invariant",
    "snapkv + CPU attention",
    "squeeze budget + KV recompute",  # the prompt's activations were not kept
)


@pytest.mark.parametrize("pair", MENDED)
def test_mended_pair_works(pair):
    cell = run_cell(chosen(pair.split(" + ")))
    assert cell.result == WORKS, cell.why


def test_offload_that_no_request_uses_is_refused():
    cell = run_cell(chosen(["mixed precision", "KV offload"]))
    assert cell.result == REFUSED, cell.why
    assert "would not be used" in cell.why
