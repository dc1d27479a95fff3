"""docs/claims.toml: the figures of the documents are those of stored results."""

import os
import re

import pytest

from benchmarks.claims.checks import check_stored
from benchmarks.claims.coverage import scanned_documents, uncovered, unused_exemptions
from benchmarks.claims.registry import read_registry
from support.snippets import ROOT

REGISTRY = read_registry(ROOT / "docs/claims.toml")
SCRIPTS = sorted((ROOT / "runs").glob("*.sh"))


@pytest.mark.parametrize("claim", REGISTRY.claims, ids=lambda claim: claim.name)
def test_sentence_occurs_once_and_agrees_with_the_stored_result(claim):
    assert [row.text for row in check_stored([claim], ROOT) if not row.agrees] == []


def test_every_measured_figure_is_claimed_or_exempt():
    found = [f"{u.document}:{u.line}: {u.text}" for u in uncovered(REGISTRY, ROOT)]

    assert found == [], "add a [claim.NAME] to docs/claims.toml, or an exemption with its reason"


def test_every_exemption_is_used_and_has_a_reason():
    reasons = [reason for texts in REGISTRY.exempt.values() for reason in texts.values()]

    assert unused_exemptions(REGISTRY, ROOT) == []
    assert all(reasons)


def test_pages_for_users_are_scanned():
    scanned = scanned_documents(REGISTRY, ROOT)

    assert {"README.md", "docs/index.md", "docs/features.md", "docs/install.md"} <= set(scanned)
    guides = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/guides/*.md")}
    assert guides <= set(scanned)


def test_claims_of_documents_that_are_not_scanned_are_none():
    assert {claim.document for claim in REGISTRY.claims} <= set(scanned_documents(REGISTRY, ROOT))


def test_quick_forms_are_used_and_take_less_than_six_minutes():
    used = {claim.quick for claim in REGISTRY.claims if claim.quick is not None}
    text = (ROOT / "docs/claims.toml").read_text(encoding="utf-8")

    assert {form.name for form in used} == set(re.findall(r"^\[quick\.(\w+)\]", text, re.MULTILINE))
    assert sum(form.duration_s for form in used) < 360


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_prints_one_json_object_at_the_end(script):
    text = script.read_text(encoding="utf-8")

    assert os.access(script, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n#")
    assert "set -euo pipefail" in text
    said = " ".join(text.replace("#", " ").split())
    assert re.search(r"Last line( of output)?: one JSON object", said)


def test_make_target_runs_the_claims():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")

    assert "\nclaims: setup\n\tPYTHONPATH=src:. $(BIN)/python -m benchmarks.claims" in makefile
