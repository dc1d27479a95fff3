"""Audits the pinned dependencies for known vulnerabilities with pip-audit: part of `make check`.

Exit code 1 only for a known vulnerability. If the database cannot be reached, that is printed, and
the exit code is 0: `make check` works without a network.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PINNED = Path(__file__).resolve().parents[1] / "requirements" / "dev.txt"
COMMAND = ("-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off")
LONGEST_S = 120


def audited(requirements: Path) -> Sequence[Mapping[str, object]] | None:
    """Return pip-audit's entry of each package; None if its database cannot be reached."""
    command = [sys.executable, *COMMAND, "--timeout", "5", "-f", "json", "-r", str(requirements)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
        found = json.loads(ran.stdout)["dependencies"]
    except (ValueError, KeyError, subprocess.TimeoutExpired):
        return None
    return found if isinstance(found, list) else None


def report(entries: Sequence[Mapping[str, object]] | None) -> tuple[str, int]:
    """Return the text and the exit code for pip-audit's entries."""
    if entries is None:
        return "not audited: pip-audit gave no result (no network, or not installed)", 0
    skipped = sum("skip_reason" in entry for entry in entries)
    bad = [entry for entry in entries if entry.get("vulns")]
    lines = [f"{entry['name']} {entry['version']}: {ids(entry['vulns'])}" for entry in bad]
    total = f"{len(entries) - skipped} packages audited, {skipped} not in the database"
    return "\n".join([*lines, f"{total}, {len(bad)} with known vulnerabilities"]), int(bool(bad))


def ids(vulnerabilities: object) -> str:
    """Return the names of vulnerabilities, with the versions that fix them."""
    assert isinstance(vulnerabilities, list), "pip-audit's format"
    return ", ".join(
        f"{each['id']} (fixed in {' or '.join(each['fix_versions']) or 'no version'})"
        for each in vulnerabilities
    )


def main() -> int:
    """Audit the pinned dependencies; return the exit code."""
    text, code = report(audited(PINNED))
    sys.stdout.write(f"{text}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
