"""The README keeps its word: its code runs as printed, its numbers are those of the demo."""

import json
from pathlib import Path

import pytest

from quire.layout.refusals import REFUSED
from quire.layout.sizes import format_size
from support import zoo
from support.snippets import ROOT, snippets

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_prints_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = snippets(ROOT / "README.md")

    exec(snippet.code, {"__name__": "readme"})

    assert capsys.readouterr().out == snippet.output


def test_the_code_of_the_readme_is_eight_lines() -> None:
    [snippet] = snippets(ROOT / "README.md")

    assert len([line for line in snippet.code.splitlines() if line]) == 8


def test_the_numbers_of_the_readme_are_those_of_the_kept_run() -> None:
    run = json.loads((ROOT / "docs/results/demo.json").read_text(encoding="utf-8"))
    claims = run["claims"]
    first, _, _ = README.partition("![")
    words = " ".join(first.split())

    assert f"runs {claims['requests']} prompts in" in words
    assert f"in {claims['kv_total_bytes'] / 2**20:g} MiB" in words
    assert f"up to {claims['most_running']} of them at once" in words
    assert f"takes {claims['crowd_contiguous_bytes'] / 2**20:.0f} MiB" in words
    assert f"the {claims['exactness_checked']} outputs it compares" in words
    assert claims["exactness_equal"] == claims["exactness_checked"]
    assert run["commit"]
    assert run["versions"]["torch"]


def test_the_picture_shows_the_kept_run() -> None:
    claims = json.loads((ROOT / "docs/results/demo.json").read_text(encoding="utf-8"))["claims"]
    picture = (ROOT / "docs/images/memory.svg").read_text(encoding="utf-8")

    for name in ("crowd_used_bytes", "crowd_reserved_bytes", "crowd_contiguous_bytes"):
        assert format_size(claims[name]) in picture


def test_the_readme_names_the_commands_of_a_fresh_machine() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert f"\n{target}: setup\n" in makefile


def test_the_readme_names_every_architecture_the_zoo_compares() -> None:
    [row] = [line for line in README.splitlines() if "equal to Transformers in tests" in line]

    named = set(row.split("`")[1::2])

    assert named == {make().model_type for make in zoo.ARCHITECTURES.values()}


def test_the_models_the_readme_calls_refused_are_refused() -> None:
    [row] = [line for line in README.splitlines() if "refused with the reason" in line]

    named = row.split("`")[1::2]

    assert len(named) >= 5
    assert set(named) <= set(REFUSED)


def test_every_document_the_readme_links_to_exists() -> None:
    named = [part.partition(")")[0] for part in README.split("](")[1:]]
    missing = [name for name in named if not (ROOT / Path(name.partition("#")[0])).exists()]

    assert len(named) > 10
    assert missing == []
