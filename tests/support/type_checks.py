"""Checks types, and shapes if a signature has them, of calls of quire while tests run.

jaxtyping's own wrapper binds the arguments, checks them twice and checks the result once, which
takes five times the scheduler's own time. Here beartype checks once. A function with axes in its
signature is checked in its own scope of axis names. jaxtyping's wrapper remains for generators, for
functions that name an axis after an argument, and for types that are given as strings.

Calls are sampled: in each test, the first calls of each function and then one call in `EVERY`.
`QUIRE_TYPE_CHECKS=all` checks every call; `make test-all` sets it.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, ForwardRef, get_args

import jaxtyping
from beartype import beartype

BIND = jaxtyping.jaxtyped
FIRST, EVERY = 8, 32  # calls of a function in one test that are checked: the first, and then one in
ALL_CALLS = os.environ.get("QUIRE_TYPE_CHECKS") == "all"


class _Test:
    """The number of the test that runs: counts of calls restart with it."""

    number = 0


def start_test() -> None:
    """Restart the counts of calls, so that what a test checks does not depend on other tests."""
    _Test.number += 1


def check_types() -> None:
    """Check the functions of all modules of quire that are imported after this call."""
    jaxtyping.jaxtyped = _checked if ALL_CALLS else _sampled  # the import hook's decorator
    jaxtyping.install_import_hook("quire", "beartype.beartype")


def _checked(decorated: Any = None, *, typechecker: Callable) -> Any:
    if decorated is None:
        return functools.partial(_checked, typechecker=typechecker)
    if inspect.isclass(decorated):
        if "__dataclass_fields__" in vars(decorated):
            decorated.__init__ = _checked(decorated.__init__, typechecker=typechecker)
        return decorated
    parts = [part for hint in decorated.__annotations__.values() for part in _parts(hint)]
    if any(map(_needs_binding, parts)) or inspect.isgeneratorfunction(decorated):
        return BIND(decorated, typechecker=typechecker)
    checked = beartype(decorated)
    return _in_a_scope(checked) if any(map(_has_axes, parts)) else checked


def _sampled(decorated: Any = None, *, typechecker: Callable) -> Any:
    if decorated is None:
        return functools.partial(_sampled, typechecker=typechecker)
    if inspect.isclass(decorated):
        if "__dataclass_fields__" in vars(decorated):
            decorated.__init__ = _sampled(decorated.__init__, typechecker=typechecker)
        return decorated
    checked = _checked(decorated, typechecker=typechecker)
    calls = test = 0

    @functools.wraps(decorated)
    def sampled(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls, test
        if test != _Test.number:
            calls, test = 0, _Test.number
        calls += 1
        is_checked = calls <= FIRST or calls % EVERY == 0
        return (checked if is_checked else decorated)(*args, **kwargs)

    return sampled


def _parts(hint: Any) -> Iterator[Any]:
    """A type hint, and those that it is made of."""
    yield hint
    for part in hint if isinstance(hint, list) else get_args(hint):  # a list: of a Callable
        yield from _parts(part)


def _has_axes(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)


def _needs_binding(hint: Any) -> bool:
    return isinstance(hint, str | ForwardRef) or (_has_axes(hint) and "{" in hint.dim_str)


def _in_a_scope(function: Callable) -> Callable:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with BIND("context"):
            return function(*args, **kwargs)

    return scoped
