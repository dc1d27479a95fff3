"""A sample of the fuzz; all of it is `python -m tests.fuzz` (see CONTRIBUTING.md)."""

import json
from pathlib import Path

import pytest

from fuzz.case import from_json
from fuzz.command import main, read
from fuzz.draw import draw
from fuzz.run import FAILED, OK, run_case

SAMPLE = (1850, 1, 5, 8, 9, 10, 12, 14, 15, 18, 20, 21, 23, 33, 39, 42, 43, 44, 46, 47, 50, 51, 59)
"""Small ones: each takes less than a second alone."""


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_case_in_little_memory_answers_as_in_ample_memory(seed):
    outcome = run_case(draw(seed))
    assert outcome.outcome != FAILED, outcome.why


@pytest.mark.parametrize("line", (Path(__file__).parent / "mended.jsonl").read_text().splitlines())
def test_a_mended_case_stays_mended(line):
    """12357: offload memory that a swapped request occupied stopped the only running request.

    41147, 41226: beams evicted under pressure before they forked, and fitted no more. 41980: keys
    were recomputed with a rotation that was more exact than the model's, and had other codes.

    680337: KV was swapped in to pages that prompts computed layer by layer were to take in the same
    step. 690244: a swapped tail with full-precision tokens of its own did not fit beside its head.
    """
    outcome = run_case(from_json(line))
    assert outcome.outcome == OK, outcome.why


def test_a_seed_draws_one_case_and_the_command_goes_on_where_it_stopped(tmp_path, capsys):
    for seed in range(200):
        case = draw(seed)
        assert draw(seed) == case
        assert from_json(case.to_json()).to_json() == case.to_json()

    out = tmp_path / "fuzz.jsonl"
    out.write_text(json.dumps({"seed": 1000, "outcome": "ok", "kinds": {}}) + '\n{"seed": 10')
    assert read(out).keys() == {1000}
    out.write_text("")
    assert main(["--seeds", "43:47", "--shard", "0/2", "--out", str(out)]) == 0
    assert read(out).keys() == {44, 46}
    lines = out.read_text()
    assert main(["--seeds", "43:47", "--shard", "0/2", "--out", str(out)]) == 0
    assert out.read_text().splitlines()[:-1] == lines.splitlines()
    assert json.loads(capsys.readouterr().out.split("\n}\n")[0] + "}")["seeds"] == 2
