"""`docs/make_page.py`, and benchmark results for it."""

import importlib.util
from types import ModuleType
from typing import Any

from benchmarks.common.result import PartResult, Table
from support.snippets import ROOT


def load_maker() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("make_page", ROOT / "docs/make_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_object(bench: str, part: str, claims: dict[str, float]) -> dict[str, Any]:
    """Last line of `python -m benchmarks BENCH` for a run of one part."""
    table = Table(name="t", caption="Of it.", columns=("a", "b"), rows=(("r", 1.5),))
    made = PartResult(claims=claims, tables=(table,), raw={"a": [1]})
    return {
        "name": f"bench {bench}",
        "claims": claims,
        "arms": {part: made.to_json()},
        "config": {"threads": 1},
        "hardware": {"cpu": "a processor"},
        "versions": {"torch": "2.13.0", "quire": "0.1.0"},
        "commit": "abc",
    }
