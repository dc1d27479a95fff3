"""The README: its code prints the shown output, and its figures are those of the stored run."""

import json
from pathlib import Path

import pytest

from quire.layout.refusals import REFUSED
from quire.layout.sizes import format_size
from support import zoo
from support.snippets import ROOT, snippets

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_shows_the_output_of_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = snippets(ROOT / "README.md")

    exec(snippet.code, {"__name__": "readme"})

    assert capsys.readouterr().out == snippet.output


def test_readme_code_has_eight_lines() -> None:
    [snippet] = snippets(ROOT / "README.md")

    assert len([line for line in snippet.code.splitlines() if line]) == 8


def test_readme_figures_equal_the_stored_run() -> None:
    run = json.loads((ROOT / "docs/results/demo.json").read_text(encoding="utf-8"))
    claims = run["claims"]
    first, _, _ = README.partition("![")
    text = " ".join(first.split())

    assert f"runs {claims['requests']} prompts in" in text
    assert f"in {claims['kv_total_bytes'] / 2**20:g} MiB" in text
    assert f"up to {claims['most_running']} of them at once" in text
    assert f"takes {claims['crowd_contiguous_bytes'] / 2**20:.0f} MiB" in text
    assert f"the {claims['exactness_checked']} outputs it compares" in text
    assert claims["exactness_equal"] == claims["exactness_checked"]
    assert run["commit"]
    assert run["versions"]["torch"]


def test_readme_image_shows_the_stored_run() -> None:
    claims = json.loads((ROOT / "docs/results/demo.json").read_text(encoding="utf-8"))["claims"]
    image = (ROOT / "docs/images/memory.svg").read_text(encoding="utf-8")

    for name in ("crowd_used_bytes", "crowd_reserved_bytes", "crowd_contiguous_bytes"):
        assert format_size(claims[name]) in image


def test_readme_names_the_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert f"\n{target}: setup\n" in makefile


def test_readme_names_every_tested_architecture() -> None:
    [row] = [line for line in README.splitlines() if "equal to Transformers in tests" in line]

    named = set(row.split("`")[1::2])

    assert named == {make().model_type for make in zoo.ARCHITECTURES.values()}


def test_readme_lists_only_refused_models_as_refused() -> None:
    [row] = [line for line in README.splitlines() if "refused with the reason" in line]

    named = row.split("`")[1::2]

    assert len(named) >= 5
    assert set(named) <= set(REFUSED)


def test_readme_links_exist() -> None:
    named = [part.partition(")")[0] for part in README.split("](")[1:]]
    missing = [name for name in named if not (ROOT / Path(name.partition("#")[0])).exists()]

    assert len(named) > 10
    assert missing == []
