import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
from transformers.pytorch_utils import Conv1D

from fuzz.case import Case, RequestCase
from fuzz.models import constants_of, model_of, resident_model_of
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, NeverFits, UnsoundCombination
from quire.plan.rates import PrefillRates
from quire.scheduler.schedule_config import ScheduleConfig
from support.exact_products import use_exact_products
from support.kv_options import kv_config
from support.redis_servers import start_redis

AMPLE_BYTES = 8 << 20
AMPLE_TINY_BYTES = 64 << 20  # for quire-tiny
ROOM_FOR_ALL = 6.0  # units in which every request fits
GROWTH, MAX_GROWTHS = 1.12, 64  # a slab can be many times the KV of a request
TIER_BYTES = 16 << 20


@contextmanager
def products(case: Case) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if case.exact:
            use_exact_products(patch)
            patch.setattr(Conv1D, "forward", _exact_conv)
        yield


def _exact_conv(layer: Conv1D, x):
    return (x.double() @ layer.weight.double() + layer.bias.double()).to(x.dtype)


@contextmanager
def with_tiers(case: Case) -> Iterator[Case]:
    with ExitStack() as undo:
        options: dict[str, object] = {}
        if "disk" in case.tiers:
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="tier-"))
            options |= {"disk_memory": TIER_BYTES, "disk_path": folder}
        if "remote" in case.tiers:
            server = start_redis()
            undo.callback(server.close)
            options |= {"remote": server.url, "remote_memory": TIER_BYTES}
        yield replace(case, kv={**case.kv, **options}) if options else case


def ample_bytes(case: Case) -> int:
    return AMPLE_TINY_BYTES if case.model == "quire-tiny" else AMPLE_BYTES


def ample_engine(case: Case, **schedule: object) -> Engine:
    """An engine that has room for all, and computes what the case's does."""
    same = ("page_tokens", "codec", "evict", "evict_allow", "attention", "sparse")
    kv = {name: case.kv[name] for name in same if name in case.kv}
    config = kv_config(
        memory=ample_bytes(case),
        enable_prefix_caching=False,
        record_evictions=True,
        **{"evict_allow": _allowed(case)} | _constants(case) | kv,
    )
    if "batch_invariant" in case.schedule:
        schedule["batch_invariant"] = case.schedule["batch_invariant"]
    return Engine(resident_model_of(case), config, ScheduleConfig(**schedule))


def _allowed(case: Case) -> str:
    return "none" if case.kv.get("evict", "full") == "full" else ""


def _constants(case: Case) -> dict[str, object]:
    folder = constants_of(case.model, str(case.kv.get("codec", "none")))
    return {"constants": folder} if folder else {}


def try_options(case: Case) -> None:
    ample = ample_bytes(case)
    host, stream = ample * bool(case.host_room), ample * bool(case.stream_room)
    _start(case, ample, host, stream).close()


def scarce_engine(case: Case, unit_bytes: int) -> Engine:
    """The case's engine: in the least memory from `room` on that takes every request."""
    if case.room >= ROOM_FOR_ALL:
        with suppress(ConfigError):  # the refusal follows, or more memory is needed
            return _start(case, *(int(n * unit_bytes) for n in _rooms(case)))
        try_options(case)
    for growth in range(MAX_GROWTHS):
        scale = unit_bytes * GROWTH**growth
        sizes = [int(room * scale) for room in _rooms(case)]
        try:
            probe = _start(case, *sizes)
            try:
                for number, request in enumerate(case.requests):
                    submit(probe, f"r{number}", request)
            finally:
                probe.close()
            return _start(case, *sizes)
        except UnsoundCombination:
            raise  # in any memory
        except (ConfigError, NeverFits):
            if growth == MAX_GROWTHS - 1:
                raise
    raise AssertionError("never reached")


def _rooms(case: Case) -> tuple[float, float, float]:
    return case.room, case.host_room, case.stream_room


def _start(case: Case, memory: int, host: int, stream: int) -> Engine:
    kv = dict(case.kv)
    if not stream:
        kv = {name: value for name, value in kv.items() if not name.startswith("offload_")}
    config = kv_config(
        memory=memory,
        swap_space=host,
        offload_memory=stream,
        record_evictions=True,
        **_constants(case) | kv,
    )
    engine = Engine(model_of(case), config, ScheduleConfig(**case.schedule))
    if engine.prefix_loader is not None:  # every prefix is worth a load
        engine.prefix_loader.costs = SlowPrefill()
    return engine


class SlowPrefill:
    """Costs of a machine that computes 1,000 tokens in a year."""

    prefill = PrefillRates(token_s=3e4)

    @property
    def costs(self) -> "SlowPrefill":
        return self

    def read(self, *_: object) -> None:
        """Learn nothing."""


def submit(engine: Engine, name: str, request: RequestCase, **changed: object) -> None:
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
