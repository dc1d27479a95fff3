"""Types are checked at every call of quire that a test makes, shapes where a signature has them.

jaxtyping binds the arguments of every function that it wraps, checks them twice and what comes back
once: five times what the scheduler itself takes. Here beartype checks once, and a function with
axes in its signature does so in a scope of names of its own; jaxtyping's wrapper is left to those
that name an axis after an argument or a type by a string, and to generators.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.claw import beartype_package

SOURCES = Path(__file__).parents[1] / "src"
BIND = jaxtyping.jaxtyped


def check_types() -> None:
    """Check what is imported of quire from here on."""
    beartype_package("quire", conf=BeartypeConf(claw_is_pep526=False))
    jaxtyping.jaxtyped = _checked  # the decorator that its hook puts on everything
    jaxtyping.install_import_hook(_with_shapes(), "beartype.beartype")  # asked before beartype's


def _with_shapes() -> list[str]:
    """Names of the modules that import jaxtyping."""
    paths = sorted(SOURCES.glob("quire/**/*.py"))
    return [_name(path) for path in paths if "jaxtyping" in path.read_text()]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts)


def _checked(decorated: Any = None, *, typechecker: Callable) -> Any:
    if decorated is None:
        return functools.partial(_checked, typechecker=typechecker)
    if inspect.isclass(decorated):
        if "__dataclass_fields__" in vars(decorated):
            decorated.__init__ = _checked(decorated.__init__, typechecker=typechecker)
        return decorated
    hints = decorated.__annotations__.values()
    axes = [axes for hint in hints for axes in _axes_in(hint)]
    if _needs_binding(hints, axes) or inspect.isgeneratorfunction(decorated):
        return BIND(decorated, typechecker=typechecker)
    checked = beartype(decorated)
    return _in_a_scope(checked) if axes else checked


def _needs_binding(hints: Iterable[Any], axes: list[str]) -> bool:
    return any("{" in names for names in axes) or any(isinstance(hint, str) for hint in hints)


def _axes_in(hint: Any) -> list[str]:
    """The axes of all arrays that a type hint speaks of."""
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return [hint.dim_str]
    return [axes for part in get_args(hint) for axes in _axes_in(part)]


def _in_a_scope(function: Callable) -> Callable:
    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with BIND("context"):
            return function(*args, **kwargs)

    return scoped
