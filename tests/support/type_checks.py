"""Checks types, and shapes if a signature has them, of calls of quire while tests run.

Here beartype checks once, five times as fast as jaxtyping's wrapper, which remains for generators,
for functions that name an axis after an argument, and for types that are given as strings.

Calls are sampled: the first `FIRST` calls of each function after the start of a test case, or of an
example of Hypothesis, and again after each call of `CLOCK` in it whose number is a power of two. So
the same calls of a case are checked alone, after other tests and on a busy machine; the items of
lists that beartype checks come from a generator that starts anew with the sampling.
`QUIRE_TYPE_CHECKS=all` checks every call; `make test-all` sets it.
"""

import functools
import inspect
import os
import random
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ForwardRef, get_args

import jaxtyping
from beartype import beartype
from beartype._check.code import codemain

BIND = jaxtyping.jaxtyped
FIRST = 2  # checked calls, or definitions in a function, from one restart to the next
CLOCK = "quire.scheduler.scheduler.Scheduler.schedule"  # called in every step, and always checked
COMPILED = "quire.kernels.triton.device"  # Triton reads the arguments and code of functions
SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
ALL_CALLS = os.environ.get("QUIRE_TYPE_CHECKS") == "all"


def check_types() -> None:
    """Check the functions of all modules of quire that are imported after this call."""
    check = _checked if ALL_CALLS else _sampled

    def jaxtyped(decorated: Any = None, *, typechecker: Callable) -> Any:
        if decorated is None:
            return functools.partial(jaxtyped, typechecker=typechecker)
        is_compiled = decorated.__module__.startswith(COMPILED)
        return decorated if is_compiled else check(decorated, typechecker=typechecker)

    vars(codemain).update(getrandbits=_ITEMS.getrandbits)  # beartype has no setting for this
    jaxtyping.jaxtyped = jaxtyped  # the import hook's decorator
    jaxtyping.install_import_hook("quire", "beartype.beartype")


def restart_sampling() -> None:
    """Check the next calls of every function."""
    _COUNTS["ticks"] = 0
    _check_next_calls()


def _check_next_calls() -> None:
    _DEFINED.clear()
    _ITEMS.seed(0)
    _COUNTS["restarts"] += 1
    while _SPENT:
        _SPENT.pop().start()


def _tick() -> None:
    _COUNTS["ticks"] = ticks = _COUNTS["ticks"] + 1
    if not ticks & (ticks - 1):
        _check_next_calls()


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
            _sampled(decorated.__init__, typechecker=typechecker)
        return decorated
    if "<locals>" in decorated.__qualname__:
        _DEFINED[decorated.__code__] += 1
        is_sampled = _DEFINED[decorated.__code__] <= FIRST
        return _checked(decorated, typechecker=typechecker) if is_sampled else decorated
    _Samples(decorated, typechecker).start()
    return decorated


class _Samples:
    """Checks the next calls of a function: until then, other code is the function's code."""

    def __init__(self, function: types.FunctionType, typechecker: Callable) -> None:
        self._function, self._typechecker = function, typechecker
        self._code, self._left, self._restarts = function.__code__, 0, 0
        self._is_clock = f"{function.__module__}.{function.__qualname__}" == CLOCK
        self._checking_code = _code_that_calls(self._check, self._code)
        function.__wrapped__ = _copy(function)  # also what `inspect.signature` describes

    def start(self) -> None:
        self._function.__code__ = self._checking_code

    def _check(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_clock:
            _tick()
            return self._checked_function(*args, **kwargs)
        if self._restarts != _COUNTS["restarts"]:
            self._left, self._restarts = FIRST, _COUNTS["restarts"]
        self._left -= 1
        if self._left <= 0:  # below 0 if another thread counts down between the two lines
            self._function.__code__ = self._code
            _SPENT.append(self)
        return self._checked_function(*args, **kwargs)

    @functools.cached_property
    def _checked_function(self) -> Callable:
        return _checked(self._function.__wrapped__, typechecker=self._typechecker)


_SPENT: list[_Samples] = []  # of functions whose calls are not checked for now
_DEFINED: Counter[types.CodeType] = Counter()  # definitions of nested functions
_ITEMS = random.Random(0)  # which items of lists are checked
_COUNTS = {"ticks": 0, "restarts": 0}  # calls of `CLOCK` in this test case


def _copy(function: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, closure=function.__closure__
    )
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    functools.update_wrapper(copy, function, updated=())
    del copy.__wrapped__  # it is no wrapper
    return copy


def _code_that_calls(check: Callable, code: types.CodeType) -> types.CodeType:
    """Code of a function that calls `check`, with the free variables of `code`, which it replaces.

    It has the flags of a generator or a coroutine too: Python takes from the flags what a call of
    `code` returns, that begins while another thread puts this code in place.
    """
    template = _template(code.co_freevars)
    constants = tuple(check if value == _PLACE else value for value in template.co_consts)
    return template.replace(
        co_consts=constants,
        co_flags=template.co_flags | (code.co_flags & SUSPENDS),
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )


def is_check(code: types.CodeType) -> bool:
    """Whether a frame of this code checks a call, and is followed by a frame of the function."""
    return code.co_varnames == _template(code.co_freevars).co_varnames


_PLACE = "the check"  # the constant that `check` replaces


@functools.cache
def _template(free_variables: tuple[str, ...]) -> types.CodeType:
    source = f"""
def outer({", ".join(free_variables)}):
    def call(*args, **kwargs):
        check = {_PLACE!r}
        return check(*args, **kwargs)
        {", ".join(free_variables)}
    return call
"""
    names: dict[str, Any] = {}
    exec(source, names)
    return names["outer"](*free_variables).__code__


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
