"""Hypothesis profiles: `HYPOTHESIS_PROFILE=deep pytest ...` or `--hypothesis-profile=deep`.

`dev` uses the same examples in every run; `random`, of `make test-all`, uses others each time, and
constants of the modules loaded so far.

Steps of the four state machines (memory with forks, tiers, prefix index, scheduler), at most:

          by Hypothesis        scheduler from seeds   together
    dev   4 * 20 * 40           6,000                 10^4
    deep  4 * 2,500 * 50       500,000                10^6

`machine_steps` has the seeded part, which only the environment variable makes deep.
"""

import atexit
import gc
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path

if not Path("/dev/nvidia0").exists():  # without a GPU, Triton's kernels are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch imports Triton

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import RuleBasedStateMachine

from support.type_checks import check_types, restart_sampling

check_types()  # before anything of quire is imported

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
for name, derandomized in (("dev", True), ("random", False)):
    settings.register_profile(
        name,
        max_examples=20,
        stateful_step_count=40,
        deadline=None,
        derandomize=derandomized,
        suppress_health_check=slow,
    )
settings.register_profile(  # a state machine takes max_examples * stateful_step_count steps
    "deep",
    max_examples=2_500,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=slow,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

_constants_of_modules = providers._get_local_constants
_no_constants = providers.Constants()


def _constants() -> providers.Constants:
    """Examples that are the same in every run: tests before this one have loaded modules."""
    return _no_constants if settings().derandomize else _constants_of_modules()


vars(providers).update(_get_local_constants=_constants)  # Hypothesis has no setting for this

_init = RuleBasedStateMachine.__init__


@wraps(_init)
def _init_machine(self: RuleBasedStateMachine) -> None:
    restart_sampling()  # a repeated example checks the same calls
    _init(self)


RuleBasedStateMachine.__init__ = _init_machine

torch.set_num_threads(1)  # pytest-xdist runs one worker on each core


@pytest.fixture(autouse=True, scope="session")
def _parameters_read_once() -> Iterator[None]:
    """Each run of a command line reads the parameters of all commands, which takes 60 ms."""
    with pytest.MonkeyPatch.context() as patch:
        read_once = cache(typer.main.get_params_from_function)
        patch.setattr(typer.main, "get_params_from_function", read_once)
        yield


def pytest_itemcollected(item: pytest.Item) -> None:
    """Restart the sampling of type checks before each example of Hypothesis.

    An example that failed is repeated: it fails again if the same calls are checked.
    """
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if handle is not None and not hasattr(handle.inner_test, "restarts_sampling"):
        handle.inner_test = _after_a_restart(handle.inner_test)


def _after_a_restart(test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def restarted(*args: object, **kwargs: object) -> None:
        restart_sampling()
        test(*args, **kwargs)

    restarted.restarts_sampling = True
    return restarted


# of a table: a sixth of its cases, at least 2 if it runs single components, else whole engines
MIN_CASES, MIN_UNIT_CASES, SAMPLED_SHARE = 1, 2, 6


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most cases of large tables as slow: `make test` runs a sample, `make test-all` all.

    Tests that are named on the command line run whole without `-m "not slow"`.
    """
    tables: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            tables[item.nodeid.partition("[")[0]].append(item)
    for cases in tables.values():
        for item in _cases_beyond_sample(cases):
            item.add_marker("slow")


def _cases_beyond_sample(cases: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of a table that `make test` leaves to `make test-all`.

    The sample has every value of each axis, as far as its size allows, and is the same each time.
    """
    left = sorted(cases, key=lambda item: zlib.crc32(item.nodeid.encode()))
    seen: set[tuple[int, str]] = set()
    least = MIN_UNIT_CASES if "/unit/" in cases[0].nodeid else MIN_CASES
    for _ in range(min(len(left), max(least, -(-len(left) // SAMPLED_SHARE)))):
        best = max(left, key=lambda item: len(_values(item) - seen))
        seen |= _values(best)
        left.remove(best)
    return left


def _values(item: pytest.Item) -> set[tuple[int, str]]:
    call = getattr(item, "callspec", None)
    return set() if call is None else set(enumerate(call.id.split("-")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without garbage collections, which take a fifth of that time.

    Later collections skip modules and tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)  # Triton reports objects that are frozen at the exit as leaks


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Restart the sampling of type checks; skip tests marked `gpu` without a GPU."""
    restart_sampling()
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
