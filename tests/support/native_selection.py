"""Policies without the C library's selection."""

import pytest

from quire.policies import choose, kvcrush
from quire.policies.signatures import context


def without_native_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choose, context, kvcrush):
        monkeypatch.setattr(module, "native_selection", lambda: None)
