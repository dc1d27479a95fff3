"""Hypothesis profiles: `HYPOTHESIS_PROFILE=deep pytest ...` or `--hypothesis-profile=deep`.

`dev` uses the same seeds in every run; `random`, of `make test-all`, uses others each time. The
examples of `dev` can still differ: Hypothesis draws constants of all modules loaded so far.

Steps of the four state machines (memory with forks, tiers, prefix index, scheduler), at most:

          by Hypothesis        scheduler from seeds   together
    dev   4 * 20 * 40           6,000                 10^4
    deep  4 * 2,500 * 50       500,000                10^6

`machine_steps` has the seeded part, which only the environment variable makes deep.
"""

import atexit
import gc
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

if not Path("/dev/nvidia0").exists():  # without a GPU, Triton's kernels are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch imports Triton

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings

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

torch.set_num_threads(1)  # pytest-xdist runs one worker on each core


_LAST: list[object] = [None]
"""The function of the last test."""


@pytest.fixture(autouse=True, scope="session")
def _parameters_read_once() -> Iterator[None]:
    """Each run of a command line reads the parameters of all commands, which takes 60 ms."""
    with pytest.MonkeyPatch.context() as patch:
        read_once = cache(typer.main.get_params_from_function)
        patch.setattr(typer.main, "get_params_from_function", read_once)
        yield


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
    """Restart the sampling of type checks; skip tests marked `gpu` without a GPU.

    The cases of a test function call the same functions, so the sampling restarts once for all.
    """
    function = getattr(item, "function", item)
    if function is not _LAST[0]:
        _LAST[0] = function
        restart_sampling()
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
