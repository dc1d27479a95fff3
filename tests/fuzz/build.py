"""Models and engines of cases."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
from transformers.pytorch_utils import Conv1D

from fuzz.case import Case, RequestCase
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, NeverFits, UnsoundCombination
from quire.models.loader import LoadedModel, load_model
from quire.scheduler.schedule_config import ScheduleConfig
from support.engines import load
from support.exact_products import use_exact_products
from support.kv_options import kv_config

AMPLE_BYTES = 8 << 20
AMPLE_TINY_BYTES = 64 << 20  # for quire-tiny
GROWTH, MOST_GROWTHS = 1.12, 40
TOO_SMALL = ("does not fit", "holds not", "too small", "no room")


@cache
def model_of(name: str) -> LoadedModel:
    """One model for all engines of a process."""
    if name == "quire-tiny":
        return load_model(name, dtype="float32", device="cpu", verify=False)
    architecture, _, times = name.partition("*")
    return load(architecture, times=int(times or 1))


@contextmanager
def products(case: Case) -> Iterator[None]:
    """Exact products for cases that ask for them."""
    with pytest.MonkeyPatch.context() as patch:
        if case.exact:
            use_exact_products(patch)
            patch.setattr(Conv1D, "forward", _exact_conv)
        yield


def _exact_conv(layer: Conv1D, x):
    product = x.double() @ layer.weight.double() + layer.bias.double()
    return product.to(x.dtype)


def ample_bytes(case: Case) -> int:
    """Memory for all requests of a case at once."""
    return AMPLE_TINY_BYTES if case.model == "quire-tiny" else AMPLE_BYTES


def ample_engine(case: Case, **schedule: object) -> Engine:
    """An engine that has room for all, and computes what the case's does."""
    same = ("page_tokens", "codec", "evict", "attention")
    kv = {name: case.kv[name] for name in same if name in case.kv}
    config = kv_config(
        memory=ample_bytes(case),
        enable_prefix_caching=False,
        evict_allow=_allowed(case),
        record_evictions=True,
        **kv,
    )
    return Engine(model_of(case.model), config, ScheduleConfig(**schedule))


def _allowed(case: Case) -> str:
    return "none" if case.kv.get("evict", "full") == "full" else ""


def try_options(case: Case) -> None:
    """Start the case's engine with room for all.

    Raises:
        ConfigError: the options do not go together.
    """
    ample = ample_bytes(case)
    host, stream = ample * bool(case.host_room), ample * bool(case.stream_room)
    _start(case, ample, host, stream)


def scarce_engine(case: Case, unit_bytes: int) -> Engine:
    """The case's engine: in the least memory from `room` on that takes every request.

    Args:
        case: in units of which its memories are.
        unit_bytes: one of them.

    Raises:
        ConfigError, NeverFits: also many times that memory is too small.
    """
    for growth in range(MOST_GROWTHS):
        scale = unit_bytes * GROWTH**growth
        sizes = [int(room * scale) for room in (case.room, case.host_room, case.stream_room)]
        try:
            probe = _start(case, *sizes)
            for number, request in enumerate(case.requests):
                submit(probe, f"r{number}", request)
            return _start(case, *sizes)
        except UnsoundCombination:
            raise  # in any memory
        except (ConfigError, NeverFits):
            if growth == MOST_GROWTHS - 1:
                raise
    raise AssertionError("never reached")


def _start(case: Case, memory: int, host: int, stream: int) -> Engine:
    kv = dict(case.kv)
    if not stream:
        kv = {name: value for name, value in kv.items() if not name.startswith("offload_")}
    config = kv_config(
        memory=memory, swap_space=host, offload_memory=stream, record_evictions=True, **kv
    )
    return Engine(model_of(case.model), config, ScheduleConfig(**case.schedule))


def submit(engine: Engine, name: str, request: RequestCase, **changed: object) -> None:
    """Submit one of a case's requests."""
    request = replace(request, **changed)
    engine.submit(
        GenerationRequest(
            request.prompt,
            SamplingParams(**request.params),
            request_id=name,
            priority=request.priority,
            tenant=request.tenant,
            evict=request.evict,
        )
    )
