"""docs/claims.toml: the figures of the documents are those of stored results."""

import os
import re
import subprocess
from importlib.util import find_spec

import pytest
from typer.main import get_command

from benchmarks.__main__ import app as benchmarks_app
from benchmarks.claims.checks import check_stored
from benchmarks.claims.registry import (
    read_registry,
    scanned_documents,
    uncovered,
    unused_exemptions,
)
from quire.cli.main import app as quire_app
from support.snippets import ROOT

PROGRAMS = {"quire": quire_app, "benchmarks": benchmarks_app}
REGISTRY = read_registry(ROOT / "docs/claims.toml")
SCRIPTS = sorted((ROOT / "runs").glob("*.sh"))


@pytest.mark.parametrize("claim", REGISTRY.claims, ids=lambda claim: claim.name)
def test_sentence_occurs_once_and_agrees_with_the_stored_result(claim):
    assert [row.text for row in check_stored([claim], ROOT) if not row.agrees] == []


def test_every_measured_figure_is_claimed_or_exempt_and_exemptions_are_used():
    assert list(uncovered(REGISTRY, ROOT)) == [], (
        "add a [claim.NAME] to docs/claims.toml, or an exemption with its reason"
    )
    reasons = [reason for texts in REGISTRY.exempt.values() for reason in texts.values()]
    assert unused_exemptions(REGISTRY, ROOT) == []
    assert all(reasons)


def test_pages_are_scanned_generated_or_the_results_log():
    scanned = scanned_documents(REGISTRY, ROOT)

    assert {"README.md", "docs/index.md", "docs/features.md", "docs/install.md"} <= set(scanned)
    guides = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/guides/*.md")}
    assert guides <= set(scanned)
    assert {claim.document for claim in REGISTRY.claims} <= set(scanned)

    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = [f"docs/{page}" for page in re.findall(r"([\w/-]+\.md)", nav)]
    scanned = set(scanned_documents(REGISTRY, ROOT))
    missing = [page for page in pages if page not in scanned and not is_generated(page)]

    assert len(pages) > 50
    assert missing == ["docs/log.md"]
    assert [page for page in scanned if is_generated(page)] == []


def is_generated(page):
    """Whether a program writes the whole page: a page of results, or one with a note."""
    if page.endswith("-measured.md"):
        return True
    head = (ROOT / page).read_text(encoding="utf-8").partition("\n")[0]
    return head.startswith("<!-- Written by ")


def test_quick_forms_are_used_and_take_less_than_five_minutes():
    used = {claim.quick for claim in REGISTRY.claims if claim.quick is not None}

    assert used == set(REGISTRY.quick)
    assert sum(form.duration_s for form in REGISTRY.quick.values()) < 300
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\nclaims: setup\n\tPYTHONPATH=src:. $(BIN)/python -m benchmarks.claims" in makefile


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_prints_one_json_object_and_its_commands_exist(script):
    text = script.read_text(encoding="utf-8")

    assert os.access(script, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n#")
    assert "set -euo pipefail" in text
    said = " ".join(text.replace("#", " ").split())
    assert re.search(r"Last line( of output)?: one JSON object", said)
    # its commands exist with their options
    text = text.replace("\\\n", " ")
    found = re.findall(r"-m (quire|benchmarks[.\w]*)((?: [\w.-]+| \S+=\S*)*)", text)

    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert found or script.name == "install.sh"
    for module, words in found:
        assert find_spec(module) is not None
        if module in PROGRAMS:
            assert unknown_words(PROGRAMS[module], words.split()) == []


def unknown_words(program, words):
    """Commands and options of a command line that the program does not have."""
    command = get_command(program)
    while hasattr(command, "commands"):
        name = words.pop(0)
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    known = {text for one in command.params for text in (*one.opts, *one.secondary_opts)}
    return [word for word in words if word.startswith("--") and word not in known]


def test_unknown_command_and_option_of_a_script_are_found():
    assert unknown_words(PROGRAMS["benchmarks"], ["qant", "--json"]) == ["qant"]
    assert unknown_words(PROGRAMS["benchmarks"], ["quant", "--jsn"]) == ["--jsn"]
    assert unknown_words(PROGRAMS["quire"], ["eval", "run", "m", "--tasks", "kv"]) == []
