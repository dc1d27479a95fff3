"""docs/inventory.py: no public name is lost unless docs/renames.json explains it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BEFORE = DOCS / "inventory-before.json"
RENAMES = DOCS / "renames.json"


def run(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCS / "inventory.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow  # imports every module
def test_public_names_of_the_old_inventory_exist_or_are_explained(tmp_path: Path) -> None:
    listed = run()
    assert listed.returncode == 0, listed.stderr
    (tmp_path / "now.json").write_text(listed.stdout)

    compared = run(BEFORE, tmp_path / "now.json", RENAMES)

    assert (compared.returncode, compared.stdout) == (0, ""), compared.stderr


def test_a_lost_name_is_printed_unless_renames_explains_it(tmp_path: Path) -> None:
    old, new, renames = (tmp_path / name for name in ("old.json", "new.json", "renames.json"))
    old.write_text(json.dumps({"commands": {"serve": ["--old=1", "--kept=2", "--gone=3"]}}))
    new.write_text(json.dumps({"commands": {"serve": ["--new=1", "--kept=2"]}}))
    renames.write_text(json.dumps({"--old": "--new"}))

    compared = run(old, new, renames)

    assert compared.returncode == 1
    assert compared.stdout == "lost: /commands/serve: --gone=3\n"
