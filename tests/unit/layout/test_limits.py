"""The table of refused combinations."""

import ast
from collections import Counter
from pathlib import Path

from quire import layout
from quire.layout import limits
from quire.layout.limits import LIMITS, refused

SOURCE = Path(layout.__file__).parents[1]


def test_texts_are_filled_in():
    error = refused(limits.UNUSED_SWAP_SPACE, num_bytes=4096)

    assert str(error) == (
        "--swap-space 4,096 B would not be used, because --preempt recompute swaps no requests: "
        "use --preempt auto, swap or hybrid, or leave out --swap-space"
    )


def test_every_limit_is_used():
    used = Counter(
        node.attr
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    )
    names = [name for name, value in vars(limits).items() if value in LIMITS and name != "LIMITS"]

    assert len(names) == len(LIMITS)
    assert [name for name in names if not used[name]] == []
