"""Types are checked at every call of quire that a test makes, shapes where a signature has them.

jaxtyping binds the arguments of every function that it wraps, checks them twice and what comes back
once: five times what the scheduler itself takes. Here beartype checks once, and a function with
axes in its signature does so in a scope of names of its own. jaxtyping's wrapper is left to
generators and to those that name an axis after an argument or a type by a string, which may be
there for the type checker alone.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ForwardRef, get_args

import jaxtyping
from beartype import beartype

BIND = jaxtyping.jaxtyped


def check_types() -> None:
    """Check what is imported of quire from here on."""
    jaxtyping.jaxtyped = _checked  # the decorator that the hook puts on everything
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
