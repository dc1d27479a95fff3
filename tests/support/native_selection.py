"""Policies without the C library's selection."""

import pytest

from quire.policies import best, kvcrush
from quire.policies.signatures import context, units


def without_native_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies select with NumPy."""
    for module in (best, context, kvcrush, units):
        monkeypatch.setattr(module, "native_selection", lambda: None)
